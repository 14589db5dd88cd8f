"""What every compressed cache is: a transformers Cache whose attention layers own positions, storage and attention."""

from __future__ import annotations

import copy
import math
import os
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionLayer,
)

from .. import planner
from ..hf.config import cache_layers, decoder_config, sizes_of
from ..hf.facts import Facts
from ..hf.method import Call, Pass, PassCache
from ..planner import Plan
from .generation import Generation
from .images import Images
from .layer import CompressedLayer
from .local import LocalLayer
from .passes import CachePass, Iteration
from .repeating import Repeats
from .saving import save_caches
from .states import new_state
from .store import PoolSettings

if TYPE_CHECKING:
    from typing_extensions import Self


UNLIMITED = 1 << 60  # tokens


def trained_length_of(config: PreTrainedConfig) -> int:
    """Positions that a model was trained for."""
    return getattr(decoder_config(config), "max_position_embeddings", None) or UNLIMITED


class CompressedCache(Images, Repeats, Generation, PassCache):
    """A cache for an attached model: what all of them answer; see IterativeCache and StreamingCache.

    config: the model's config. Layers that see a window or a chunk keep that, whatever the cache; recurrent and
    convolution layers are transformers' own. facts: of the model that it is used with, None before.
    """

    layers: list[Any]
    pool_settings = PoolSettings()  # of layers that store pages
    chunk_size: int | None = None  # tokens that prefill reads at a time; None = the whole prompt
    parted = False  # whether the rest of a prompt is to come (see open)

    def __init__(self, config: PreTrainedConfig) -> None:
        config = decoder_config(config)
        self.states: dict[int, LinearAttentionLayer] = {}  # of layers that attend and recur
        super().__init__(layers=self._made_for(config))
        self.take_handle()
        self.trained_length = trained_length_of(config)
        self.facts: Facts | None = None
        self._decoder: weakref.ref[Any] | None = None
        self._sizes = sizes_of(config)
        self._dtype: torch.dtype | None = None  # of the model that filled it
        self._begin()

    def _begin(self) -> None:
        """Of no sequences yet."""
        self._begin_count()
        self.seen = 0  # columns of input that went in, padding included: generation slices its prompt by it
        self.fixed = 0  # how many of them cannot be taken back
        self.read_ids: Tensor | None = None  # [1, T] what kvcompress.read has read; of no meaning to the cache itself
        self.places, self.parted = (), False
        self._columns_read = 0  # columns of a prompt that kvcompress.prefill is reading, so far
        self._repeated = 0
        self._incomplete = False  # a pass or a prompt has begun and not ended

    def __getstate__(self) -> dict[str, Any]:
        # the model's are found again when it is used
        state = super().__getstate__() | {"facts": None, "_decoder": None}
        return {name: x for name, x in state.items() if name != "_placed"}

    @abstractmethod
    def _new_layer(self, index: int, number: int) -> CompressedLayer:
        """A layer that compresses. number: how many of them come before it."""

    def _made_for(self, config: Any) -> list[Any]:
        """The layers of a model as transformers makes them, with ours for attention."""
        kinds = getattr(config, "layer_types", None) or ()
        layers: list[Any] = []
        every, dtype = cache_layers(config), self.pool_settings.dtype
        if isinstance(dtype, tuple) and len(dtype) != len(every):
            raise ValueError(
                f"dtype must be a name or None, or a list with one for each of the model's {len(every)} layers, got a "
                f"list of {len(dtype)}: {list(dtype)}"
            )
        for index, theirs in enumerate(every):
            if not isinstance(theirs, DynamicLayer):
                layers.append(theirs)
                continue
            if isinstance(theirs, LinearAttentionLayer):
                self.states[index] = new_state(theirs)
            window = getattr(theirs, "sliding_window", None)
            chunked = index < len(kinds) and kinds[index] == "chunked_attention"
            layers.append(self._layer(index, layers, None if chunked else window, window if chunked else None))
        return layers

    def _layer(self, index: int, before: list[Any], window: int | None, chunk: int | None) -> CompressedLayer:
        if window is not None or chunk is not None:
            return LocalLayer(index, window, chunk, self.pool_settings.dtype_of(index))
        return self._new_layer(index, sum(_compresses(layer) for layer in before))

    @property
    def own(self) -> list[CompressedLayer]:
        """The layers that attend."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def compressing(self) -> list[Any]:
        """Those of them that compress."""
        return [layer for layer in self.layers if _compresses(layer)]

    # ---- reading a prompt (kvcompress.prefill) ----

    def plan_prompt(self, length: int) -> Plan:
        """How a prompt of this many tokens is read: at once, or in chunks."""
        return planner.plan(length, chunk_size=self.chunk_size or max(length, 1), memory_size=1)

    def memory_sizes(self, b: int, plan: Plan, i: int) -> tuple[int, ...]:
        """Tokens per KV head that each layer keeps of sequence b after iteration i; () where layers decide alone."""
        return ()

    def stream_plan(self) -> Plan:
        """How a prompt of unknown length begins: its chunks are those of all that follows.

        Raises ValueError where the length must be known.
        """
        if self.chunk_size is None:
            raise ValueError(f"input_ids of unknown length need a {type(self).__name__} with a chunk_size, got None")
        return self.plan_prompt(self.chunk_size)

    @abstractmethod
    def check_guide(self) -> None:
        """Raises ValueError if a guide would have no effect."""

    def begin_prompt(self, plans: list[Plan], guide_length: int) -> None:
        """Prepares for iterations over a prompt (one plan per sequence)."""

    def end_prompt(self, columns: int) -> None:
        """The prompt is read: `columns` input columns, padding included."""
        self.seen += columns
        self.fixed = self.seen

    def reach(self) -> int:
        """The largest position so far, from 1: that of the last token read, where kept tokens stay in their places."""
        return max((n + later for n, later in zip(self._lengths, self.shifts(), strict=True)), default=0)

    def _most_held(self) -> int:
        """Tokens of the longest row in layers that compress."""
        return max((n for layer in self.compressing for row in layer.stored_lengths() for n in row), default=0)

    # ---- one forward pass (kvcompress.hf.seam) ----

    @property
    def steps_differ(self) -> bool:
        """Whether tokens that come one by one, as in decoding, attend to less than in one call."""
        return False

    def check_model(self, decoder: Any) -> None:
        """Raises ValueError if the cache was made for a model of another shape."""
        for name, size in sizes_of(decoder_config(decoder.config)).items():
            if size != self._sizes[name]:
                raise ValueError(
                    f"cache was made from a config with {name} = {self._sizes[name]}, but {type(decoder).__name__} has "
                    f"{name} = {size}; make it from this model's config"
                )

    def adopt(self, decoder: Any, facts: Facts) -> None:
        """Takes note of the model that the cache is used with. Raises ValueError for one that it was not made for."""
        if self.facts is facts:
            return
        self.check_model(decoder)
        for index, found in facts.items():
            layer = self.layers[index] if index < len(self.layers) else None
            if found.indexer is not None and (wish := self.check_indexer(found.indexer.top)) is not None:
                raise ValueError(
                    f"{wish}: layer {index} attends to {found.indexer.top:,} tokens that its indexer chooses"
                )
            if found.reads is not None:
                continue
            if not isinstance(layer, CompressedLayer):
                raise ValueError(
                    f"layer {index} of {type(decoder).__name__} attends, but its config gives it "
                    f"{'no cache' if layer is None else type(layer).__name__}; caches of such models are not supported"
                )
            window, chunk = getattr(layer, "window", None), getattr(layer, "chunk", None)
            if isinstance(layer, LocalLayer) != found.is_local or (
                found.is_local and (window, chunk) != (found.window, found.chunk)
            ):
                if self.seen or layer.stored_lengths():
                    raise ValueError(f"cache was filled by a model whose layer {index} sees another window")
                self.layers[index] = self._layer(index, self.layers[:index], found.window, found.chunk)
        for number, layer in enumerate(self.compressing):
            layer.number = number
        self.check_layers(decoder, facts)
        self._check_codes(decoder, facts)
        self.facts, self._placed = facts, None
        self._measure(facts, next(x.element_size() for x in decoder.parameters() if x.is_floating_point()))
        self.belongs_to(decoder)

    def check_indexer(self, top: int) -> str | None:
        """What must be otherwise where layers choose so many tokens by an indexer; None = nothing."""
        return f"cache must be a PrunedCache, QuantizedCache or StreamingCache, got {type(self).__name__}"

    def check_layers(self, decoder: Any, facts: Facts) -> None:
        """Raises ValueError for layers that the cache's settings are not for."""

    def _check_codes(self, decoder: Any, facts: Facts) -> None:
        """Raises ValueError where keys hold what a scale for all their numbers would round away."""
        dtype = self.pool_settings.dtype
        if any(found.beside and self.pool_settings.dtype_of(index) is not None for index, found in facts.items()):
            raise ValueError(
                f"dtype must be None for {type(decoder).__name__}, got {dtype!r}: its keys hold their positions "
                "(ALiBi), which codes would round; take a cache without codes"
            )

    def belongs_to(self, decoder: Any) -> None:
        """Notes the model that it was filled by."""
        self._decoder = weakref.ref(decoder)

    @property
    def decoder(self) -> Any:
        """That model's decoder; None where nobody knows."""
        return None if self._decoder is None else self._decoder()

    @torch.inference_mode(False)
    def begin(self, call: Call) -> CachePass:
        """Checks what the coming forward pass brings, and takes what it needs. See kvcompress.hf.method.PassCache."""
        self.check_complete()
        call.skip(self._repeated_columns(call))
        batch, columns = call.tokens.shape[:2]
        self._check_sliced(call)
        counts = self._counts(batch, columns, call.attention_mask)
        self._check_places(call, counts)
        self.adopt(call.decoder, call.facts)
        if self._batch and batch != self._batch:
            self._repeat(call.name, call.tokens)
        if self.recurs and self.seen and min(counts) < columns:
            raise ValueError(
                "attention_mask must be ones for what follows a prompt where layers recur: padding between a "
                "sequence's tokens would change their state"
            )
        if call.axes is None:
            return self.open(call.facts, counts, columns)
        self.check_images(call)
        with self.noting(call, counts):
            return self.open(call.facts, counts, columns)

    def open(
        self, facts: Facts, counts: Sequence[int], columns: int, iteration: Iteration | None = None, *,
        more: bool = False,
    ) -> CachePass:  # fmt: skip
        """A pass of counts[b] tokens of each sequence in so many columns; adopt() has been called. more: the rest of a
        sequence's prompt is to come, and what is chosen by all of it waits."""
        self._check_dtype()
        if columns > 1 and (self.seen or self._columns_read or self._states_began):
            self.check_parts(facts, padded=iteration is not None and min(counts) < columns)
        step = CachePass(self.placed(facts), self.layers, counts, columns, iteration, more=more, continues=self.parted)
        step.wants_entering = self.wants_entering
        try:
            for layer in self.own:
                layer.check_step(step, facts[layer.index])
        except BaseException:
            step.unclaim()
            raise
        self._incomplete = True
        return step

    def _check_dtype(self) -> None:
        """Raises ValueError where the model was cast since it filled the cache."""
        decoder = self.decoder
        if decoder is None:
            return
        dtype = decoder.get_input_embeddings().weight.dtype
        if not self._lengths:
            self._dtype = dtype
        elif dtype != self._dtype:
            raise ValueError(
                f"{type(decoder).__name__} must be {self._dtype} as it was when it filled this cache, got {dtype}: "
                "cast it back, or reset() the cache and read again"
            )

    @staticmethod
    def check_parts(facts: Facts, *, padded: bool) -> None:
        """Raises ValueError where a family cannot read tokens in several calls of several tokens. padded: whether one
        of them brings sequences of several lengths."""
        if not facts.reads_chunks:
            raise ValueError(
                "input_ids of several tokens must come in one call, the first, to this model: its recurrent layers "
                "begin anew in every call of several tokens; use a cache without chunk_size, or with one that holds "
                "the prompt"
            )
        if facts.asks_length and padded:
            raise ValueError(
                "input_ids of several lengths must be read in one pass by this model, whose layers ask how many tokens "
                "came before, for a whole batch: read them one by one, or use a chunk_size that holds the prompts"
            )

    def end(self, current: Pass, hidden: Tensor | None) -> None:
        assert isinstance(current, CachePass)
        current.unclaim()
        # a decoded token on a GPU does not wait for the device
        if (
            hidden is not None
            and (hidden.device.type == "cpu" or current.columns > 1)
            and math.isnan(hidden[:, -1].amax())
        ):
            raise RuntimeError(
                "the model's hidden states hold NaN: a layer's weights or inputs do, or overflowed; the cache is "
                "incomplete, reset() it"
            )
        self._count(current.kept)
        if current.iteration is None:
            self.seen += current.columns
            if current.padded:  # sequences grew unequally: crop would not know by how much
                self.fixed = self.seen
            self._incomplete, self.parted = False, current.more
        else:
            self._columns_read += max(current.kept)
        for layer in self.own:
            layer.seen = self.get_seq_length()

    def check_complete(self) -> None:
        """Raises RuntimeError if a pass or a prompt has begun and not ended."""
        if self._incomplete:
            raise RuntimeError(
                "this cache is incomplete: a prompt is being read, or an earlier forward pass, prefill or change of "
                "its sequences stopped before its end; call reset() then"
            )

    def mark_incomplete(self, incomplete: bool = True) -> None:
        """A pass or a prompt begins (incomplete) or has ended."""
        self._incomplete, self._repeated, self._columns_read = incomplete, 0, 0

    def _counts(self, batch: int, columns: int, mask: Tensor | None) -> tuple[int, ...]:
        # a decode step on a GPU does not wait for the device: its column is a token in every sequence
        if mask is None or (columns == 1 and self.seen > 0 and mask.device.type != "cpu"):
            return (columns,) * batch
        if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] < columns:
            raise ValueError(
                f"attention_mask must be [{batch}, at least {columns}] of zeros and ones, got shape {tuple(mask.shape)}"
            )
        here = mask[:, -columns:] != 0
        if mask.is_floating_point() and not torch.equal(here, mask[:, -columns:] == 1):
            raise ValueError("attention_mask must hold zeros and ones, got other numbers (an additive mask?)")
        counts = here.sum(1)
        expected = torch.arange(columns, device=mask.device) >= columns - counts[:, None]
        if not torch.equal(here, expected):
            raise ValueError("attention_mask must be left-padded: zeros, then ones; other padding is not supported")
        return tuple(counts.tolist())

    # ---- what users ask ----

    @property
    def batch_size(self) -> int:
        return self._batch or -1

    def nbytes(self) -> int:
        """Bytes in use now: the pages that hold this cache's tokens (each once; one shared with a fork counts in both),
        tables and buffers of all layers, recurrent ones included. Free pages, kept for coming tokens, count in
        reserved_nbytes alone."""
        return sum(layer.nbytes() for layer in self.own) + self._states_nbytes()

    def reserved_nbytes(self) -> int:
        """Bytes of all tensors that the cache keeps alive: free pages and those of its forks included."""
        return sum(layer.reserved_nbytes() for layer in self.own) + self._states_nbytes()

    def trim(self) -> None:
        """Gives free pages back, those that dropped forks have left included: reserved_nbytes falls to about nbytes.

        Forks share pages and go on as before; pages of forks that live are not free. The next token takes new pages:
        trim a cache that will rest. With grow="error" pages are kept. Waits for the device, and needs memory for a copy
        of one layer's pages in use; RuntimeError if there is none: each layer is then trimmed or as it was. On a GPU
        the memory goes back to PyTorch's allocator: torch.cuda.empty_cache() gives it to others.
        """
        for layer in self.own:
            layer.trim()

    @torch.inference_mode(False)
    def fork(self) -> Self:
        """An independent cache of the same state, for one of several questions over one prompt.

        Pages are shared until one of the two writes to them, and free again when no cache needs them; windows and
        recurrent states are copied. copy.copy does the same.
        Raises RuntimeError while a prompt is being read or if the cache is incomplete.
        """
        self.check_complete()
        fork = copy.deepcopy(self)
        fork._decoder = self._decoder
        return fork

    def save(self, path: str | os.PathLike[str], model: nn.Module | None = None) -> Path:
        """Saves the cache as one file, without code, whole or not at all; kvcompress.load_cache(path, model) goes on
        with it in any process, token for token.

        path: of the file, usually .safetensors. model: that it belongs to; None = the one that it was used with last.
        kvcompress.save_caches saves several forks, which go on sharing the pages of their prompt. Returns the path.
        Raises RuntimeError for an incomplete cache, ValueError where its model is not there.
        """
        return save_caches([self], path, model)

    def __copy__(self) -> Self:
        return self.fork()  # what shares its layers would change with it

    def stored_lengths(self) -> list[list[list[int]]]:
        """Tokens held per layer, sequence and KV head: [L][B][Hkv]; [] for a layer that holds no keys of its own.
        get_seq_length() says how many tokens were seen."""
        return [layer.stored_lengths() if isinstance(layer, CompressedLayer) else [] for layer in self.layers]

    def kept_positions(self) -> list[list[list[Tensor]]]:
        """Which tokens are held: [L][B][Hkv] of int64, rising, on the CPU; as many as stored_lengths() says.

        Numbers are those of a sequence's tokens, from 0, its padding and guides not counted, wherever their keys stand
        for attention: tokens[kept_positions()[layer][b][head]] are the tokens that a KV head still has. [] for a layer
        that holds no keys of its own. Waits for the device.
        """
        return [layer.kept_positions() if isinstance(layer, CompressedLayer) else [] for layer in self.layers]

    def reset(self) -> None:
        """Empties the cache and makes it usable again, whatever state it was in."""
        self._incomplete = True  # until all layers are new
        for index, layer in enumerate(self.layers):
            if isinstance(layer, LocalLayer):
                self.layers[index] = self._layer(index, self.layers[:index], layer.window, layer.chunk)
            elif isinstance(layer, CompressedLayer):
                self.layers[index] = self._new_layer(index, layer.number)
        self._reset_states()
        self._begin()

    @torch.inference_mode(False)
    def select_sequences(self, indices: list[int]) -> None:
        """Keeps copies of the given sequences in this order. Raises ValueError for one that is not there; nothing is
        changed then. After any other error the cache is incomplete."""
        for b in indices if self._batch else ():
            if not 0 <= b < self._batch:
                raise ValueError(f"indices must be those of sequences, 0 to {self._batch - 1}, got {b}")
        with self._changing():
            for layer in self.own:
                layer.select(indices, self._batch)
            self._select_states(indices)
            self.select_places(indices)
            self._lengths = [self._lengths[b] for b in indices] if self._lengths else []

    @torch.inference_mode(False)
    @torch.no_grad()
    def join(self, other: Self) -> None:
        """Takes over the sequences of another cache of the same settings and model, behind its own; the other is of no
        use then. Layers with pages must have theirs from one store.

        Raises ValueError for a cache whose sequences cannot: IterativeCache, QuestCache, PoDCache, and DMC with
        track=True. Nothing is changed then.
        """
        for layer in (*self.own, *other.own):
            if not layer.joins:
                raise ValueError(
                    f"sequences of {type(self).__name__} cannot join others: layer {layer.index} "
                    f"({type(layer).__name__}) keeps what belongs to its own batch"
                )
        with self._changing():
            for layer, new in zip(self.own, other.own, strict=True):
                layer.join(new, self._batch, other._batch)
            self._join_states(other)
            self.join_places(other)
            self._lengths = self._lengths + other._lengths


def _compresses(layer: Any) -> bool:
    return isinstance(layer, CompressedLayer) and not isinstance(layer, LocalLayer)
