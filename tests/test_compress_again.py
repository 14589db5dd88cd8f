"""PrunedCache(later="keep"): what follows the prompt is kept whole, and one reading serves several budgets."""

import pytest
import torch
from helpers import attached, kind_model, left_padded, random_ids, stays, tiny_gates

import kvcompress
from kvcompress import (
    AdaKV,
    CacheSpec,
    GlobalTopK,
    PrunedCache,
    PyramidKV,
    RemoteGap,
    Uniform,
    attach,
    prefill,
)
from kvcompress.heads import HeadProfile
from kvcompress.profiles import BudgetProfile, Profiled
from kvcompress.pruners import (
    H2O,
    CenterOfGravity,
    ChunkKV,
    CriticalKV,
    DuoAttention,
    ExpectedAttention,
    Gate,
    KeyNorm,
    KVzip,
    Replay,
    SnapKV,
    StreamingLLM,
    Successor,
)

SNAP = SnapKV(window=6, num_sink_tokens=2)
PROFILE = BudgetProfile(((1.0, 0.5), (3.0, 0.2), (0.8, 0.5)))
SIZES = [stays(24), stays(0.25), stays("20KiB"), stays(24, PyramidKV(window=6)), stays(24, AdaKV()),
         stays(24, GlobalTopK()), stays(24, Profiled(PROFILE))]  # fmt: skip
PRUNERS = [H2O(), ExpectedAttention(future_positions=16), Replay(chunk=16, last=4), Successor(last=4), KeyNorm(),
           StreamingLLM(), ChunkKV(SNAP), Gate(tiny_gates(), last=4),
           KVzip(chunk=16, num_sink_tokens=3, lead_in=2)]  # fmt: skip


def name_of(x):
    return type(x).__name__ if not isinstance(x, dict) else f"{x['keep']} {type(x['budget']).__name__}"


@pytest.fixture(scope="module")
def model():
    return attached()


def kept(cache, b=None):
    return [
        [[h.tolist() for h in row] for row in (layer if b is None else layer[b : b + 1])]
        for layer in cache.kept_positions()
    ]


def answer(model, ids, cache, **settings):
    return model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False, **settings)[:, -4:]


@pytest.mark.parametrize("chunk_size", [30, 45, 64])
@pytest.mark.parametrize("pruner", [SNAP, KeyNorm(), H2O(), KVzip(chunk=16, num_sink_tokens=3, lead_in=2)], ids=name_of)
def test_all_of_a_prompt_that_was_read_in_chunks_has_scores(model, pruner, chunk_size):
    """Chunks that leave it within the budget too."""
    ids = random_ids(90)
    for size in (stays(1.0), stays(1000), stays(70, PyramidKV(window=6))):
        cache = prefill(model, ids, PrunedCache(model.config, pruner, **size, later="keep", chunk_size=chunk_size))
        cache.compress(Uniform(), keep=20)
        assert cache.stored_lengths() == [[[20, 20]]] * 3


def test_a_second_reading_leaves_nothing_behind_where_what_follows_is_kept(model):
    ids = random_ids(120)
    pruner = KVzip(chunk=16, num_sink_tokens=3, lead_in=2, prompt=(5, 6), next_prompt=(7,))
    cache = prefill(model, ids[:, :90], PrunedCache(model.config, pruner, keep=30, later="keep"))
    prefill(model, ids, cache)
    assert cache.stored_lengths() == [[[60, 60]]] * 3
    cache.compress(keep=20)
    assert cache.stored_lengths() == [[[50, 50]]] * 3


def test_forks_are_compressed_where_positions_change(model):
    ids = random_ids(90)
    whole = prefill(model, ids, PrunedCache(model.config, SNAP, keep=1.0, later="keep", positions="contiguous"))
    fork = whole.fork()
    fork.compress(keep=24)
    whole.compress(keep=24)
    assert torch.equal(answer(model, ids, fork), answer(model, ids, whole))


def test_a_full_pool_loses_nothing(model):
    ids = random_ids(90)
    cache = PrunedCache(model.config, SNAP, keep=1.0, later="keep", page_size=16, max_pages=13, grow="error")
    fork = prefill(model, ids, cache).fork()
    for size in (stays(24), stays(24, AdaKV())):
        with pytest.raises(RuntimeError, match="max_pages = 13"):
            fork.compress(**size)
    assert fork.stored_lengths() == cache.stored_lengths() == [[[89, 89]]] * 3
    del cache
    fork.trim()
    fork.compress(keep=24)
    assert fork.stored_lengths() == [[[24, 24]]] * 3


@pytest.mark.parametrize("pruner", [SNAP, *PRUNERS], ids=name_of)
def test_bytes_are_what_a_cache_holds(model, pruner):
    """What is remembered of each token included; the latest queries alone come on top."""
    for budget in (Uniform(), PyramidKV(), AdaKV(), GlobalTopK()):
        for later in ("compress", "keep"):
            cache = PrunedCache(model.config, pruner, budget, keep="40KiB", later=later, page_size=4)
            prefill(model, random_ids(200), cache)
            recent = [layer.chooser.recent for layer in cache.layers]
            queries = sum(held.nbytes() for held in recent if held is not None)
            assert 36 << 10 < cache.nbytes() - queries <= 40 << 10, (budget, later)


@pytest.mark.parametrize(
    ("pruner", "size"),
    [(SNAP, size) for size in SIZES]
    + [(pruner, stays(24, GlobalTopK())) for pruner in PRUNERS]
    + [(H2O(), stays(24, AdaKV()))],
    ids=name_of,
)
def test_one_reading_serves_several_sizes(model, pruner, size):
    ids = random_ids(90)
    whole = prefill(model, ids, PrunedCache(model.config, pruner, keep=1.0, later="keep", page_size=8))
    cache, read = (
        whole.fork(),
        prefill(model, ids, PrunedCache(model.config, pruner, **size, later="keep", page_size=8)),
    )
    cache.compress(**size)
    assert kept(cache) == kept(read) != kept(whole)
    assert (cache.keep, cache.budget) == (read.keep, read.budget)
    assert torch.equal(answer(model, ids, cache), answer(model, ids, read))
    assert cache.stored_lengths() == read.stored_lengths()


@pytest.mark.parametrize(
    ("sizes", "budget"), [((60, 40, 20), None), ((0.7, "1/2", "10%"), None), ((60, 20, 18), AdaKV()),
                          ((60, 15), GlobalTopK())],
)  # fmt: skip
def test_larger_sizes_of_one_budget_come_first(model, sizes, budget):
    """And with positions given anew, where what is compressed again is rotated again."""
    ids, question = random_ids(90), torch.cat([random_ids(90), random_ids(7, seed=5)], 1)
    for positions in ("original", "contiguous", RemoteGap(gap=16, near_length=4)):
        if positions != "original" and isinstance(budget, GlobalTopK):
            continue
        given = {"positions": positions, "later": "keep", "page_size": 8}
        cache = prefill(model, ids, PrunedCache(model.config, SNAP, budget, keep=sizes[0], **given))
        for size in sizes[1:]:
            cache.compress(keep=size)
        read = prefill(model, ids, PrunedCache(model.config, SNAP, budget, keep=sizes[-1], **given))
        assert kept(cache) == kept(read)
        with torch.no_grad():
            ours, theirs = (model(question[:, 89:], past_key_values=x).logits for x in (cache, read))
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)


def test_batches_and_padding(model):
    prompts = [random_ids(length, seed=length) for length in (80, 9, 41)]
    ids, mask = left_padded(prompts)
    for size in (stays(0.4), stays(20, AdaKV()), stays(20, GlobalTopK())):
        cache = prefill(model, ids, PrunedCache(model.config, H2O(), keep=1.0, later="keep"), mask)
        cache.compress(**size)
        together = answer(model, ids, cache, attention_mask=mask)
        for b, prompt in enumerate(prompts):
            alone = prefill(model, prompt, PrunedCache(model.config, H2O(), **size, later="keep"))
            assert torch.equal(together[b : b + 1], answer(model, prompt, alone))
            assert kept(cache, b) == kept(alone)


@pytest.mark.parametrize("chunk_size", [None, 32])
def test_what_follows_is_kept_whole_and_stays(model, chunk_size):
    ids = random_ids(120)
    for pruner, positions in ((SNAP, "original"), (H2O(), "original"), (SNAP, RemoteGap(gap=8, near_length=4))):
        cache = PrunedCache(model.config, pruner, keep=30, chunk_size=chunk_size, positions=positions, later="keep")
        prefill(model, ids[:, :90], cache)
        first = kept(cache)
        answer(model, ids[:, :100], cache)  # in one call, then tokens
        prefill(model, ids, cache)  # and read as a prompt
        later = list(range(89, 119))
        assert kept(cache) == [[[head + later for head in row] for row in layer] for layer in first]
        cache.fork().compress(keep=100)
        cache.compress(keep=20)
        assert [[len(h) for h in layer[0]] for layer in cache.kept_positions()] == [[50, 50]] * 3
        assert all(head[-30:] == later for layer in kept(cache) for head in layer[0])
        if chunk_size is None and positions == "original":
            read = prefill(model, ids[:, :90], PrunedCache(model.config, pruner, keep=20))
            assert kept(read) == [[[head[:-30] for head in row] for row in layer] for layer in kept(cache)]
        assert answer(model, torch.cat([ids, ids], 1)[:, :130], cache).shape == (1, 4)


def test_a_question_is_answered_as_after_a_prompt_alone(model):
    """later="compress" would drop some of it."""
    ids, asked = random_ids(90), torch.cat([random_ids(90), random_ids(20, seed=4)], 1)
    alike = prefill(model, ids, PrunedCache(model.config, SNAP, keep=30))
    cache = prefill(model, ids, PrunedCache(model.config, SNAP, keep=30, later="keep"))
    one_by_one = []
    with torch.no_grad():
        together = model(asked[:, 89:], past_key_values=cache).logits
        for t in range(89, 110):
            one_by_one.append(model(asked[:, t : t + 1], past_key_values=alike).logits)
    torch.testing.assert_close(together, torch.cat(one_by_one, 1), atol=1e-3, rtol=1e-3)


def test_what_follows_can_be_taken_back(model):
    ids = random_ids(90)
    cache = prefill(model, ids, PrunedCache(model.config, SNAP, keep=30, later="keep", positions="contiguous"))
    expected = answer(model, ids, cache.fork())
    answer(model, torch.cat([ids, random_ids(5, seed=3)], 1), cache)
    cache.crop(-(cache.get_seq_length() - 89))
    assert torch.equal(answer(model, ids, cache), expected)
    with pytest.raises(ValueError, match="crop can remove at most the 4 tokens"):
        cache.crop(-7)
    direct = PrunedCache(model.config, SNAP, keep=30, later="keep")
    with torch.no_grad():
        model(ids, past_key_values=direct)
    with pytest.raises(ValueError, match="crop can remove at most the 0 tokens"):
        direct.crop(-1)


def test_layers_that_see_a_window_keep_it():
    model, ids = kind_model("gemma2"), random_ids(60)
    attach(model)
    cache = prefill(model, ids, PrunedCache(model.config, SNAP, keep=1.0, later="keep"))
    cache.compress(GlobalTopK(), keep=20)
    read = prefill(model, ids, PrunedCache(model.config, SNAP, GlobalTopK(), keep=20))
    assert kept(cache) == kept(read)
    assert torch.equal(answer(model, ids, cache), answer(model, ids, read))


def test_memory_is_freed_and_forks_are_left_alone(model):
    ids = random_ids(90)
    cache = prefill(model, ids, PrunedCache(model.config, SNAP, keep=1.0, later="keep", page_size=8))
    expected, used = answer(model, ids, cache.fork()), cache.nbytes()
    forks = [cache.fork() for _ in range(2)]
    for fork, size in zip(forks, (45, 22), strict=True):
        fork.compress(keep=size)
    assert used > 1.7 * forks[0].nbytes() > 2.5 * forks[1].nbytes()
    assert torch.equal(answer(model, ids, cache), expected)
    del cache, forks[0]
    forks[0].trim()
    assert forks[0].reserved_nbytes() < 0.4 * used


def test_a_budget_alone_divides_as_many(model):
    ids = random_ids(90)
    cache = prefill(model, ids, PrunedCache(model.config, SNAP, keep=24, later="keep"))
    cache.compress(AdaKV())
    assert (cache.keep, cache.budget) == (24, AdaKV())
    assert [sum(row[0]) for row in cache.stored_lengths()] == [48] * 3


def test_what_cannot_be_is_refused(model):
    config, ids = model.config, random_ids(60)
    with pytest.raises(ValueError, match=r"later must be one of compress, keep, got 'drop'"):
        PrunedCache(config, SNAP, keep=20, later="drop")
    with pytest.raises(ValueError, match=r"every must be None with later='keep', .*got 4"):
        PrunedCache(config, SNAP, keep=20, later="keep", every=4)
    with pytest.raises(ValueError, match=r"later must be 'keep' for compress\(\), got 'compress'"):
        prefill(model, ids, PrunedCache(config, SNAP, keep=20)).compress(keep=10)
    for pruner in (CenterOfGravity(20, 20, window=4), CriticalKV(SNAP), ChunkKV(CenterOfGravity(20, 20, window=4))):
        with pytest.raises(ValueError, match=f"but {type(pruner).__name__} scores for the budget that it is given"):
            prefill(model, ids, PrunedCache(config, pruner, keep=40, later="keep")).compress(keep=10)
    streams = DuoAttention(HeadProfile(((0.0, 1.0),) * 3, 2, 8), sparsity=0.5)
    with pytest.raises(
        ValueError, match=r"pruner must not bring a budget of its own for compress\(\), as DuoAttention"
    ):
        prefill(model, ids, PrunedCache(config, streams, later="keep")).compress(keep=10)
    cache = PrunedCache(config, SNAP, keep=20, later="keep")
    with pytest.raises(ValueError, match="needs a cache that has read a prompt, got an empty one"):
        cache.compress(keep=10)
    prefill(model, ids, cache)
    for wrong, message in ((0, "keep must be at least 1, got 0"), (0.0, "above 0 and at most 1"), ("2B", "too small")):
        with pytest.raises(ValueError, match=message):
            cache.compress(keep=wrong)
    with pytest.raises(ValueError, match=r"how many stay is keep=0.125 \(0.875 was the share to remove\)"):
        cache.compress(0.875)
    with pytest.raises(ValueError, match="keep must be given, or another budget, got neither"):
        cache.compress()
    with pytest.raises(ValueError, match="profile must be of this model"):
        cache.compress(Profiled(BudgetProfile(((1.0,),))), keep=9)
    with pytest.raises(ValueError, match="guide has no effect on what follows the prompt with later='keep'"):
        prefill(model, torch.cat([ids, ids], 1), cache, guide=random_ids(3)[0])
    assert cache.stored_lengths() == [[[20, 20]]] * 3
    nan = prefill(model, ids, PrunedCache(config, SNAP, keep=1.0, later="keep"))
    nan.layers[1].chooser.held.scores[0, 3] = float("nan")
    for size in (stays(20), stays(20, AdaKV()), stays(20, GlobalTopK())):
        with pytest.raises(RuntimeError, match="scores of SnapKV in layer 1 hold NaN"):
            nan.compress(**size)
    assert nan.stored_lengths() == [[[59, 59]]] * 3
    assert answer(model, ids, nan).shape == (1, 4)
    made = CacheSpec.parse("pruned,pruner=snapkv,keep=0.5,later=keep").make(config)
    assert made.later == "keep"
    assert kvcompress.generate(model, ids, made, max_new_tokens=3, do_sample=False).shape == (1, 63)
