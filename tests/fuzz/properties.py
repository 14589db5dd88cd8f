"""The tests that hypothesis feeds, fed with random bytes instead: many more cases than they try themselves. Those that
take a fixture or come in variants are left to pytest."""

from __future__ import annotations

import functools
import importlib
import inspect
import random
from collections.abc import Callable
from pathlib import Path

UNITS = "cases"
CASES = 5  # in a round
MOST_BYTES = 2000


@functools.cache
def properties() -> dict[str, Callable[[bytes], bytes | None]]:
    """By name: hypothesis's own entry for fuzzers, of every such test."""
    found = {}
    for path in sorted(Path(__file__).parents[1].glob("test_*.py")):
        text = path.read_text()
        if "@given" not in text or "vllm" in path.name:
            continue
        for name, test in inspect.getmembers(importlib.import_module(path.stem), inspect.isfunction):
            handle = getattr(test, "hypothesis", None)
            if handle is not None and not inspect.signature(test).parameters and test.__module__ == path.stem:
                found[f"{path.stem}.{name}"] = handle.fuzz_one_input
    return found


def one_round(chance: random.Random) -> int:
    for _ in range(CASES):
        name = chance.choice(sorted(properties()))
        try:
            properties()[name](chance.randbytes(chance.randint(50, MOST_BYTES)))
        except BaseException as error:
            raise AssertionError(f"{name}: {error}") from error
    return CASES
