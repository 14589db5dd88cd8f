"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """UTF-8, under a temporary name in the same folder, then renamed. Returns the path."""
    path = Path(path)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
