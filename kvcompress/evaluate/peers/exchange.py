"""Prompts to kvpress_program.py as a file of tokens, and its answers, line by line."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...models import EXAMPLE, EXAMPLE_NAME
from ...support.files import write_text
from ...support.names import check_name
from .environment import PROGRAM, Peer, last_line

DENSE = "dense"  # as a press: none
_CHECKED = 256  # tokens that tell whether both sides have the same model
_MOST_NATS = 0.02  # of a token, by which both sides may differ where weights are 16 bits wide


class PeerError(RuntimeError):
    """The other side ended, or said what is no answer."""


class Refused(RuntimeError):
    """The other side cannot measure this model."""


def request_of(model: Any, name: str, tasks: list[list[dict[str, Any]]], runs: list[tuple[str, int, float]]
               ) -> dict[str, Any]:  # fmt: skip
    """model: as it is here; name: its name or folder. tasks: samples of each. runs: (press, task, share that stays)."""
    place, first = EXAMPLE if name == EXAMPLE_NAME else Path(check_name("model", name)), tasks[0][0]
    check = [*first["read"], *(first["scored"][0] if "scored" in first else first["asked"][0]["ids"])][:_CHECKED]
    return {
        "model": str(place.absolute()) if place.is_dir() else name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "check": check,
        "tasks": [{"samples": samples} for samples in tasks],
        "runs": [{"press": press, "task": task, "share": share} for press, task, share in runs],
    }


@torch.no_grad()
def nats_of(model: Any, ids: list[int]) -> float:
    """Of a token, in one pass: what the other side must compute as well."""
    read = torch.tensor([ids], device=model.device)
    logits = model(read[:, :-1], use_cache=False).logits[0].float()
    return float(torch.nn.functional.cross_entropy(logits, read[0, 1:]))


def answers(peer: Peer, model: Any, tokenizer: Any, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One for each run, as they come. Raises Refused or PeerError."""
    nats = nats_of(model, request["check"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save_pretrained(folder / "tokenizer")
        write_text(folder / "request.json", json.dumps(request))
        program = shutil.copy(PROGRAM, folder)  # alone, so that it imports nothing of ours by accident
        with (folder / "errors.txt").open("w+", encoding="utf-8") as errors:
            command = [str(peer.python), str(program), name]
            running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder)
            try:
                lines = _lines(running, Path(errors.name))
                first = next(lines)
                if (reason := first.get("refused")) is not None:
                    raise Refused(str(reason).strip().partition("\n")[0])
                theirs = _field(first, "nats")
                if not abs(theirs - nats) <= _MOST_NATS:
                    raise Refused(f"it computes {theirs:.4f} nats for a token where we have {nats:.4f}")
                for _ in request["runs"]:
                    yield next(lines)
            finally:
                running.kill()
                running.wait()
                assert running.stdout is not None
                running.stdout.close()


def _lines(running: subprocess.Popen[str], errors: Path) -> Iterator[dict[str, Any]]:
    assert running.stdout is not None
    for line in running.stdout:
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            raise PeerError(f"kvpress's program wrote what is no answer: {line.strip()[:80]!r}")
        yield said
    status = running.wait()
    reason = last_line(errors.read_text(encoding="utf-8", errors="replace"))
    raise PeerError(f"kvpress's program ended with status {status}" + (f": {reason}" if reason else ""))


def _field(answer: dict[str, Any], name: str) -> float:
    value = answer.get(name)
    if not isinstance(value, (int, float)):
        raise PeerError(f"kvpress's program must say {name}, got {str(answer)[:80]}")
    return float(value)
