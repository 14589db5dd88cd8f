"""DuoAttention: heads that keep all beside heads that stream, and the profiles that say which."""

import json

import pytest
import torch
from helpers import attached, left_padded, random_ids

import kvcompress
from kvcompress import AdaKV, CacheSpec, IterativeCache, PrunedCache, RemoteGap, prefill
from kvcompress.heads import HeadProfile
from kvcompress.pruners import DuoAttention

HEADS = HeadProfile(((0.9, 0.1), (0.2, 0.0), (1.0, 0.8)), sinks=3, recent=8, measured="by hand")
DUO = DuoAttention(HEADS)  # half of the heads stream: those of 0.1, 0.2 and 0.0
WHOLE = [[True, False], [False, False], [True, True]]


def lengths(cache, b=0):
    return [layer[b] for layer in cache.stored_lengths()]


def streamed(T, more=0):
    return [[T if whole else min(T, 11 + more) for whole in row] for row in WHOLE]


def test_streaming_heads_hold_the_first_and_the_latest():
    model, ids = attached(), random_ids(41)
    cache = prefill(model, ids, PrunedCache(model.config, DUO, page_size=4))
    dense = prefill(model, ids, PrunedCache(model.config, keep=64, page_size=4))
    assert lengths(cache) == streamed(40)
    stay = [0, 1, 2, *range(32, 40)]
    for ours, theirs, row in zip(cache.layers, dense.layers, WHOLE, strict=True):
        held, whole = (layer.pool.gather(40) for layer in (ours, theirs))
        for h, keeps in enumerate(row):
            for x, y in zip(held, whole, strict=True):
                torch.testing.assert_close(x[h, : 40 if keeps else 11], y[h] if keeps else y[h, stay])
    assert cache.nbytes() < 0.75 * dense.nbytes()
    assert cache.reserved_nbytes() < 0.8 * dense.reserved_nbytes()


@pytest.mark.parametrize("every", [1, 4])
def test_they_stream_while_decoding(every):
    model, ids = attached(), random_ids(41)
    cache = PrunedCache(model.config, DUO, every=every, page_size=4)
    kvcompress.generate(model, ids, cache, max_new_tokens=31, do_sample=False)  # the last one is not read
    held = lengths(cache)
    for layer, row in enumerate(WHOLE):
        for h, keeps in enumerate(row):
            assert held[layer][h] == 71 if keeps else 11 <= held[layer][h] < 11 + every
    # the same as when each token is decided by all that came: the keys of a text of the same tokens
    assert cache.get_seq_length() == 71


def test_the_last_tokens_are_those_of_the_text():
    model, ids = attached(num_hidden_layers=1), random_ids(60)
    duo = DuoAttention(HeadProfile(((1.0, 0.0),), sinks=2, recent=5))
    cache = prefill(model, ids[:, :31], PrunedCache(model.config, duo, every=1, page_size=4))
    with torch.no_grad():
        for t in range(30, 59):
            model(ids[:, t : t + 1], past_key_values=cache)
    dense = prefill(model, ids, PrunedCache(model.config, keep=64))
    held, whole = (x.layers[0].pool.gather(59)[0] for x in (cache, dense))
    torch.testing.assert_close(held[0], whole[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(held[1, :7], whole[1, [0, 1, *range(54, 59)]], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk_size", [None, 16])
def test_batches_and_padding_change_nothing(chunk_size):
    model, prompts = attached(), [random_ids(n, seed=n) for n in (50, 9, 27)]
    ids, mask = left_padded(prompts)

    def cache():
        return PrunedCache(model.config, DUO, every=2, chunk_size=chunk_size)

    together = cache()
    out = kvcompress.generate(model, ids, together, mask, max_new_tokens=6, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = kvcompress.generate(model, prompt, one := cache(), max_new_tokens=6, do_sample=False)
        assert torch.equal(out[b, -6:], alone[0, -6:])
        for row, own, whole in zip(lengths(together, b), lengths(one), WHOLE, strict=True):
            assert [n for n, keeps in zip(row, whole, strict=True) if keeps] == [
                n for n, keeps in zip(own, whole, strict=True) if keeps
            ]


def test_no_head_streams_or_all_do():
    model, ids = attached(), random_ids(41)
    cache = prefill(model, ids, PrunedCache(model.config, DuoAttention(HEADS, sparsity=0.0)))
    plain = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False), plain)
    all_of_them = PrunedCache(model.config, DuoAttention(HEADS, sparsity=1.0, sinks=1, recent_tokens=4))
    assert lengths(prefill(model, ids, all_of_them)) == [[5, 5]] * 3


def test_shares_are_of_the_lowest_gates():
    assert HEADS.retrieves(0.5) == tuple(map(tuple, WHOLE))
    equal = HeadProfile(((0.5, 0.5), (0.5, 0.5)))
    assert equal.retrieves(0.25) == ((False, True), (True, True))
    assert HeadProfile(((-0.1, 1.2),)).gates == ((0.0, 1.0),)


def test_files_of_ours_and_of_the_authors(tmp_path):
    path = HEADS.save(tmp_path / "heads.json")
    assert HeadProfile.load(path) == HEADS
    assert CacheSpec.parse(f"pruned,pruner=duoattention,heads={path},every=16").make(attached().config).pruner == DUO
    (tmp_path / "full_attention_heads.tsv").write_text("9.0e-01\t1.0e-01\n2.0e-01\t-1e-3\n1.0e+00\t8.0e-01\n")
    assert HeadProfile.load(tmp_path).sinks == 128
    (tmp_path / "config.json").write_text(json.dumps({"sink_size": 3, "recent_size": 8, "lr": 0.02}))
    theirs = HeadProfile.load(tmp_path)
    assert (theirs.gates, theirs.sinks, theirs.recent) == (HEADS.gates, 3, 8)
    spec = CacheSpec.parse(f"pruned,pruner=duoattention:{tmp_path}")
    assert spec.make(attached().config).pruner == DuoAttention(theirs)
    for text, message in (("[1]", "got a JSON list"), ("{}", "format of x.json must be"), ("1 2", "in JSON")):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            HeadProfile.load(tmp_path / "x.json")
    (tmp_path / "full_attention_heads.tsv").write_text("a\tb\n")
    with pytest.raises(ValueError, match="must be a line of numbers for each layer"):
        HeadProfile.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="head profile must be a file"):
        HeadProfile.load(tmp_path / "none.json")


def test_what_has_no_meaning_is_refused():
    model = attached(num_hidden_layers=2)
    with pytest.raises(ValueError, match="keep must be None with DuoAttention, which brings its own, got 12"):
        PrunedCache(model.config, DUO, keep=12)
    with pytest.raises(ValueError, match="budget must be None with DuoAttention"):
        PrunedCache(model.config, DUO, AdaKV())
    with pytest.raises(ValueError, match=r"heads must be of this model: they are \[2, 2, 2\] by layer"):
        prefill(model, random_ids(20), PrunedCache(model.config, DUO))
    with pytest.raises(ValueError, match="positions must be 'original' with DuoAttention"):
        PrunedCache(model.config, DUO, positions=RemoteGap())
    with pytest.raises(ValueError, match="pruner must not be DuoAttention, which brings its own budget"):
        IterativeCache(model.config, pruner=DUO)
    for build, message in (
        (lambda: DuoAttention("heads.json"), "heads must be a HeadProfile, got str"),
        (lambda: DuoAttention(HEADS, sparsity=1.5), "sparsity must be a number between 0.0 and 1.0, got 1.5"),
        (lambda: DuoAttention(HEADS, sinks=-1), "sinks must be at least 0, got -1"),
        (lambda: DuoAttention(HEADS, recent_tokens=0), "recent_tokens must be at least 1, got 0"),
        (lambda: HeadProfile(()), "gates must be a list of numbers for each layer"),
        (lambda: HeadProfile(((float("nan"),),)), "gates must be a number"),
    ):
        with pytest.raises(ValueError, match=message):
            build()
