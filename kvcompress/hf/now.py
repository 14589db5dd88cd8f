"""What the forward pass of a thread is: written by the seam's hooks, read by its attention function and by caches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from .indexing import IndexTicket
from .method import Pass
from .probe import Probe


class Now:
    """At most one of current, outer and probe is set. A plain object: torch.compile follows what hooks write to it,
    which it does not for a threading.local."""

    def __init__(self) -> None:
        self.current: Pass | None = None
        self.coming: Pass | None = None  # that of the next call of a decoder (see coming)
        self.handle: Tensor | None = None  # of the cache whose pass it is; compiled hooks know no more of it
        self.outer: dict[str, Any] | None = None  # arguments of the multimodal model around the decoder of ours
        self.probe: Probe | None = None
        self.watcher: Any = None  # sees the attention of passes that are not ours (hf/verify)
        self.layer: int | None = None  # whose keys the family has just handed to the cache
        self.entered: tuple[Any, Any] | None = None  # the attention module that was called last, and with what

    @property
    def ours(self) -> bool:
        return self.handle is not None or self.current is not None or self.probe is not None

    def over(self) -> None:
        """No pass is ours."""
        self.current = self.handle = self.layer = self.entered = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.now = Now()


THREAD = _Thread()


@contextmanager
def coming(current: Pass) -> Iterator[None]:
    """Calls of a model meanwhile are this pass of its decoder: heads of some families hand no keywords down to it."""
    THREAD.now.coming = current
    try:
        yield
    finally:
        THREAD.now.coming = None


class NotedCache(DynamicCache):
    """A plain cache that notes whose keys it is handed, for passes that are to tell layers apart. keeps: whether it
    holds them. note: called with the layer's number. asked: whether a layer asked for the length."""

    def __init__(self, config: Any, *, keeps: bool, note: Callable[[int], None] | None = None) -> None:
        super().__init__(config=config)
        self._index_size = getattr(config, "index_head_dim", None)
        self._keeps, self._note, self._began, self.asked = keeps, note, False, False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        self.asked = self.asked or self._began  # the decoder asks before its layers
        return super().get_seq_length(layer_idx)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._began = True
        if self._note is not None:
            self._note(layer_idx)
        THREAD.now.layer = layer_idx
        if not self._keeps:
            return key_states, value_states
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self._keeps:
            return super().update_indexer(indexer_key_states, layer_idx, *args, **kwargs)
        ticket = IndexTicket(layer_idx, indexer_key_states)
        if indexer_key_states.shape[2:] != (self._index_size,):  # several things in one, or what is no key of a token
            raise ticket.odd
        return ticket
