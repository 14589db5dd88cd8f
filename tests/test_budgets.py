import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress import AdaKV, GlobalTopK, PrunedCache, PyramidKV, Uniform
from kvcompress.budgets import Budget, CacheShape
from kvcompress.profiles import BudgetProfile, Profiled
from kvcompress.pruners import H2O, RKV, CriticalKV, SnapKV
from kvcompress.support.units import Keep, instead_of

SHAPE = CacheShape(layers=4, rows=2, slot_nbytes=128, page_size=16)


@pytest.mark.parametrize(
    ("share", "length", "kept"),
    [(0.1, 10, 1), (0.9, 10, 9), (0.3, 10, 3), (0.7, 10, 7), (0.71, 100, 71), (0.43, 100, 43), (0.5, 7, 4),
     (0.01, 3, 1), (1.0, 10, 10), (0.5, 1, 1), (0.0001, 5000, 1), ("1/3", 9, 3), ("1/3", 10, 4), ("12.5%", 80, 10)],
)  # fmt: skip
def test_a_share_is_the_number_that_is_written(share, length, kept):
    for budget in (Uniform(), AdaKV(), PyramidKV()):
        assert budget.mean_tokens(Keep.of(share), length, SHAPE) == kept


@given(share=st.integers(1, 1000), length=st.integers(1, 5000))
def test_a_share_keeps_what_exact_arithmetic_says(share, length):
    assert Uniform().mean_tokens(Keep.of(share / 1000), length, SHAPE) == -(-share * length // 1000)


def test_tokens_are_at_most_what_there_is():
    assert [Uniform().mean_tokens(Keep.of(20), length, SHAPE) for length in (5, 20, 99)] == [5, 20, 20]


def test_one_size_is_written_in_many_ways():
    for tokens, written in (
        (1024, (1024, "1024", " 1k ", "1K", np.int64(1024))), (1, (1, "1")), (1536, ("1.5k",)), (1 << 20, ("1M",)),
    ):  # fmt: skip
        assert {Keep.of(x).tokens for x in written} == {tokens}
    quarter = (0.25, ".25", "0.25", "25%", "25 %", "1/4", "2.5e-1")
    for share, written in ((Fraction(1, 4), quarter), (1, (1.0, "100%", "1/1"))):
        assert {Keep.of(x).share for x in written} == {share}
    assert Keep.of(np.float32(0.1)).share == Fraction(1, 10) and Keep.of("2kb").nbytes == 2000
    assert Keep.of("512MiB").nbytes == 512 << 20 and Keep.of("0.5 KB").nbytes == 500
    assert Keep.of("1.5TiB").nbytes == 3 << 39 and Keep.of("2TB").nbytes == 2 * 10**12


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (0, "keep must be at least 1, got 0"),
        (True, r"keep must be tokens \(1024, '4k'\), the share that stays .* got True, a bool"),
        (1.5, "keep as a share must be above 0 and at most 1, got 1.5$"),
        (1024.0, "at most 1, got 1024.0; tokens are a whole number, 1024"),
        (0.0, "above 0 and at most 1, got 0.0"),
        (float("nan"), "above 0 and at most 1, got nan"),
        ("150%", "at most 1, got 150%"),
        ("1/0", "keep must be tokens .* got the text '1/0'"),
        ("-1", "keep must be at least 1, got -1"),
        ("3 parsecs", "keep must be tokens .* got the text '3 parsecs'"),
        (None, "got None, a NoneType"),
        ("1.2345k", "keep must be tokens .* got the text '1.2345k'"),
        ("0MiB", "keep must be above 0 bytes, got 0MiB"),
    ],
)
def test_what_is_no_size_is_named(keep, message):
    with pytest.raises(ValueError, match=message):
        Keep.of(keep)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Uniform(1024), "Uniform divides tokens .* is keep=1024, given to the cache; got 1024"),
        (
            lambda: GlobalTopK(0.875),
            r"keep=0.125 \(0.875 was the share to remove\), or keep=0.875 .*, given to the cache",
        ),
        (lambda: PyramidKV(0.75, beta=3), r"keep=0.25 \(0.75 was"),
        (lambda: PyramidKV(size="512MiB"), r"keep='512MiB', given"),
        (
            lambda: AdaKV(SnapKV()),
            r"AdaKV must be given beside the pruner, .*\(config, SnapKV\(\), AdaKV\(\), keep",
        ),
        (
            lambda: GlobalTopK(SnapKV),
            r"SnapKV\(\), GlobalTopK\(\), keep=0.25\), say; got GlobalTopK\(SnapKV\(\)\)",
        ),
        (lambda: AdaKV(1024), "inner divides tokens .* is keep=1024; got 1024"),
        (lambda: AdaKV(0.0), r"keep=1.0 \(0.0 was"),
        (lambda: Profiled(64, BudgetProfile(((1.0,),))), "Profiled divides .* keep=64, given"),
    ],
)
def test_a_size_of_a_budget_is_answered_with_keep(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("size", ["16KiB", "20KB", "33000B", "0.05MB", "40 KiB"])
@pytest.mark.parametrize("growth", [0, 5])
@pytest.mark.parametrize("kind", [Uniform, PyramidKV, AdaKV])
def test_bytes_hold_pages_and_tables(size, growth, kind):
    shape = CacheShape(layers=4, rows=2, slot_nbytes=128, page_size=4, growth=growth)
    number = {"16KiB": 16384, "20KB": 20000, "33000B": 33000, "0.05MB": 50000, "40 KiB": 40960}[size]
    length = 500

    def worst(budget, mean):
        """Pages of both rows of all layers before a compression, however AdaKV's heads divide a layer's tokens."""
        pages = 0
        for layer in range(4):
            keep = budget.layer_tokens(mean, length, layer, 4)
            first = range(2 * keep + 1) if kind is AdaKV else [keep]
            pages += max(sum(-(-(kept + growth) // 4) for kept in (one, 2 * keep - one)) for one in first)
        return pages * (4 * 128 + 8) + 8 * 4

    budget = kind()
    mean = budget.mean_tokens(Keep.of(size), length, shape)
    assert 1 < mean < length
    assert worst(budget, mean) <= number
    assert worst(budget, mean + 4) > number
    if kind is Uniform:
        assert worst(budget, mean + 1) > number


@settings(deadline=None)
@given(
    mean=st.integers(1, 3000),
    length=st.integers(1, 6000),
    layers=st.integers(1, 80),
    beta=st.integers(1, 40),
    window=st.integers(0, 64),
)
def test_a_pyramid_conserves_its_sum_and_never_rises(mean, length, layers, beta, window):
    shape = CacheShape(layers, 2, 128, 16)
    budget = PyramidKV(beta=beta, window=window)
    tokens = [budget.tokens_of(Keep.of(mean), length, layer, shape) for layer in range(layers)]
    assert sum(tokens) == layers * min(mean, length)
    assert min(tokens) >= 1
    assert max(tokens) <= length
    assert tokens == sorted(tokens, reverse=True)


def test_a_pyramid_is_the_line_of_the_paper():
    # base 100 - 20 = 80, from 160 - 4 = 156 down to 4, and the window of 20 on top
    shape = CacheShape(5, 2, 128, 16)
    pyramid, keep = PyramidKV(beta=20, window=20), Keep.of(100)
    assert [pyramid.tokens_of(keep, 1000, j, shape) for j in range(5)] == [176, 138, 100, 62, 24]
    # a first layer that would keep more than the 120 tokens keeps them all: 100 down to 60
    assert [pyramid.tokens_of(keep, 120, j, shape) for j in range(5)] == [120, 110, 100, 90, 80]


def kvpress_layer_budget(length, removed, layer, layers, window=64, beta=20):
    """What PyramidKVPress says of a layer, where it says something."""
    capacity = window + length * (1 - removed)
    least = (capacity - window) / beta
    most = (capacity - window) * 2 - least
    if most >= length - window:
        most = length - window
        least = (capacity - window) * 2 - most
    if not (length >= most >= least >= window):
        return round(length * (1 - removed))
    return round(most - layer * ((most - least) / (layers - 1)))


@pytest.mark.parametrize("layers", [2, 4, 6, 12, 28, 61])
def test_pyramids_of_kvpress(layers):
    shape = CacheShape(layers, 2, 64, 16, 0)
    for length in (65, 100, 129, 200, 513, 700, 1001, 5000, 32_771):
        for removed in (0.05, 0.1, 0.25, 0.3, 0.5, 0.6, 0.75, 0.9, 0.95, 0.99):
            budget, keep = PyramidKV.preset("kvpress"), Keep.of(f"{round(100 - 100 * removed)}%")
            ours = [budget.tokens_of(keep, length, layer, shape) for layer in range(layers)]
            theirs = [kvpress_layer_budget(length, removed, layer, layers) for layer in range(layers)]
            assert ours == [max(count, 1) for count in theirs], (length, removed)


def test_presets_of_pyramids():
    assert PyramidKV.preset("kvcache-factory", beta=5) == PyramidKV(beta=5, window=8)
    shape = CacheShape(6, 2, 64, 16, 0)
    pyramid = PyramidKV.preset("kvpress")
    assert [pyramid.tokens_of(Keep.of(1.0), length, 3, shape) for length in (10, 700)] == [10, 700]
    assert pyramid.tokens_of(Keep.of(0.5), 700, 0, CacheShape(1, 2, 64, 16, 0)) == 350
    # tokens and bytes are means of whole tokens; the sum of the layers is theirs to within one each
    for size in (400, "320KiB"):
        keep = Keep.of(size)
        tokens = [pyramid.tokens_of(keep, 700, layer, shape) for layer in range(6)]
        assert tokens == sorted(tokens, reverse=True) and tokens[0] > tokens[-1]
        assert abs(sum(tokens) - 6 * pyramid.mean_tokens(keep, 700, shape)) <= 6


def test_heads_share_a_layers_tokens():
    ranks = torch.tensor([[9.0, 1, 2, 8, 3], [4, 7, 0, 0, 5]])
    indices, kept = AdaKV(floor=0.0).divide(0, ranks, 2, 10)
    assert kept.tolist() == [2, 2]
    indices, kept = AdaKV(floor=0.0).divide(0, ranks * torch.tensor([[1.0], [0.1]]), 2, 10)
    assert [row[:n].tolist() for row, n in zip(indices, kept, strict=True)] == [[0, 3, 4], [1]]
    indices, kept = AdaKV(floor=0.5).divide(0, ranks * torch.tensor([[1.0], [0.1]]), 2, 10)
    assert [row[:n].tolist() for row, n in zip(indices, kept, strict=True)] == [[0, 3, 4], [1]]


@settings(deadline=None, max_examples=60)
@given(
    heads=st.integers(1, 6), T=st.integers(1, 40), keep=st.integers(1, 40), floor=st.integers(0, 10),
    seed=st.integers(0, 2**31), sure=st.integers(0, 4), hidden=st.integers(0, 5),
)  # fmt: skip
def test_flat_top_k_with_a_floor(heads, T, keep, floor, seed, sure, hidden):
    generator = torch.Generator().manual_seed(seed)
    keep, floor = min(keep, T), floor / 10
    ranks = torch.rand(heads, T, generator=generator)
    ranks[:, : min(sure, keep)] = float("inf")
    for head in range(heads):  # rows that end earlier
        if hidden and T - hidden * head % 7 > max(keep, 1):
            ranks[head, T - hidden * head % 7 :] = float("-inf")
    allowed = int((ranks > float("-inf")).sum())
    indices, kept = AdaKV(floor=floor).divide(0, ranks, keep, allowed)
    assert int(kept.sum()) == min(heads * keep, allowed)
    chosen = [row[:n].tolist() for row, n in zip(indices, kept.tolist(), strict=True)]
    # the definition, in loops
    order = {h: sorted(range(T), key=lambda t, h=h: (-float(ranks[h, t]), t)) for h in range(heads)}
    floor_count = max(int(round(floor * 10) * keep // 10), 1)
    sets = [{t for t in order[h][:floor_count] if ranks[h, t] > float("-inf")} for h in range(heads)]
    rest = sorted(
        ((float(ranks[h, t]), -h, -t) for h in range(heads) for t in range(T) if t not in sets[h]), reverse=True
    )
    for _, h, t in rest[: min(heads * keep, allowed) - sum(map(len, sets))]:
        sets[-h].add(-t)
    assert [set(row) for row in chosen] == sets
    assert all(row == sorted(row) for row in chosen)
    for row, offered in zip(chosen, ranks, strict=True):
        assert len(row) >= min(floor_count, int((offered > float("-inf")).sum()))
        assert set(offered.isposinf().nonzero().flatten().tolist()) <= set(row)


@pytest.mark.parametrize("keep", [1, 2, 3, 4])
@pytest.mark.parametrize("always", [0, 1])
def test_the_smallest_budgets_empty_no_head(keep, always):
    ranks = torch.rand(8, 20) + torch.arange(8)[:, None]  # the last head outdoes all others
    ranks[:, 20 - always :] = float("inf")
    indices, kept = AdaKV().divide(0, ranks, keep, 160)
    assert kept.sum() == 8 * keep and kept.min() == 1
    best = ranks.argmax(1).tolist()
    assert all(best[h] in indices[h, :n].tolist() for h, n in enumerate(kept.tolist()))


def test_a_head_that_offers_nothing_is_empty_and_leaves_its_share_to_others():
    ranks = torch.rand(3, 6)
    ranks[1] = float("-inf")
    indices, kept = AdaKV(floor=1.0).divide(0, ranks, 2, 12)
    assert kept[1] == 0 and kept.sum() == 6 and kept.min(dim=0).values == 0
    assert AdaKV().divide(0, torch.full((3, 6), float("-inf")), 2, 0)[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PyramidKV(inside=1), "inside must be True or False, got 1"),
        (lambda: PyramidKV.preset("paper"), "preset must be one of kvpress, kvcache-factory, got 'paper'"),
        (lambda: PyramidKV(beta=0), "beta must be at least 1, got 0"),
        (lambda: PyramidKV(window=-1), "window must be at least 0, got -1"),
        (lambda: AdaKV(floor=1.1), "floor must be between 0 and 1, got 1.1"),
        (lambda: AdaKV(floor="0.2"), "floor must be between 0 and 1, got '0.2'"),
        (lambda: AdaKV(floor=float("nan")), "floor must be between 0 and 1, got nan"),
        (lambda: AdaKV(AdaKV()), r"inner must be a budget that divides no heads .*, got AdaKV"),
        (lambda: AdaKV(GlobalTopK()), r"inner must be a budget that divides no heads .*, got GlobalTopK"),
    ],
)
def test_wrong_settings_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@dataclass(frozen=True)
class LastLayer(Budget):
    """All tokens in the last layer, but for `least` in each of the others: the one method that a budget has."""

    least: int = 1

    def layer_tokens(self, mean, length, layer, layers):
        last = min(layers * mean - (layers - 1) * self.least, length)
        return last if layer == layers - 1 else self.least


def test_one_method_is_a_budget():
    shape = CacheShape(layers=4, rows=2, slot_nbytes=128, page_size=16)
    budget = LastLayer()
    assert (budget.divides_layers, budget.divides_heads) == (True, False)
    for size, mean in ((10, 10), (0.1, 10), ("26KiB", 12)):
        keep = Keep.of(size)
        assert [budget.tokens_of(keep, 100, j, shape) for j in range(4)] == [1, 1, 1, 4 * mean - 3]
        assert budget.mean_tokens(keep, 100, shape) == mean
    # bytes count the pages of what it says: three rows of 1 page and one of 3, of two heads
    assert budget.all_pages(10, 100, shape) == 2 * (3 + 3)
    assert AdaKV(budget).tokens_of(Keep.of(10), 100, 3, shape) == 37 and AdaKV(budget).divides_layers
    assert not Uniform().divides_layers and AdaKV().divides_heads
    ranks = torch.rand(2, 3, 9)
    indices, kept = budget.divide(1, ranks, 4, 12)
    assert kept is None and torch.equal(indices.long(), ranks.topk(4).indices.sort().values)


@pytest.mark.parametrize("least", [0, 101, 1.0])
def test_a_layer_that_keeps_what_it_cannot_is_refused(least):
    message = rf"layer_tokens of LastLayer must be an integer between 1 and length = 100, got {least} for layer 1"
    with pytest.raises(ValueError, match=message):
        LastLayer(least).tokens_of(Keep.of(10), 100, 1, CacheShape(4, 2, 64, 16))


def test_a_budget_of_ones_own_may_have_numbers():
    assert LastLayer(3).least == 3 and LastLayer(least=2) != LastLayer()
    with pytest.raises(ValueError, match=r"LastLayer divides tokens over .* keep=1024, given to the cache; got 1024"):
        LastLayer(1024, 1)


def test_the_window_of_a_pyramid_is_the_pruners():
    config = tiny_model().config
    for pruner, window in ((SnapKV(window=7), 7), (CriticalKV(SnapKV(window=7)), 7), (RKV(), 8), (H2O(), None)):
        assert PrunedCache(config, pruner, PyramidKV(), keep=40).budget == PyramidKV(window=window)
        assert PrunedCache(config, pruner, AdaKV(PyramidKV()), keep=40).budget.inner == PyramidKV(window=window)
    shape = CacheShape(3, 2, 64, 16)
    assert [PyramidKV().tokens_of(Keep.of(100), 500, j, shape) for j in range(3)] == [
        PyramidKV(window=32).tokens_of(Keep.of(100), 500, j, shape) for j in range(3)
    ]
    for budget in (PyramidKV(window=64), AdaKV(PyramidKV(window=64))):
        with pytest.raises(ValueError, match=r"window of PyramidKV must be that of SnapKV, 32 \(None .*, got 64"):
            PrunedCache(config, SnapKV(), budget, keep=40)
    assert PrunedCache(config, SnapKV.preset("kvpress"), PyramidKV.preset("kvpress"), keep=40).budget.window == 64
    # H2O has no window to differ from
    assert PrunedCache(config, H2O(), PyramidKV(window=64), keep=40).budget.window == 64


@pytest.mark.parametrize(
    ("computed", "length", "kept"),
    [(1 - 0.7, 100, 30), (1 / 11, 110, 10), (1 / 15, 120, 8), (0.1 + 0.2, 10, 3), (0.3, 101, 31)],
)
def test_a_share_that_was_computed_is_the_fraction_next_to_it(computed, length, kept):
    assert math.ceil(Keep.of(computed).share * length) == kept
    assert Keep.of(0.123456789012345).text == "0.123456789012345"


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (0.875, "keep=0.125 (0.875 was the share to remove), or keep=0.875 if it is to stay"),
        (1e-05, "keep=0.99999 (1e-05 was the share to remove), or keep=1e-05 if it is to stay"),
        (0.0, "keep=1.0 (0.0 was the share to remove)"), ("0.", "keep=1.0 (0. was the share to remove)"),
        ("00.5", "keep=0.5 (00.5 was the share to remove), or keep=00.5 if it is to stay"),
        (1024, "keep=1024"), ("512MiB", "keep='512MiB'"), (".", None),
        ("globaltopk", None), (True, None), (None, None),
    ],
)  # fmt: skip
def test_what_was_a_size_is_told_in_the_new_word(size, told):
    assert instead_of(size) == told
