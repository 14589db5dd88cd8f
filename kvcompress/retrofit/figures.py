"""Figures of a run: means over passes and ranks, and the file that they go to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..support.files import naming
from .checkpoints import write_whole
from .ranks import summed

METRICS = "metrics.jsonl"


class Figures:
    """Figures of forward passes, as sums that stay on their device until they are asked for.

    newest: names of those that are as they are in the last pass; of others means are taken.
    """

    def __init__(self, newest: tuple[str, ...]) -> None:
        self.newest = newest
        self._sums: dict[str, tuple[Tensor, int]] = {}
        self._last: dict[str, Any] = {}

    def note(self, figures: dict[str, Any]) -> None:
        """Of a pass: numbers, tensors, and lists of numbers in which None stands for one that is not there."""
        for name, value in figures.items():
            if name in self.newest:
                self._last[name] = value
                continue
            if isinstance(value, list):
                value = [math.nan if x is None else x for x in value]
            value = torch.as_tensor(value).detach().double()
            total, passes = self._sums.get(name, (0.0, 0))
            self._sums[name] = value + total, passes + 1

    @property
    def noted(self) -> bool:
        return bool(self._sums or self._last)

    def take(self, device: torch.device) -> dict[str, Any]:
        """Means over the passes that have a figure, on all ranks, and begins anew; collective. Every rank gets them."""
        names = sorted(self._sums)
        sums, passes = [self._sums[name][0] for name in names], [self._sums[name][1] for name in names]
        found = dict(self._last)
        if names:
            flat = torch.cat([*(x.flatten().to(device) for x in sums), torch.tensor(passes, device=device).double()])
            flat = summed(flat).cpu()
            parts, counts = flat[: -len(names)].split([x.numel() for x in sums]), flat[-len(names) :]
            for name, part, shape, count in zip(names, parts, [x.shape for x in sums], counts, strict=True):
                found[name] = _listed((part / count).reshape(shape).tolist())
        self._sums, self._last = {}, {}
        return found


def _listed(value: Any) -> Any:
    """None for what is not there."""
    if isinstance(value, list):
        return [_listed(x) for x in value]
    return None if math.isnan(value) else value


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return round(value, 5) if isinstance(value, float) else value


class MetricsFile(TrainerCallback):
    """One JSON line in output_dir/metrics.jsonl each time figures are logged; a resumed run goes on where it stood.

    Raises ValueError where a run is resumed and a line of the file is none of these; the file stays as it is.
    """

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        path = Path(args.output_dir or ".", METRICS)
        if not state.is_world_process_zero:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_bytes().split(b"\n") if path.is_file() and state.global_step else []
        steps = [(_step_of(path, number, line), line) for number, line in enumerate(lines, 1) if line.strip()]
        write_whole(path, b"".join(line + b"\n" for step, line in steps if step <= state.global_step))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            line = {"step": state.global_step} | kwargs.get("logs", {}) | self.latest
            path = Path(args.output_dir or ".", METRICS)
            with naming(path), path.open("ab", buffering=0) as file:
                end, left = file.tell(), json.dumps(line).encode() + b"\n"
                try:
                    while left:
                        left = left[file.write(left) :]
                except OSError:
                    file.truncate(end)  # no half line, which nobody could go on from
                    raise


def _step_of(path: Path, number: int, line: bytes) -> int:
    """The step that a line of metrics is of."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, IndexError):  # no JSON, or of something else
        step = None
    if isinstance(step, bool) or not isinstance(step, int):
        shown = line[:60].decode(errors="replace")
        raise ValueError(
            f"{path}, line {number}, must be a JSON object with a step, got {shown!r}: a run that was stopped may have "
            "left it half written. Remove or mend that line and resume again; nothing was changed"
        )
    return step
