"""What every compressed cache is: a transformers Cache whose layers own positions, storage and attention."""

from __future__ import annotations

import copy
import weakref
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from ..planner import Plan
from ..positions import RotaryTables
from .store import PoolSettings

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Iteration:
    """One iteration of reading a prompt. memory[b][layer]: tokens per KV head to keep; () for a sequence that has no
    tokens in it. guide_length: how many of its last tokens are the guide."""

    memory: tuple[tuple[int, ...], ...]
    guide_length: int = 0


@dataclass(frozen=True)
class Step:
    """One forward pass. counts[b]: tokens of sequence b in it, right-aligned; columns before them are padding."""

    counts: tuple[int, ...] = ()
    columns: int = 0
    iteration: Iteration | None = None


def decoder_config(config: PreTrainedConfig) -> Any:
    """The part of a model's config that describes its decoder."""
    if not isinstance(config, PreTrainedConfig):
        what = "the model itself: pass model.config" if isinstance(config, nn.Module) else type(config).__name__
        raise TypeError(f"config must be a transformers config (model.config), got {what}")
    return config.get_text_config(decoder=True)


def sizes_of(config: Any) -> dict[str, int]:
    """What a cache and the model that it is used with must have in common."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"layers": config.num_hidden_layers, "KV heads": config.num_key_value_heads, "head dim": head_dim}


class CompressedLayer(CacheLayerMixin):
    """One attention layer's cache. Subclasses store keys and values and answer `attend`."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: CompressedCache, index: int, sliding_window: int | None) -> None:
        super().__init__()
        self.index = index  # of the layer
        # weak, so that a cache is freed as soon as nobody holds it, and its pages with it
        self.cache = cast(CompressedCache, weakref.proxy(cache))
        self.sliding_window = sliding_window

    @abstractmethod
    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Stores the new tokens and returns their attention.

        queries: [B, Hq, S, D], keys, values: [B, Hkv, S, D], before rotation (after any q/k norm).
        Returns [B, Hq, S, D]. Which columns are tokens says cache.step.
        """

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of keys, values and tables in use now."""

    def reserved_nbytes(self) -> int:
        """Bytes of all tensors held for them, room to grow included."""
        return self.nbytes()

    def trim(self) -> None:
        """Gives back room to grow."""

    @abstractmethod
    def stored_lengths(self) -> list[list[int]]:
        """Tokens held per sequence and KV head: [B][Hkv]."""

    @abstractmethod
    def select_batch(self, indices: list[int]) -> None:
        """Keeps copies of the given sequences in this order."""

    @abstractmethod
    def keys_in_sight(self, step: Step) -> int:
        """Most keys that a query of this step sees."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "cache"}

    def check_step(self, step: Step) -> None:
        """Refuses to go where the model's own sliding window would hide keys."""
        if self.sliding_window is not None and (keys := self.keys_in_sight(step)) > self.sliding_window:
            raise ValueError(
                f"this layer's sliding_window of {self.sliding_window} tokens is shorter than the {keys} keys in "
                f"sight; {self.cache.smaller}"
            )

    # the rest of CacheLayerMixin, and what generation calls besides

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError(
            "compressed caches have no update(): an attached model fills them in its own forward pass. If a model "
            "called it, that model is not attached: call kvcompress.attach(model) first. If you did: give the cache to "
            "a model, model(input_ids, past_key_values=cache)"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # as for a first prompt: transformers then builds no mask

    def get_seq_length(self) -> int:
        return self.cache.seen

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        raise NotImplementedError(
            "offloading is not supported by compressed caches; they are small: keep them in place"
        )

    prefetch = offload

    def drop_last(self, tokens: int) -> None:
        """Takes back the last tokens of every sequence; called only where is_croppable is true."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select_batch(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select_batch([b for b in range(len(self.stored_lengths())) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.select_batch(indices.tolist())


class CompressedCache(Cache):
    """A cache for an attached model; see IterativeCache and StreamingCache."""

    layers: list[CompressedLayer]
    smaller = "let the cache hold less"  # advice where too many keys are in sight
    pool_settings = PoolSettings()  # of layers that store pages
    chunk_size: int | None = None  # tokens that prefill reads at a time; None = the whole prompt

    def __init__(self, config: PreTrainedConfig) -> None:
        config = decoder_config(config)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(f"layer type {kind!r} is not supported, only full_attention and sliding_attention")
        window = getattr(config, "sliding_window", None)
        has_types = getattr(config, "layer_types", None) is not None
        windows = [window if kind == "sliding_attention" or not has_types else None for kind in kinds]
        super().__init__(layers=[self._new_layer(index, window) for index, window in enumerate(windows)])
        self.trained_length: int = config.max_position_embeddings
        self._sizes = sizes_of(config)
        self.step = Step()
        self.seen = 0  # columns of input that went in, padding included: generation slices its prompt by it
        self.fixed = 0  # how many of them cannot be taken back
        self.rotary: RotaryTables | None = None
        self._rotary_source: nn.Module | None = None
        self._batch = 0
        self._running = False
        self._repeated = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for layer in self.layers:
            layer.cache = cast(CompressedCache, weakref.proxy(self))

    @abstractmethod
    def _new_layer(self, index: int, sliding_window: int | None) -> CompressedLayer: ...

    # ---- reading a prompt (kvcompress.prefill) ----

    @abstractmethod
    def plan_prompt(self, length: int) -> Plan:
        """How a prompt of this many tokens is read."""

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

    # ---- one forward pass (the hook of kvcompress.attach) ----

    def check_model(self, decoder: Any) -> None:
        """Raises ValueError if the cache was made for a model of another shape."""
        for name, size in sizes_of(decoder.config).items():
            if size != self._sizes[name]:
                raise ValueError(
                    f"cache was made from a config with {name} = {self._sizes[name]}, but {type(decoder).__name__} has "
                    f"{name} = {size}; make it from this model's config"
                )

    @torch.inference_mode(False)
    def begin_forward(self, decoder: Any, name: str, tokens: Tensor, attention_mask: Tensor | None) -> None:
        """Checks and notes what the coming forward pass brings.

        decoder: has config and rotary_emb. tokens: the argument of that name, input_ids [B, columns] or inputs_embeds
        [B, columns, hidden size]. attention_mask: [B, at least columns] or None.
        """
        self.check_complete()
        rotary_emb, (batch, columns) = decoder.rotary_emb, tokens.shape[:2]
        if columns == 0:
            raise ValueError(
                f"{name} must hold at least one token, got shape {tuple(tokens.shape)}: the cache has seen "
                f"{self.seen_lengths()} tokens, and generate takes the whole conversation, those included"
            )
        if self._rotary_source is not rotary_emb:
            self.check_model(decoder)
            self.rotary, self._rotary_source = RotaryTables(rotary_emb), rotary_emb
        counts = self._counts(batch, columns, attention_mask)
        if self._batch and batch != self._batch:
            self._repeat(name, tokens)
        step = Step(counts, columns, self.step.iteration)
        for layer in self.layers:
            layer.check_step(step)
        self._batch, self.step, self._running = batch, step, True

    def _repeat(self, name: str, tokens: Tensor) -> None:
        """Repeats every sequence, for beams and several samples: their rows begin alike. Waits for the device."""
        batch, held = tokens.shape[0], self._batch
        if batch % held:
            raise ValueError(f"{name} has batch size {batch}, but the cache holds {held} sequences")
        groups = tokens.unflatten(0, (held, batch // held))
        if not torch.equal(groups, groups[:, :1].expand_as(groups)):
            raise ValueError(
                f"{name} has batch size {batch}, but the cache holds {held} sequences, and rows that would continue "
                "the same one differ; use a cache that read these prompts as one batch, or, to continue a prompt in "
                f"several ways, cache.fork() for each or cache.batch_repeat_interleave({batch // held}) first"
            )
        self.batch_repeat_interleave(batch // held)

    def activate_past_recording(self) -> None:
        """Assisted decoding begins: tokens must be able to go back."""
        if not self.is_croppable:
            raise NotImplementedError(
                f"assisted decoding is not supported by {type(self).__name__}: what it dropped cannot come back; "
                "IterativeCache can, for a model that is not converted"
            )
        self._repeated = self.seen

    def repeated_columns(self, columns: int, attention_mask: Tensor | None) -> int:
        """How many of this forward's first columns the cache has read already.

        transformers' assisted decoding passes the whole prompt once more in its first step, mask and all.
        """
        repeated, self._repeated = self._repeated, 0
        whole = attention_mask is None or attention_mask.shape[-1] == columns
        return repeated if columns > repeated and whole else 0

    def end_forward(self) -> None:
        if self.step.iteration is None:
            self.seen += self.step.columns
            if min(self.step.counts) < self.step.columns:  # sequences grew unequally: crop would not know by how much
                self.fixed = self.seen
        self._running = False

    def check_complete(self) -> None:
        if self._running:
            raise RuntimeError(
                "this cache is incomplete: an earlier forward pass or prefill stopped before its end; call reset()"
            )

    def mark_incomplete(self, incomplete: bool = True) -> None:
        self._running, self._repeated = incomplete, 0

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
        tables and buffers of all layers. Free pages, kept for coming tokens, count in reserved_nbytes alone."""
        return sum(layer.nbytes() for layer in self.layers)

    def reserved_nbytes(self) -> int:
        """Bytes of all tensors that the cache keeps alive: free pages and those of its forks included."""
        return sum(layer.reserved_nbytes() for layer in self.layers)

    def trim(self) -> None:
        """Gives free pages back, those that dropped forks have left included: reserved_nbytes falls to about nbytes.

        Forks share pages and go on as before; pages of forks that live are not free. The next token takes new pages:
        trim a cache that will rest. With grow="error" pages are kept. Waits for the device, and needs memory for a copy
        of one layer's pages in use; RuntimeError if there is none: each layer is then trimmed or as it was. On a GPU
        the memory goes back to PyTorch's allocator: torch.cuda.empty_cache() gives it to others.
        """
        for layer in self.layers:
            layer.trim()

    @torch.inference_mode(False)
    def fork(self) -> Self:
        """An independent cache of the same state, for one of several questions over one prompt.

        Pages are shared until one of the two writes to them, and free again when no cache needs them; windows of
        StreamingCache are copied. copy.copy does the same.
        Raises RuntimeError while a prompt is being read or if the cache is incomplete.
        """
        self.check_complete()
        if self.step.iteration is not None:
            raise RuntimeError("a cache cannot be forked while a prompt is being read")
        # a rotary embedding is the model's, and its tables are the same for both
        shared = {id(x): x for x in (self.rotary, self._rotary_source) if x is not None}
        return copy.deepcopy(self, dict(shared))

    def __copy__(self) -> Self:
        return self.fork()  # what shares its layers would change with it

    def stored_lengths(self) -> list[list[list[int]]]:
        """Tokens held per layer, sequence and KV head: [L][B][Hkv]. seen_lengths() says how many tokens were seen."""
        return [layer.stored_lengths() for layer in self.layers]

    def reset(self) -> None:
        """Empties the cache and makes it usable again, whatever state it was in."""
        windows = [layer.sliding_window for layer in self.layers]
        self.layers = [self._new_layer(index, window) for index, window in enumerate(windows)]
        self.step, self.seen, self.fixed, self._batch, self._running, self._repeated = Step(), 0, 0, 0, False, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

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
            for layer in self.layers:
                layer.drop_last(-tokens_to_remove)
            self.seen += tokens_to_remove

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.layers[0].update()

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._batch *= repeats

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._batch = len(self.layers[0].stored_lengths())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._batch = len(beam_idx)
