"""Everything that needs a GPU, in one command: build, the tests of every op, sanitizer, benchmarks.

    python benchmarks/gpu/gpu_check.py [--quick] [--json FILE]

1. builds the extension in place with KVC_CUDA=1; 2. runs the tests that have a GPU to run on (pytest -m gpu, with
two devices if they are there), each file in a process of its own, and what failed once more alone: after an illegal
access nothing else runs in that process; 3. runs some of them under compute-sanitizer (memcheck, racecheck,
synccheck) if it is on PATH; 4. times decode, decode_shared, scores and attention, in processes of their own: medians
of CUDA events, ours and the peer in turns behind a queue that is never empty, buffers that rotate through at least
1 GiB. Ceilings are measured in the same run: copy bandwidth (read + write) and the rate of a large bfloat16 product.
Writes benchmarks/results/gpu_<name of the GPU>.json, anew after every step. Exit status: 0 all well, 1 a failure,
2 no GPU.
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
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
HQ, HKV, D, PAGE, W = 32, 8, 128, 64, 64
RESULTS = Path(__file__).parent / "results"
FIXTURES = ("backend", "cuda", "gpu", "hardware")
SANITIZED = "as_the_reference"  # tests with this in their name run under compute-sanitizer
MOST_ALONE = 20  # failed tests of a file that are run once more alone


def build() -> None:
    environment = os.environ | {"KVC_CUDA": "1"}
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, env=environment, check=True)


def run(command: list[str], timeout: float, **environment: str) -> tuple[int, str]:
    """Exit status (-9 after the time limit) and what was printed."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
        return -9, (printed if isinstance(printed, str) else printed.decode(errors="replace")) + "\ntoo late"
    return done.returncode, done.stdout


def pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", *arguments]


def files_with_tests(name: str = "") -> list[str]:
    """Files with a test that has a GPU to run on, by the fixtures of tests/conftest.py. name: that its name holds."""
    pattern = re.compile(rf"^def test_\w*{name}\w*\([^)]*\b(?:{'|'.join(FIXTURES)})\b", re.MULTILINE)
    files = sorted(ROOT.glob("tests/test_*.py"))
    return [file.relative_to(ROOT).as_posix() for file in files if pattern.search(file.read_text())]


def failed_tests(printed: str) -> list[str]:
    """Names in the summary of pytest -rfE."""
    return re.findall(r"^(?:FAILED|ERROR) (\S+?::[^[\s]+(?:\[.*?\])?)(?= - |$)", printed, flags=re.MULTILINE)


def check_file(name: str, *, marker: str = "gpu", timeout: float = 1800) -> dict:
    """What came of the tests of a file. failed: alone too; failed_after_others: not alone."""
    status, printed = run(pytest("-m", marker, name), timeout)
    found: dict = {"name": name, "status": status, "summary": printed.strip().rpartition("\n")[2]}
    if status in (0, 5):
        return found
    failed = failed_tests(printed)
    alone = {test: run(pytest(test), 600) for test in failed[:MOST_ALONE]}
    found["failed"] = {test: text[-4000:] for test, (code, text) in alone.items() if code}
    found["failed_after_others"] = [test for test, (code, _) in alone.items() if not code]
    found["not_run_alone"] = failed[MOST_ALONE:]
    if not failed:  # the process died
        found["output"] = printed[-4000:]
    return found


def sanitize() -> Iterator[dict]:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("  compute-sanitizer is not on PATH: left out")
        return
    files = files_with_tests(SANITIZED)
    for check, name in itertools.product(("memcheck", "racecheck", "synccheck"), files):
        command = [tool, "--tool", check, "--error-exitcode", "9", *pytest("-m", "gpu", "-k", SANITIZED, name)]
        status, printed = run(command, 3600, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        found = {"name": f"{check}/{name}", "status": status, "summary": printed.strip().rpartition("\n")[2]}
        yield found if status == 0 else found | {"output": printed[-4000:]}


def alternate(repeats: int, *works: Callable[[], object]) -> list[float]:
    """Median seconds of each work on the GPU; they take turns.

    A large product goes first in every round: while it runs the host enqueues all of the round, so that no work,
    however short, waits for the host.
    """
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for work in works:
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in works]
    for _ in range(repeats):
        a @ b
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


def pages_of(k: torch.Tensor, v: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [R, T, D], T a multiple of page, as pages in random order and their table."""
    R, T, dim = k.shape
    order = torch.randperm(R * T // page, device=k.device)
    k_pages, v_pages = (torch.empty(R * T // page, page, dim, dtype=k.dtype, device=k.device) for _ in range(2))
    k_pages[order], v_pages[order] = k.reshape(-1, page, dim), v.reshape(-1, page, dim)
    return k_pages, v_pages, order.to(torch.int32).reshape(R, T // page)


def decode_rows(repeats: int, quick: bool) -> Iterator:
    from benchmarks.common import Row
    from kvcompress import ops

    bandwidth = copy_bandwidth()
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
            yield Row(f"{kind}/{name}", seconds, times[3], "SDPA, dense", moved / seconds / bandwidth, moved, note)
        for kind, seconds, moved in (
            ("decode/probabilities", times[4], nbytes + 12 * B * HQ * T),
            ("decode_shared", times[5], nbytes // 2 + 4 * B * HQ * T),
        ):
            note = f"{moved / seconds / 1e9:.0f} GB/s"
            peer_name = "decode, the same pages"
            yield Row(f"{kind}/{name}", seconds, times[1], peer_name, moved / seconds / bandwidth, moved, note)


def score_rows(repeats: int, quick: bool) -> Iterator:
    from benchmarks.common import Row
    from kvcompress import ops

    rate = product_rate()
    for T in (4096,) if quick else (4096, 32768):
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
        yield Row(name, *times, "matmul, mask, softmax, mean, avg_pool1d", ceiling, keys.nbytes)


def attention_rows(repeats: int, quick: bool) -> Iterator:
    from benchmarks.common import Row, visible
    from kvcompress import ops

    rate = product_rate()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for kind, T, dim in (("causal", 8192, 128), ("causal", 8192, 64), ("window", 8192, 128)):
        T = T // 2 if quick else T
        mask = {"window": 1024, "sinks": 16} if kind == "window" else {}
        q = torch.randn(1, HQ, T, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.randn(1, HKV, T, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        seen = visible(T, **mask, device=q.device) if mask else None
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
            yield Row(name, *times, peer_name, done / times[0] / rate, None, note)


PARTS = {"decode": decode_rows, "score": score_rows, "attention": attention_rows}


def measure(part: str, path: Path, quick: bool) -> None:
    """Writes the rows of a part to the file, one more each time."""
    rows = []
    for row in PARTS[part](11 if quick else 41, quick):
        rows.append(asdict(row))
        path.write_text(json.dumps(rows))


def measured(part: str, quick: bool) -> tuple[list[dict], dict | None]:
    """Rows of a part, measured in a process of its own, as far as it came; and what failed, if something did."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--part", part, "--json", str(path), *(["--quick"] if quick else [])]
        status, printed = run(command, 3600)
        rows = json.loads(path.read_text()) if path.exists() else []
    return rows, {"name": f"time/{part}", "status": status, "output": printed[-4000:]} if status else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--part", choices=PARTS, help="only measure this, with the extension as it is; needs --json")
    choice = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"gpu_check: no GPU: torch {torch.__version__} sees no CUDA device. Nothing was built or run.")
        return 2
    sys.path.insert(0, str(ROOT))
    if choice.part:
        measure(choice.part, choice.json, choice.quick)
        return 0
    from benchmarks.common import write_json

    name = torch.cuda.get_device_name()
    path = choice.json or RESULTS / f"gpu_{re.sub('[^a-z0-9]+', '_', name.lower())}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"building for {name}", flush=True)
    build()
    checks: list[dict] = []
    rows: list[dict] = []

    def keep(found: dict | None = None) -> None:
        if found is not None:
            checks.append(found)
            well = found["status"] in (0, 5)
            print(f"  {found['name']}: {'passed' if well else 'FAILED'} {found.get('summary', '')}", flush=True)
        write_json(path, rows, gpu=name, cuda=torch.version.cuda, checks=checks)

    print("tests that run on the GPU", flush=True)
    for file in files_with_tests():
        keep(check_file(file))
    print("compute-sanitizer", flush=True)
    for found in sanitize():
        keep(found)
    print("measuring", flush=True)
    for part in PARTS:
        more, failure = measured(part, choice.quick)
        rows += more
        keep(failure)
    failures = [found["name"] for found in checks if found["status"] not in (0, 5)]
    print(f"{path}: {len(rows)} rows; failed: {', '.join(failures) or 'nothing'}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
