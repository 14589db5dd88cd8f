"""The attention class that an attached model gets: the model family's own, with a way past it for compressed caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..caches import CompressedCache
from ..retrofit.method import KEYWORD


@torch.compiler.disable
def _attend(cache: CompressedCache, layer: int, *args: Any) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():  # what is stored must be usable outside inference mode
        return cache.layers[layer].attend(*args)


class CompressedAttention:
    """Mixed in before a family's attention class. With any cache that is not ours the family's own forward runs, but in
    a converted model, whose method then attends."""

    # what every supported family has
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    head_dim: int
    layer_idx: int
    scaling: float

    def forward(self, hidden_states: Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        method_pass = kwargs.pop(KEYWORD, None)
        if method_pass is None and not isinstance(past_key_values, CompressedCache):
            return super().forward(hidden_states, *args, past_key_values=past_key_values, **kwargs)  # type: ignore[misc]
        shape = hidden_states.shape[:-1]
        values = self._project("v", hidden_states)
        # under autocast a norm may have left float32
        queries, keys = (self._project(kind, hidden_states).to(values.dtype) for kind in ("q", "k"))
        if method_pass is not None:
            out = method_pass.attend(self.layer_idx, queries, keys, values, self.scaling)
        else:
            out = _attend(past_key_values, self.layer_idx, queries, keys, values, self.scaling)
        return self.o_proj(out.transpose(1, 2).reshape(*shape, -1)), None

    def _project(self, kind: str, hidden_states: Tensor) -> Tensor:
        """[B, H, S, D] before rotation, after the q/k norm where the family has one (Qwen3)."""
        x = getattr(self, f"{kind}_proj")(hidden_states).unflatten(-1, (-1, self.head_dim))
        norm = getattr(self, f"{kind}_norm", None)
        return (norm(x) if norm is not None else x).transpose(1, 2)


def compressed_class(family: type[nn.Module], module: str) -> type[nn.Module]:
    """The subclass of a family's attention class that attach swaps in, as a class of the given module."""
    return type(f"Compressed{family.__name__}", (CompressedAttention, family), {"__module__": module})


def is_compressed(module: object) -> bool:
    return isinstance(module, CompressedAttention)
