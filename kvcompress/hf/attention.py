"""The attention class that an attached model gets: the model family's own, with a way past it for compressed caches."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn

from ..caches import CompressedCache


class CompressedAttention:
    """Mixed in before a family's attention class. With any cache that is not ours the family's own forward runs."""

    # what every supported family has
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    head_dim: int
    layer_idx: int
    scaling: float

    def forward(self, hidden_states: Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if not isinstance(past_key_values, CompressedCache):
            return super().forward(hidden_states, *args, past_key_values=past_key_values, **kwargs)  # type: ignore[misc]
        shape = hidden_states.shape[:-1]
        queries = self._project("q", hidden_states)
        if queries.requires_grad:
            raise RuntimeError(
                "compressed caches do not carry gradients: use torch.no_grad(), or train without a cache"
            )
        keys, values = self._project("k", hidden_states), self._project("v", hidden_states)
        out = past_key_values.layers[self.layer_idx].attend(queries, keys, values, self.scaling)
        return self.o_proj(out.transpose(1, 2).reshape(*shape, -1)), None

    def _project(self, kind: str, hidden_states: Tensor) -> Tensor:
        """[B, H, S, D] before rotation, after the q/k norm where the family has one (Qwen3)."""
        x = getattr(self, f"{kind}_proj")(hidden_states).unflatten(-1, (-1, self.head_dim))
        norm = getattr(self, f"{kind}_norm", None)
        return (norm(x) if norm is not None else x).transpose(1, 2)


@cache
def compressed_class(family: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a family's attention class that attach swaps in."""
    return type(f"Compressed{family.__name__}", (CompressedAttention, family), {"__module__": __name__})


def is_compressed(module: object) -> bool:
    return isinstance(module, CompressedAttention)
