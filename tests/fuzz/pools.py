"""Pools of pages and their forks in several threads, against lists (tests/test_pool_threads.py)."""

from __future__ import annotations

import random

from test_pool_threads import THREADS, eager_switching, forks_in_threads

UNITS = "forks"


def one_round(chance: random.Random) -> int:
    with eager_switching():
        return forks_in_threads(chance.randrange(1 << 30)) * THREADS
