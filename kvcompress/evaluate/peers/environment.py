"""A Python that has kvpress: one that the user names, or one of its own, made once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...support.files import user_cache

KVPRESS = "0.5.5"
REQUIREMENTS = (f"torch=={torch.__version__.partition('+')[0]}", f"kvpress=={KVPRESS}", "transformers<5.3")
PROGRAM = Path(__file__).parent / "kvpress_program.py"


@dataclass(frozen=True)
class Peer:
    """python: the program. presses: names of those that are measured; not_run: of others, with the reason."""

    python: Path
    versions: dict[str, str]
    presses: tuple[str, ...]
    not_run: dict[str, str]

    def __str__(self) -> str:
        return f"kvpress {self.versions['kvpress']} with transformers {self.versions['transformers']}"


def peer_of(python: Path | None, told: Callable[[str], object]) -> Peer:
    """python: None = the environment of its own. told: what takes long, for who waits. Raises ValueError for a Python
    that has no kvpress as it is needed, or where there is no way to get one."""
    if python is not None:
        return _asked(python, "peers_python")
    own = _own_python(told)
    try:
        return _asked(own, "peers")
    except ValueError as error:
        raise ValueError(f"{error}; remove {own.parents[1]}, and it is made again") from None


def _own_python(told: Callable[[str], object]) -> Path:
    folder = user_cache()
    made = folder / f"kvpress-{KVPRESS}-{REQUIREMENTS[0].replace('==', '-')}"
    within = Path("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if made.exists():
        return made / within
    told(f"making an environment with kvpress {KVPRESS}, once, in {made}: minutes, and a GB or more")
    making = folder / f".{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        venv.create(making, with_pip=True)
        for requirements in (REQUIREMENTS[:1], REQUIREMENTS):
            told(f"installing {', '.join(requirements)}")
            _install(making / within, requirements)
        if not made.exists():  # or another process was faster
            making.rename(made)  # of its files only scripts know its name, and none of them is run
    except (subprocess.CalledProcessError, OSError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise ValueError(
            f"peers needs an environment with {', '.join(REQUIREMENTS)}, which could not be made; "
            f"--peers-python takes one that is there: {said[-1] if said else error}"
        ) from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
    told("the environment is there")
    return made / within


def _install(python: Path, requirements: tuple[str, ...]) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True, stderr=subprocess.PIPE,
                   text=True)  # fmt: skip


def _asked(python: Path, argument: str) -> Peer:
    """What kvpress_program.py says of itself there."""
    try:
        done = subprocess.run([python, PROGRAM], capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"{argument} must be a Python that has kvpress, got {python}: {error}") from None
    try:
        said = json.loads(done.stdout)
        return Peer(python.absolute(), dict(said["versions"]), tuple(said["presses"]), dict(said["not_run"]))
    except (ValueError, KeyError, TypeError):
        reason = last_line(done.stderr) or last_line(done.stdout) or f"status {done.returncode}"
        raise ValueError(
            f"{argument} must be a Python that has {' and '.join(REQUIREMENTS[1:])}, got {python}: {reason}"
        ) from None


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
