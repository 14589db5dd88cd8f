"""PrunedCache at its limits: memory, settings, positions, the smallest sizes."""

import gc
import warnings

import pytest
import torch
from helpers import attached, kind_model, left_padded, random_ids, stays, tiny_model

import kvcompress
from kvcompress import (
    AdaKV,
    GlobalTopK,
    IterativeCache,
    PrunedCache,
    PyramidKV,
    QuantizedCache,
    RemoteGap,
    Uniform,
    prefill,
)
from kvcompress.hf.argument import CACHE
from kvcompress.profiles import BudgetProfile, Profiled
from kvcompress.pruners import CenterOfGravity, ChunkKV, ExpectedAttention, LagKV, Random, SnapKV, StreamingLLM

# ---- memory ----


def test_nbytes_is_what_the_pool_holds_and_is_given_back():
    model, ids = attached(), random_ids(300)
    cache = prefill(model, ids, PrunedCache(model.config, SnapKV(window=8), keep=64, page_size=16))
    pages, slot = 2 * 64 // 16, 2 * 16 * 4
    tables = 2 * 4 * (2 * 0 + cache.layers[0].pool.block_table.shape[1]) + 2 * 4 + 2 * 4  # table, lengths, shift
    assert cache.nbytes() == 3 * (pages * 16 * slot + tables)
    assert cache.reserved_nbytes() < 3 * (2 * pages * 16 * slot + 1000)  # never the prompt's 300 tokens
    del cache
    gc.collect()
    dense = prefill(model, ids, PrunedCache(model.config, SnapKV(), keep=10**6, page_size=16))
    assert dense.nbytes() > 4 * 3 * pages * 16 * slot


def test_pages_that_held_a_chunk_are_given_back():
    model, ids = attached(), random_ids(300)
    cache = PrunedCache(model.config, SnapKV(window=6), keep=20, chunk_size=100, page_size=4)
    prefill(model, ids, cache)
    assert cache.reserved_nbytes() < 1.2 * cache.nbytes()


def test_a_refused_step_changes_nothing():
    model, ids = attached(), random_ids(60)
    cache = PrunedCache(model.config, SnapKV(window=4), keep=16, max_pages=4, page_size=8, every=8)
    prefill(model, ids[:, :40], cache)
    with pytest.raises(RuntimeError, match="max_pages = 4 is too few"), torch.no_grad():
        model(ids[:, 39:], past_key_values=cache)
    cache.check_complete()
    assert cache.stored_lengths() == [[[16, 16]]] * 3


# ---- settings ----


@pytest.mark.parametrize(
    ("length", "pruner", "keep", "chunk_size", "said"),
    [
        (1010, SnapKV(window=4), 25, None, '^keep=25 keeps 25 of a row.s 1009 tokens; 25 percent are keep="25%"$'),
        (1100, SnapKV(window=4), 25, 256, r"^keep=25 keeps 25 of a row's 1\d+ tokens; 25 percent"),
        (50, SnapKV(), 25, None, "49 tokens, which are those that SnapKV always keeps: it chooses none; 25 percent"),
        (300, SnapKV(window=200), 200, None, "^keep=200 keeps 200 of a row's 299 tokens, .* it chooses none$"),
        (
            300,
            LagKV(lag=128),
            60,
            None,
            "^keep=60 keeps 60 of a row's 299 tokens, .* LagKV always keeps: it chooses none",
        ),
        (300, ChunkKV(LagKV()), 120, None, "that ChunkKV always keeps: it chooses none$"),
        (50, Random(), 1, None, '49 tokens; 1 percent are keep="1%"$'),
    ],
)
def test_so_few_tokens_that_a_share_was_meant_are_said_once(length, pruner, keep, chunk_size, said):
    model, ids = attached(max_position_embeddings=2048), random_ids(length)
    cache = PrunedCache(model.config, pruner, keep=keep, chunk_size=chunk_size)
    with pytest.warns(UserWarning, match=said):
        prefill(model, ids, cache)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(ids[:, -1:].expand(-1, 3), **{CACHE: cache})


@pytest.mark.parametrize(
    ("length", "pruner", "keep"),
    [
        (900, SnapKV(window=4), 25),
        (1010, SnapKV(window=4), 64),
        (1010, SnapKV(window=4), 0.01),
        (300, StreamingLLM(), 32),
        (300, LagKV(lag=40), 100),
        (20, SnapKV(), 25),
    ],
)
def test_of_few_tokens_that_others_keep_too_nothing_is_said(length, pruner, keep):
    model = attached(max_position_embeddings=2048)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prefill(model, random_ids(length), PrunedCache(model.config, pruner, keep=keep))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"pruner": "snapkv"},
            r"pruner must be an instance .*, got the text 'snapkv': give .*; .*Spec",
        ),
        ({"keep": None}, "keep must be given with SnapKV, got None"),
        ({"keep": 0}, r"keep must be at least 1, got 0: a whole number is tokens; a share of them is .* \(0.25, "),
        ({"keep": 1.5}, "above 0 and at most 1, got 1.5"),
        (
            {"budget": 0.75},
            r"budget divides .* is keep=0.25 \(0.75 was .*\), or keep=0.75 if it is to stay; got 0.75",
        ),
        ({"share": 0.25}, "share is keep here, got share=0.25"),
        ({"target_cr": 4}, "target_cr is keep = 1 / target_cr here, got target_cr=4"),
        ({"budget": 1024}, "how many stay is keep=1024; got 1024"),
        ({"budget": "512MiB"}, "how many stay is keep='512MiB'; got"),
        ({"keep": "12 parsecs"}, "keep must be tokens .*, the share that stays .* or bytes .* '12 parsecs'"),
        ({"budget": "adakv"}, r"budget must be a Budget, such as AdaKV\(\) .*, got 'adakv'"),
        ({"keep": [3]}, r"keep must be tokens .* got \[3\], a list"),
        ({"budget": AdaKV}, r"budget must be an instance, got the class AdaKV: AdaKV\(\)"),
        ({"pruner": SnapKV}, r"got the class SnapKV, not an instance: SnapKV\(\)"),
        ({"pruner": type("KnormPress", (), {})()}, r"got KnormPress: give kvcompress.pruners.KeyNorm\(\); a press's"),
        ({"pruner": type("TOVAPress", (), {})()}, r"got TOVAPress: give kvcompress.pruners.TOVA\(\); a press's"),
        (
            {"pruner": 64, "budget": SnapKV()},
            r"the pruner must come before the budget, .* pruner = 64 and budget",
        ),
        (
            {"compression_ratio": 0.75},
            r"compression_ratio is keep = 1 - compression_ratio here: keep=0.25; got compression_ratio=0.75",
        ),
        ({"compression_ratio": "half"}, "here: keep=0.5, say; got compression_ratio='half'"),
        ({"pruner": 0.5, "budget": None}, r"pruner must be an instance .*, got 0.5; how many stay is keep=0.5"),
        ({"pruner": None, "budget": SnapKV()}, r"the pruner must come before the budget, .* got pruner = None"),
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"chunk_size": -1}, "chunk_size must be at least 1, got -1"),
        ({"positions": "far"}, "positions must be 'original', 'contiguous' or a RemoteGap, got 'far'"),
        ({"positions": RemoteGap(gap=400)}, r"gap 400 needs 548 positions .* trained for 512; use gap <= 364"),
        ({"keep": 500, "positions": RemoteGap()}, "leave no position below the 512"),
        ({"pruner": ExpectedAttention(), "positions": "contiguous"}, "positions must be 'original' with Expected"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrunedCache(tiny_model().config, **{"pruner": SnapKV(), "keep": 20, **arguments})


def test_what_keeps_every_token_takes_no_keep():
    with pytest.raises(ValueError, match="keep is of PrunedCache, which takes dtype too: every token stays here"):
        QuantizedCache(tiny_model().config, keep=0.5)


def test_too_small_a_number_of_bytes_names_the_least():
    model, ids = attached(), random_ids(60)
    with pytest.raises(ValueError, match=r"keep = 1,024 bytes is too small for 6 .* at least (\d+) bytes") as error:
        prefill(model, ids, PrunedCache(model.config, SnapKV(), keep="1KiB", page_size=8))
    least = str(error.value).split("at least ")[1].split(" ")[0]
    cache = prefill(model, ids, PrunedCache(model.config, SnapKV(), keep=f"{least}B", page_size=8))
    assert sum(layer.pool.nbytes() for layer in cache.layers) <= int(least)


class Broken(SnapKV):
    """Scores of a wrong kind."""

    def __init__(self, scores):
        super().__init__(window=4)
        object.__setattr__(self, "wrong", scores)

    def scores(self, candidates, keep):
        return self.wrong


@torch.no_grad()
@pytest.mark.parametrize("wrong", [None, torch.zeros(4, 30), torch.zeros(2, 29), torch.zeros(2, 30, dtype=torch.long)])
def test_wrong_scores_of_a_users_pruner_are_named(wrong):
    model = attached()
    with pytest.raises(ValueError, match=r"scores of Broken must be float32 \[Hkv, count\] = \(2, 30\), got"):
        model(random_ids(30), past_key_values=PrunedCache(model.config, Broken(wrong), keep=12))
    with pytest.raises(RuntimeError, match="scores of Broken in layer 0 hold NaN"):
        model(
            random_ids(30), past_key_values=PrunedCache(model.config, Broken(torch.full((2, 30), torch.nan)), keep=12)
        )
    for settings in ({"window": 2.5}, {"kernel_size": 5.0}):
        with pytest.raises(ValueError, match="must be an integer"):
            SnapKV(**settings)


@pytest.mark.parametrize("kind", [PrunedCache, IterativeCache])
def test_a_model_of_windows_alone_is_pruned_nowhere_and_says_so_once(kind):
    model, ids = kind_model("gemma2", layer_types=["sliding_attention"] * 4), random_ids(60)
    kvcompress.attach(model)
    size = {"keep": 20} if kind is PrunedCache else {"memory_size": 20, "chunk_size": 30}
    cache = kind(model.config, **size)
    with pytest.warns(UserWarning, match=f"{kind.__name__} prunes nothing of Gemma2Model: every layer .* window or a"):
        prefill(model, ids, cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (cache, cache.fork()):
            model.generate(ids, max_new_tokens=3, do_sample=False, **{CACHE: one})
        mixed = kind_model("gemma2")
        kvcompress.attach(mixed)
        prefill(mixed, ids, PrunedCache(mixed.config, keep=20))


EACH_BUDGET = [Uniform(), PyramidKV(), AdaKV(), GlobalTopK(), Profiled(BudgetProfile(((1.0, 2.0),) * 3))]


@torch.no_grad()
@pytest.mark.parametrize("missing", [[3], [3, 17], range(30)], ids=str)
@pytest.mark.parametrize("budget", EACH_BUDGET, ids=lambda budget: type(budget).__name__)
def test_every_budget_refuses_nan_before_it_chooses(budget, missing, monkeypatch):
    """Also on CUDA, where select_topk refuses nothing and has -1 where a row has too few that are not NaN."""
    scores = torch.rand(2, 30)
    scores[1, list(missing)] = torch.nan
    model = attached()
    cache = PrunedCache(model.config, Broken(scores), budget, keep=12)
    monkeypatch.setattr(kvcompress.ops, "select_topk", lambda *given: pytest.fail("nothing is to be chosen"))
    with pytest.raises(RuntimeError, match="scores of Broken in layer 0 hold NaN"):
        model(random_ids(30), past_key_values=cache)
    assert cache.layers[0].pool.counts == [0, 0]


# ---- positions ----


def test_positions_never_reach_the_trained_length():
    model = attached(max_position_embeddings=96)
    gap = RemoteGap(headroom=8)
    with pytest.raises(ValueError, match=r"prompt of 99 tokens in one pass .* chunk_size"):
        prefill(model, random_ids(100), PrunedCache(model.config, SnapKV(window=4), keep=16, positions=gap))
    cache = PrunedCache(model.config, SnapKV(window=4), keep=16, positions=gap, chunk_size=20, every=8)
    kvcompress.generate(model, random_ids(300), cache, max_new_tokens=100, do_sample=False)
    unbounded = PrunedCache(model.config, SnapKV(window=4), keep=16, positions=gap)
    with pytest.raises(ValueError, match="positions reach 97, but the model was trained for 96"):
        kvcompress.generate(model, random_ids(50), unbounded, max_new_tokens=60, do_sample=False)


def test_positions_of_a_sequence_that_was_never_compressed_are_checked_too():
    model = attached(max_position_embeddings=64)
    cache = PrunedCache(model.config, SnapKV(window=4), keep=32, positions=RemoteGap(headroom=16))
    with pytest.raises(ValueError, match="positions reach 65, but the model was trained for 64"):
        kvcompress.generate(model, random_ids(10), cache, max_new_tokens=100, do_sample=False)


def test_positions_that_would_need_other_frequencies_are_refused():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = attached(max_position_embeddings=64, rope_parameters=scaling)
    cache = PrunedCache(model.config, SnapKV(window=4), keep=16, positions="contiguous")
    with pytest.raises(ValueError, match="rope type 'dynamic' beyond its switch point"):
        prefill(model, random_ids(100), cache)


# ---- smallest sizes, ties ----


def test_a_one_token_prompt_then_another():
    model, ids = attached(), random_ids(40)
    cache = IterativeCache(model.config, memory_size=16, chunk_size=8)
    prefill(model, ids[:, :1], cache)
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache)
    prefill(model, ids, cache)
    assert cache.stored_lengths() == [[[16, 16]]] * 3


def test_a_last_chunk_of_one_token_is_part_of_the_prompt():
    model, ids = attached(), random_ids(34)
    cache = prefill(model, ids, PrunedCache(model.config, SnapKV(window=4), keep=16, chunk_size=16))
    assert cache.stored_lengths() == [[[16, 16]]] * 3


@torch.no_grad()
def test_a_row_of_no_more_tokens_than_the_window_stays_whole():
    """AdaKV cuts rows down to what always stays; the next window may be as long as a row."""
    model, ids = attached(), random_ids(60)
    for cache in (
        PrunedCache(model.config, SnapKV(), AdaKV(floor=0.0), keep=8, every=1),
        PrunedCache(model.config, SnapKV(), AdaKV(), keep=32, every=4, chunk_size=32),
        IterativeCache(model.config, memory_size=4, budget=AdaKV(floor=0.0), chunk_size=4, every=1),
    ):
        prefill(model, ids[:, :36], cache)
        for t in range(35, 60):
            model(ids[:, [t]], past_key_values=cache)
        assert all(sum(rows[0]) <= 2 * (cache.policy.keep.tokens + cache.every) for rows in cache.stored_lengths())


def test_a_head_that_goes_does_not_reach_into_what_stays():
    model = attached()
    pruner = CenterOfGravity(8, 8, 4, keep_head=False, window=2)
    for length, keep, kept in ((4, 3, 2), (5, 3, 2), (9, 3, 3)):
        cache = PrunedCache(model.config, pruner, keep=keep)
        with torch.no_grad():
            model(random_ids(length), past_key_values=cache)
        assert cache.stored_lengths() == [[[kept] * 2]] * 3
    ids, mask = left_padded([random_ids(2), random_ids(50)])
    prefill(model, ids, PrunedCache(model.config, pruner, AdaKV(), keep=0.5, chunk_size=5), mask)


@pytest.mark.parametrize("size", [stays(3), stays(4), stays(5), stays(None), stays(5, AdaKV(floor=0.0))])
@pytest.mark.parametrize("sizes", [(3, 3, 3), (3, 4, 3)])
def test_a_head_that_goes_is_not_kept_by_a_small_budget(sizes, size):
    model, pruner = attached(), CenterOfGravity(*sizes, keep_head=False, window=1)
    keep = size["keep"] or sum(sizes[:2])
    for length in range(keep + 1, keep + 6):
        ids = random_ids(length)
        whole, cache = PrunedCache(model.config, pruner, keep=100), PrunedCache(model.config, pruner, **size)
        iterative = IterativeCache(model.config, memory_size=keep, pruner=pruner, chunk_size=length, append=True)
        with torch.no_grad():
            for one in (whole, cache):
                model(ids, past_key_values=one)
            prefill(model, torch.cat([ids, ids[:, :1]], 1), iterative)
        recent = -(-keep * sizes[1] // sum(sizes[:2]))
        lost = min(sizes[2], length - recent)
        for held in (cache, iterative):
            for layer, every in zip(held.layers, whole.layers, strict=True):
                values, all_values = layer.pool.gather(length)[1], every.pool.gather(length)[1]
                for row, count, candidates in zip(values, layer.pool.counts, all_values, strict=True):
                    places = torch.cdist(row[:count], candidates).argmin(1).tolist()
                    assert lost <= min(places) and places == sorted(set(places))
                if size["budget"] is None:
                    assert layer.pool.counts == [min(keep, length - lost)] * 2


def test_ties_go_to_all_heads_alike():
    indices, kept = AdaKV(floor=0.0).divide(0, torch.zeros(2, 100), 29, 200)
    assert kept.tolist() == [29, 29]
    assert indices.tolist() == [list(range(29))] * 2
