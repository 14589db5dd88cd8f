"""Bytes and FLOPs of the kernels that matter at one size, their ceiling on an H100 SXM, and how near its code can come.

Size: a layer of Llama-3-8B in bfloat16, B = 1, Hq = 32, Hkv = 8, D = 128; T = 32,768 keys where a token is decoded or
2,048 are added, 8,192 tokens elsewhere. Nothing here is measured. The first GPU is to say whether `seconds` is what it
takes; where it is not, one of the numbers below is wrong, and which one is what a profiler shows under the same name.

The machine, per multiprocessor (132 of them at 1.755 GHz) and cycle:
    memory      3.35e12 B/s    / 132 / 1.755e9 =   14.5 bytes
    products    989e12 FLOP/s  / 132 / 1.755e9 = 4,270 FLOP by wgmma; mma.sync (HMMA), which these kernels use, reaches
                62% of it ("Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", 2024): 2,650
    issue       4 instructions of a warp, one per scheduler
    shared      128 bytes
    latency     800 cycles from memory under load, 270 from L2 (the same paper: 478 and 200 to 260 idle)

A kernel's main loop (sass.py), one warp, once through, takes of the multiprocessor at least so many cycles:
    issue       instructions / 4
    shared      the sum over LDS, STS, LDSM, LDGSTS of their bytes / 128, without bank conflicts
    products    HMMA * 4,096 FLOP / 2,650
    flight      Little's law: bytes loaded * latency / (bytes on their way, of all warps that the multiprocessor holds)
    ceiling     for what memory bounds, (bytes loaded + stored) / 14.5; for what products bound, HMMA * 4,096 / 4,270
`fraction` is ceiling / the most of all these: how much of the machine's rate this code can reach at best, if there are
blocks enough. What it leaves out: every instruction of the loop counts once, that of a branch rarely taken (the other
path of odd rows, the remainder of an unrolled loop) as well as that of a loop inside, whose turns are not known; waits
for barriers and for results within a warp count nothing. Ratios between the units are what a profiler can check.

The kernels that begin, place and join are of another kind, which CHAINS holds: a few KB by one block, or by as many as
there are heads, so that neither memory nor instructions bound them, but loads that wait for each other. `seconds` of
them is trips * 800 cycles, no less than their bytes at the full rate. It leaves out what a launch takes, reading the
kernel's own code, barriers, and stores that are read again: an H200 took 14.0 us for paged_step's begin_kernel and 4.2
for decode's join_kernel (docs/gpu.md, 4,096 tokens), launches included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common import print_table

from .rules import Report, short

PROCESSORS, CLOCK = 132, 1.755e9
BANDWIDTH, RATE = 3.35e12, 989e12
BYTES_PER_CYCLE, FLOP_PER_CYCLE = BANDWIDTH / PROCESSORS / CLOCK, RATE / PROCESSORS / CLOCK
HMMA_SHARE, FLOP_PER_HMMA = 0.62, 2 * 16 * 8 * 16
LATENCY = {"memory": 800, "L2": 270}

B, Hq, Hkv, D, T, KEYS, SIZE = 1, 32, 8, 128, 8_192, 32_768, 2
PAIRS = Hq * T * (T + 1) // 2  # of a query and a key that it sees, over the heads
QUERY_ROWS, KEY_ROWS = Hq * T * D * SIZE, Hkv * T * D * SIZE  # bytes
NEW = 2_048  # tokens of a prompt's chunk, the last of the keys
GATES, STATES = 4 * Hkv * T, 2 * 4 * Hkv * (T // 64) * D


@dataclass(frozen=True)
class Work:
    """What one launch of a kernel must do. source: where the loads of its main loop come from."""

    file: str
    kernel: str
    nbytes: int
    flops: int
    source: str = "memory"


WORK = (
    # queries, keys and values in, the result out; two products of 2*D per pair. Keys and values of a head come from L2
    Work("attention", "forward_kernel<bf16, 128, false>", 2 * QUERY_ROWS + 2 * KEY_ROWS, 4 * D * PAIRS, "L2"),
    # q, dout, k, v in, dk, dv out; logits, dp, dk, dv
    Work("attention_backward", "keys_kernel<bf16, 128, false>", 2 * QUERY_ROWS + 4 * KEY_ROWS, 8 * D * PAIRS, "L2"),
    # q, dout, k, v in, dq out; logits, dp, dq
    Work("attention_backward", "queries_kernel<bf16, 128, false>", 3 * QUERY_ROWS + 2 * KEY_ROWS, 6 * D * PAIRS, "L2"),
    # keys and values once; each meets the G = 4 query heads of its own
    Work("decode", "pieces_mma_kernel<bf16, 128, 0, false, false>", 2 * Hkv * KEYS * D * SIZE, 4 * D * Hq * KEYS),
    # the same as codes with a scale each, of 8 bits and with values of 4
    Work("decode", "pieces_mma_kernel<bf16, 128, 1, false, false>", 2 * Hkv * KEYS * (D + 2), 4 * D * Hq * KEYS),
    Work(
        "decode",
        "pieces_mma_kernel<bf16, 128, 2, false, false>",
        Hkv * KEYS * (D + D // 2 + 4),
        4 * D * Hq * KEYS,
    ),
    # tokens in, codes and scales out
    Work("quantize", "quantize_kernel", Hkv * T * (D * SIZE + D + 2), 0),
    # scores of all queries (Replay): queries and keys, 2*D per pair in each pass; what comes to a block is from L2
    Work("score_mma", "statistics_kernel<bf16, true, false>", QUERY_ROWS + KEY_ROWS, 2 * D * PAIRS, "L2"),
    Work("score_mma", "columns_kernel<bf16, true, false>", QUERY_ROWS + KEY_ROWS, 2 * D * PAIRS, "L2"),
    # the same keys and values, once for all new tokens; blocks of a KV head read them from L2
    Work(
        "decode_prefill",
        "prefill_kernel<bf16, 128, false>",
        2 * Hkv * KEYS * D * SIZE + 2 * Hq * NEW * D * SIZE,
        4 * D * Hq * (NEW * KEYS - NEW * (NEW - 1) // 2),
        "L2",
    ),
    # values once, a probability for each of them and query head
    Work("decode_shared", "mix_kernel<bf16, 8, 4, 8>", Hkv * KEYS * (D * SIZE + 4 * Hq // Hkv), 2 * D * Hq * KEYS),
    # keys and values in and out, alpha, omega and z, the states before chunks of 64; a multiply-add for each of two
    Work("dmc_accumulate", "forward_kernel<true, bf16>", 4 * KEY_ROWS + 3 * GATES + STATES, 8 * Hkv * T * D),
    # keys, values and both gradients in, dk, dv out; alpha, omega, z in, dbeta out
    Work(
        "dmc_accumulate_backward",
        "backward_kernel<true, bf16>",
        6 * KEY_ROWS + 5 * GATES + STATES,
        24 * Hkv * T * D,
    ),
    # tokens in, slots out, of keys and values; kept slots the same, with an index of 4 bytes each
    Work("pages", "append_kernel<uint4>", 4 * KEY_ROWS, 0),
    Work("pages", "move_kernel", 4 * KEY_ROWS + GATES, 0),
    # queries in and out, cos and sin of D/2 each
    Work("rope", "rope_kernel<bf16, 8>", 2 * QUERY_ROWS + 4 * T * D, 3 * Hq * T * D),
    # two results and their lse in, one out
    Work("merge", "merge_kernel<bf16, 8>", 3 * QUERY_ROWS + 3 * 4 * Hq * T, 3 * Hq * T * D),
)


@dataclass(frozen=True)
class Chain:
    """What one launch of a kernel must move, and its longest chain of loads from memory of which each waits for the
    one before, counted in its source; what the block has read before is in L1 and no trip."""

    file: str
    kernel: str
    nbytes: int
    trips: int


HEADS, MANY, PAGE = Hq + Hkv, 64, 16  # where sequences are MANY, heads have a launch of their own
STEP = (2 * Hq + 4 * Hkv) * D * SIZE  # queries rotated, key and value stored
TABLE = 4 * Hkv * (KEYS // PAGE)  # that no page is missing is seen at every step
PIECES = 32 + (KEYS - 32 * 128) // 256  # of a row: the first 32 of 128 keys, the others of 256
LISTED = 16 * Hkv * PIECES
TURN = 4 * D  # cos and sin of a head
JOINED = 4 * (D + 2) * Hq * PIECES
TAIL = 2 * 4 * Hkv * (2 * D + 2)  # DMC: sums of keys and values, weights, counts, read and written
RING = 68  # places of streaming

CHAINS = (
    # a warp of those that wait longest: length; query and turn; its second head; its part of the table, in two parts
    Chain("paged_step", "begin_kernel", STEP + TABLE + LISTED + HEADS * TURN, 5),
    # verdict and length; page; query and turn
    Chain("paged_step", "place_kernel", MANY * (STEP + HEADS * TURN), 3),
    # the same, and what a page's keys span, read and written
    Chain("quest_step", "begin_kernel", STEP + TABLE + HEADS * TURN + 4 * Hkv * D * SIZE, 10),
    Chain("quest_step", "place_kernel", MANY * (STEP + HEADS * TURN + 4 * Hkv * D * SIZE), 4),
    # two tables, of keys and of values
    Chain("pod_step", "begin_kernel", STEP + 2 * TABLE + LISTED + HEADS * TURN, 13),
    Chain("pod_step", "place_kernel", MANY * (STEP + HEADS * TURN), 3),
    # a ring has no table
    Chain("ring_step", "begin_kernel", STEP + HEADS * TURN + 4 * Hkv * RING, 6),
    Chain("ring_step", "place_kernel", MANY * (STEP + HEADS * TURN), 3),
    # as paged_step; before it the decision of each row, behind it the sums of its last slot
    Chain("dmc_step", "begin_kernel<4, bf16>", STEP + TABLE + LISTED + HEADS * TURN + TAIL, 11),
    Chain("dmc_step", "place_kernel<4, bf16>", MANY * (STEP + HEADS * TURN + TAIL), 5),
    # length; statistics and results of the pieces; of the groups. Of a row of more queries than its pieces' blocks join
    Chain("decode", "join_kernel<false>", JOINED + Hq * D * SIZE, 3),
    Chain("decode_shared", "join_kernel", JOINED + 2 * Hq * D * SIZE, 3),
)


@dataclass(frozen=True)
class Estimate:
    """issue, shared, products, flight, ceiling: cycles of a multiprocessor for one turn of a warp through its loop."""

    name: str
    bytes: int
    flops: int
    ceiling_seconds: float
    issue: float
    shared: float
    products: float
    flight: float
    ceiling: float
    fraction: float
    bound_by: str
    seconds: float


def estimate(work: Work, report: Report) -> Estimate:
    found = report.kernel.facts
    by_memory, by_products = work.nbytes / BANDWIDTH, work.flops / RATE
    hmma = found.main["HMMA"]
    moved = 32 * (found.main_load_bytes + found.main_store_bytes)
    warps = report.occupancy.blocks * report.threads // 32
    on_way = 32 * found.flight.nbytes * warps
    cycles = {
        "issue": found.main_instructions / 4,
        "shared": float(found.main_shared_cycles),
        "products": hmma * FLOP_PER_HMMA / (FLOP_PER_CYCLE * HMMA_SHARE),
        "flight": 32 * found.main_load_bytes * LATENCY[work.source] / on_way if on_way else 0.0,
    }
    ceiling = hmma * FLOP_PER_HMMA / FLOP_PER_CYCLE if by_products > by_memory else moved / BYTES_PER_CYCLE
    bound_by = max(cycles, key=lambda name: cycles[name])
    fraction = min(1.0, ceiling / cycles[bound_by])
    at_best = max(by_memory, by_products)
    return Estimate(
        name=report.name, bytes=work.nbytes, flops=work.flops, ceiling_seconds=at_best, **cycles, ceiling=ceiling,
        fraction=fraction, bound_by="ceiling" if fraction == 1.0 else bound_by, seconds=at_best / fraction,
    )  # fmt: skip


@dataclass(frozen=True)
class ChainEstimate:
    """block: threads of one. bound_by: "trips", or "bytes" where these take longer."""

    name: str
    bytes: int
    trips: int
    block: int
    ceiling_seconds: float
    seconds: float
    bound_by: str


def estimate_chain(chain: Chain, report: Report) -> ChainEstimate:
    by_memory, waited = chain.nbytes / BANDWIDTH, chain.trips * LATENCY["memory"] / CLOCK
    return ChainEstimate(
        report.name, chain.nbytes, chain.trips, report.threads, by_memory, max(by_memory, waited),
        "trips" if waited >= by_memory else "bytes",
    )  # fmt: skip


def estimates(reports: Sequence[Report]) -> tuple[list[Estimate], list[ChainEstimate]]:
    """Of the kernels of WORK and of CHAINS, from reports on sm_90. RuntimeError if one is not there: it was renamed."""
    if not reports:
        return [], []
    by_name = {(report.kernel.file, short(report.kernel.name)): report for report in reports}
    missing = [f"{x.file}.cu: {x.kernel}" for x in (*WORK, *CHAINS) if (x.file, x.kernel) not in by_name]
    if missing:
        raise RuntimeError(f"kernels that ceilings.py names are not there: {', '.join(missing)}")
    return (
        [estimate(work, by_name[work.file, work.kernel]) for work in WORK],
        [estimate_chain(chain, by_name[chain.file, chain.kernel]) for chain in CHAINS],
    )


def show(found: Sequence[Estimate]) -> None:
    columns = ("kernel", "MB", "GFLOP", "ceiling us", "issue", "shared", "products", "flight", "ceiling", "fraction",
               "bound by", "us")  # fmt: skip
    lines = [
        (
            x.name, f"{x.bytes / 1e6:.1f}", f"{x.flops / 1e9:.1f}", f"{x.ceiling_seconds * 1e6:.1f}", f"{x.issue:.0f}",
            f"{x.shared:.0f}", f"{x.products:.0f}", f"{x.flight:.0f}", f"{x.ceiling:.0f}", f"{x.fraction:.2f}",
            x.bound_by, f"{x.seconds * 1e6:.1f}",
        )
        for x in found
    ]  # fmt: skip
    title = f"Llama-3-8B layer, bfloat16, {T:,} tokens ({KEYS:,} keys to decode): estimates for an H100, not measured"
    print_table(title, columns, lines, left=("kernel", "bound by"))


def show_chains(found: Sequence[ChainEstimate]) -> None:
    columns = ("kernel", "KB", "block", "by bytes us", "trips", "us", "bound by")
    lines = [
        (
            x.name, f"{x.bytes / 1e3:.1f}", str(x.block), f"{x.ceiling_seconds * 1e6:.2f}", str(x.trips),
            f"{x.seconds * 1e6:.2f}", x.bound_by,
        )
        for x in found
    ]  # fmt: skip
    title = f"begin, place ({MANY} sequences) and join, a token over {KEYS:,} keys: estimates for an H100, not measured"
    print_table(title, columns, lines, left=("kernel", "bound by"))
