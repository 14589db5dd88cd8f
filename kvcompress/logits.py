"""What `prefill` can do with the logits of a prompt, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["AllLogits", "TokenLoss"]

# (sequence, start, logits [n, vocabulary], targets int64 [n], or [n - 1] where nobody knows what follows the last)
LogitsSink = Callable[[int, int, Tensor, Tensor], None]


def scaled(config: Any, logits: Tensor) -> Tensor:
    """What a model makes of the numbers of its output layer. config: of its decoder."""
    logits = logits * (getattr(config, "logit_scale", None) or 1.0)  # Cohere
    logits = logits * (getattr(config, "lm_head_multiplier", None) or 1.0)  # Falcon H1
    logits = logits / (getattr(config, "logits_scaling", None) or 1.0)  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return logits if cap is None else cap * torch.tanh(logits / cap)


class TokenLoss:
    """Per-token loss of a prompt: prefill(..., logits=loss), then loss.nll(b).

    Every token but a sequence's first is predicted, a chunk's first one from the last row of the chunk before it. Keeps
    4 bytes per token, on the CPU.
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[Tensor]] = {}

    def __call__(self, sequence: int, start: int, logits: Tensor, targets: Tensor) -> None:
        loss = torch.nn.functional.cross_entropy(logits[: len(targets)].float(), targets, reduction="none")
        self._parts.setdefault(sequence, []).append(loss.cpu())

    def nll(self, sequence: int = 0) -> Tensor:
        """float32 [T - 1]: negative log-likelihood in nats of tokens 1, 2, ... of what was read."""
        return torch.cat(self._parts.get(sequence, [torch.empty(0, device="cpu")]))


class AllLogits:
    """All logits of a prompt on the CPU: prefill(..., logits=kept), then kept.logits(b). [T, vocabulary] is large."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Tensor]] = {}

    def __call__(self, sequence: int, start: int, logits: Tensor, targets: Tensor) -> None:
        self._parts.setdefault(sequence, []).append(logits.cpu())

    def logits(self, sequence: int = 0) -> Tensor:
        """[T, vocabulary] in the model's dtype: row t is the prediction after token t of what was read."""
        if sequence not in self._parts:
            raise ValueError(f"sequence must be one that was read ({sorted(self._parts)}), got {sequence}")
        return torch.cat(self._parts[sequence])
