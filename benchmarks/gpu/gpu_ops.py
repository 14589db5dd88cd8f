"""Every op on a device against kvcompress.reference in float64: what gpu_check.py runs on a GPU (any device will do).

Tolerance as in the tests: error at most twice that of the same formula in the same dtype in plain PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from kvcompress import ops, reference

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from helpers import assert_as_accurate

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF = float("inf")


def double(*tensors: Tensor) -> list[Tensor]:
    return [x.double() for x in tensors]


def int32(device: str, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def pages_of(k: Tensor, v: Tensor, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [R, T, D], T a multiple of page, as pages in random order and their table."""
    R, T, D = k.shape
    order = torch.randperm(R * T // page, device=k.device)
    k_pages, v_pages = (torch.empty(R * T // page, page, D, dtype=k.dtype, device=k.device) for _ in range(2))
    k_pages[order], v_pages[order] = k.reshape(-1, page, D), v.reshape(-1, page, D)
    return k_pages, v_pages, order.to(torch.int32).reshape(R, T // page)


def check_rope(device: str, dtype: torch.dtype, few: bool) -> None:
    for D in (64,) if few else (64, 128, 33):
        x = torch.randn(2, 3, 50, D, device=device).to(dtype)
        angles = torch.randn(70, D // 4, device=device)
        positions = torch.randint(0, 70, (2, 50), device=device, dtype=torch.int32)
        exact = reference.rope(x.double(), angles.double().cos(), angles.double().sin(), positions)
        tables = angles.cos(), angles.sin()
        plain = reference.rope(x.float(), *tables, positions).to(dtype)
        assert_as_accurate(ops.rope(x, *tables, positions), plain, exact)


def check_window_scores(device: str, dtype: torch.dtype, few: bool) -> None:
    for Hq, Hkv, W, T, D in (
        ((4, 2, 8, 100, 64),) if few else ((4, 2, 8, 100, 64), (8, 2, 64, 3000, 128), (3, 3, 5, 70, 33))
    ):
        queries = torch.randn(2, Hq, W, D, device=device).to(dtype)
        keys = torch.randn(2, Hkv, T, D, device=device).to(dtype)
        lengths = int32(device, T, T // 2)
        for options in ({}, {"reduce": "max", "pooling": "max", "kernel_size": 7}):
            exact = reference.window_scores(*double(queries, keys), lengths=lengths, **options)
            plain = reference.window_scores(queries.float(), keys.float(), lengths=lengths, **options)
            ours = ops.window_scores(queries, keys, lengths=lengths, **options)
            assert_as_accurate(ours, plain, exact)


def check_layer_similarity(device: str, dtype: torch.dtype, few: bool) -> None:
    for L, Hq, Hkv, S, T, D in (
        ((3, 4, 2, 3, 100, 64),) if few else ((3, 4, 2, 3, 100, 64), (24, 8, 2, 16, 3000, 128), (5, 3, 3, 5, 70, 33))
    ):
        queries = torch.randn(L, Hq, S, D, device=device).to(dtype)
        keys = torch.randn(L, Hkv, T, D, device=device).to(dtype)
        for options in ({}, {"sinks": 4, "recent": 20}):
            exact, count = reference.layer_similarity(*double(queries, keys), **options)
            ours, ours_count = ops.layer_similarity(queries, keys, **options)
            assert ours_count == count
            torch.testing.assert_close(ours, exact, rtol=0, atol=4e-6 * count)
            queries[1], keys[1] = queries[0], keys[0]
            assert not ops.layer_similarity(queries, keys, **options)[0][:, 0, 1].any()


def check_select(device: str, dtype: torch.dtype, few: bool) -> None:
    for T, k in ((300, 77),) if few else ((300, 77), (5000, 4999), (20_000, 1024)):
        scores = torch.randn(3, T, device=device).mul(50).round()
        indices = ops.select_topk(scores, k)
        assert torch.equal(indices, reference.select_topk(scores, k)), "indices differ"


def check_decode(device: str, dtype: torch.dtype, few: bool) -> None:
    shapes = [(2, 8, 2, 1, 640, 128, 64), (1, 4, 2, 3, 96, 33, 32)]
    if not few:
        shapes += [(2, 32, 8, 1, 4096, 128, 64), (1, 16, 1, 16, 512, 64, 16), (2, 3, 3, 1, 320, 80, 32),
                   (1, 4, 2, 2, 512, 256, 64), (1, 2, 2, 1, 512, 96, 256)]  # fmt: skip
    for B, Hq, Hkv, S, T, D, P in shapes:
        R = B * Hkv
        queries = torch.randn(B, Hq, S, D, device=device).to(dtype)
        k, v = (torch.randn(R, T, D, device=device).to(dtype) for _ in range(2))
        k_pages, v_pages, table = pages_of(k, v, P)
        end = torch.randint(1, T // 8, (R,), device=device, dtype=torch.int32)
        end[0] = T
        begin = torch.randint(0, 3, (R,), device=device, dtype=torch.int32)
        for causal in (False, True):
            options = {"begin": begin, "causal": causal}
            exact = reference.decode(queries.double(), k, v, end, **options)
            plain = reference.decode(queries, k, v, end, **options)
            for ours in (
                ops.decode(queries, k_pages, v_pages, end, block_table=table, **options),
                ops.decode(queries, k, v, end, **options),
            ):
                assert_as_accurate(ours[0], plain[0], exact[0], typical=True)
                assert_as_accurate(ours[1], plain[1].float(), exact[1], typical=True)
            again = ops.decode(queries, k, v, end, **options)
            assert torch.equal(again[0], ours[0]), "bits differ between two calls"
        if S == 1:
            ours, plain = (torch.zeros(B, Hq, T, device=device) for _ in range(2))
            exact = plain.double()
            reference.decode(queries.float(), k, v, end, begin=begin, probabilities=plain)
            reference.decode(queries.double(), k, v, end, begin=begin, probabilities=exact)
            ops.decode(queries, k_pages, v_pages, end, block_table=table, begin=begin, probabilities=ours)
            assert_as_accurate(ours, plain, exact, typical=True)


def check_decode_shared(device: str, dtype: torch.dtype, few: bool) -> None:
    shapes = [(2, 8, 2, 640, 128, 64), (1, 4, 2, 96, 33, 32)]
    if not few:
        shapes += [(2, 32, 8, 4096, 128, 64), (1, 18, 1, 512, 64, 16), (2, 3, 3, 320, 80, 32),
                   (1, 16, 2, 512, 256, 64)]  # fmt: skip
    for B, Hq, Hkv, T, D, P in shapes:
        R = B * Hkv
        near = torch.randn(B, Hq, 1, D, device=device).to(dtype), torch.randn(B, Hq, 1, device=device)
        v_pages, _, table = pages_of(*(torch.randn(R, T, D, device=device).to(dtype) for _ in range(2)), P)
        weights = torch.randn(B, Hq, T, device=device).softmax(-1)
        end = torch.randint(1, T, (R,), device=device, dtype=torch.int32)
        begin = torch.randint(0, 3, (R,), device=device, dtype=torch.int32)
        begin[0], end[0] = 0, T
        far_lse = torch.randn(B, Hq, 1, device=device)
        far_lse[0, : Hq // Hkv] = near[1][0, : Hq // Hkv] - 3
        for tau in (None, 0.7):
            if tau:
                v_pages[table[0].long()] = float("nan")  # all query heads of this row are skipped
            given = (weights, far_lse, v_pages, begin, end)
            doubles = (near[0].double(), near[1].double()), weights.double(), far_lse.double()
            exact = reference.decode_shared(*doubles, v_pages, begin, end, block_table=table, tau=tau)
            plain = reference.decode_shared(near, *given, block_table=table, tau=tau)
            ours = ops.decode_shared(near, *given, block_table=table, tau=tau)
            assert_as_accurate(ours[0], plain[0], exact[0], typical=True)
            assert torch.equal(ours[1].cpu(), exact[1].cpu()), "other heads are skipped"
            again = ops.decode_shared(near, *given, block_table=table, tau=tau)
            assert torch.equal(again[0], ours[0]), "bits differ between two calls"


def check_merge_states(device: str, dtype: torch.dtype, few: bool) -> None:
    states = [
        (torch.randn(2, 3, 5, 80, device=device).to(dtype), 3 * torch.randn(2, 3, 5, device=device)) for _ in range(2)
    ]
    states[0][1][0, 0, 0] = -INF
    exact = reference.merge_states(*((out.double(), lse.double()) for out, lse in states))
    plain = reference.merge_states(*states)
    ours = ops.merge_states(*states)
    assert_as_accurate(ours[0], plain[0].to(dtype), exact[0])
    assert_as_accurate(ours[1], plain[1], exact[1])


def gradients(attention: Callable, tensors: list[Tensor], dout: Tensor, dlse: Tensor, options: dict) -> list[Tensor]:
    """out, lse and the gradients of queries, keys, values, key_bias."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = attention(*leaves[:3], key_bias=leaves[3], **options)
    loss = (out * dout).sum() + (lse.masked_fill(lse == -INF, 0) * dlse).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def check_attention(device: str, dtype: torch.dtype, few: bool) -> None:
    masks = [{}, {"window": 20, "sinks": 3}]
    shapes = [(2, 4, 2, 70, 130, 64)]
    if not few:
        masks += [{"causal": False}, {"window": 20, "sinks": 3, "complement": True}]
        shapes += [(1, 8, 2, 300, 300, 128), (1, 2, 1, 100, 333, 80), (1, 2, 2, 65, 140, 256), (1, 1, 1, 40, 70, 33)]
    for B, Hq, Hkv, S, T, D in shapes:
        tensors = [torch.randn(B, Hq, S, D, device=device).to(dtype)]
        tensors += [torch.randn(B, Hkv, T, D, device=device).to(dtype) for _ in range(2)]
        bias, dlse = torch.randn(B, Hkv, T, device=device), torch.randn(B, Hq, S, device=device)
        bias[..., ::5] = -INF
        dout = torch.randn(B, Hq, S, D, device=device).to(dtype)
        lengths = int32(device, T, S - 5)[:B]
        for mask in masks:
            options = mask | {"lengths": lengths}
            exact = gradients(reference.attention, double(*tensors, bias), *double(dout, dlse), options)
            plain = gradients(reference.attention, [*tensors, bias], dout, dlse.to(dtype), options)
            ours = gradients(ops.attention, [*tensors, bias], dout, dlse, options)
            for name, x, y, z in zip(("out", "lse", "dq", "dk", "dv", "dkey_bias"), ours, plain, exact, strict=True):
                try:
                    # lse is rounded to float32 before the gradients: an ulp of it is an ulp of every probability
                    assert_as_accurate(x, y.to(x.dtype), z, typical=True)
                except AssertionError as error:
                    raise AssertionError(f"{name}, D {D}, {mask}: {error}") from None
            again = gradients(ops.attention, [*tensors, bias], dout, dlse, options)
            assert all(torch.equal(x, y) for x, y in zip(ours, again, strict=True)), "bits differ between two calls"


def averages(accumulate: Callable, tensors: list[Tensor], grads: list[Tensor], options: dict) -> list[Tensor]:
    """Averages of keys and values, z, and the gradients of keys, values, alpha, omega."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    keys, values, z = accumulate(*leaves, **options)
    found = torch.autograd.grad((keys, values), leaves, [g.to(keys.dtype) for g in grads])
    return [x.detach() for x in (keys, values, z, *found)]


def check_dmc_gates(device: str, dtype: torch.dtype, few: bool) -> None:
    logits = (5 + 3 * torch.randn(2, 6, 70 if few else 5000, 8, device=device)).to(dtype)[..., 3]
    noise = ops.Noise(2**62 + 1, 3, 4, 5, 6)
    for options in ({}, {"noise": noise}, {"hard": True}):
        exact = reference.dmc_decisions(logits.double(), **options)
        for x, y in zip(ops.dmc_decisions(logits, **options), exact, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=2e-6, atol=3e-5)
    cpu = ops.dmc_decisions(logits.cpu(), noise=noise)
    ours = ops.dmc_decisions(logits, noise=noise)
    assert torch.equal(ours.hard.cpu(), cpu.hard) and torch.equal(ours.tempered.cpu(), cpu.tempered), "noise differs"
    for reduce in ops.IMPORTANCES:
        exact = reference.dmc_importance(logits.double(), 2, reduce=reduce)
        torch.testing.assert_close(ops.dmc_importance(logits, 2, reduce=reduce).double(), exact, rtol=3e-6, atol=0)
    exact = reference.dmc_mask(ours.tempered.double())
    torch.testing.assert_close(ops.dmc_mask(ours.tempered).double(), exact, rtol=1e-6, atol=1e-40)


def check_dmc_accumulate(device: str, dtype: torch.dtype, few: bool) -> None:
    for B, H, T, D in ((2, 2, 150, 64),) if few else ((2, 4, 300, 128), (1, 2, 1500, 33), (1, 1, 700, 256)):
        keys, values = (torch.randn(B, H, T, D, device=device).to(dtype) for _ in range(2))
        alpha, omega = torch.rand(B, H, T, device=device) ** 0.3, 0.01 + torch.rand(B, H, T, device=device)
        alpha[..., ::9] = 0
        grads = [torch.randn(B, H, T, D, device=device).to(dtype) for _ in range(2)]
        tensors = [keys, values, alpha, omega]
        for options in ({"neuron": -1}, {"window": 12}):
            exact = averages(reference.dmc_accumulate, double(*tensors), grads, options)
            plain = averages(reference.dmc_accumulate, tensors, grads, options)
            ours = averages(ops.dmc_accumulate, tensors, grads, options)
            for x, y, z in zip(ours, plain, exact, strict=True):
                assert_as_accurate(x, y, z, typical=True)
            again = averages(ops.dmc_accumulate, tensors, grads, options)
            assert all(torch.equal(x, y) for x, y in zip(ours, again, strict=True)), "bits differ between two calls"


def check_dmc_append(device: str, dtype: torch.dtype, few: bool) -> None:
    B, H, P, (S, D) = 2, 3, 16, (40, 64) if few else (600, 128)
    keys, values = (torch.randn(B, H, S, D, device=device).to(dtype) for _ in range(2))
    alpha, omega = (torch.rand(B, H, S, device=device) < 0.8).float(), 0.1 + torch.rand(B, H, S, device=device)
    angles, blocks = torch.randn(S, D // 2, device=device), S // P + 1
    for window in (None, 12):
        found = []
        for append in (ops.dmc_append_, reference.dmc_append_):
            free = int32(device, *range(B * H * blocks))
            rows = torch.zeros(B * H, dtype=torch.int32, device=device)
            block_table = torch.full((B * H, blocks), -1, dtype=torch.int32, device=device)
            table = ops.PageTable(block_table, rows, torch.zeros_like(free), free, int32(device, len(free), 0))
            tail = ops.Tail.empty(B * H, D, window=window, device=rows.device)
            pages = [torch.zeros(len(free), P, D, dtype=dtype, device=device) for _ in range(2)]
            for begin, end in ((0, S - 1), (S - 1, S)):
                part = (x[:, :, begin:end] for x in (keys, values, alpha, omega))
                tables = {"cos": angles[begin:end].cos(), "sin": angles[begin:end].sin()}
                append(*pages, table, tail, *part, **tables, neuron=-1, window=window)
            found.append((table.block_table, table.lengths, tail.counts, *pages))
        for x, y in zip(*found, strict=True):
            eps = 2 * torch.finfo(x.dtype).eps if x.is_floating_point() and x.dtype != torch.float32 else 1e-5
            torch.testing.assert_close(x, y, rtol=eps, atol=2e-5)


CHECKS = (
    check_rope, check_window_scores, check_layer_similarity, check_select, check_decode,
    check_decode_shared, check_merge_states, check_attention, check_dmc_gates, check_dmc_accumulate, check_dmc_append,
)  # fmt: skip


def run_checks(device: str, few: bool = False) -> Iterator[tuple[str, Exception | None]]:
    """Name and error (None: passed) of each check."""
    for check in CHECKS:
        for dtype in DTYPES:
            torch.manual_seed(0)
            name = f"{check.__name__.removeprefix('check_')}/{str(dtype).removeprefix('torch.')}"
            try:
                check(device, dtype, few)
            except (AssertionError, RuntimeError, ValueError) as error:
                yield name, error
            else:
                yield name, None


if __name__ == "__main__":
    sys.exit("gpu_ops.py holds the checks of a GPU's ops; run benchmarks/gpu/gpu_check.py, which calls them")
