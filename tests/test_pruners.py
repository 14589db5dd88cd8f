import pytest
import torch

from kvcompress import reference
from kvcompress.pruners import Candidates, SnapKV, StreamingLLM


def offer(count=60, chunk=20, guide=0, heads=2, group=2):
    queries = torch.randn(1, heads * group, chunk + guide, 16)
    keys = torch.randn(1, heads, count + guide, 16)
    return Candidates(queries, keys, count, chunk, guide, 0.25)


def assert_valid(chosen, heads, keep, count):
    assert chosen.shape == (heads, keep)
    assert chosen.dtype == torch.int32
    assert (chosen[:, 1:] > chosen[:, :-1]).all()
    assert chosen.min() >= 0
    assert chosen.max() < count


@pytest.mark.parametrize("keep", [1, 2, 3, 10, 35, 59])
@pytest.mark.parametrize("sinks", [0, 2])
def test_snapkv_keeps_window_sinks_and_best(keep, sinks):
    candidates = offer()
    pruner = SnapKV(window=8, num_sink_tokens=sinks)
    chosen = pruner.select(candidates, keep)
    assert_valid(chosen, 2, keep, 60)
    s = min(sinks, keep)
    W = min(8, keep - s)
    expected = [set(range(s)) | set(range(60 - W, 60)) for _ in range(2)]
    if W:
        scores = reference.window_scores(candidates.queries[:, :, -W:], candidates.keys, scale=0.25)[0]
        for h in range(2):
            rest = [t for t in scores[h].argsort(descending=True).tolist() if t >= s]
            expected[h] |= set(rest[: keep - s - W])
    assert [set(row.tolist()) for row in chosen] == expected


@pytest.mark.parametrize("guide_reduce", ["max", "mean"])
def test_guided_snapkv_lets_the_guide_choose(guide_reduce):
    candidates = offer(guide=6)
    chosen = SnapKV(window=4, guide_kernel_size=3, guide_reduce=guide_reduce).select(candidates, 15)
    scores = reference.window_scores(
        candidates.queries[:, :, -6:], candidates.keys, scale=0.25, reduce=guide_reduce, pooling="max", kernel_size=3
    )[0]
    assert torch.equal(chosen[:, :11], reference.select_topk(scores[:, :56], 11))
    assert chosen[:, 11:].tolist() == [[56, 57, 58, 59]] * 2


def test_a_key_that_the_guide_asks_for_is_kept_with_what_follows():
    candidates = offer(count=200, chunk=20, guide=3)
    candidates.keys[0, :, 70] = 8 * candidates.queries[0, ::2, -1]
    chosen = SnapKV(window=4).select(candidates, 20)
    for row in chosen:
        assert set(range(70, 78)) <= set(row.tolist())  # half of the pooling width


@pytest.mark.parametrize(("keep", "expected"), [(3, [0, 1, 2]), (4, [0, 1, 2, 3]), (6, [0, 1, 2, 3, 58, 59])])
def test_streaming_keeps_first_and_last(keep, expected):
    chosen = StreamingLLM(num_sink_tokens=4).select(offer(), keep)
    assert_valid(chosen, 2, keep, 60)
    assert chosen.tolist() == [expected] * 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SnapKV(window=0), "window must be at least 1, got 0"),
        (lambda: SnapKV(kernel_size=4), "kernel_size must be odd and at least 1, got 4"),
        (lambda: SnapKV(guide_kernel_size=0), "guide_kernel_size must be odd"),
        (lambda: SnapKV(guide_reduce="median"), "guide_reduce must be one of mean, sum, max"),
        (lambda: SnapKV(num_sink_tokens=-1), "num_sink_tokens must be at least 0, got -1"),
        (lambda: StreamingLLM(num_sink_tokens=-1), "num_sink_tokens must be at least 0, got -1"),
    ],
)
def test_wrong_settings_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
