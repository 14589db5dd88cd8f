"""What a run says to who sits there: lines as it goes, and what came of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

# of what is logged, in this order; metrics.jsonl has all of it
_LOGGED = {
    "loss": "loss", "lm_loss": "of the language model", "distillation_loss": "distillation",
    "ratio_hard": "tokens per entry", "gate": "gate", "learning_rate": "learning rate",
    "eval_loss": "held-out loss", "eval_bits_per_byte": "bits per byte", "eval_ratio_hard": "tokens per entry",
}  # fmt: skip
NAMES = {  # of an evaluation's figures
    "loss": "loss, nats per token",
    "bits_per_byte": "bits per byte",
    "ratio_hard": "tokens per cache entry",
    "ratio_soft": "tokens per cache entry, relaxed",
    "gate": "mean gate of near tokens",
}


class ProgressLines(ProgressCallback):
    """The Trainer's bar, with a line of words and figures where it would print what is logged as a dict."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        line = logged_in_words(state.global_step, logs or {})
        if state.is_world_process_zero and line:
            if self.training_bar is None:
                print(line, file=sys.stderr)
            else:
                self.training_bar.write(line, file=sys.stderr)


def logged_in_words(step: int, logs: dict[str, Any]) -> str:
    """One line; empty for what says nothing of the model, such as the Trainer's own last one."""
    found = [f"{words} {logs[name]:.4g}" for name, words in _LOGGED.items() if isinstance(logs.get(name), (int, float))]
    return f"step {step:,}: {', '.join(found)}" if found else ""


def use_lines(trainer: Any) -> None:
    """Gives a Trainer ProgressLines in place of what it prints itself."""
    own: list[TrainerCallback] = [
        x for x in trainer.callback_handler.callbacks if isinstance(x, (ProgressCallback, PrinterCallback))
    ]
    for callback in own:
        trainer.remove_callback(callback)
        trainer.add_callback(ProgressLines())


def summary(figures: dict[str, Any], out: Path) -> str:
    """What came of a run, in a few lines to print. figures: what run.train returns. out: where the model is."""
    settings, last = figures["settings"], (figures["last"] or [{}])[-1]
    lines = [
        f"Trained on {figures['tokens']:,} tokens in {figures['steps']:,} steps, rows of {settings['length']:,}; "
        f"the model is in {out}"
    ]
    if "loss" in last:
        lines.append(f"  {'loss in training':<24}{last['loss']:.4g} nats per token")
    if figures["validation"]:
        before, after = figures["validation"][0], figures["validation"][-1]
        for name, words in NAMES.items():
            if (value := after.get(f"eval_{name}")) is not None:
                was = before.get(f"eval_{name}")
                said = f"{value:.4g}" if was is None or before is after else f"{was:.4g} before, {value:.4g} now"
                lines.append(f"  {words:<24}{said} (held-out text)")
    elif "ratio_hard" in last:
        lines.append(f"  {NAMES['ratio_hard']:<24}{last['ratio_hard']:.4g}")
    if (ratio := figures["measured_ratio"]) is not None:
        words = f"{ratio:.2f} times less than dense" if ratio >= 1 else f"{1 / ratio:.2f} times what dense takes"
        lines.append(f"  {'cache':<24}{words}, after a text of {settings['length']:,} tokens")
    return "\n".join([*lines, f'Try it: kvcompress generate "a text" --model {out}'])
