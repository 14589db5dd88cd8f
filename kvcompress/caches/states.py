"""Recurrent and convolution layers beside ours: transformers' own, also those that share a layer with attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer


def new_state(like: LinearAttentionLayer) -> LinearAttentionLayer:
    return LinearAttentionLayer(number_of_states=like.number_of_states)


class RecurrentStates:
    """Of a cache. states: by layer, of those that attend and recur; transformers looks for them in the layer itself."""

    layers: list[Any]
    states: dict[int, LinearAttentionLayer]

    @property
    def recurs(self) -> bool:
        """Whether layers hold a state that goes from token to token, and cannot take one back."""
        return bool(self._every_state)

    @property
    def _every_state(self) -> list[Any]:
        """What layers that recur hold, in their order."""
        found = (self.states.get(index, layer) for index, layer in enumerate(self.layers))
        return [x for x in found if isinstance(x, LinearAttentionCacheLayerMixin)]

    @property
    def _states_began(self) -> bool:
        return any(state.has_previous_state.get(0) for state in self._every_state)

    def _states_nbytes(self) -> int:
        tensors = [
            x
            for layer in self._every_state
            for held in (layer.conv_states, layer.recurrent_states)
            for x in held.values()
        ]
        return sum(x.nbytes for x in tensors if x is not None)

    def _reset_states(self) -> None:
        self.states = {index: new_state(state) for index, state in self.states.items()}
        self.layers = [new_state(x) if isinstance(x, LinearAttentionLayer) else x for x in self.layers]

    def _select_states(self, indices: list[int]) -> None:
        for state in self._every_state:
            state.reorder_cache(torch.tensor(indices, dtype=torch.long, device="cpu"))

    def _join_states(self, other: RecurrentStates) -> None:
        """Those of another cache's sequences stand behind its own."""
        for own, new in zip(self._every_state, other._every_state, strict=True):
            for held, more in ((own.conv_states, new.conv_states), (own.recurrent_states, new.recurrent_states)):
                for i, x in held.items():
                    held[i] = None if x is None else torch.cat([x, more[i]])

    def _state_of(self, layer_idx: int) -> LinearAttentionLayer:
        return self.states.get(layer_idx, self.layers[layer_idx])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """As transformers has it: that of a layer, None before the first token."""
        layer = self._state_of(layer_idx)
        return layer.conv_states[state_idx] if layer.has_previous_state[state_idx] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """As transformers has it: that of a layer, None before the first token."""
        layer = self._state_of(layer_idx)
        return layer.recurrent_states[state_idx] if layer.has_previous_state[state_idx] else None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """As transformers has it: stores the state of a layer and returns it."""
        return self._state_of(layer_idx).update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """As transformers has it: stores the state of a layer and returns it."""
        return self._state_of(layer_idx).update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """As transformers has it: whether a layer (None: the last that recurs) holds a state."""
        every = self._every_state
        found = (every[-1] if every else None) if layer_idx is None else self._state_of(layer_idx)
        if not isinstance(found, LinearAttentionCacheLayerMixin):
            return False
        flags = found.has_previous_state
        return all(flags.values()) if state_idx is None else flags[state_idx]
