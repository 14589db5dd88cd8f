"""Runs the fuzzers of tests/fuzz in turn until the time is up: python tools/fuzz.py [--minutes 60] [--seed N] [NAME...]

Prints the seed of each round that fails, with the command that replays it, and goes on. Exit status 1 if any did.
--rounds 1 --seed N NAME: one round again, with its traceback.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "cuda_emulation")]

import torch  # noqa: E402  (the path comes first)
from fuzz import NAMES, fuzzer, one_round  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; none = all")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, help="of each fuzzer, instead of minutes")
    parser.add_argument("--seed", type=int, help="of the first round; those after it count on; default: the clock's")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.names) - set(NAMES)):
        parser.error(f"NAME must be one of {', '.join(NAMES)}, got {', '.join(unknown)}")
    names = chosen.names or list(NAMES)
    seed = int(time.time()) if chosen.seed is None else chosen.seed
    torch.set_num_threads(1)
    print(f"fuzz: {', '.join(names)} from seed {seed}", flush=True)
    rounds, checked, failed = Counter[str](), Counter[str](), Counter[str]()
    end = time.monotonic() + 60 * chosen.minutes
    number = seed
    while number < seed + chosen.rounds if chosen.rounds is not None else time.monotonic() < end:
        for name in names:
            rounds[name] += 1
            try:
                checked[name] += one_round(name, number)
            except Exception:
                failed[name] += 1
                traceback.print_exc()
                print(f"replay: python tools/fuzz.py --rounds 1 --seed {number} {name}", flush=True)
        number += 1
    for name in names:
        print(f"{name}: {rounds[name]} rounds, {checked[name]:,} {fuzzer(name).UNITS}, {failed[name]} wrong")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
