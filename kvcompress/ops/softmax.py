"""How a layer makes probabilities of products of queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Softmax(NamedTuple):
    """What the ops take besides tensors. scale: factor of the products. softcap: logits l become
    softcap*tanh(l/softcap) (gemma2); None = as they are. sink_logits: float32 [Hq], a logit of a key without value in
    every head's softmax (gpt_oss); None = no such key."""

    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of attention, decode and window_scores."""
        given: dict[str, Any] = {"scale": self.scale}
        if self.softcap is not None:
            given["softcap"] = self.softcap
        if self.sink_logits is not None:
            given["sink_logits"] = self.sink_logits
        return given

    @property
    def rest(self) -> Softmax:
        """For further segments of keys, whose states are merged: one segment alone counts the sinks."""
        return self if self.sink_logits is None else self._replace(sink_logits=None)

    def capped(self, logits: Tensor) -> Tensor:
        """Logits as the softmax takes them: scaled products, through softcap."""
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def of_heads(self, heads: slice | list[int]) -> Softmax:
        """That of some query heads."""
        return self if self.sink_logits is None else self._replace(sink_logits=self.sink_logits[heads])
