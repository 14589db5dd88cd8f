"""Clients that mean no good, at vLLM's server with the plugin: whether it goes on, and has all its pages at the end.

    .venv-vllm/bin/python benchmarks/serving/hostile.py [--minutes 60] [--cache CACHE] [--quick] [--json FILE]

`kvcompress serve` of the shipped model, over memory for little more than one request of the longest length. Clients at
once, each of which draws what it does: asks as one should (equal: share of answers that are the first to the prompt),
leaves a stream after some pieces, reads one slowly, asks for many answers at once, posts what is no JSON, wrong types,
lengths that are not allowed, and bodies of 200 MB. Then, with nobody else there, a prompt that needs nearly all pages
must be answered. Rows: hostile/server (alive, status: of its end by SIGINT, usage: vLLM's share of blocks in use at the
end, whole: whether that prompt was answered, nbytes: resident memory of its processes after the first minute and at the
end), hostile/answers (asked, equal, failed), hostile/KIND (requests, statuses: how many of each; 0 = the
connection was closed). Exits with 1 where one of these is not as it must be.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.common import parse_arguments, parser, print_table, write_json
from kvcompress.models.text import held_out_text

ROOT = Path(__file__).resolve().parents[2]
LONGEST, NEW, BODY = 1024, 48, 200 << 20
MINUTES = {"full": 60.0, "quick": 1.0, "tiny": 0.2}
KINDS = {"asked": 10, "left": 5, "slow": 2, "many": 2, "no JSON": 2, "wrong": 4, "too long": 2, "huge": 0.05}  # weights
WRONG: list[dict[str, Any]] = [
    {"prompt": {"a": 1}}, {"prompt": None}, {"max_tokens": "many"}, {"max_tokens": -1}, {"temperature": "hot"},
    {"n": 0}, {"n": 1 << 40}, {"stop": [[]]}, {"logprobs": 10**6}, {"model": "another"}, {"prompt": []},
    {"prompt": [1 << 40]}, {"top_p": 7}, {"stream": "yes"},
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def processes(pid: int) -> list[int]:
    """A process and those below it."""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *(x for child in children for x in processes(int(child)))]
    return []


def resident(pid: int) -> int:
    found = 0
    for one in processes(pid):
        with suppress(OSError):
            found += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return found


class Clients:
    """What they do, and what came of it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.statuses: dict[str, Counter[int]] = {kind: Counter() for kind in KINDS}
        self.first: dict[str, str] = {}
        self.asked = self.equal = 0
        self.failed: list[str] = []
        self.lock = threading.Lock()
        text = bytes(held_out_text()).decode("ascii", "replace")
        draw = random.Random(0)
        starts = [draw.randrange(len(text) - LONGEST) for _ in range(40)]
        self.prompts = [text[start : start + draw.randint(20, LONGEST - NEW)] for start in starts]

    def post(self, content: bytes, reads: int | None = None, pause: float = 0.0) -> tuple[int, bytes]:
        """(status, answer) of a completion. reads: so many pieces are read before the client leaves; None = all. pause:
        seconds between them."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
            if reads == 0:
                return 0, b""
            answer = connection.getresponse()
            read = b""
            while (reads is None or reads > 0) and (piece := answer.read1(4096)):
                read += piece
                reads = None if reads is None else reads - 1
                time.sleep(pause)
            return answer.status, read
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def run(self, seed: int, until: float) -> None:
        draw = random.Random(seed)
        while time.monotonic() < until:
            kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
            try:
                status = self.do(kind, draw)
            except Exception as error:  # the client's own fault
                self.failed.append(f"{kind}: {error!r}")
                return
            with self.lock:
                self.statuses[kind][status] += 1

    def do(self, kind: str, draw: random.Random) -> int:
        prompt = draw.choice(self.prompts)
        body: dict[str, Any] = {"model": "example", "prompt": prompt, "max_tokens": NEW, "temperature": 0}
        if kind == "asked":
            status, read = self.post(json.dumps(body).encode())
            self.note(prompt, status, read)
            return status
        if kind == "left":
            return self.post(json.dumps(body | {"stream": True}).encode(), draw.randrange(6))[0]
        if kind == "slow":
            return self.post(json.dumps(body | {"stream": True}).encode(), pause=0.2)[0]
        if kind == "many":
            sampled = {"n": 6, "temperature": 1.0, "seed": draw.randrange(9), "max_tokens": 8}
            return self.post(json.dumps(body | sampled).encode())[0]
        if kind == "no JSON":
            return self.post(draw.choice([b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"prompt": NaN', b"null"]))[0]
        if kind == "wrong":
            return self.post(json.dumps(body | draw.choice(WRONG)).encode())[0]
        if kind == "too long":
            return self.post(json.dumps(body | {"prompt": prompt * (2 * LONGEST // len(prompt) + 1)}).encode())[0]
        return self.post(json.dumps(body | {"prompt": "x" * BODY}).encode())[0]

    def note(self, prompt: str, status: int, read: bytes) -> None:
        with self.lock:
            self.asked += 1
            if status != 200:
                self.failed.append(f"status {status}: {read[:200]!r}")
                return
            text = json.loads(read)["choices"][0]["text"]
            self.equal += text == self.first.setdefault(prompt, text)

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()


def usage(clients: Clients) -> float:
    """Share of vLLM's blocks in use."""
    found = re.search(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", clients.get("/metrics"), re.MULTILINE)
    if found is None:
        raise RuntimeError("/metrics must have vllm:kv_cache_usage_perc")
    return float(found[1])


def wait(true: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError, http.client.HTTPException):
            if true():
                return True
        time.sleep(0.5)
    return False


def attacked(cache: str, memory: str, minutes: float, log: Path) -> list[dict[str, Any]]:
    """Rows."""
    clients = Clients(free_port())
    command = [
        sys.executable, "-m", "kvcompress", "serve", "--cache", cache, "--memory", memory, "--port", str(clients.port),
        "--max-model-len", str(LONGEST), "--enforce-eager", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("w") as out, subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out) as server:
        try:
            if not wait(lambda: server.poll() is not None or clients.get("/health") == "", 300) or server.poll():
                sys.exit(log.read_text()[-4000:])
            until = time.monotonic() + 60 * minutes
            threads = [threading.Thread(target=clients.run, args=(seed, until)) for seed in range(8)]
            for thread in threads:
                thread.start()
            time.sleep(min(60.0, 30 * minutes))
            before = resident(server.pid)
            for thread in threads:
                thread.join()
            idle = wait(lambda: usage(clients) == 0, 120)
            body = {"model": "example", "prompt": "a" * (LONGEST - NEW), "max_tokens": NEW, "temperature": 0}
            whole, _ = clients.post(json.dumps(body).encode())
            alive = server.poll() is None
            row = {
                "name": "hostile/server",
                "alive": alive,
                "whole": whole == 200,
                "nbytes": [before, resident(server.pid)],
            }
            row["usage"] = 0.0 if idle and wait(lambda: usage(clients) == 0, 60) else usage(clients)
            server.send_signal(signal.SIGINT)
            row["status"] = server.wait(120)
        finally:
            server.kill()
    share = clients.equal / max(clients.asked, 1)
    rows = [row, {"name": "hostile/answers", "asked": clients.asked, "equal": share, "failed": clients.failed[:5]}]
    for kind, counts in clients.statuses.items():
        by_status = {str(status): count for status, count in sorted(counts.items())}
        rows.append({"name": f"hostile/{kind}", "requests": counts.total(), "statuses": by_status})
    return rows


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--minutes", type=float, help="60 by default")
    parse.add_argument(
        "--cache", default="pruned,pruner=snapkv,window=16,keep=256,every=16", help="as of kvcompress serve"
    )
    parse.add_argument("--memory", default="10MiB", help="as of kvcompress serve")
    choice = parse_arguments(parse)
    minutes = MINUTES[choice.size] if choice.minutes is None else choice.minutes
    with tempfile.TemporaryDirectory() as folder:
        rows = attacked(choice.cache, choice.memory, minutes, Path(folder) / "log")
    for row in rows:
        row |= {"cache": choice.cache, "memory": choice.memory, "minutes": minutes}
    if choice.json is not None:
        write_json(choice.json, rows)
    hidden = ("name", "cache", "memory", "minutes")
    lines = [[row["name"], ", ".join(f"{k} {v}" for k, v in row.items() if k not in hidden)] for row in rows]
    print_table("hostile", ("row", "what came of it"), lines)
    server, answers = rows[:2]
    good = server["alive"] and server["whole"] and server["usage"] == 0 and server["status"] == 0
    if not good or answers["failed"]:
        sys.exit("pages were not given back, an answer is missing, or the server has ended: see the rows")


if __name__ == "__main__":
    main()
