"""What transformers' generation asks of a cache: lengths, slices of a conversation, beams and samples, assistants."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..hf.argument import CACHE
from ..hf.indexing import IndexTicket
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
    trained_length: int
    _repeated: int  # columns that an assistant's first step brings once more
    _columns_read: int

    @property
    @abstractmethod
    def own(self) -> list[CompressedLayer]: ...

    @abstractmethod
    def shifts(self) -> list[int]: ...

    @abstractmethod
    def select_sequences(self, indices: list[int]) -> None: ...

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """What is done to one layer after the other: where it stops between two, the cache is incomplete."""
        before, self._incomplete = self._incomplete, True
        yield
        self._incomplete = before

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen + self._columns_read

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    @property
    def max_cache_len(self) -> int:
        """Asked for by PEFT alone, before it puts a cache of its own in place of this one."""
        raise NotImplementedError(
            f"prefix tuning (PEFT) is not supported by {type(self).__name__}, which has no max_cache_len: PEFT puts a "
            "cache of its own, which holds the prefix, in its place; adapters in the weights (LoRA) are taken"
        )

    @property
    def is_croppable(self) -> bool:
        return not self.recurs and all(layer.is_croppable for layer in self.own)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back tokens; a negative number, as transformers has it. Not those of a compressed prompt."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.15 hands over a tensor
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, got {tokens_to_remove}; before transformers 5.14, "
                "which gives the number that stays, there is no assisted decoding over a compressed cache"
            )
        if tokens_to_remove and not self.is_croppable:
            raise NotImplementedError(f"{type(self).__name__} cannot take back tokens (crop): what it dropped is gone")
        if -tokens_to_remove > self.seen - self.fixed:
            raise ValueError(
                f"crop can remove at most the {self.seen - self.fixed} tokens that followed the prompt (or padded "
                f"input), got {-tokens_to_remove}"
            )
        if tokens_to_remove:
            self.take_back(-tokens_to_remove)

    def take_back(self, tokens: int) -> None:
        """Takes back the last tokens of every sequence, of which nothing was dropped since."""
        with self._changing():
            for layer in self.own:
                layer.drop_last(tokens)
            self.seen -= tokens
            self.fixed = min(self.fixed, self.seen)
            self._count([-tokens] * len(self._lengths))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The family hands its keys and values over here, and to our attention after that: nothing is done yet."""
        now = THREAD.now
        if not now.ours:
            return self.own[0].update()
        now.layer = layer_idx  # an attention module that serves several layers does not know it
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> IndexTicket:
        """The same of index keys; what a layer's indexer does with them, our attention does."""
        return IndexTicket(layer_idx, indexer_key_states)

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
        columns, mask = call.tokens.shape[1], call.attention_mask
        width = 0 if mask is None or mask.ndim != 2 else mask.shape[1]
        # of as many ids as were seen it makes what looks like a padded turn, but for position_ids (_check_places)
        if columns == 0 or columns < width < self.seen + columns or self.seen == 0 < columns < width:
            raise self._sliced(call)

    def _sliced(self, call: Call) -> ValueError:
        return ValueError(
            f"{call.name} must hold the whole conversation: the cache has seen {self.seen} tokens, and generate "
            "slices as many from the front of what it is given. Pass those tokens and the new ones, "
            f"model.generate(torch.cat([seen_ids, new_ids], 1), {CACHE}=cache), or call "
            f"model(new_ids, {CACHE}=cache) without attention_mask and position_ids; for another prompt "
            "call cache.reset() first"
        )

    def _check_places(self, call: Call, counts: Sequence[int]) -> None:
        """Refuses position_ids that are not where the cache has its tokens: behind those that each sequence has had, or
        behind all columns, where padding is counted. At the last position that the model was trained for they may stop.

        counts: tokens of each sequence in the call. A decoded token on a GPU does not wait for the device.
        """
        at, columns, batch = call.position_ids, call.tokens.shape[1], len(counts)
        if at is None or (columns == 1 and at.device.type != "cpu"):
            return
        if at.ndim != 2 or at.shape[0] not in (1, batch) or at.shape[1] != columns:
            raise ValueError(f"position_ids must be [{batch}, {columns}], got shape {tuple(at.shape)}")
        had = self._lengths or [0]
        if batch % len(had):
            return  # _repeat refuses it
        each = batch // len(had)
        had, later = ([n for n in numbers for _ in range(each)] for numbers in (had, self.shifts() or [0]))
        places = [n + more for n, more in zip(had, later, strict=True)]  # behind images they are no numbers of tokens
        if columns == 1 and min(counts) == 1 and at[:, 0].tolist() in (had, places):
            return
        column = torch.arange(columns, device="cpu")
        new, before = (torch.tensor(numbers, device="cpu")[:, None] for numbers in (counts, had))
        padding = column < columns - new
        own = column + before - (columns - new)
        at = at.to("cpu").expand(batch, -1)
        stands = (at == own) | ((at < own) & (at >= self.trained_length - 1))
        ways = [stands, at == column + self.seen, at == own + torch.tensor(later, device="cpu")[:, None]]
        if call.shifted is not None and batch % len(call.shifted) == 0:
            of_model = call.shifted.to("cpu").repeat_interleave(batch // len(call.shifted), 0)
            ways += [at == own + of_model, at == column + self.seen + of_model]
        right = torch.stack([(way | padding).all(1) for way in ways]).any(0)
        if bool(right.all()):
            return
        b = int((~right).nonzero()[0])
        places = at[b, columns - counts[b] :].tolist()
        if places[0] < had[b]:
            raise self._sliced(call)
        got = ", ".join(map(str, places[:8]))
        raise ValueError(
            f"position_ids must count on from the {had[b]} tokens that sequence {b} has had, one by one, or be left "
            f"out: a compressed cache gives positions itself; got {got}{', ...' if counts[b] > 8 else ''}"
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
                "IterativeCache without every, PrunedCache with later='keep', QuantizedCache and QuestCache "
                "can, for a model that is not converted"
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
