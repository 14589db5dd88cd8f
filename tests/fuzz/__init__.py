"""Fuzzers: what makes one random round from a seed, and raises where a result is wrong. tools/fuzz.py runs them for as
long as one likes, tests/test_fuzz.py a few rounds of each."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from types import ModuleType

import torch

NAMES = ("ops", "votes", "turns", "caches_in_threads", "pools", "properties")


def fuzzer(name: str) -> ModuleType:
    """A file of this folder: one_round(chance) makes its decisions by `chance` and returns how much it has checked, in
    units that the file calls UNITS."""
    return importlib.import_module(f"fuzz.{name}")


def one_round(name: str, seed: int) -> int:
    """The same round for the same seed, but for what threads do in which order."""
    run: Callable[[random.Random], int] = fuzzer(name).one_round
    torch.manual_seed(seed)
    return run(random.Random(f"{name} {seed}"))
