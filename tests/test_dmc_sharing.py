"""DMCCache: sequences, beams and forks that share pages, and pools that may not grow."""

import copy
import pickle

import pytest
import torch
from helpers import DMC_MODES, deciding_model, logits_of, random_ids, turns

import kvcompress
from kvcompress import DMCCache, attach, prefill

modes = pytest.mark.parametrize("dmc", DMC_MODES.values(), ids=DMC_MODES)
both = pytest.mark.parametrize("dmc", [DMC_MODES["dmc"], DMC_MODES["dms"]], ids=["dmc", "dms"])


def attached(**kwargs):
    model = deciding_model(**kwargs)
    attach(model)
    return model


def new_cache(model, **options):
    return DMCCache(model.config, **{"page_size": 4, **options})


@modes
@pytest.mark.parametrize("mode", [{"num_beams": 4}, {"num_return_sequences": 3, "do_sample": True}], ids=str)
def test_beams_and_samples_are_those_of_a_cache_that_reads_all_anew(dmc, mode):
    model, ids = attached(dmc=dmc), random_ids(40, batch=2)
    settings = {
        "max_new_tokens": 14, "do_sample": False, "top_k": 0, "return_dict_in_generate": True, "output_scores": True
    }  # fmt: skip
    out = kvcompress.generate(model, ids, new_cache(model), **settings | mode)
    scores = model.compute_transition_scores(
        out.sequences, out.scores, getattr(out, "beam_indices", None), normalize_logits="num_beams" not in mode
    )
    for sequence, found in zip(out.sequences, scores, strict=True):
        logits = logits_of(model, sequence[None], new_cache(model))[0, 39:-1]
        expected = logits.log_softmax(-1).gather(1, sequence[40:, None])[:, 0]
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@modes
@pytest.mark.parametrize("chunk_size", [None, 16])
def test_sequences_can_be_chosen_and_repeated(dmc, chunk_size):
    model, ids = attached(dmc=dmc), random_ids(60, batch=3)

    def read(rows):
        return prefill(model, ids[rows], new_cache(model, chunk_size=chunk_size))

    cache = read([0, 1, 2])
    cache.batch_select_indices(torch.tensor([2, 0, 2, 2]))
    order = [2, 0, 2, 2]
    following = random_ids(20, batch=4, seed=9)
    logits = [logits_of(model, ids[order, 59:], cache)[:, -1]]
    for t in range(12):  # the copies go different ways
        logits.append(logits_of(model, following[:, t : t + 1], cache)[:, -1])
    logits.append(logits_of(model, following[:, 12:], cache)[:, -1])
    for b, of in enumerate(order):
        text = torch.cat([ids[[of]], following[b : b + 1]], 1)
        expected = logits_of(model, text, new_cache(model))[0, [*range(59, 72), 79]]
        torch.testing.assert_close(torch.stack([x[b] for x in logits]), expected, atol=2e-3, rtol=2e-3)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 8 and len(cache.stored_lengths()[0]) == 8
    for layer in cache.layers:
        assert int((layer.pool.store.refs > 0).sum()) == layer.pool.pages_in_use()


@pytest.mark.parametrize(("dmc", "how"), turns(DMC_MODES.values(), ["fork", "copy", "deepcopy", "pickle"]))
def test_forks_do_not_disturb_each_other(dmc, how):
    model, ids = attached(dmc=dmc), random_ids(45)
    cache = prefill(model, ids, new_cache(model))
    before = cache.stored_lengths()
    questions = [torch.cat([ids, random_ids(n, seed=n)], 1) for n in (1, 6, 17)]

    def answer(asked, cache):
        return model.generate(asked, past_key_values=cache, max_new_tokens=9, do_sample=False)

    forks = []
    for _ in questions:
        if how == "pickle":
            forks.append(pickle.loads(pickle.dumps(cache)))
        else:
            forks.append(cache.fork() if how == "fork" else getattr(copy, how)(cache))
        forks[-1].stored_lengths()  # the host then knows the lengths
    for asked, fork in zip(questions, forks, strict=True):
        expected = answer(asked, prefill(model, ids, new_cache(model)))
        assert torch.equal(answer(asked, fork), expected)
        assert cache.get_seq_length() == 44 and cache.stored_lengths() == before
    assert torch.equal(answer(questions[1], cache), answer(questions[1], prefill(model, ids, new_cache(model))))


@pytest.mark.parametrize("max_pages", [None, 10])
def test_a_merge_into_a_shared_full_page_takes_a_page(max_pages):
    """The newest slot of a full page that a fork shares is written anew, though no slot is added."""
    model = attached(dmc={"shift": -1e4})  # every token is merged
    ids = random_ids(30)
    cache = new_cache(model, page_size=1, max_pages=max_pages)
    logits_of(model, ids[:, :20], cache)
    forks = [cache.fork() for _ in range(3)]
    for one in (cache, *forks):  # the host then knows all lengths
        assert one.stored_lengths() == [[[1, 1]]] * 3
    for t in range(20, 30):
        first, *others = (logits_of(model, ids[:, t : t + 1], one) for one in (cache, *forks))
        assert all(torch.equal(first, other) for other in others)
    expected = logits_of(model, ids, new_cache(model))[:, -1]
    torch.testing.assert_close(first[:, 0], expected, atol=2e-3, rtol=2e-3)


def test_forks_that_find_no_page_for_a_merge_lose_nothing():
    model, ids = attached(dmc={"shift": -1e4}), random_ids(30)
    cache = new_cache(model, page_size=1, max_pages=4)
    logits_of(model, ids[:, :20], cache)
    fork = cache.fork()
    fork.stored_lengths()
    logits_of(model, ids[:, 20:21], cache)  # two rows of a page each, both copied
    with pytest.raises(RuntimeError, match="max_pages = 4 is too few: 6 pages"):
        logits_of(model, ids[:, 20:21], fork)
    del cache
    logits = logits_of(model, ids[:, 20:21], fork)
    expected = logits_of(model, ids[:, :21], new_cache(model))[:, -1:]
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)


# ---- memory ----


def test_a_pool_of_fixed_size_holds_what_merging_leaves():
    model, ids = attached(), random_ids(120)
    free = prefill(model, ids, new_cache(model))
    pages = max(layer.pool.pages_in_use() for layer in free.layers)
    assert pages < 2 * 120 / 4
    cache = new_cache(model, max_pages=pages, grow="error")
    prefill(model, ids, cache)
    assert cache.stored_lengths() == free.stored_lengths()
    with pytest.raises(RuntimeError, match=f"max_pages = {pages - 1} is too few"):
        prefill(model, ids, small := new_cache(model, max_pages=pages - 1))
    with pytest.raises(RuntimeError, match="incomplete"):
        logits_of(model, ids, small)
    small.reset()
    logits_of(model, ids[:, :20], small)


@both
def test_a_full_pool_loses_nothing_while_decoding(dmc):
    model, ids = attached(dmc=dmc), random_ids(200)
    expected = logits_of(model, ids, new_cache(model))
    cache = new_cache(model, max_pages=14)
    logits = []

    def decode_to(end):
        for t in range(len(logits), end):
            logits.append(logits_of(model, ids[:, t : t + 1], cache))

    with pytest.raises(RuntimeError, match="max_pages = 14 is too few"):
        decode_to(200)
    held = len(logits)
    assert cache.get_seq_length() == held > 20
    before = cache.stored_lengths()
    cache.pool_settings = kvcompress.caches.PoolSettings(4)
    for layer in cache.layers:
        layer.pool.store.settings = cache.pool_settings
    decode_to(held + 5)
    torch.testing.assert_close(torch.cat(logits, 1), expected[:, : held + 5], atol=2e-3, rtol=2e-3)
    assert before != cache.stored_lengths()


def test_tokens_of_the_window_need_no_page():
    model, ids = attached(dmc={"mode": "dms", "dms_window": 20, "shift": 1e4}), random_ids(30)
    cache = new_cache(model, max_pages=1)
    for t in range(21):
        logits_of(model, ids[:, t : t + 1], cache)
    with pytest.raises(RuntimeError, match="max_pages = 1 is too few: 2 pages"):
        logits_of(model, ids[:, 21:22], cache)
    assert cache.stored_lengths() == [[[21, 21]]] * 3


@both
def test_trim_and_reset(dmc):
    model, ids = attached(dmc=dmc), random_ids(60)
    cache = prefill(model, ids, new_cache(model))
    for t in range(3):
        logits_of(model, ids[:, t : t + 1], cache)
    other = cache.fork()
    cache.trim()
    other_logits, logits = (logits_of(model, ids[:, 5:9], one) for one in (other, cache))
    assert torch.equal(logits, other_logits)
    del other
    cache.trim()
    assert cache.nbytes() <= cache.reserved_nbytes() < 1.1 * cache.nbytes()
    cache.reset()
    assert cache.nbytes() == 0 and cache.seen_lengths() == []
    with pytest.raises(ValueError, match="compression ratio needs a cache that has seen tokens"):
        cache.compression_ratios()
    with pytest.raises(ValueError, match="compression ratio needs a cache that has seen tokens"):
        cache.compression_ratio()
    torch.testing.assert_close(logits_of(model, ids, cache), logits_of(model, ids, new_cache(model)))
