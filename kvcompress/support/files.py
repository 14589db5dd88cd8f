"""Files that are written whole or not at all, and JSON that is what it says."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from .checks import need

_STREAM = re.compile(r"inline_container|PytorchStreamWriter|iostream")  # of the message


@contextmanager
def naming(path: str | os.PathLike[str], written: Path | None = None) -> Iterator[None]:
    """What a full disk makes of its body is an OSError that names the file, or the folder of files. written: under
    which name, where that is another one."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # it has words alone
            raise OSError(f"{path} could not be written: {error}") from error
        if error.filename is None or (written is not None and error.filename == str(written)):
            error.filename = str(path)
        raise
    except (SafetensorError, RuntimeError) as error:  # as safetensors and torch.save tell of it
        if isinstance(error, RuntimeError) and not _STREAM.search(str(error)):
            raise
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, f"could not be written, {error}", str(path)) from error


def user_cache() -> Path:
    """The folder for what is made once for a user: kvcompress in $XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcompress"


@contextmanager
def staged(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary name in the same folder, renamed to path at the end; gone after an error, which names the path where
    it is the disk's. Whoever writes it, its mode is that of a new file here (the process's umask)."""
    path = Path(path)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with naming(path, temporary):
            temporary.touch()
            mode = stat.S_IMODE(temporary.stat().st_mode)
            yield temporary
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.chmod(mode)  # safetensors writes files that only their owner reads
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """UTF-8, under a temporary name in the same folder, then renamed. Returns the path."""
    with staged(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def read_json(path: str | os.PathLike[str], what: str, form: str) -> dict[str, Any]:
    """The fields of a file of this format, but for the format itself. what: it is, for messages.

    Raises FileNotFoundError for no file, ValueError for no JSON object of the format.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{what} must be a file, got {path}")
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} must be a {what} in JSON: {error}") from None
    need(isinstance(saved, dict), f"{path.name} must be a {what}, got a JSON {type(saved).__name__}")
    kind = saved.pop("format", None)
    need(kind == form, f"format of {path.name} must be {form!r}, got {kind!r}")
    return dict(saved)


def read_fields(path: str | os.PathLike[str], what: str, form: str, made: type) -> dict[str, Any]:
    """What read_json gives of a file that holds the fields of a dataclass, all of them and no others."""
    saved, known = read_json(path, what, form), {field.name for field in fields(made)}
    need(set(saved) == known, f"{Path(path).name} must have the fields {', '.join(sorted(known))}, got {sorted(saved)}")
    return saved
