"""Every op at sizes that models have, on the CPU and on a GPU: what small shapes cannot show of launches and limits."""

import accuracy
import accuracy_dmc
import oracle
import pytest
import torch
from accuracy import assert_within
from attention_definition import errors
from helpers import check_table, others_of, paged, rows_of, shared_table

from kvcompress import ops

SIXTEEN = [torch.bfloat16, torch.float16]


def tensors(*shapes, dtype=torch.bfloat16):
    return [torch.randn(*shape).to(dtype) for shape in shapes]


def double(*given):
    return [x.double() for x in given]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_rope_of_many_tokens(hardware):
    (x,) = tensors((2, 9, 4096, 64))
    angles, positions = torch.randn(5000, 32), torch.randint(0, 5000, (2, 4096), dtype=torch.int32)
    cos, sin = angles.cos(), angles.sin()
    exact = oracle.rope(x.double(), cos.double(), sin.double(), positions)
    assert_within(ops.rope(x, cos, sin, positions), exact, accuracy.rope(x, cos, sin, positions))


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN])
@pytest.mark.parametrize(("Hq", "Hkv", "W", "T"), [(32, 8, 64, 5000), (8, 8, 1, 5000), (4, 1, 700, 1500)])
def test_window_scores(hardware, dtype, Hq, Hkv, W, T):
    """With 16 bits several splits of the keys, with the longest window of many tiles of rows."""
    queries, keys = tensors((1, Hq, W, 64), (1, Hkv, T, 64), dtype=dtype)
    exact = oracle.window_scores(*double(queries, keys))
    assert_within(ops.window_scores(queries, keys), exact, accuracy.window_scores(queries, keys))


def test_layer_similarity_of_many_layers(hardware):
    queries, keys = tensors((24, 4, 8, 128), (24, 2, 1000, 128))
    exact, count = oracle.layer_similarity(*double(queries, keys), sinks=4, recent=20)
    ours, ours_count = ops.layer_similarity(queries, keys, sinks=4, recent=20)
    assert ours_count == count
    assert_within(ours, exact, accuracy.layer_similarity(queries, keys, sinks=4, recent=20))


@pytest.mark.parametrize(("R", "T", "k"), [(3, 20_000, 1024), (2, 131_072, 131_071), (70_000, 7, 3)])
def test_select(hardware, R, T, k):
    scores = torch.randn(R, T).mul(50).round()  # many ties
    assert torch.equal(ops.select_topk(scores, k), oracle.select_topk(scores, k))


@pytest.mark.parametrize(("B", "Hq", "Hkv", "S", "T", "P"), [(2, 32, 8, 1, 4096, 64), (1, 16, 1, 16, 1024, 16)])
def test_decode(hardware, B, Hq, Hkv, S, T, P):
    queries, k, v = tensors((B, Hq, S, 128), (B * Hkv, T, 128), (B * Hkv, T, 128))
    k_pages, v_pages, table = paged(k, v, P)
    end = torch.randint(S, T, (B * Hkv,), dtype=torch.int32)
    end[0] = T
    exact = oracle.decode(queries.double(), k.double(), v.double(), end, causal=True)
    out, lse = ops.decode(queries, k_pages, v_pages, end, block_table=table, causal=True)
    softmax, values = accuracy.of_pages(queries, k, v, end, causal=True)
    assert_within(out, exact[0], softmax.out_error(values, out.dtype), "out")
    assert_within(lse, exact[1], softmax.lse_error(), "lse")


def test_decode_that_hands_on_its_probabilities(hardware):
    B, Hq, Hkv, T, D = 2, 32, 8, 4096, 128
    queries, k, v = tensors((B, Hq, 1, D), (B * Hkv, T, D), (B * Hkv, T, D))
    k_pages, v_pages, table = paged(k, v, 64)
    begin, end = torch.zeros(B * Hkv, dtype=torch.int32), torch.randint(1, T, (B * Hkv,), dtype=torch.int32)
    ours = torch.zeros(B, Hq, T)
    exact = ours.double()
    oracle.decode(queries.double(), k.double(), v.double(), end, probabilities=exact)
    _, lse = ops.decode(queries, k_pages, v_pages, end, block_table=table, probabilities=ours)
    assert_within(ours, exact, accuracy.probabilities(T, queries, k, v, end))
    near = tensors((B, Hq, 1, D))[0], torch.randn(B, Hq, 1)
    given = ours, lse, v_pages, begin, end
    exact, _ = oracle.decode_shared(
        tuple(double(*near)), ours.double(), lse.double(), v_pages, begin, end, block_table=table
    )
    assert_within(ops.decode_shared(near, *given, block_table=table)[0], exact, accuracy.shared(near, *given, table))


@pytest.mark.parametrize("mask", [{}, {"window": 200, "sinks": 4}], ids=["causal", "window"])
@pytest.mark.parametrize("D", [64, 128])
def test_attention_and_its_gradients(hardware, mask, D):
    given = tensors((1, 8, 700, D), (1, 2, 700, D), (1, 2, 700, D))
    (grad,) = tensors((1, 8, 700, D))

    def results(attention, given, grad):
        leaves = [x.detach().clone().requires_grad_() for x in given]
        out = attention(*leaves, **mask)[0]
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    exact = results(oracle.attention, double(*given), grad.double())
    bounds = errors((*given, None), (grad, torch.zeros(grad.shape[:3])), **mask)
    for name, x, y in zip(("out", "dq", "dk", "dv"), results(ops.attention, given, grad), exact, strict=True):
        assert_within(x, y, bounds[name], name)


def test_accumulation_over_4096_tokens_and_its_gradients(hardware):
    B, H, T, D = 1, 1, 4096, 16
    keys, values, *grads = tensors(*[(B, H, T, D)] * 4)
    alpha, omega = torch.rand(B, H, T) ** 0.3, 0.01 + torch.rand(B, H, T)

    def results(accumulate, given, grads):
        leaves = [x.detach().clone().requires_grad_() for x in given]
        keys, values, _ = accumulate(*leaves, neuron=-1)
        found = torch.autograd.grad((keys, values), leaves, grads)
        return [keys.detach(), values.detach(), *found]

    given = [keys, values, alpha, omega]
    exact = results(oracle.dmc_accumulate, double(*given), double(*grads))
    bounds = accuracy_dmc.accumulate(given, grads, neuron=-1)
    names = ("keys", "values", "dkeys", "dvalues", "dalpha", "domega")
    for name, x, y in zip(names, results(ops.dmc_accumulate, given, grads), exact, strict=True):
        assert_within(x, y, bounds[name], name)


@pytest.mark.parametrize("S", [1, 3])
def test_1024_rows_append_or_merge(hardware, S):
    B, H, D, P = 128, 8, 32, 16
    keys, values = tensors((B, H, S, D), (B, H, S, D))
    alpha, omega = (torch.rand(B, H, S) < 0.7).float(), 0.1 + torch.rand(B, H, S)

    def appended(append, keys, values, alpha, omega):
        free = torch.arange(B * H, dtype=torch.int32)
        rows = torch.zeros(B * H, dtype=torch.int32)
        block_table = torch.full((B * H, 1), -1, dtype=torch.int32)
        table = ops.PageTable(block_table, rows, torch.zeros_like(free), free, ints(B * H, 0))
        tail = ops.Tail.empty(B * H, D, device=rows.device)
        pages = [torch.zeros(B * H, P, D, dtype=keys.dtype) for _ in range(2)]
        for _ in range(2):
            append(*pages, table, tail, keys, values, alpha, omega, neuron=-1)
        assert table.free_count.tolist() == [0, 0]
        return [x.cpu() for x in (table.lengths, tail.counts, *(torch.cat(rows_of(x, table)) for x in pages))]

    given = (keys, values, alpha, omega)
    found = appended(ops.dmc_append_, *given)
    with torch.device("cpu"):  # row by row, which takes a GPU minutes
        wanted = appended(oracle.dmc_append_, *(x.cpu() for x in given))
    for x, y in zip(found, wanted, strict=True):
        eps = 2 * torch.finfo(x.dtype).eps if x.is_floating_point() else 0
        torch.testing.assert_close(x, y, rtol=eps, atol=2e-5)


def test_pages_of_1024_rows(hardware):
    """Appended to, cut and compacted."""
    B, H, S, P = 128, 8, 40, 16
    R = B * H
    table = ops.PageTable(*shared_table(0, R, P, 70, 6 * R))
    others, array = others_of(table, P), torch.randn(len(table.refs), P, 32).bfloat16()
    (tokens,) = tensors((B, H, S, 32))
    before = rows_of(array, table)
    ops.append_tokens_([array], [tokens], table)
    check_table(table, P, others)
    held = [torch.cat([old, tokens[r // H, r % H]]) for r, old in enumerate(before)]
    assert all(torch.equal(x, y) for x, y in zip(rows_of(array, table), held, strict=True))

    lengths = (torch.rand(R) * (table.lengths + 1)).to(torch.int32)
    ops.truncate_rows_(table, lengths, P)
    check_table(table, P, others)
    held = [old[:length] for old, length in zip(held, lengths.tolist(), strict=True)]
    assert all(torch.equal(x, y) for x, y in zip(rows_of(array, table), held, strict=True))

    kept = (lengths + 1) // 2  # every second slot
    indices = (2 * torch.arange(int(kept.max()), dtype=torch.int32)).repeat(R, 1)
    ops.compact_pages_([array], table, indices, kept=kept)
    check_table(table, P, others)
    assert all(torch.equal(x, y[::2]) for x, y in zip(rows_of(array, table), held, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_captured_in_a_cuda_graph(gpu, dtype):
    queries, keys = tensors((2, 8, 64, 128), (2, 2, 5000, 128), dtype=dtype)
    lengths = ints(5000, 300)
    replayed = captured(lambda: (ops.window_scores(queries, keys, lengths=lengths),))
    queries.normal_()
    lengths.copy_(ints(70, 4999))
    torch.testing.assert_close(replayed()[0], ops.window_scores(queries, keys, lengths=lengths), rtol=0, atol=0)


def test_decode_captured_in_a_cuda_graph(gpu):
    """A replay reads the lengths and pages of its moment."""
    queries, k, v = tensors((2, 8, 1, 128), (4, 1024, 128), (4, 1024, 128))
    end = ints(100, 1, 700, 9)
    replayed = captured(lambda: ops.decode(queries, k, v, end))
    end.copy_(ints(1024, 0, 257, 300))
    queries.normal_()
    for x, y in zip(replayed(), ops.decode(queries, k, v, end), strict=True):
        assert torch.equal(x, y)


def captured(work):
    """What replays a call of work, and gives the results that it leaves."""
    with torch.cuda.device(torch.get_default_device()):
        work()  # libraries make their handles, which a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = work()

    def replay():
        graph.replay()
        torch.cuda.synchronize(torch.get_default_device())
        return results

    return replay
