"""Checkpoints that cannot half-exist: written aside, flushed to disk, renamed; a marker says what is in them."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors

from ..support.files import naming

MARKER = "checkpoint.json"  # step, run, and files: their sizes in bytes by name
STAGING = "writing"  # in the output folder: what is being written or removed
# how names of files begin
WEIGHTS = ("model", "pytorch_model", "adapter_model", "shard-")
OPTIMIZER, RANDOM = ("optimizer", "scheduler"), ("rng_state",)
_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoints(out: Path) -> list[Path]:
    """The folders of checkpoints in an output folder, by step, whole or not."""
    found = [path for path in out.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def read_marker(folder: Path) -> dict[str, Any]:
    """Raises ValueError, naming the file, where it is missing, not readable, or not what is there."""
    path = folder / MARKER
    if not path.is_file():
        raise ValueError(f"{path} is missing: the checkpoint was cut off, or written by an older version")
    marker = read_json(path, "step", "run", "files")
    for name, size in marker["files"].items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{file} is missing")
        if file.stat().st_size != size:
            raise ValueError(f"{file} must have {size:,} bytes, got {file.stat().st_size:,}")
    return marker


def newest_whole(out: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with each newer one."""
    faults = []
    for folder in reversed(checkpoints(out)):
        try:
            read_marker(folder)
        except ValueError as error:
            faults.append(str(error))
        else:
            return folder, faults
    return None, faults


def need_state(folder: Path, marker: dict[str, Any], *also: str) -> None:
    """Raises FileNotFoundError, naming the file, for a whole checkpoint without all that a run goes on from, ValueError
    for a marker that does not say of how many ranks it is."""
    ranks = marker["run"].get("ranks") if isinstance(marker["run"], dict) else None
    if not isinstance(ranks, int):
        raise ValueError(f"{folder / MARKER} must name the ranks of its run, got {str(marker['run'])[:60]}")
    names = {name.partition("/")[0] for name in marker["files"]}
    for name in ("optimizer.pt", "scheduler.pt", "trainer_state.json", *random_files(ranks), *also):
        if name not in names and not (name == "optimizer.pt" and "optimizer" in names):  # a folder of parts
            raise FileNotFoundError(f"{folder / name} must be there for a run to go on as it was; it was not saved")


def random_files(ranks: int) -> set[str]:
    """The state of random number generators of so many processes."""
    return {"rng_state.pth"} if ranks == 1 else {f"rng_state_{rank}.pth" for rank in range(ranks)}


def read_json(path: Path, *fields: str) -> dict[str, Any]:
    """A file that holds a JSON object with these fields. Raises ValueError, naming it, for anything else."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be JSON, got {type(error).__name__}: {error}") from None
    missing = [name for name in fields if not isinstance(found, dict) or name not in found]
    if missing or not isinstance(found, dict):
        raise ValueError(f"{path} must be a JSON object with {', '.join(fields)}, got {json.dumps(found)[:60]}")
    return found


@contextmanager
def naming_the_file(folder: Path, *stems: str) -> Iterator[None]:
    """What goes wrong in its body comes out as a ValueError that names the file of these stems which cannot be read, or
    the first one where all of them can: that is of something else."""
    try:
        yield
    except Exception as error:
        inside = [x for x in sorted(folder.rglob("*")) if x.is_file()]
        files = [x for stem in stems for x in inside if str(x.relative_to(folder)).startswith(stem)]
        wrong = next((path for path in files if not _readable(path)), files[0] if files else folder)
        raise ValueError(f"{wrong} must be as the run saved it, got {type(error).__name__}: {error}") from error


def _readable(path: Path) -> bool:
    try:
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        elif path.suffix == ".safetensors":
            with safetensors.safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  no dict
                    file.get_tensor(name)
        elif path.suffix in (".pt", ".pth", ".bin"):
            with zipfile.ZipFile(path) as archive:  # as torch.save writes it
                return archive.testzip() is None
        elif path.suffix == ".distcp" or path.name == ".metadata":  # as torch.distributed.checkpoint does
            with path.open("rb") as file:
                return file.read(2)[:1] in (b"P", b"\x80")
    except Exception:  # whatever a broken file makes of its reader
        return False
    return True


def need_space(out: Path, nbytes: int) -> None:
    """Raises OSError if a folder's disk has no room for so many bytes."""
    free = shutil.disk_usage(out).free
    if free < nbytes:
        raise OSError(
            errno.ENOSPC, f"a checkpoint needs {nbytes:,} bytes, and {free:,} are free; nothing was written", str(out)
        )


def begin(out: Path) -> Path:
    """An empty folder beside the checkpoints, for one to be written in."""
    staging = out / STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def seal(staged: Path, out: Path, **facts: Any) -> Path:
    """Makes a written folder a checkpoint of the output folder, at once: everything is on disk, then it has its name.

    facts: of the marker, besides the files. Returns where it is.
    """
    files = {str(path.relative_to(staged)): path.stat().st_size for path in sorted(staged.rglob("*")) if path.is_file()}
    write_whole(staged / MARKER, json.dumps(facts | {"files": files}, indent=1).encode())
    flush(staged)
    final = out / staged.name
    if final.exists():  # cut off, or of a run that went another way
        _remove(final, out)
    staged.rename(final)
    flush_folder(out)
    return final


def rotate(out: Path, keep: int | None, sealed: Path, also: Sequence[str | None] = ()) -> None:
    """Removes all whole checkpoints but `keep` (None: no one is removed), which are the one just sealed and the newest
    others, and those named in also. What is not whole is not counted and stays: it may be another tool's."""
    if keep is not None and keep > 0:
        spared = {Path(path).name for path in also if path is not None}
        whole = [x for x in checkpoints(out) if x.name not in spared and _is_whole(x)]
        whole.sort(key=lambda folder: folder.name == sealed.name)  # the last, though another may be of a later step
        for folder in whole[:-keep]:
            _remove(folder, out)
    shutil.rmtree(out / STAGING, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        read_marker(folder)
    except ValueError:
        return False
    return True


def _remove(folder: Path, out: Path) -> None:
    """Takes its name away first."""
    gone = out / STAGING / "gone"
    shutil.rmtree(gone, ignore_errors=True)
    gone.parent.mkdir(exist_ok=True)
    folder.rename(gone)
    shutil.rmtree(gone)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is there with all of it or as it was."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        with naming(path, fresh):
            with fresh.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    flush_folder(path.parent)


def flush(folder: Path) -> None:
    """Brings everything in a folder to disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            flush_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """Brings the names in a folder to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
