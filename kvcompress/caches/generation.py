"""What transformers' generation asks of a cache: lengths, slices of a conversation, beams and samples, assistants."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..hf.method import Call
from ..hf.now import THREAD
from .layer import CompressedLayer
from .local import LocalLayer
from .states import RecurrentStates
from .summary import Summary


class Generation(Summary, RecurrentStates, Cache):
    """Of a cache. seen: columns of input that went in, padding included. fixed: how many of them cannot go back."""

    seen: int
    fixed: int
    _batch: int
    _repeated: int  # columns that an assistant's first step brings once more
    _columns_read: int

    @property
    @abstractmethod
    def own(self) -> list[CompressedLayer]: ...

    @abstractmethod
    def select_sequences(self, indices: list[int]) -> None: ...

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen + self._columns_read

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    @property
    def is_croppable(self) -> bool:
        return not self.recurs and all(layer.is_croppable for layer in self.own)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back tokens; a negative number, as transformers has it. Not those of a compressed prompt."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")
        if tokens_to_remove and not self.is_croppable:
            raise NotImplementedError(f"{type(self).__name__} cannot take back tokens (crop): what it dropped is gone")
        if -tokens_to_remove > self.seen - self.fixed:
            raise ValueError(
                f"crop can remove at most the {self.seen - self.fixed} tokens that followed the prompt (or padded "
                f"input), got {-tokens_to_remove}"
            )
        if tokens_to_remove:
            for layer in self.own:
                layer.drop_last(-tokens_to_remove)
            self.seen += tokens_to_remove
            self._count([tokens_to_remove] * len(self._lengths))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The family hands its keys and values over here, and to our attention after that: nothing is done yet."""
        now = THREAD.now
        if not now.ours:
            return self.own[0].update()
        now.layer = layer_idx  # an attention module that serves several layers does not know it
        return key_states, value_states

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select_sequences([b for b in range(self._batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.select_sequences(indices.tolist())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select_sequences(beam_idx.tolist())

    # ---- prompts that come once more ----

    def _check_sliced(self, call: Call) -> None:
        """Refuses what generate makes of fewer ids than the cache has seen: it slices them from the wrong end."""
        columns, mask, at, short = call.tokens.shape[1], call.attention_mask, call.position_ids, False
        if self.seen and mask is not None and mask.ndim == 2:
            width = mask.shape[1]
            short = width < self.seen + columns and (width > columns or columns == self.seen)
        elif self.seen and at is not None and (columns > 1 or at.device.type == "cpu"):
            short = int(at[..., -1].max()) + 1 < self.seen + columns
        if columns == 0 or short:
            raise ValueError(
                f"{call.name} must hold the whole conversation: the cache has seen {self.seen} tokens, and generate "
                "slices as many from the front of what it is given. Pass those tokens and the new ones, "
                "model.generate(torch.cat([seen_ids, new_ids], 1), past_key_values=cache), or call "
                "model(new_ids, past_key_values=cache) without attention_mask and position_ids; for another prompt "
                "call cache.reset() first"
            )

    def _repeat(self, name: str, tokens: Tensor) -> None:
        """Repeats every sequence, for beams and several samples: their rows begin alike. Waits for the device."""
        batch, held = tokens.shape[0], self._batch
        if batch % held:
            raise ValueError(
                f"{name} has batch size {batch}, but the cache holds {held} sequences; for other prompts call "
                "cache.reset() first"
            )
        groups = tokens.unflatten(0, (held, batch // held))
        if not torch.equal(groups, groups[:, :1].expand_as(groups)):
            raise ValueError(
                f"{name} has batch size {batch}, but the cache holds {held} sequences, and rows that would continue "
                "the same one differ; use a cache that read these prompts as one batch, or, to continue a prompt in "
                f"several ways, cache.fork() for each or cache.batch_repeat_interleave({batch // held}) first; for "
                "other prompts call cache.reset()"
            )
        self.batch_repeat_interleave(batch // held)

    def activate_past_recording(self) -> None:
        """Assisted decoding begins: tokens must be able to go back."""
        if not self.is_croppable:
            if self.recurs or any(isinstance(layer, LocalLayer) for layer in self.own):
                raise NotImplementedError(
                    "assisted decoding is not supported for a model with recurrent layers, or with layers that see a "
                    "window or a chunk: what has left those cannot come back"
                )
            raise NotImplementedError(
                f"assisted decoding is not supported by {type(self).__name__}: what it dropped cannot come back; "
                "IterativeCache without every can, for a model that is not converted"
            )
        self._repeated = self.seen

    @property
    def rereads(self) -> bool:
        """Whether the next pass brings once more what the cache has read (assisted decoding)."""
        return self._repeated > 0

    def _repeated_columns(self, call: Call) -> int:
        """How many of this forward's first columns the cache has read already.

        transformers' assisted decoding passes the whole prompt once more in its first step, mask and all.
        """
        repeated, self._repeated = self._repeated, 0
        columns, mask = call.tokens.shape[1], call.attention_mask
        whole = mask is None or mask.shape[-1] == columns
        return repeated if columns > repeated and whole else 0
