"""Text that every machine with Python has: the standard library's source, split into training and held-out files.

Also the two sentences of the recall task: a fact (a five-digit pass key of a name) and the question for it.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

# Never trained on; used by evaluation and by the demo only.
HELD_OUT = (
    "argparse.py",
    "tarfile.py",
    "statistics.py",
    "pickle.py",
    "configparser.py",
    "difflib.py",
    "mailbox.py",
    "calendar.py",
    "heapq.py",
    "textwrap.py",
    "http/cookiejar.py",
    "asyncio/base_events.py",
)
_SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}
_WORDS = b"red blue green gold iron salt rain lake moon star fern wolf bear rose sand fire".split()


def _root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_text() -> bytes:
    """The held-out files in their fixed order, each followed by a zero byte; missing ones are left out."""
    paths = [_root() / name for name in HELD_OUT]
    return b"".join(path.read_bytes() + b"\0" for path in paths if path.is_file())


def _training_files() -> Iterator[Path]:
    root = _root()
    held_out = {root / name for name in HELD_OUT}
    for path in sorted(root.rglob("*.py")):
        if path not in held_out and not _SKIPPED_FOLDERS & set(path.relative_to(root).parts):
            yield path


def training_text(rng: np.random.Generator) -> bytes:
    """All other files of the standard library (tests left out) in random order, each followed by a zero byte."""
    paths = list(_training_files())
    order = rng.permutation(len(paths))
    return b"".join(paths[i].read_bytes() + b"\0" for i in order)


def long_text(nbytes: int) -> bytes:
    """nbytes of source: held-out files first, then the others, then all again for as long as it takes."""
    parts, size = [held_out_text()], 0
    size = len(parts[0])
    while size < nbytes:
        for path in _training_files():
            parts.append(path.read_bytes() + b"\0")
            size += len(parts[-1])
            if size >= nbytes:
                break
        else:
            parts.append(parts[0])
            size += len(parts[0])
    return b"".join(parts)[:nbytes]


def random_name(rng: np.random.Generator) -> bytes:
    """One of 256 names such as b"iron-lake"."""
    first, second = rng.integers(len(_WORDS), size=2)
    return _WORDS[first] + b"-" + _WORDS[second]


def random_pass_key(rng: np.random.Generator) -> bytes:
    """Five decimal digits."""
    return b"%05d" % rng.integers(100_000)


def fact(name: bytes, pass_key: bytes) -> bytes:
    """The sentence that states a fact."""
    return question(name) + pass_key + b".\n"


def question(name: bytes) -> bytes:
    """The same sentence up to its answer: what follows it is the pass key."""
    return b"\n# The pass key of " + name + b" is "


def plant(text: bytes, sentence: bytes, depth: float) -> bytes:
    """text with sentence put in at a depth between 0 (start) and 1 (end); the result is longer by the sentence."""
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth must be between 0 and 1, got {depth}")
    cut = int(len(text) * depth)
    return text[:cut] + sentence + text[cut:]
