"""Everything that needs a GPU, in one command: build, every op against the reference, sanitizer, benchmarks.

    python benchmarks/gpu/gpu_check.py [--quick] [--json FILE]

1. builds the extension in place with KVC_CUDA=1; 2. runs gpu_ops.py's checks on the GPU, and a decode step captured in
a CUDA graph; 3. runs a few of them under compute-sanitizer (memcheck, racecheck, synccheck) if it is on PATH; 4. times
decode, decode_shared, scores and attention: medians of CUDA events, ours and the peer in turns, buffers that rotate
through at least 1 GiB. Ceilings are measured in the same run: copy bandwidth (read + write) and the rate of a large
bfloat16 product.
Writes benchmarks/results/gpu_<name of the GPU>.json. Exit status: 0 all well, 1 something failed, 2 no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # what is built in place comes before what is installed
HQ, HKV, D, PAGE, W = 32, 8, 128, 64, 64
RESULTS = ROOT / "benchmarks" / "results"


def build() -> None:
    environment = os.environ | {"KVC_CUDA": "1"}
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, env=environment, check=True)


def print_checks(few: bool) -> int:
    """Runs the checks on the GPU; the number of failures."""
    from benchmarks.gpu.gpu_ops import run_checks

    failures = 0
    for name, error in run_checks("cuda", few):
        print(f"  {name}: {'passed' if error is None else f'FAILED: {error}'}", flush=True)
        failures += error is not None
    return failures


def check_graph() -> int:
    """A captured decode step reads the lengths and pages of the moment it is replayed."""
    from kvcompress import ops

    queries = torch.randn(2, 8, 1, D, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(4, 1024, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    end = torch.tensor([100, 1, 700, 9], dtype=torch.int32, device="cuda")
    ops.decode(queries, k, v, end)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = ops.decode(queries, k, v, end)
    end.copy_(torch.tensor([1024, 0, 257, 300]))
    queries.normal_()
    graph.replay()
    expected = ops.decode(queries, k, v, end)
    right = torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    print(f"  decode in a CUDA graph: {'passed' if right else 'FAILED: replay differs from a call'}")
    return not right


def sanitize() -> int:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("  compute-sanitizer is not on PATH: left out")
        return 0
    failures = 0
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for check in ("memcheck", "racecheck", "synccheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, __file__, "--checks-only"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        print(f"  {check}: {'passed' if result.returncode == 0 else 'FAILED'}", flush=True)
        if result.returncode:
            print(result.stdout[-4000:], result.stderr[-4000:])
            failures += 1
    return failures


def alternate(repeats: int, *works: Callable[[], object]) -> list[float]:
    """Median seconds of each work on the GPU; they take turns, and the queue never runs empty between them."""
    for work in works:
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in works]
    for _ in range(repeats):
        for number, work in enumerate(works):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            marks[number].append((begin, end))
    torch.cuda.synchronize()
    return [statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3 for pairs in marks]


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").zero_()
    y = torch.empty_like(x)
    return 2 * x.nbytes / alternate(20, lambda: y.copy_(x))[0]


def product_rate() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / alternate(10, lambda: a @ b)[0]


def decode_rows(repeats: int, bandwidth: float, quick: bool) -> list:
    from benchmarks.common import Row
    from benchmarks.gpu.gpu_ops import pages_of
    from kvcompress import ops

    rows = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for dtype, B, T in itertools.product((torch.bfloat16, torch.float32), (1, 8), (4096, 32768)):
        if quick and (B, T) not in ((1, 4096), (8, 32768)):
            continue
        R = B * HKV
        nbytes = 2 * R * T * D * dtype.itemsize
        copies = max(1, -(-(1 << 30) // nbytes))
        caches = []
        for _ in range(copies):
            k, v = (torch.randn(R, T, D, device="cuda", dtype=dtype) for _ in range(2))
            caches.append((k, v, *pages_of(k, v, PAGE)))
        queries = torch.randn(B, HQ, 1, D, device="cuda", dtype=dtype)
        full = torch.full((R,), T, dtype=torch.int32, device="cuda")
        shares = torch.tensor([1.0, 1 / 2, 1 / 8, 1 / 16, 1 / 16, 1 / 16, 1 / 16, 1 / 8])  # mean 1/4
        ragged = (T * shares).to(torch.int32).repeat(B).cuda()
        turn = itertools.cycle(range(copies))

        def contiguous(caches=caches, queries=queries, end=full, turn=turn):
            return ops.decode(queries, *caches[next(turn)][:2], end)

        def paged(caches=caches, queries=queries, end=full, turn=turn):
            _, _, k_pages, v_pages, table = caches[next(turn)]
            return ops.decode(queries, k_pages, v_pages, end, block_table=table)

        def compressed(paged=paged, ragged=ragged):
            return paged(end=ragged)

        def peer(caches=caches, queries=queries, turn=turn, B=B):
            k, v = (x.unflatten(0, (B, HKV)) for x in caches[next(turn)][:2])
            return sdpa(queries, k, v, enable_gqa=True)

        near = torch.randn_like(queries), torch.randn(B, HQ, 1, device="cuda")
        weights = torch.full((B, HQ, T), 1 / T, device="cuda")
        begin = torch.zeros_like(full)

        def leading(caches=caches, queries=queries, end=full, turn=turn, weights=weights):
            _, _, k_pages, v_pages, table = caches[next(turn)]
            return ops.decode(queries, k_pages, v_pages, end, block_table=table, probabilities=weights)

        def following(caches=caches, near=near, begin=begin, end=full, turn=turn, weights=weights):
            _, _, _, v_pages, table = caches[next(turn)]
            return ops.decode_shared(near, weights, near[1], v_pages, begin, end, block_table=table)

        times = alternate(repeats, contiguous, paged, compressed, peer, leading, following)
        part = int(nbytes * ragged.sum() / full.sum())
        name = f"{str(dtype).removeprefix('torch.')}/T{T}/B{B}"
        for kind, seconds, moved, note in (
            ("decode", times[0], nbytes, "contiguous rows"),
            (f"decode/paged{PAGE}", times[1], nbytes, "ratio 1 through pages"),
            ("decode/ragged4", times[2], part, f"{times[1] / times[2]:.2f}x our own dense time at compression 4"),
        ):
            note = f"{moved / seconds / 1e9:.0f} GB/s; {note}"
            rows.append(
                Row(f"{kind}/{name}", seconds, times[3], "SDPA, dense", moved / seconds / bandwidth, moved, note)
            )
        for kind, seconds, moved in (
            ("decode/probabilities", times[4], nbytes + 12 * B * HQ * T),
            ("decode_shared", times[5], nbytes // 2 + 4 * B * HQ * T),
        ):
            note = f"{moved / seconds / 1e9:.0f} GB/s"
            peer_name = "decode, the same pages"
            rows.append(Row(f"{kind}/{name}", seconds, times[1], peer_name, moved / seconds / bandwidth, moved, note))
    return rows


def score_rows(repeats: int, rate: float) -> list:
    from benchmarks.common import Row
    from kvcompress import ops

    rows = []
    for T in (4096, 32768):
        queries, keys = (torch.randn(1, H, n, D, device="cuda", dtype=torch.bfloat16) for H, n in ((HQ, W), (HKV, T)))
        hidden = torch.ones(W, T, dtype=torch.bool, device="cuda").triu(T - W + 1)

        def peer(queries=queries, keys=keys, hidden=hidden, T=T):
            grouped = queries.reshape(1, HKV, HQ // HKV * W, D)
            logits = (grouped @ keys.mT * D**-0.5).view(1, HKV, HQ // HKV, W, T)
            votes = logits.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32)[..., : T - W]
            return torch.nn.functional.avg_pool1d(votes.mean(dim=(2, 3)), 5, 1, 2)

        times = alternate(repeats, lambda q=queries, k=keys: ops.window_scores(q, k), peer)
        ceiling = 2 * HQ * W * T * D / times[0] / rate
        name = f"score/bfloat16/T{T}/Hq{HQ}/Hkv{HKV}/D{D}/W{W}"
        rows.append(Row(name, *times, "matmul, mask, softmax, mean, avg_pool1d", ceiling, keys.nbytes))
    return rows


def attention_rows(repeats: int, rate: float, quick: bool) -> list:
    from benchmarks.common import Row
    from kvcompress import ops, reference

    rows = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for kind, T, dim in (("causal", 8192, 128), ("causal", 8192, 64), ("window", 8192, 128)):
        T = T // 2 if quick else T
        mask = {"window": 1024, "sinks": 16} if kind == "window" else {}
        q = torch.randn(1, HQ, T, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.randn(1, HKV, T, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        seen = reference.visible(T, T, **mask, device=q.device) if mask else None
        pairs = T * (T + 1) // 2 if seen is None else int(seen.sum())
        grad = torch.randn_like(q)

        def ours(q=q, k=k, v=v, mask=mask):
            return ops.attention(q, k, v, **mask)[0]

        def peer(q=q, k=k, v=v, seen=seen):
            return sdpa(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True)

        def both(forward, grad=grad):
            forward().backward(grad)

        with torch.no_grad():
            forward = alternate(repeats, ours, peer)
        backward = alternate(repeats, lambda ours=ours: both(ours), lambda peer=peer: both(peer))
        for what, times, flops in (("forward", forward, 4), ("forward+backward", backward, 14)):
            done = flops * dim * HQ * pairs
            note = f"{done / times[0] / 1e12:.0f} TFLOP/s; SDPA {done / times[1] / 1e12:.0f}"
            name = f"attention/{kind}/{what}/bfloat16/T{T}/D{dim}/Hkv{HKV}"
            peer_name = "SDPA, causal" if seen is None else "SDPA, boolean mask"
            rows.append(Row(name, *times, peer_name, done / times[0] / rate, None, note))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--checks-only", action="store_true", help="only a few checks, with the extension as it is")
    choice = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"gpu_check: no GPU: torch {torch.__version__} sees no CUDA device. Nothing was built or run.")
        return 2
    if choice.checks_only:
        return int(print_checks(few=True) > 0)
    name = torch.cuda.get_device_name()
    print(f"building for {name}", flush=True)
    build()
    print("checks against kvcompress.reference", flush=True)
    failures = print_checks(few=False) + check_graph()
    print("compute-sanitizer", flush=True)
    failures += sanitize()

    from benchmarks.common import report

    repeats = 11 if choice.quick else 41
    bandwidth, rate = copy_bandwidth(), product_rate()
    rows = decode_rows(repeats, bandwidth, choice.quick)
    rows += score_rows(repeats, rate)
    rows += attention_rows(repeats, rate, choice.quick)
    path = choice.json or RESULTS / f"gpu_{re.sub('[^a-z0-9]+', '_', name.lower())}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report(rows, path, copy_bytes=bandwidth, gemm_flops=rate)
    content = json.loads(path.read_text())
    content["machine"] |= {"gpu": name, "cuda": torch.version.cuda, "failed_checks": failures}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{path}: {len(rows)} rows; {failures} checks failed")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
