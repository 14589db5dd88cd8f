"""benchmarks/gpu/gpu_static.py: the gate on every .cu file as sm_80 code, and that each of its rules can fail.

sm_80 code runs on sm_80 and sm_86, the devices with the least to spend; that of sm_90 is left to the program itself.
Where the extension holds it, as TORCH_CUDA_ARCH_LIST=8.0 in .ci/run has it, nothing is compiled; elsewhere a file is,
once per content (build/gpu_static): four minutes of one processor for all of them, seconds after that.
"""

import ctypes
import dataclasses

import emulated
import pytest
import torch

from benchmarks.gpu import gpu_static
from benchmarks.gpu.gate import ceilings, cubins, extremes, launches, occupancy, rules, sass

pytestmark = pytest.mark.skipif(cubins.nvcc() is None, reason="needs nvcc")

DEVICES = ("sm_80", "sm_86")
COPY = """
#include <cstdint>
extern "C" __global__ void ahead(float4* to, const float4* from, int64_t n) {
    for (int64_t i = threadIdx.x; i < n; i += 512) {
        const float4 a = from[i], b = from[i + 128], c = from[i + 256], d = from[i + 384];
        to[i] = a, to[i + 128] = b, to[i + 256] = c, to[i + 384] = d;
    }
}
extern "C" __global__ void chased(int* at, int n) {
    int place = *at;
    for (int i = 0; i < n; i++) place = at[place];
    *at = place;
}
extern "C" __global__ void local(float* at, const int* places, int n) {
    float held[64];
    for (int i = 0; i < 64; i++) held[i] = at[i];
    for (int i = 0; i < n; i++) held[places[i] & 63] += held[places[i + 1] & 63];
    for (int i = 0; i < 64; i++) at[i] = held[i];
}
"""


@pytest.mark.parametrize("source", gpu_static.SOURCES, ids=lambda source: source.stem)
def test_kernels_pass_the_gate(source):
    reports = gpu_static.look(list(DEVICES), (source,), jobs=1)
    assert reports
    assert not [fault for report in reports for fault in rules.faults(report)]


@pytest.fixture(scope="module")
def pages():
    """A row copy with 16-byte loads, on sm_86."""
    reports = gpu_static.look(["sm_86"], (cubins.ROOT / "csrc/cuda/pages.cu",), jobs=1)
    return next(report for report in reports if "append_kernel<uint4>" in report.name)


def faults(report, **kernel):
    """Those of the report once its kernel is what `kernel` says."""
    return list(rules.faults(dataclasses.replace(report, kernel=dataclasses.replace(report.kernel, **kernel))))


def test_each_fault_names_kernel_device_value_and_limit(pages):
    facts, where = pages.kernel.facts, "pages: append_kernel<uint4> on sm_86: "
    assert faults(pages) == []
    assert faults(pages, bound=96) == [where + "launched with 128 threads, its launch bounds allow 96"]
    large = dataclasses.replace(pages, threads=1024)
    assert faults(large, registers=72, bound=1024) == [
        where + "1024 threads take 73728 registers, a block may have 65536"
    ]
    assert faults(dataclasses.replace(pages, dynamic=101_377)) == [
        where + "101377 bytes of shared memory, a block may have 101376"
    ]
    assert faults(pages, facts=dataclasses.replace(facts, spills=3)) == [
        where + "3 loads from and stores to local memory, 0 are allowed"
    ]
    narrow = dataclasses.replace(facts, wide_loads=0, wide_stores=0)
    assert faults(pages, facts=narrow) == [
        where + "0 loads of 128 bits in a copy of rows, at least 1 is due",
        where + "0 stores of 128 bits in a copy of rows, at least 1 is due",
    ]
    assert faults(dataclasses.replace(pages, launches=0)) == [
        where + "launched by 0 of the calls of launches.py, which must lead to every kernel"
    ]
    attention = dataclasses.replace(pages, calls=frozenset({"attention/bfloat16/128"}))
    assert faults(attention) == [
        where + "0 tensor core instructions (HMMA) in what attention/bfloat16/128 launches, at least 1 is due"
    ]
    averages = dataclasses.replace(pages.kernel, file="dmc_accumulate", name="forward_kernel<true, bf16>(int)")
    few = dataclasses.replace(facts, flight=sass.Flight(7, 56))
    assert faults(dataclasses.replace(pages, kernel=averages), facts=few) == [
        where + "7 global loads on their way in the main loop, at least 8 are due"
    ]


def test_blocks_per_multiprocessor_are_those_of_the_calculator():
    from benchmarks.gpu.gate.occupancy import DEVICES, Occupancy, occupancies

    # 65,536 registers / (64 * 128); 164 KB / (40 + 1) KB; 2,048 threads / 1,024; nothing fits
    questions = [(64, 0, 0, 128), (32, 0, 40 * 1024, 128), (32, 0, 0, 1024), (32, 0, 164 * 1024, 128)]
    expected = [Occupancy(8, "registers"), Occupancy(4, "shared memory"), Occupancy(2, "registers")]
    assert occupancies(DEVICES["sm_80"], questions[:3]) == expected
    assert occupancies(DEVICES["sm_80"], questions[3:])[0].blocks == 0


def test_loads_on_their_way_and_local_memory_are_read_from_the_machine_code(tmp_path):
    source = tmp_path / "copies.cu"
    source.write_text(COPY)
    found = {kernel.name: kernel.facts for kernel in cubins.kernels_of(source, "sm_80")}
    assert found["ahead"].flight == sass.Flight(4, 64)
    assert (found["ahead"].main_load_bytes, found["ahead"].main_store_bytes) == (64, 64)
    assert found["chased"].flight.loads == 1
    assert not found["ahead"].spills and not found["chased"].spills
    assert found["local"].spills


def test_launches_are_those_of_the_device():
    """Head dim 256 in 16 bits takes just what a block of sm_86 may have: no device is left to tiles of 16 queries."""
    for limit in (99, 163):
        kernels = {
            rules.short(x.kernel)
            for x in launches.launches(limit * 1024).launches
            if x.call == "attention/bfloat16/256"
        }
        assert kernels == {"forward_kernel<bf16, 256, false>", "forward_kernel<bf16, 256, true>"}


def greedy(rows):
    """A call of a launcher that asks for 300 KB of shared memory from 2^20 rows on."""
    check = ctypes.CDLL(str(emulated.library())).check_greedy
    check.argtypes = [ctypes.c_longlong]

    def run():
        if error := check(rows):
            raise RuntimeError(f"error {error}")

    return f"greedy/{rows}", run


def test_a_request_that_only_a_million_rows_make_is_noted_and_a_fault(pages):
    noted = launches.note_launches(163 * 1024, [greedy(1000), greedy(extremes.MILLION)])
    assert not noted.refused
    assert [(x.call, x.shared) for x in noted.launches] == [("greedy/1000", 4096), ("greedy/1048576", 307_200)]
    kernel = dataclasses.replace(pages.kernel, name=noted.launches[0].kernel)
    (report,) = rules.reports(occupancy.DEVICES["sm_80"], [kernel], noted.launches, noted.launches)
    assert next(rules.faults(report)).endswith(
        f"on sm_80: {307_200 + kernel.shared} bytes of shared memory, a block may have 166912"
    )


def test_what_a_launcher_refuses_is_kept_beside_the_launches(monkeypatch):
    native, wide, half = torch.ops.kvcompress, torch.empty(1, 1, 1, 600), torch.empty(1, 4)
    good = ("rope", lambda: native.rope(wide, half, half, None, False))
    bad = ("attention", lambda: native.attention(wide, wide, wide, None, None, 0.1, True, 0, 0, False, None, 0.0))
    noted = launches.note_launches(163 * 1024, [bad, good])
    assert noted.refused == ["attention: attention: invalid argument"]
    assert {x.call for x in noted.launches} == {"rope"}
    monkeypatch.setattr(gpu_static, "launches", lambda shared: noted)
    assert gpu_static.refusals(["sm_86"]) == ["attention: attention: invalid argument on sm_86"]


def test_no_launcher_refuses_the_ends_and_every_op_is_asked_there():
    noted = launches.launches(99 * 1024)
    assert not noted.refused
    ends = {name for name, _ in extremes.extremes()}
    assert {name.split("/")[0] for name, _ in launches.calls()} <= {name.split("/")[0] for name in ends}
    for end in ("x1048576", "/512x", "x128x", "x512"):
        assert {x.call for x in noted.launches if end in x.call} <= ends and any(end in name for name in ends)


def test_estimate_is_the_ceiling_over_the_slowest_unit(pages):
    """A loop of 8 warps that loads 2 * 16 bytes and stores as many per thread, all of it once on its way."""
    main = sass.Counter({"LDG": 2, "STG": 2, "IMAD": 12})
    facts = dataclasses.replace(pages.kernel.facts, flight=sass.Flight(2, 32), main=main, main_instructions=16,
                                main_load_bytes=32, main_store_bytes=32, main_shared_cycles=0)  # fmt: skip
    report = dataclasses.replace(pages, kernel=dataclasses.replace(pages.kernel, facts=facts), threads=128)
    report = dataclasses.replace(report, occupancy=dataclasses.replace(report.occupancy, blocks=2))
    found = ceilings.estimate(ceilings.Work("pages", "append_kernel<uint4>", 3_350_000, 0), report)
    assert (found.issue, found.products, found.flight) == (4, 0, 32 * 32 * 800 / (32 * 32 * 8))
    assert found.ceiling == pytest.approx(2048 / 14.4607, rel=1e-4)
    assert found.fraction == 1.0
    assert found.seconds == pytest.approx(1e-6)
    half = dataclasses.replace(report, occupancy=dataclasses.replace(report.occupancy, blocks=1), threads=32)
    found = ceilings.estimate(ceilings.Work("pages", "append_kernel<uint4>", 3_350_000, 0), half)
    assert found.bound_by == "flight"
    assert found.seconds == pytest.approx(1e-6 * 800 / 141.6241, rel=1e-4)


def test_a_chain_takes_its_trips_or_its_bytes(pages):
    few, many = (ceilings.Chain("pages", "append_kernel<uint4>", nbytes, 5) for nbytes in (3350, 33_500_000))
    assert ceilings.estimate_chain(few, pages).seconds == pytest.approx(5 * 800 / 1.755e9)
    assert ceilings.estimate_chain(few, pages).ceiling_seconds == pytest.approx(1e-9)
    found = ceilings.estimate_chain(many, pages)
    assert (found.bound_by, found.seconds) == ("bytes", pytest.approx(1e-5))
    with pytest.raises(
        RuntimeError, match=r"not there: .*paged_step\.cu: begin_kernel.*decode_shared\.cu: join_kernel"
    ):
        ceilings.estimates([pages])
