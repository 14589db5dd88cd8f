"""The facts of every kernel on a device, and what of them is a fault."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .cubins import Kernel
from .launches import Launch
from .occupancy import REGISTERS, Device, Occupancy, occupancies

# Of a call that must use the tensor cores, the kernels that multiply no matrices.
NO_PRODUCTS = r"(delta|sinks|plan|join|probabilities)_kernel\b"
# Kernels that may load from and store to local memory, so many instructions of them, and why: file and kernel.
LOCAL = {
    # a block of three has a few registers less than they want; an H200 was measured with that
    r"decode: pieces_mma_kernel<\w+, (128|256), [12], ": 48,
    # heads of 256 whose probabilities are asked for: one register is put aside and fetched again
    r"decode: pieces_mma_kernel<\w+, 256, 0, true, ": 2,
    # the same of eight queries over values of 4 bits that are loaded one by one
    r"decode: pieces_kernel<k8v4_row, 1, 8, 8, true>": 8,
}
# Calls whose products are of 16-bit rows that start on 16 bytes. Decoding above D = 256, or where the block's memory is
# too small for tiles of 256, is plain FMA by design: memory bounds it still.
PRODUCTS = r"(attention|attention_backward)/(bfloat16|float16)/\d+$|decode/(bfloat16|float16)/(64|128)$"
# Calls that copy rows of 16-byte units.
ROW_COPIES = r"(append_tokens|compact_pages)/bfloat16/128$"
MOVERS = r"(append|move)_kernel\b"
# DMC's averages with a full history, rows that 16-byte loads (8 bytes in 16-bit types) cover: rows read ahead.
AHEAD_FILES, AHEAD = ("dmc_accumulate", "dmc_accumulate_backward"), 8
AHEAD_KERNELS = r"(forward|ends|starts|backward)_kernel<true, "


@dataclass(frozen=True)
class Report:
    """One kernel on one device. threads, dynamic: the most that a launch asks for. launches: 0 if no op starts it."""

    name: str
    device: Device
    kernel: Kernel
    launches: int
    threads: int
    dynamic: int
    occupancy: Occupancy
    calls: frozenset[str]


def short(name: str) -> str:
    """Without namespace and parameters: forward_kernel<bf16, 128, false>; of an enumeration its number."""
    return re.sub(r"\(stored\)(\d)", r"\1", name.replace("(anonymous namespace)::", "")).split("(")[0]


def reports(
    device: Device, kernels: Sequence[Kernel], launches: Sequence[Launch], elsewhere: Sequence[Launch]
) -> list[Report]:
    """elsewhere: launches where blocks have the most memory. What runs there alone is left out: another path serves."""
    other = {launch.kernel for launch in elsewhere} - {launch.kernel for launch in launches}
    kernels = [kernel for kernel in kernels if kernel.name not in other]
    of_kernel: dict[str, list[Launch]] = {kernel.name: [] for kernel in kernels}
    for launch in launches:
        if launch.kernel in of_kernel:  # gpu_static.py may look at some files only
            of_kernel[launch.kernel].append(launch)
    # A kernel that no op launches is judged by the block that its bounds promise
    threads = [max((x.threads for x in of_kernel[k.name]), default=k.bound) for k in kernels]
    dynamic = [max((x.shared for x in of_kernel[k.name]), default=0) for k in kernels]
    questions = [(k.registers, k.shared, d, t) for k, d, t in zip(kernels, dynamic, threads, strict=True)]
    return [
        Report(
            f"{kernel.file}: {short(kernel.name)}", device, kernel, len(of_kernel[kernel.name]),
            threads[i], dynamic[i], occupancy, frozenset(x.call for x in of_kernel[kernel.name]),
        )
        for i, (kernel, occupancy) in enumerate(zip(kernels, occupancies(device, questions), strict=True))
    ]  # fmt: skip


def faults(report: Report) -> Iterator[str]:
    """Each names kernel, device, value and limit."""
    kernel, found, device = report.kernel, report.kernel.facts, report.device
    where = f"{report.name} on {device.name}"
    # registers are given to a warp in units of 256
    registers = -(-kernel.registers * 32 // 256) * 256 * (report.threads // 32)
    shared = kernel.shared + report.dynamic
    if report.threads > kernel.bound:
        yield f"{where}: launched with {report.threads} threads, its launch bounds allow {kernel.bound}"
    if registers > REGISTERS:
        yield f"{where}: {report.threads} threads take {registers} registers, a block may have {REGISTERS}"
    if shared > device.shared:
        yield f"{where}: {shared} bytes of shared memory, a block may have {device.shared}"
    if (
        report.occupancy.blocks < 1
        and report.threads <= kernel.bound
        and registers <= REGISTERS
        and shared <= device.shared
    ):
        why = report.occupancy.limited_by
        yield f"{where}: a multiprocessor holds 0 blocks of {report.threads} threads ({why}), at least 1 is due"
    local = next((most for pattern, most in LOCAL.items() if re.match(pattern, report.name)), 0)
    if found.spills > local:
        yield f"{where}: {found.spills} loads from and stores to local memory, {local} are allowed"
    if not report.launches:
        yield f"{where}: launched by 0 of the calls of launches.py, which must lead to every kernel"
    products = sorted(call for call in report.calls if re.match(PRODUCTS, call))
    if products and not found.hmma and not re.match(NO_PRODUCTS, short(kernel.name)):
        yield f"{where}: 0 tensor core instructions (HMMA) in what {products[0]} launches, at least 1 is due"
    if any(re.match(ROW_COPIES, call) for call in report.calls) and re.match(MOVERS, short(kernel.name)):
        if not found.wide_loads:
            yield f"{where}: 0 loads of 128 bits in a copy of rows, at least 1 is due"
        if not found.wide_stores:
            yield f"{where}: 0 stores of 128 bits in a copy of rows, at least 1 is due"
    if kernel.file in AHEAD_FILES and re.match(AHEAD_KERNELS, short(kernel.name)) and found.flight.loads < AHEAD:
        yield f"{where}: {found.flight.loads} global loads on their way in the main loop, at least {AHEAD} are due"
