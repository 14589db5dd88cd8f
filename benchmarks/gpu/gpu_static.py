"""What can be said of the CUDA kernels without a GPU: a gate, and ceilings for the first GPU to confirm or refute.

Compiles csrc/cuda/*.cu as setup.py does (minutes the first time; kept in build/gpu_static by content) and asks, for
every kernel on sm_80, sm_86 and sm_90: registers, spills, shared memory, the largest block that our launchers start,
blocks per multiprocessor, tensor core instructions, 16-byte loads, global loads on their way in the main loop. A device
runs the code that setup.py ships for it: sm_86 that of sm_80. Exit code 1 if a kernel cannot be launched, be
it for a million tokens, 512 sequences or 128 heads, spills, does
16-bit attention or decoding without tensor cores, copies rows by less than 16 bytes, or reads fewer rows ahead than it
says; 2 if nvcc is missing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import parse_arguments, parser, print_table, write_json
from benchmarks.gpu.gate import ceilings, cubins, rules
from benchmarks.gpu.gate.launches import launches
from benchmarks.gpu.gate.occupancy import DEVICES

SOURCES = tuple(sorted((cubins.ROOT / "csrc" / "cuda").glob("*.cu")))


def look(devices: list[str], sources: tuple[Path, ...], jobs: int) -> list[rules.Report]:
    """Every kernel of these files on these devices."""
    elsewhere = launches(max(device.shared for device in DEVICES.values())).launches
    return [
        report
        for name in devices
        for report in rules.reports(
            DEVICES[name],
            cubins.all_kernels(sources, cubins.shipped_for(name), jobs),
            launches(DEVICES[name].shared).launches,
            elsewhere,
        )
    ]


def refusals(devices: list[str]) -> list[str]:
    """Calls that launchers, or CUDA's limits on grids and blocks, refuse on these devices."""
    return [f"{refused} on {name}" for name in devices for refused in launches(DEVICES[name].shared).refused]


def row(report: rules.Report) -> dict[str, object]:
    found = report.kernel.facts
    return {
        "name": f"{report.device.name}/{report.kernel.file}/{rules.short(report.kernel.name)}",
        "registers": report.kernel.registers,
        "spills": found.spills,
        "shared_static": report.kernel.shared,
        "shared_dynamic": report.dynamic,
        "block": report.threads,
        "launch_bound": report.kernel.bound,
        "blocks_per_processor": report.occupancy.blocks,
        "limited_by": report.occupancy.limited_by,
        "hmma": found.hmma,
        "ldgsts": found.ldgsts,
        "loads_128": found.wide_loads,
        "loads": found.loads,
        "loads_in_flight": found.flight.loads,
        "bytes_in_flight": found.flight.nbytes,
        "instructions": found.instructions,
        "main_loop": found.main_instructions,
    }


def show(reports: list[rules.Report]) -> None:
    columns = ("kernel", "regs", "spills", "static", "dynamic", "block", "blocks/SM", "limit", "HMMA", "LDGSTS",
               "128 bit", "in flight", "bytes")  # fmt: skip
    for device in dict.fromkeys(report.device.name for report in reports):
        lines = [
            (
                report.name, *(str(row(report)[field]) for field in (
                    "registers", "spills", "shared_static", "shared_dynamic", "block", "blocks_per_processor",
                    "limited_by", "hmma", "ldgsts", "loads_128", "loads_in_flight", "bytes_in_flight")),
            )
            for report in reports
            if report.device.name == device
        ]  # fmt: skip
        print_table(f"{device}, code of {cubins.shipped_for(device)}", columns, lines, left=("kernel", "limit"))


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--device", choices=list(DEVICES), action="append", help="one of them; default all")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    choice = parse_arguments(options)
    if cubins.nvcc() is None:
        print("no nvcc in CUDA_HOME, PATH or /usr/local/cuda: the kernels cannot be compiled")
        return 2
    # smaller than full: the code with the least memory and registers to spend
    devices = choice.device or (list(DEVICES) if choice.size == "full" else ["sm_86"])
    reports = look(devices, SOURCES, choice.jobs)
    show(reports)
    estimates, chains = ceilings.estimates([report for report in reports if report.device.name == "sm_90"])
    if estimates:
        ceilings.show(estimates)
        ceilings.show_chains(chains)
    found = [fault for report in reports for fault in rules.faults(report)] + refusals(devices)
    for fault in found:
        print(fault)
    print(f"{len(reports)} kernels on {', '.join(devices)}: {len(found) or 'no'} faults")
    if choice.json is not None:
        rows, more = [row(report) for report in reports], [vars(x) for x in (*estimates, *chains)]
        write_json(choice.json, rows, nvcc=cubins.release(), ceilings=more, faults=found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
