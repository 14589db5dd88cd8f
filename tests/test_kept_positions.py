"""Which tokens a cache says that it holds: those whose keys and values are there."""

import pytest
import torch
from helpers import DMC_MODES, attached, deciding_model, kind_model, left_padded, random_ids

import kvcompress
from kvcompress import (
    AdaKV,
    DMCCache,
    GlobalTopK,
    IterativeCache,
    PoDCache,
    PrunedCache,
    PyramidKV,
    QuestCache,
    RemoteGap,
    StreamingCache,
    attach,
    pod,
    prefill,
)
from kvcompress.pod import PoDConfig
from kvcompress.pruners import H2O, CenterOfGravity, SnapKV

SNAP = SnapKV(window=4)
CACHES = {
    "uniform": lambda c: PrunedCache(c, SNAP, keep=20),
    "adakv, every": lambda c: PrunedCache(c, SNAP, AdaKV(PyramidKV(window=4)), keep=20, every=3, page_size=8),
    "h2o in chunks": lambda c: PrunedCache(c, H2O(), keep=20, chunk_size=16, every=2),
    "global": lambda c: PrunedCache(c, SNAP, GlobalTopK(), keep=20),
    "cge, gap": lambda c: PrunedCache(c, CenterOfGravity(10, 10, 2, window=4), every=4, positions=RemoteGap(gap=8)),
    "contiguous": lambda c: PrunedCache(c, SNAP, AdaKV(), keep=20, every=4, positions="contiguous"),
    "iterative": lambda c: IterativeCache(c, memory_size=20, chunk_size=16, pruner=SNAP),
    "iterative, adakv": lambda c: IterativeCache(
        c, memory_size=20, budget=AdaKV(), chunk_size=16, pruner=SNAP, every=3
    ),
    "iterative, sqrt": lambda c: IterativeCache(c, memory_size=20, chunk_size=16, schedule="sqrt", prune="forward"),
    "streaming": lambda c: StreamingCache(c, window_size=20),
    "quest": lambda c: QuestCache(c, token_budget=12),
}
caches = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)


def check_shape(cache):
    """Rising numbers below what was seen, as many as are stored."""
    kept = cache.kept_positions()
    lengths = [[[len(head) for head in row] for row in layer] for layer in kept]
    assert lengths == [layer if any(layer) else [] for layer in cache.stored_lengths()]
    for layer in kept:
        for row in layer:
            for head in row:
                assert head.dtype == torch.int64 and head.device.type == "cpu"
                assert head.tolist() == sorted(set(head.tolist()))
    return kept


def first_values(model, ids, places):
    """[Hkv, n, D] of layer 0 at these places: they depend on the token alone."""
    layer = model.model.layers[0]
    hidden = layer.input_layernorm(model.model.embed_tokens(ids[:, places]))
    return layer.self_attn.v_proj(hidden)[0].unflatten(-1, (2, -1)).transpose(0, 1)


@caches
@torch.no_grad()
def test_they_are_the_tokens_whose_values_are_held(make):
    """After a prompt, decoding, a further prompt, for forks and beams."""
    model, ids = attached(), torch.randperm(95, generator=torch.Generator().manual_seed(1))[None] + 2
    cache = make(model.config)
    prefill(model, ids[:, :61], cache)
    for columns in (61, 68, 82):
        if columns > 61:
            model.generate(ids[:, :columns], past_key_values=cache, max_new_tokens=1)
        kept = check_shape(cache)
        if isinstance(cache, StreamingCache):
            held = [
                row[[*range(4), *(4 + (p - 4) % 20 for p in kept[0][0][0].tolist()[4:])]]
                for row in cache.layers[0].values
            ]
        else:
            held = [
                row[:n] for row, n in zip(cache.layers[0].pool.gather(90)[1], cache.stored_lengths()[0][0], strict=True)
            ]
        for head in range(2):
            expected = first_values(model, ids, kept[0][0][head])[head]
            torch.testing.assert_close(held[head], expected, atol=1e-4, rtol=1e-4)
    fork = cache.fork()
    fork.batch_repeat_interleave(2)
    assert [[[h.tolist() for h in row] for row in layer] for layer in fork.kept_positions()] == [
        [[h.tolist() for h in layer[0]]] * 2 for layer in cache.kept_positions()
    ]
    cache.reset()
    assert cache.kept_positions() == [[]] * 3


@caches
def test_batches_count_no_padding(make):
    model = attached()
    prompts = [random_ids(length, seed=length) for length in (70, 9, 41)]
    ids, mask = left_padded(prompts)
    cache = make(model.config)
    kvcompress.generate(model, ids, cache, mask, max_new_tokens=6, do_sample=False)
    kept = check_shape(cache)
    for b, prompt in enumerate(prompts):
        alone = make(model.config)
        kvcompress.generate(model, prompt, alone, max_new_tokens=6, do_sample=False)
        assert [[h.tolist() for h in layer[b]] for layer in kept] == [
            [h.tolist() for h in layer[0]] for layer in alone.kept_positions()
        ]


def test_a_guide_is_no_token():
    model, ids = attached(), random_ids(60)
    for cache in (
        PrunedCache(model.config, SNAP, keep=20, chunk_size=16),
        IterativeCache(model.config, memory_size=20, chunk_size=16),
    ):
        prefill(model, ids, cache, guide=random_ids(5, seed=3)[0])
        assert max(int(head.max()) for layer in check_shape(cache) for head in layer[0]) <= 58


def test_windows_hold_their_last_tokens():
    model = kind_model("gemma2")
    attach(model)
    cache = prefill(model, random_ids(41), PrunedCache(model.config, SNAP, keep=20))
    kept = check_shape(cache)
    assert [head.tolist() for head in kept[0][0]] == [list(range(28, 40))] * 2
    assert [len(head) for head in kept[1][0]] == [20, 20]


@pytest.mark.parametrize("mode", ["dmc", "window", "dms", "dms 0"])
def test_entries_of_dmc_begin_where_heads_decide(mode):
    model, ids = deciding_model(dmc=DMC_MODES[mode]), random_ids(61)
    attach(model)
    cache = DMCCache(model.config, track=True, chunk_size=16)
    kvcompress.generate(model, ids, cache, max_new_tokens=6, do_sample=False)
    kept = check_shape(cache)
    for layer in range(len(kept)):
        merged = cache.decisions(layer)[0]
        for head in range(2):
            if "dms" in mode:
                newest = DMC_MODES[mode]["dms_window"] + 1
                expected = [t for t in range(66) if t >= 66 - newest or not merged[head, t + 1]]
            else:
                expected = [t for t in range(66) if not merged[head, t]]
            assert kept[layer][0][head].tolist() == expected
    untracked = DMCCache(model.config)
    with pytest.raises(ValueError, match="kept_positions needs a cache made with track=True"):
        untracked.kept_positions()


@pytest.mark.parametrize("distant", [None, 8])
def test_followers_of_pod_keep_near_keys(distant):
    model, ids = attached(num_hidden_layers=4), random_ids(70)
    pod.convert(model, PoDConfig(((0, 0), (0, 1), (2, 1), (2, 1)), 3, 9))
    pruned = {} if distant is None else {"pruner": SNAP, "distant": distant}
    cache = PoDCache(model.config, page_size=4, **pruned)
    kvcompress.generate(model, ids, cache, max_new_tokens=4, do_sample=False)
    values, keys = check_shape(cache), cache.kept_key_positions()
    assert [[[len(head) for head in row] for row in layer] for layer in keys] == cache.stored_keys()
    config = cache.pod
    near = {*range(config.sinks), *range(73 - config.recent, 73)}
    for layer in range(len(keys)):
        for head, lead in enumerate(config.lead[layer]):
            mine, all_ = set(keys[layer][0][head].tolist()), set(values[layer][0][head].tolist())
            assert near <= mine <= set(range(73)) and near <= all_
            if lead == layer:
                assert mine == all_
            else:
                assert len(mine) < len(near) + 8
                assert all_ == set(values[lead][0][head].tolist())
    if distant is None:
        assert len(values[0][0][0]) == 73
