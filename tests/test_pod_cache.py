"""PoDCache: what it computes, holds and gives back, and what it refuses."""

import copy

import hypothesis
import pytest
import torch
from helpers import FAMILIES, left_padded, logits_of, random_ids, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import kvcompress
from kvcompress import PoDCache, attach, pod, prefill
from kvcompress.caches import PoolSettings
from kvcompress.caches.pool import PagePool
from kvcompress.pod import PoDConfig

ONE = ((0, 0), (0, 0), (0, 0), (0, 0))
MIXED = ((0, 0), (0, 1), (2, 1), (2, 1))
SELF = ((0, 0), (1, 1), (2, 2), (3, 3))
SETTINGS = {  # lead, sinks, recent, mode
    "one": (ONE, 2, 6, "pod"),
    "mixed": (MIXED, 3, 9, "pod"),
    "no sinks": (MIXED, 0, 5, "pod"),
    "one recent": (ONE, 5, 1, "pod"),
    "self": (SELF, 2, 6, "pod"),
    "all near": (ONE, 100, 100, "pod"),
    "window": (ONE, 2, 6, "window"),
    "window without sinks": (ONE, 0, 7, "window"),
    "cla": (MIXED, 2, 6, "cla"),
}
settings = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
some = pytest.mark.parametrize(
    "setting", [SETTINGS[name] for name in ("mixed", "window", "cla")], ids=["mixed", "window", "cla"]
)


def converted(setting=SETTINGS["mixed"], family="llama", **model):
    lead, sinks, recent, mode = setting
    model = tiny_model(family, num_hidden_layers=4, **model)
    pod.convert(model, PoDConfig(lead, sinks, recent, mode=mode))
    return model


def new_cache(model, **options):
    return PoDCache(model.config, **{"page_size": 4, **options})


def trained(model, ids, **given):
    """Logits as in training, without a cache."""
    with torch.no_grad():
        return model(ids, **given).logits


def read(model, ids, cache, chunks):
    """Logits of all tokens, given in chunks."""
    assert sum(chunks) == ids.shape[1]
    return torch.cat([logits_of(model, part, cache) for part in ids.split(chunks, 1)], 1)


CHUNKS = {
    "one by one": [1] * 45,
    "whole": [45],
    "chunk, then one by one": [30] + [1] * 15,
    "chunks": [7, 1, 13, 2, 22],
    "short, long": [3, 40, 1, 1],
}


# ---- what is computed ----


@settings
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_cached_attention_is_that_of_training(setting, chunks):
    model, ids = converted(setting), random_ids(45, 2)
    expected = trained(model, ids)
    torch.testing.assert_close(read(model, ids, new_cache(model), chunks), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@some
def test_every_family(family, setting):
    model, ids = converted(setting, family), random_ids(45)
    torch.testing.assert_close(
        read(model, ids, new_cache(model), [20, 9] + [1] * 16), trained(model, ids), rtol=2e-3, atol=2e-3
    )


@some
@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_pages_of_any_size(setting, page_size):
    model, ids = converted(setting), random_ids(45, 2)
    cache = new_cache(model, page_size=page_size)
    torch.testing.assert_close(read(model, ids, cache, [5, 17] + [1] * 23), trained(model, ids), rtol=1e-3, atol=1e-3)


@settings
@pytest.mark.parametrize("chunk_size", [None, 7])
def test_each_prompt_of_a_padded_batch_gives_what_it_gives_alone(setting, chunk_size):
    model = converted(setting)
    prompts = [random_ids(length, seed=length) for length in (40, 23, 9, 1)]
    ids, mask = left_padded(prompts)
    cache = new_cache(model, chunk_size=chunk_size)
    together = kvcompress.generate(model, ids, cache, mask, max_new_tokens=12, do_sample=False)
    for b, prompt in enumerate(prompts):
        alone = new_cache(model)
        out = kvcompress.generate(model, prompt, alone, max_new_tokens=12, do_sample=False)
        assert together[b, ids.shape[1] :].tolist() == out[0, prompt.shape[1] :].tolist()
        assert [layer[b] for layer in cache.stored_lengths()] == [layer[0] for layer in alone.stored_lengths()]
    assert cache.seen_lengths() == [prompt.shape[1] + 11 for prompt in prompts]


@settings
def test_padding_of_any_call_changes_nothing(setting):
    """Three sequences whose tokens come in calls with different numbers of padded columns, none at all included."""
    model = converted(setting)
    ids = random_ids(64, 3)
    calls = [(9, 4, 0), (1, 0, 0), (6, 17, 3), (1, 1, 1), (0, 5, 20), (1, 1, 1), (30, 21, 36)]
    cache, at = new_cache(model), [0, 0, 0]
    out = [[], [], []]
    for counts in calls:
        S = max(counts)
        columns, mask = torch.full((3, S), 5), torch.zeros(3, S, dtype=torch.long)
        for b, count in enumerate(counts):
            columns[b, S - count :] = ids[b, at[b] : at[b] + count]
            mask[b, S - count :] = 1
        with torch.no_grad():
            logits = model(columns, attention_mask=mask, past_key_values=cache).logits
        for b, count in enumerate(counts):
            out[b].append(logits[b, S - count :])
        at = [n + count for n, count in zip(at, counts, strict=True)]
    assert cache.seen_lengths() == at
    for b, n in enumerate(at):
        torch.testing.assert_close(torch.cat(out[b])[None], trained(model, ids[b : b + 1, :n]), rtol=1e-3, atol=1e-3)


@hypothesis.settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_table_window_and_chunks(data):
    heads = []
    for _ in range(2):
        starts = sorted(data.draw(st.sets(st.integers(1, 3))) | {0})
        heads.append([max(start for start in starts if start <= layer) for layer in range(4)])
    rows = tuple(zip(*heads, strict=True))
    mode = data.draw(st.sampled_from(["pod", "pod", "window", "cla"]))
    setting = (rows, data.draw(st.integers(0, 12)), data.draw(st.integers(1, 20)), mode)
    model, chunks = converted(setting), data.draw(st.lists(st.integers(1, 15), min_size=1, max_size=6))
    ids = random_ids(sum(chunks), 2)
    cache = new_cache(model, page_size=data.draw(st.sampled_from([1, 2, 8])))
    torch.testing.assert_close(read(model, ids, cache, chunks), trained(model, ids), rtol=2e-3, atol=2e-3)


@some
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(setting, dtype):
    model, ids = converted(setting, initializer_range=0.05).to(dtype), random_ids(45)
    cache = new_cache(model)
    found, expected = read(model, ids, cache, [20, 9] + [1] * 16).float(), trained(model, ids).float()
    assert cache.layers[0].keys.pages.dtype == dtype
    assert (found - expected).norm() < 20 * torch.finfo(dtype).eps * expected.norm()


@some
@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_rotary_embeddings_of_any_kind(setting, kind):
    parameters = {
        "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
    }[kind]
    model = converted(setting, rope_parameters=parameters, max_position_embeddings=32)
    prompts = [random_ids(length, seed=length) for length in (60, 12)]
    ids, mask = left_padded(prompts)
    together = kvcompress.generate(model, ids, new_cache(model, chunk_size=16), mask, max_new_tokens=8, do_sample=False)
    for b, prompt in enumerate(prompts):  # with "dynamic" each has frequencies of its own
        out = kvcompress.generate(model, prompt, new_cache(model), max_new_tokens=8, do_sample=False)
        assert together[b, ids.shape[1] :].tolist() == out[0, prompt.shape[1] :].tolist()


# ---- what is held ----


@settings
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_followers_hold_near_keys_and_no_more(setting, chunks):
    (lead, sinks, recent, mode), P = setting, 4
    model, ids = converted(setting), random_ids(45, 2)
    cache, seen = new_cache(model), 0
    first = -(-sinks // P) * P
    for chunk in ids.split(chunks, 1):
        logits_of(model, chunk, cache)
        seen += chunk.shape[1]
        least, most = min(seen, sinks + min(recent - 1, max(seen - sinks, 0))), min(seen, first + recent + P)
        total = 0
        for layer, row in enumerate(lead):
            for head, a in enumerate(row):
                leads = a == layer and mode != "window"
                keys, values = (
                    [x[layer][b][head] for b in (0, 1)] for x in (cache.stored_keys(), cache.stored_lengths())
                )
                assert keys[0] == keys[1] and values[0] == values[1]
                if leads:
                    assert keys[0] == values[0] == seen
                elif mode == "cla":
                    assert keys[0] == values[0] == 0
                else:
                    assert least <= keys[0] <= most
                    assert values[0] == (keys[0] if mode == "window" else seen)
                total += 2 * sum(-(-n // P) for n in (keys[0], values[0]))
        tables = sum(
            x.nbytes
            for layer in cache.layers
            for pool in (layer.keys.pool, layer.values.pool)
            for x in (pool.block_table, pool.lengths)
        )
        assert cache.nbytes() == total * P * 16 * 4 + tables
    if chunks == [45]:  # a prompt in one go takes no more pages than it leaves in use
        for layer in cache.layers:
            assert layer.keys.pool.store.pages == layer.keys.pool.pages_in_use()


def test_what_leaves_the_window_makes_room_for_what_comes():
    model, ids = converted(SETTINGS["one"]), random_ids(300)
    cache = new_cache(model)
    read(model, ids, cache, [20] + [1] * 280)
    # sinks 2 and recent 6, page by page, of two heads: never more than four pages each
    for layer in cache.layers[1:]:
        assert layer.keys.pool.pages_in_use() <= 8 and layer.keys.pool.store.pages <= 16
    assert cache.layers[0].keys.pool.pages_in_use() == 150


def test_the_saving_is_that_of_the_formula():
    """dense - followers * (T - W) * D * b, but for a page or two per row."""
    lead, sinks, recent = MIXED, 4, 32
    model, ids = converted((lead, sinks, recent, "pod")), random_ids(400)
    cache = new_cache(model)
    for n, chunk in ((100, ids[:, :100]), (400, ids[:, 100:])):
        logits_of(model, chunk, cache)
        config, b = pod.state(model).config, 16 * 4
        wanted = (2 * 4 * 2 * n - config.followers * max(0, n - config.window)) * b
        tables = sum(p.block_table.nbytes + p.lengths.nbytes for layer in cache.layers for p in layer._pools())
        assert wanted - config.followers * b <= cache.nbytes() - tables <= wanted + 2 * 16 * 4 * b


@pytest.mark.parametrize("forked", [False, True])
def test_pages_are_given_back_from_the_middle_of_rows(forked):
    pool = PagePool(3, {"keys": ((2,), torch.float32)}, torch.device("cpu"), PoolSettings(4))
    tokens = torch.arange(3 * 22 * 2).float().view(1, 3, 22, 2)
    pool.append([tokens], [22, 17, 3])
    rows = [tokens[0, r, 22 - n :] for r, n in enumerate((22, 17, 3))]
    fork = pool.fork() if forked else None
    for bad in ([6, 0, 0], [0, 0, 1], [-1, 0, 0]):
        with pytest.raises(ValueError, match="pages must be between 0 and those of row"):
            pool.drop_pages(1, bad)
    pool.drop_pages(1, [2, 4, 0])  # the last page of the second row is not full
    assert pool.counts == pool.lengths.tolist() == [14, 4, 3]
    held = [torch.cat([rows[0][:4], rows[0][12:]]), rows[1][:4], rows[2]]
    for _ in range(2):
        for row, found in zip(held, pool.gather(30)[0], strict=True):
            assert torch.equal(found[: len(row)], row)
        more = torch.randn(1, 3, 5, 2)
        pool.append([more], [5, 0, 4])
        held = [torch.cat([row, x[5 - n :]]) for row, x, n in zip(held, more[0], (5, 0, 4), strict=True)]
    assert pool.pages_in_use() == sum(-(-n // 4) for n in pool.counts)
    if fork is not None:
        for row, found in zip(rows, fork.gather(30)[0], strict=True):
            assert torch.equal(found[: len(row)], row)
    else:
        assert pool.store.pages == 12  # what was given back was used again


# ---- beams, forks, taking back ----


@some
def test_beams_and_samples(setting):
    model, ids = converted(setting), random_ids(30, 2)
    out = kvcompress.generate(model, ids, new_cache(model), max_new_tokens=8, num_beams=3, do_sample=False)
    expected = model.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False, use_cache=False)
    assert torch.equal(out, expected)
    cache = prefill(model, ids, new_cache(model))
    out = model.generate(ids, past_key_values=cache, max_new_tokens=6, num_return_sequences=2, do_sample=True)
    assert out.shape == (4, 36) and cache.batch_size == 4


@some
def test_forks_go_their_own_ways(setting):
    model, ids = converted(setting), random_ids(70)
    cache = prefill(model, ids[:, :31], new_cache(model))
    first, second = cache.fork(), copy.copy(cache)
    others = random_ids(40, seed=9)
    for fork, rest in ((first, ids[:, 30:]), (second, others), (cache, ids[:, 30:])):
        whole = torch.cat([ids[:, :30], rest], 1)
        found = read(model, rest, fork, [1] * 20 + [rest.shape[1] - 20])
        torch.testing.assert_close(found, trained(model, whole)[:, 30:], rtol=1e-3, atol=1e-3)


@some
def test_sequences_are_chosen_and_the_cache_is_emptied(setting):
    model, ids = converted(setting), random_ids(60, 3)
    cache = new_cache(model)
    logits_of(model, ids[:, :30], cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    found = read(model, ids[[2, 0], 30:], cache, [1] * 10 + [20])
    torch.testing.assert_close(found, trained(model, ids[[2, 0]])[:, 30:], rtol=1e-3, atol=1e-3)
    used = cache.nbytes()
    cache.trim()
    assert cache.nbytes() <= used
    cache.reset()
    assert cache.nbytes() == 0 and cache.stored_lengths() == [[]] * 4
    torch.testing.assert_close(read(model, ids, cache, [45, 15]), trained(model, ids), rtol=1e-3, atol=1e-3)


@settings
def test_tokens_are_taken_back_where_the_window_still_holds(setting):
    model, ids = converted(setting), random_ids(40)
    cache = prefill(model, ids[:, :31], new_cache(model))
    read(model, random_ids(5, seed=7), cache, [1] * 5)
    most = min(layer.removable() for layer in cache.layers)
    if most < 5:
        with pytest.raises(ValueError, match=f"at most {most} tokens here, got 5: earlier near keys were dropped"):
            cache.crop(-5)
    else:
        cache.crop(-5)
        torch.testing.assert_close(
            read(model, ids[:, 30:], cache, [1] * 10), trained(model, ids)[:, 30:], rtol=1e-3, atol=1e-3
        )
    cache = prefill(model, ids[:, :31], new_cache(model))
    kept = 0
    for t in range(30, 40):
        logits_of(model, ids[:, t : t + 1], cache)
        if min(layer.removable() for layer in cache.layers) >= 1 and t < 39:
            cache.crop(-1)
            kept += 1
            logits_of(model, ids[:, t : t + 1], cache)
    torch.testing.assert_close(
        logits_of(model, ids[:, :1], cache),
        trained(model, torch.cat([ids, ids[:, :1]], 1))[:, -1:],
        rtol=1e-3,
        atol=1e-3,
    )
    assert kept or setting in (SETTINGS["one recent"],)


def test_a_full_pool_loses_nothing():
    model, ids = converted(SETTINGS["one"]), random_ids(60)
    cache = new_cache(model, max_pages=20, grow="error")
    logits_of(model, ids[:, :40], cache)
    with pytest.raises(RuntimeError, match="max_pages = 20 is too few"):
        logits_of(model, ids[:, 40:41], cache)
    cache.reset()
    logits_of(model, ids[:, :30], cache)


# ---- what is refused ----


def test_a_model_that_is_not_converted_or_otherwise_is_refused():
    with pytest.raises(ValueError, match="must be that of a model converted to PoD, got none"):
        PoDCache(tiny_model().config)
    model, ids = converted(), random_ids(10)
    other = PoDCache(converted(SETTINGS["one"]).config)
    with pytest.raises(
        ValueError, match=r"config\.kvcompress with lead = .*sinks = 2, recent = 6, but that of LlamaModel"
    ):
        prefill(model, ids, other)
    plain = tiny_model(num_hidden_layers=4)
    attach(plain)
    with pytest.raises(ValueError, match="must be that of a model converted to PoD"):
        logits_of(plain, ids, new_cache(model))
    model.config.kvcompress = {"method": "dmc"}
    with pytest.raises(ValueError, match="must be of the method pod, got 'dmc'"):
        PoDCache(model.config)
    with pytest.raises(ValueError, match="must be of the method dmc, got 'pod'"):
        kvcompress.DMCCache(converted().config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 0}, "chunk_size must be"),
        ({"tau": 2}, "tau must be"),
        ({"tau": 0.5, "reuse": False}, "reuse must not be False with tau"),
        ({"reuse": 3}, "reuse must be True, False"),
        ({"page_size": 3}, "power of two"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PoDCache(converted().config, **options)


def test_what_cannot_be_done_says_so():
    model, ids = converted(), random_ids(30)
    cache = prefill(model, ids, new_cache(model))
    with pytest.raises(NotImplementedError, match="assisted decoding is not supported by PoDCache"):
        model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=2, max_new_tokens=5)
    with pytest.raises(ValueError, match="guide is not supported by PoDCache"):
        prefill(model, random_ids(40), new_cache(model), guide=ids[0])
    with pytest.raises(RuntimeError, match="update"):
        cache.update(None, None, 0)


def test_a_prompt_without_end_is_read_in_chunks():
    model, ids = converted(), random_ids(70)
    cache = prefill(model, iter(ids[0].tolist()), new_cache(model, chunk_size=16))
    assert cache.seen_lengths() == [70]
    torch.testing.assert_close(
        logits_of(model, ids[:, :1], cache),
        trained(model, torch.cat([ids, ids[:, :1]], 1))[:, -1:],
        rtol=1e-3,
        atol=1e-3,
    )
