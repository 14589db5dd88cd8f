"""The emulation itself: barriers, warp operations, limits and the report of what CUDA leaves undefined."""

import ctypes

import emulated
import pytest
import torch


@pytest.mark.parametrize("threads", [32, 96])
def test_warp_operations_give_the_values_of_cuda(kernels, threads):
    out = emulated.int_array(6 * threads)
    assert kernels.library.check_shuffles(out, threads) == 0
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


def test_returned_threads_do_not_hold_up_a_barrier(kernels):
    out = emulated.int_array(128)
    assert kernels.library.check_early_return(out) == 0
    assert list(out) == [2 * (127 - i) + 128 for i in range(128)]


def test_deadlock_is_reported(kernels, capfd):
    assert kernels.library.check_divergent_barrier() == emulated.LAUNCH_FAILURE
    message = capfd.readouterr().err
    assert "block (0, 0, 0): threads wait for each other for ever" in message
    assert "thread 0 at a shuffle" in message
    assert "and 56 more" in message
    # the next launch starts afresh
    assert kernels.library.check_grid(1, 1, 32) == 0


def test_shuffle_from_a_lane_outside_the_mask_is_reported(kernels, capfd):
    assert kernels.library.check_shuffle_from_outsider(emulated.int_array(32)) == emulated.LAUNCH_FAILURE
    assert "shuffles from lane 20, which takes no part" in capfd.readouterr().err


def test_missing_barrier_shows_in_the_order_of_threads(kernels, monkeypatch):
    results = {}
    for order in ("forward", "reverse"):
        monkeypatch.setenv("KVC_EMULATION_ORDER", order)
        for barrier in (0, 1):
            out = emulated.int_array(64)
            assert kernels.library.check_neighbours(out, barrier) == 0
            results[order, barrier] = list(out)
    assert results["forward", 1] == results["reverse", 1] == [7] * 64
    assert results["forward", 0] != results["reverse", 0]


def test_shared_memory_needs_the_attribute_above_48_kib(kernels):
    out = emulated.int_array(1)
    check = kernels.library.check_shared_bytes
    assert check(out, 48 * 1024, 0) == 0
    assert out[0] == -1, "memory that nobody wrote holds NaN bytes"
    assert check(out, 48 * 1024 + 4, 0) == emulated.INVALID_VALUE
    assert check(out, 228 * 1024, 1) == emulated.INVALID_VALUE
    assert check(out, 227 * 1024, 1) == 0


def test_atomics_count_every_thread(kernels):
    total, top, float_sum = emulated.int_array(1), emulated.int_array(1), torch.zeros(1)
    assert kernels.library.check_counters(total, top, emulated.float_pointer(float_sum)) == 0
    assert (total[0], top[0], float_sum.item()) == (288, 287, 144.0)


@pytest.mark.parametrize("dtype", emulated.DTYPES)
@pytest.mark.parametrize("by_columns", [0, 1])
def test_products_of_one_warp(kernels, dtype, by_columns):
    a = torch.randint(-3, 4, (16, 16)).float()  # exact in every type
    b = torch.randint(-1, 2, (16, 16)).float()
    out = torch.empty(2, 16, 16)
    pointers = [emulated.float_pointer(x) for x in (out, a, b)]
    assert kernels.library.check_products(*pointers, emulated.DTYPES.index(dtype), by_columns) == 0
    assert torch.equal(out[0], a @ b)
    assert torch.equal(out[1], a @ b @ (b.T if by_columns else b))


def test_matrix_operation_of_half_a_warp_is_reported(kernels, capfd):
    assert kernels.library.check_half_a_warp(emulated.float_pointer(torch.empty(32))) == emulated.LAUNCH_FAILURE
    assert "takes no part in a matrix operation" in capfd.readouterr().err


def test_copy_to_an_odd_address_is_reported(kernels, capfd):
    assert kernels.library.check_copy_to_odd_address(emulated.float_pointer(torch.empty(8))) == emulated.LAUNCH_FAILURE
    assert "no multiple of 16" in capfd.readouterr().err


@pytest.mark.parametrize("grid", [(1, 65536, 32), (0, 1, 32), (1, 1, 1025), (1, 1, 0)])
def test_launch_outside_the_limits_is_an_error(kernels, grid):
    assert kernels.library.check_grid(*grid) == emulated.INVALID_CONFIGURATION


def test_conversions_round_as_torch_does(kernels):
    every_half = torch.arange(65536).to(torch.int32).to(torch.uint16).view(torch.float16)
    to = torch.empty(65536)
    kernels.library.check_f16(ctypes.c_void_p(every_half.data_ptr()), emulated.float_pointer(to), ctypes.c_int64(65536))
    assert torch.equal(to.isnan(), every_half.isnan())
    assert torch.equal(to.nan_to_num(0), every_half.float().nan_to_num(0))

    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    near_ties = (bits & ~0x1FFF) | torch.randint(0x0FFF, 0x1002, bits.shape, generator=generator).to(torch.int32)
    halves = every_half.float().view(torch.int32)
    x = torch.cat([bits, near_ties, halves, halves + 0x1000, halves + 1]).view(torch.float32)
    as_f16, as_bf16 = torch.empty_like(x, dtype=torch.float16), torch.empty_like(x, dtype=torch.bfloat16)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, as_f16, as_bf16)]
    kernels.library.check_conversions(*pointers, ctypes.c_int64(x.numel()))
    for got in (as_f16, as_bf16):
        expected = x.to(got.dtype)
        assert torch.equal(got.isnan(), expected.isnan())
        numbers = ~expected.isnan()
        assert torch.equal(got[numbers].view(torch.int16), expected[numbers].view(torch.int16))
