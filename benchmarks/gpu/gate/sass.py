"""What the machine code of a kernel says: instructions counted, spills, loops, global loads on their way at a time.

An instruction is 128 bits, two words of a listing with encodings. Bits 105-125 are its scheduling (Jia et al.,
"Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", 2018; the same up to sm_90): 110-112 the
scoreboard that a load holds until its result is there (7: none), 116-121 a mask of the scoreboards that must be free
before it issues.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/\s*/\* 0x([0-9a-f]{16}) \*/", re.DOTALL)
WIDTH = re.compile(r"\.(U8|S8|U16|S16|64|128)\b")
BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str  # with its modifiers: LDG.E.128.CONSTANT
    text: str
    sets: int | None  # scoreboard
    waits: int  # mask of scoreboards

    @cached_property
    def base(self) -> str:
        return self.name.split(".")[0]

    @cached_property
    def nbytes(self) -> int:
        """Of a load or store, per thread."""
        match = WIDTH.search(self.name)
        return BYTES[match[1]] if match else 4

    @cached_property
    def target(self) -> int | None:
        match = re.search(r"(?:^|\s)(?:`\(\.L_x_\d+\)|0x([0-9a-f]+))\s*$", self.text) if self.base == "BRA" else None
        return int(match[1], 16) if match and match[1] else None


def parse(listing: str) -> list[Instruction]:
    found = []
    for address, text, _, high in LINE.findall(listing):
        bits = int(high, 16)
        sets = bits >> 46 & 7
        words = text.split()
        name = words[1] if words[0].startswith("@") else words[0]
        found.append(Instruction(int(address, 16), name, text, None if sets == 7 else sets, bits >> 52 & 63))
    return found


@dataclass(frozen=True)
class Flight:
    """Global loads on their way in one warp: how many instructions, and bytes of a thread."""

    loads: int
    nbytes: int


def flight(code: list[Instruction]) -> Flight:
    """The most loads that this code has on their way, run twice in the order of addresses, as a loop that goes on.

    A load into registers (LDG) is on its way from where it issues to the first instruction that waits for its
    scoreboard: exactly where the warp stops, whatever reads the registers behind it. A load without a scoreboard of its
    own shares the next one that is set. A copy into shared memory (LDGSTS) is on its way until DEPBAR waits for its
    group, which LDGDEPBAR closes; DEPBAR.LE SB, n leaves the last n groups. Branches are not followed: code that a loop
    may skip counts, as does code of both sides.
    """
    most = Flight(0, 0)
    held: dict[int, list[int]] = {}  # scoreboard: bytes of its loads
    unbound: list[int] = []
    groups: list[list[int]] = [[]]  # the last one is open
    for instruction in code + code:
        if instruction.waits and held:
            held = {board: loads for board, loads in held.items() if not instruction.waits >> board & 1}
        if instruction.base == "LDG":
            unbound.append(instruction.nbytes)
            if instruction.sets is not None:
                held.setdefault(instruction.sets, []).extend(unbound)
                unbound = []
        elif instruction.base == "LDGSTS":
            groups[-1].append(instruction.nbytes)
        elif instruction.base == "LDGDEPBAR":
            groups.append([])
        elif instruction.base == "DEPBAR":
            match = re.search(r"SB0, 0x([0-9a-f]+)", instruction.text)
            left = int(match[1], 16) if match else 0
            groups = groups[len(groups) - 1 - left :] if len(groups) - 1 > left else groups
        if instruction.base not in ("LDG", "LDGSTS"):
            continue  # no more on their way than before
        on_way = [*unbound, *(x for loads in held.values() for x in loads), *(x for group in groups for x in group)]
        if sum(on_way) > most.nbytes:
            most = Flight(len(on_way), sum(on_way))
    return most


def loops(code: list[Instruction]) -> list[list[Instruction]]:
    """The bodies of all loops: from the target of a branch backwards to the branch."""
    bodies, addresses = [], [x.address for x in code]
    for place, instruction in enumerate(code):
        if instruction.target is not None and instruction.target < instruction.address:
            bodies.append(code[bisect_left(addresses, instruction.target) : place + 1])
    return bodies


def main_loop(code: list[Instruction]) -> list[Instruction]:
    """The innermost loop that loads the most bytes from global memory, or all of a kernel in which none does; of a
    kernel that multiplies on tensor cores while it loads, of the loops that do.

    Innermost: of loops one in the other only the one with the most bytes on their way counts, and of those the
    shortest; an outer loop that merely holds the inner one has no more on their way than that.
    """

    def worth(body: list[Instruction]) -> tuple[int, int]:
        return flight(body).nbytes, -len(body)

    loading = [body for body in loops(code) if any(x.base in ("LDG", "LDGSTS") for x in body)]
    multiplying = [body for body in loading if any(x.base == "HMMA" for x in body)]
    return max(multiplying or loading, key=worth) if loading else code


@dataclass(frozen=True)
class Facts:
    """spills: loads from and stores to local memory. wide: loads of 16 bytes, into registers and into shared memory."""

    instructions: int
    spills: int
    hmma: int
    ldgsts: int
    wide_loads: int
    loads: int
    wide_stores: int
    stores: int
    flight: Flight
    main: Counter[str]
    main_instructions: int
    main_load_bytes: int  # of a thread
    main_store_bytes: int
    main_shared_cycles: int


# Cycles of a multiprocessor's shared memory, 128 bytes each, that one instruction of a warp takes without conflicts.
def _shared_cycles(x: Instruction) -> int:
    if x.base in ("LDS", "STS", "LDGSTS"):
        return max(1, 32 * x.nbytes // 128)
    if x.base == "LDSM":
        return 4 if ".4" in x.name else 2 if ".2" in x.name else 1
    return 1 if x.base in ("SHFL", "ATOMS") else 0


def facts(listing: str) -> Facts:
    code = parse(listing)
    if not code:
        raise RuntimeError("a listing without instructions: this version of cuobjdump writes them in another way")
    body = main_loop(code)
    loads = [x for x in code if x.base in ("LDG", "LDGSTS")]
    stores = [x for x in code if x.base == "STG"]
    return Facts(
        instructions=len(code),
        spills=sum(x.base in ("LDL", "STL") for x in code),
        hmma=sum(x.base == "HMMA" for x in code),
        ldgsts=sum(x.base == "LDGSTS" for x in code),
        wide_loads=sum(x.nbytes == 16 for x in loads),
        loads=len(loads),
        wide_stores=sum(x.nbytes == 16 for x in stores),
        stores=len(stores),
        flight=flight(body),
        main=Counter(x.base for x in body),
        main_instructions=len(body),
        main_load_bytes=sum(x.nbytes for x in body if x.base in ("LDG", "LDGSTS")),
        main_store_bytes=sum(x.nbytes for x in body if x.base == "STG"),
        main_shared_cycles=sum(map(_shared_cycles, body)),
    )
