"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staged(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary name in the same folder, renamed to path at the end; gone after an error."""
    path = Path(path)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """UTF-8, under a temporary name in the same folder, then renamed. Returns the path."""
    with staged(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)
