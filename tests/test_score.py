import accuracy
import oracle
import pytest
import torch
from accuracy import assert_within
from backends import BACKENDS
from helpers import DTYPES, MASKED_RANGES, covering
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress import ops


def check(queries, keys, **options):
    exact = oracle.window_scores(queries.double(), keys.double(), **options)
    assert_within(ops.window_scores(queries, keys, **options), exact, accuracy.window_scores(queries, keys, **options))


SIZES = [
    (1, 1, 1, 1, 2, 16), (2, 4, 2, 8, 77, 64), (1, 8, 1, 32, 300, 128), (1, 3, 3, 5, 64, 33),
    (1, 2, 1, 65, 130, 256), (3, 6, 3, 4, 200, 8), (1, 2, 1, 130, 200, 40),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "sizes", "backend"), covering(DTYPES, SIZES, BACKENDS), indirect=["backend"])
def test_scores_as_the_reference(backend, dtype, sizes):
    B, Hq, Hkv, W, T, D = sizes
    queries, keys = torch.randn(B, Hq, W, D).to(dtype), torch.randn(B, Hkv, T, D).to(dtype)
    check(queries, keys)


@pytest.mark.parametrize(
    ("dtype", "reduce", "pooling", "kernel_size", "backend"),
    covering(DTYPES[:2], ops.REDUCTIONS, ops.POOLINGS, [1, 3, 15], BACKENDS),
    indirect=["backend"],
)
def test_every_reduction_and_pooling(backend, reduce, pooling, kernel_size, dtype):
    queries, keys = 2 * torch.randn(1, 4, 6, 32).to(dtype), torch.randn(1, 2, 150, 32).to(dtype)
    check(queries, keys, reduce=reduce, pooling=pooling, kernel_size=kernel_size)


@pytest.mark.parametrize(
    ("dtype", "reduce", "ranges", "backend"),
    covering(DTYPES[:2], ops.REDUCTIONS, MASKED_RANGES, BACKENDS),
    indirect=["backend"],
)
def test_masked_columns_and_own_keys(backend, ranges, reduce, dtype):
    queries, keys = torch.randn(2, 4, 9, 32).to(dtype), 3 * torch.randn(2, 2, 150, 32).to(dtype)
    lengths = torch.tensor([150, 40], dtype=torch.int32)
    check(queries, keys, reduce=reduce, kernel_size=1, lengths=lengths, **ranges)
    check(queries, keys, reduce=reduce, pooling="max", kernel_size=3, lengths=lengths, **ranges)


@pytest.mark.parametrize(
    ("dtype", "sizes", "backend"),
    covering(DTYPES, [(2, 1, 300), (1, 1, 64), (3, 3, 65), (1, 1, 1)], BACKENDS),
    indirect=["backend"],
)
def test_every_query_scores_every_key_it_sees(backend, sizes, dtype):
    Hq, Hkv, T = sizes
    queries, keys = torch.randn(1, Hq, T, 16).to(dtype), torch.randn(1, Hkv, T, 16).to(dtype)
    check(queries, keys, reduce="sum", kernel_size=1, skip_last=0)
    every = ops.window_scores(queries, keys, reduce="sum", kernel_size=1, skip_last=0)
    torch.testing.assert_close(every.sum(), torch.tensor(float(Hq * T)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_masked_key_does_not_hide_small_logits(backend, dtype):
    """The heaviest key is masked before the exponentials, so that the others do not vanish beside it."""
    queries, keys = torch.ones(1, 1, 1, 16, dtype=dtype), torch.randn(1, 1, 40, 16).to(dtype)
    keys[0, 0, 1] = 100.0
    check(queries, keys, mask_first=2, kernel_size=1, scale=1.0)
    assert ops.window_scores(queries, keys, mask_first=2, kernel_size=1, scale=1.0)[0, 0, 2:].sum() > 0.5


def test_a_long_window_is_cut_into_passes_without_a_difference():
    queries, keys = torch.randn(1, 2, 3000, 16), torch.randn(1, 1, 3000, 16)
    check(queries, keys, reduce="sum", kernel_size=1, skip_last=0)


@pytest.mark.parametrize("pooling", ops.POOLINGS)
def test_ragged_batch_scores_each_sequence_as_alone(backend, pooling):
    queries, keys = torch.randn(3, 4, 4, 32), torch.randn(3, 2, 90, 32)
    lengths, options = torch.tensor([90, 5, 41], dtype=torch.int32), {"pooling": pooling, "kernel_size": 7}
    check(queries, keys, lengths=lengths, **options)
    keys[1, :, 5:] = float("nan")  # past the length: never seen
    together = ops.window_scores(queries, keys, lengths=lengths, **options)
    for b, length in enumerate(lengths.tolist()):
        alone = ops.window_scores(queries[b : b + 1], keys[b : b + 1, :, :length], **options)
        assert torch.equal(together[b, :, : length - 4], alone[0])
        assert not together[b, :, length - 4 :].any()


def test_strided_queries_and_keys(backend):
    queries = torch.randn(1, 9, 4, 32).transpose(1, 2)[:, :, -5:]
    keys = torch.randn(1, 80, 2, 40).transpose(1, 2)
    check(queries, keys[..., 8:])
    check(queries.to(torch.bfloat16), keys[..., 5:37])  # of two types, not on 16 bytes


def test_large_logits_do_not_overflow(backend):
    check(60 * torch.randn(1, 2, 3, 64), 60 * torch.randn(1, 1, 40, 64))


@pytest.mark.parametrize(
    ("dtype", "reduce", "kernel_size", "backend"),
    covering(DTYPES[:2], ops.REDUCTIONS, [1, 5], BACKENDS),
    indirect=["backend"],
)
def test_nan_key_spoils_its_head_only(backend, reduce, kernel_size, dtype):
    queries, keys = torch.randn(1, 4, 3, 16).to(dtype), torch.randn(1, 2, 80, 16).to(dtype)
    keys[0, 1, 70, 3] = float("nan")
    options = {"reduce": reduce, "kernel_size": kernel_size}
    scores = ops.window_scores(queries, keys, **options)
    assert scores[0, 1].isnan().all()
    torch.testing.assert_close(
        scores[0, 0], ops.window_scores(queries[:, :2], keys[:, :1], **options)[0, 0], rtol=1e-6, atol=1e-9
    )


def keys_in_memory(layout: str) -> torch.Tensor:
    """Keys [3, 2, 150, 16] in bfloat16 that lie in memory in different ways."""
    shapes = {
        "dense": lambda x: x(3, 2, 150, 16),
        "room behind": lambda x: x(3, 2, 190, 16)[:, :, :150],
        "room in front, heads apart": lambda x: x(3, 5, 190, 16)[:, 1:3, 40:],
        "heads of a token beside each other": lambda x: x(3, 150, 2, 16).transpose(1, 2),
        "one for all sequences": lambda x: x(1, 2, 150, 16).expand(3, 2, 150, 16),
        "one for all heads": lambda x: x(3, 1, 150, 16).expand(3, 2, 150, 16),
        "one token": lambda x: x(3, 2, 1, 16).expand(3, 2, 150, 16),
        "odd rows": lambda x: x(3, 2, 150, 19)[..., :16],
        "odd start": lambda x: x(3, 2, 150, 24)[..., 3:19],
        "every second": lambda x: x(3, 2, 300, 16)[:, :, ::2],
    }
    return shapes[layout](lambda *shape: torch.randn(*shape).to(torch.bfloat16))


NOT_ON_16_BYTES = ("one token", "odd rows", "odd start")  # or on top of each other


@pytest.mark.parametrize(
    "layout",
    ["dense", "room behind", "room in front, heads apart", "heads of a token beside each other",
     "one for all sequences", "one for all heads", "every second", *NOT_ON_16_BYTES],
)  # fmt: skip
def test_16_bit_keys_may_lie_anyhow(backend, layout):
    keys = keys_in_memory(layout)
    chunk = torch.randn(3, 4, 20, 24).to(torch.bfloat16)
    for queries in (chunk[..., :16], chunk[:, :, -6:, 4:20], chunk[:, :, ::2, 1:17]):
        check(queries, keys)
        check(queries, keys, lengths=torch.tensor([150, 64, 101], dtype=torch.int32), reduce="max", kernel_size=1)
    check(chunk[:, :2, -3:, :16], keys[:, 1:])  # one head, whose stride means nothing


def test_sinks_and_softcap_of_16_bit_products(backend):
    queries, keys = torch.randn(2, 6, 5, 32).half(), torch.randn(2, 3, 150, 32).half()
    for sinks in (torch.randn(6), torch.full((6,), float("-inf")), torch.tensor([50.0, -9, 3, 0, -60, 1])):
        check(queries, keys, sink_logits=sinks)
        check(queries, keys, sink_logits=sinks, softcap=1.5, mask_first=130)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_sequence_of_a_batch_scores_as_alone_in_every_dtype(backend, dtype):
    queries, keys = torch.randn(5, 4, 4, 32).to(dtype), torch.randn(5, 2, 300, 32).to(dtype)
    together = ops.window_scores(queries, keys)
    for b in range(5):
        torch.testing.assert_close(together[b : b + 1], ops.window_scores(queries[b : b + 1], keys[b : b + 1]))


def test_thread_count_changes_no_bit(cpu):
    queries, keys = torch.randn(1, 4, 8, 64), torch.randn(1, 2, 1000, 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = ops.window_scores(queries, keys)
        torch.set_num_threads(3)
        assert torch.equal(one, ops.window_scores(queries, keys))
    finally:
        torch.set_num_threads(threads)


@settings(deadline=None, max_examples=30)
@given(
    T=st.integers(2, 200),
    W=st.integers(1, 20),
    G=st.integers(1, 8),
    D=st.sampled_from([16, 20, 64]),
    seed=st.integers(0, 2**31),
)
def test_scores_without_pooling_sum_to_what_the_window_leaves(T, W, G, D, seed):
    W = min(W, T - 1)
    generator = torch.Generator().manual_seed(seed)
    queries, keys = torch.randn(1, G, W, D, generator=generator), torch.randn(1, 1, T, D, generator=generator)
    scores = ops.window_scores(queries, keys, reduce="sum", kernel_size=1)
    logits = queries @ keys.transpose(2, 3) / D**0.5
    hidden = torch.ones(W, T, dtype=torch.bool).triu(T - W + 1)
    own = logits.masked_fill(hidden, float("-inf")).softmax(-1)[..., T - W :].sum()  # the window's own keys
    torch.testing.assert_close(scores.sum(), G * W - own, atol=1e-3, rtol=1e-4)


def test_opcheck():
    arguments = (torch.randn(2, 4, 3, 16), torch.randn(2, 2, 20, 16), None, 0.25, 0, 0, 5, 3, 1, 2)
    torch.library.opcheck(torch.ops.kvcompress.window_scores, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.randn(1, 2, 4, 16)}, "longer than skip_last = 4"),
        ({"keys": torch.randn(1, 2, 3, 16)}, "at least as many as the window's 4"),
        ({"skip_last": 40}, "longer than skip_last = 40"),
        ({"mask_first": -1}, "mask_first must be at least 0"),
        ({"mask_last": -1}, "mask_last must be at least 0"),
        ({"keys": torch.randn(1, 3, 40, 16)}, "do not divide"),
        ({"keys": torch.randn(1, 2, 40, 8)}, "keys must be"),
        ({"queries": torch.randn(1, 4, 0, 16)}, "at least 1 token"),
        ({"kernel_size": 4}, "kernel_size must be odd"),
        ({"reduce": "median"}, "reduce must be one of mean, sum, max"),
        ({"pooling": "min"}, "pooling must be one of avg, max"),
        ({"lengths": torch.tensor([40])}, "lengths must be int32"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {"queries": torch.randn(1, 4, 4, 16), "keys": torch.randn(1, 2, 40, 16), **change}
    with pytest.raises(ValueError, match=message):
        ops.window_scores(**arguments)


@pytest.mark.parametrize("length", [3, 41])
def test_length_out_of_range_is_refused(length):
    lengths = torch.tensor([length], dtype=torch.int32)
    with pytest.raises(
        RuntimeError, match=rf"^window_scores: lengths must be between 4 and 40 \(T\), got {length} at 0$"
    ):
        ops.window_scores(torch.randn(1, 4, 4, 16), torch.randn(1, 2, 40, 16), lengths=lengths)


def test_a_sequence_of_no_more_keys_than_are_skipped_scores_nothing(backend):
    queries, keys = torch.randn(2, 4, 4, 16), torch.randn(2, 2, 40, 16)
    scores = ops.window_scores(queries, keys, lengths=torch.tensor([4, 40], dtype=torch.int32))
    assert not scores[0].any()
    torch.testing.assert_close(scores[1:], ops.window_scores(queries[1:], keys[1:]))


def test_lengths_shorter_than_the_window_score_zero(cuda):
    queries, keys = torch.randn(3, 1, 4, 16), torch.randn(3, 1, 9, 16)
    assert not ops.window_scores(queries, keys, lengths=torch.tensor([3, 0, -3], dtype=torch.int32)).any()


def test_heads_that_are_too_large_are_refused(cuda):
    with pytest.raises((ValueError, RuntimeError), match=r"head dim of at most 512|invalid argument"):
        ops.window_scores(torch.randn(1, 2, 3, 513), torch.randn(1, 1, 8, 513))


def test_a_gradient_is_refused_when_it_comes_back():
    queries, keys = torch.randn(1, 2, 4, 16, requires_grad=True), torch.randn(1, 2, 20, 16)
    for tensors in ((queries, keys), (queries.detach(), keys.requires_grad_())):
        scores = ops.window_scores(*tensors)
        assert torch.equal(scores, ops.window_scores(*(x.detach() for x in tensors)))
        assert not ops.select_topk(scores[0], 3).requires_grad  # places are numbers, not functions of the scores
        with pytest.raises(NotImplementedError, match=r"window_scores has no gradient; detach"):
            scores.sum().backward()


@pytest.mark.parametrize("D", [16, 64, 72, 128, 136, 512])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_tiles_of_16_bit_products(backend, dtype, D):
    """Rows and keys that fill no tile, windows that begin within one, and splits of the keys; a block holds its own
    rows up to a head dim of 128."""
    queries, keys = torch.randn(1, 6, 50, D).to(dtype), torch.randn(1, 2, 333, D).to(dtype)
    check(queries, keys, reduce="max" if D % 3 else "sum", kernel_size=1, mask_first=130, mask_last=20)


def test_scores_of_a_sequence_do_not_depend_on_the_batch(backend):
    queries, keys = torch.randn(3, 2, 40, 64).to(torch.bfloat16), torch.randn(3, 1, 700, 64).to(torch.bfloat16)
    together = ops.window_scores(queries, keys)
    for b in range(3):
        assert torch.equal(together[b], ops.window_scores(queries[b : b + 1], keys[b : b + 1])[0])


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_an_infinite_key_is_a_number_to_queries_of_numbers(backend, dtype):
    """Also in tiles of rows that hold fewer queries than rows; a softcap makes its logits finite."""
    queries, keys = torch.ones(1, 4, 60, 16, dtype=dtype), torch.randn(1, 1, 300, 16).to(dtype)
    keys[0, 0, 7, 3] = float("-inf")
    for options in ({"reduce": "mean"}, {"reduce": "max"}, {"softcap": 5.0}):
        if "softcap" in options:
            keys[0, 0, 9, 3] = float("inf")
        options |= {"kernel_size": 1, "skip_last": 0}
        exact = oracle.window_scores(queries.double(), keys.double(), **options)
        torch.testing.assert_close(ops.window_scores(queries, keys, **options), exact.float(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_masks_beyond_all_keys_leave_nothing(backend, dtype):
    queries, keys = torch.randn(1, 1, 1, 16).to(dtype), torch.randn(1, 1, 300, 16).to(dtype)
    for size in (300, 2**31 + 5, 2**32 - 200, 2**33):
        for mask in ("mask_first", "mask_last"):
            assert not ops.window_scores(queries, keys, reduce="sum", kernel_size=1, skip_last=0, **{mask: size}).any()


def test_no_query_scores_nothing(backend):
    for dtype in DTYPES:
        assert not ops.window_scores(torch.ones(1, 0, 3, 16).to(dtype), torch.ones(1, 2, 300, 16).to(dtype)).any()
