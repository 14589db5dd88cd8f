"""The emulation itself: barriers, warp operations, limits and the report of what CUDA leaves undefined."""

import ctypes

import emulated
import pytest
import torch
from helpers import DTYPES

INVALID_VALUE, INVALID_CONFIGURATION, LAUNCH_FAILURE = 1, 9, 719  # of cudaError_t


@pytest.fixture(scope="module")
def checks():
    return ctypes.CDLL(str(emulated.library()))


def ints(count: int) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * count)()


def floats(x: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


@pytest.mark.parametrize("threads", [32, 96])
def test_warp_operations_give_the_values_of_cuda(checks, threads):
    out = ints(6 * threads)
    assert checks.check_shuffles(out, threads) == 0
    for thread in range(threads):
        warp, lane = thread - thread % 32 + 100, thread % 32
        expected = [
            warp + (lane ^ 5),
            warp + (lane + 3 if lane + 3 < 32 else lane),
            warp + (lane - 2 if lane >= 2 else lane),
            warp + 7,
            sum(1 << i for i in range(0, 32, 3)),
            warp + 1 if lane < 16 else 2 * (warp + 17),
        ]
        got = list(out[6 * thread : 6 * thread + 6])
        got[4] &= 0xFFFFFFFF
        assert got == expected, thread


def test_returned_threads_do_not_hold_up_a_barrier(checks):
    out = ints(128)
    assert checks.check_early_return(out) == 0
    assert list(out) == [2 * (127 - i) + 128 for i in range(128)]


def test_deadlock_is_reported(checks, capfd):
    assert checks.check_divergent_barrier() == LAUNCH_FAILURE
    message = capfd.readouterr().err
    assert "block (0, 0, 0): threads wait for each other for ever" in message
    assert "thread 0 at a shuffle" in message
    assert "and 56 more" in message
    # the next launch starts afresh
    assert checks.check_grid(1, 1, 32) == 0


def test_shuffle_from_a_lane_outside_the_mask_is_reported(checks, capfd):
    assert checks.check_shuffle_from_outsider(ints(32)) == LAUNCH_FAILURE
    assert "shuffles from lane 20, which takes no part" in capfd.readouterr().err


def test_missing_barrier_shows_in_the_order_of_threads(checks, monkeypatch):
    results = {}
    for order in ("forward", "reverse"):
        monkeypatch.setenv("KVC_EMULATION_ORDER", order)
        for barrier in (0, 1):
            out = ints(64)
            assert checks.check_neighbours(out, barrier) == 0
            results[order, barrier] = list(out)
    assert results["forward", 1] == results["reverse", 1] == [7] * 64
    assert results["forward", 0] != results["reverse", 0]


def test_shared_memory_needs_the_attribute_above_48_kib(checks):
    out = ints(1)
    check = checks.check_shared_bytes
    assert check(out, 48 * 1024, 0) == 0
    assert out[0] == -1, "memory that nobody wrote holds NaN bytes"
    assert check(out, 48 * 1024 + 4, 0) == INVALID_VALUE
    assert check(out, 228 * 1024, 1) == INVALID_VALUE
    assert check(out, 227 * 1024, 1) == 0


def test_atomics_count_every_thread(checks):
    total, top, float_sum = ints(1), ints(1), torch.zeros(1)
    assert checks.check_counters(total, top, floats(float_sum)) == 0
    assert (total[0], top[0], float_sum.item()) == (288, 287, 144.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_columns", [0, 1])
def test_products_of_one_warp(checks, dtype, by_columns):
    a = torch.randint(-3, 4, (16, 16)).float()  # exact in every type
    b = torch.randint(-1, 2, (16, 16)).float()
    out = torch.empty(2, 16, 16)
    pointers = [floats(x) for x in (out, a, b)]
    assert checks.check_products(*pointers, DTYPES.index(dtype), by_columns) == 0
    assert torch.equal(out[0], a @ b)
    assert torch.equal(out[1], a @ b @ (b.T if by_columns else b))


def test_matrix_operation_of_half_a_warp_is_reported(checks, capfd):
    assert checks.check_half_a_warp(floats(torch.empty(32))) == LAUNCH_FAILURE
    assert "takes no part in a matrix operation" in capfd.readouterr().err


def test_copy_to_an_odd_address_is_reported(checks, capfd):
    assert checks.check_copy_to_odd_address(floats(torch.empty(8))) == LAUNCH_FAILURE
    assert "no multiple of 16" in capfd.readouterr().err


@pytest.mark.parametrize("grid", [(1, 65536, 32), (0, 1, 32), (1, 1, 1025), (1, 1, 0)])
def test_launch_outside_the_limits_is_an_error(checks, grid):
    assert checks.check_grid(*grid) == INVALID_CONFIGURATION


def test_conversions_round_as_torch_does(checks):
    every_half = torch.arange(65536).to(torch.int32).to(torch.uint16).view(torch.float16)
    to = torch.empty(65536)
    checks.check_f16(ctypes.c_void_p(every_half.data_ptr()), floats(to), ctypes.c_int64(65536))
    assert torch.equal(to.isnan(), every_half.isnan())
    assert torch.equal(to.nan_to_num(0), every_half.float().nan_to_num(0))

    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    near_ties = (bits & ~0x1FFF) | torch.randint(0x0FFF, 0x1002, bits.shape, generator=generator).to(torch.int32)
    halves = every_half.float().view(torch.int32)
    x = torch.cat([bits, near_ties, halves, halves + 0x1000, halves + 1]).view(torch.float32)
    as_f16, as_bf16 = torch.empty_like(x, dtype=torch.float16), torch.empty_like(x, dtype=torch.bfloat16)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, as_f16, as_bf16)]
    checks.check_conversions(*pointers, ctypes.c_int64(x.numel()))
    for got in (as_f16, as_bf16):
        expected = x.to(got.dtype)
        assert torch.equal(got.isnan(), expected.isnan())
        numbers = ~expected.isnan()
        assert torch.equal(got[numbers].view(torch.int16), expected[numbers].view(torch.int16))
