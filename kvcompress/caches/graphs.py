"""Decoding by CUDA graphs: a whole step of a model with a compressed cache, recorded once and replayed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..hf.argument import CACHE
from .base import CompressedCache

WARM = 2  # steps that run before one is recorded: libraries take their workspaces then


def record(
    run: Callable[[], Any], device: torch.device, pool: Any = None, stream: Any = None
) -> tuple[Callable[[], None], Any]:
    """What does again on the device what run() does there, and run's results, into which it goes. Nothing is done
    yet. pool, stream: memory and a stream that recordings share which are never done at once
    (torch.cuda.graph_pool_handle), None = of their own."""
    collects = gc.isenabled()
    gc.disable()  # it may come upon an older graph, which cannot go meanwhile
    try:
        with torch.cuda.device(device):  # PyTorch's own stream for recording is one of the device that was first
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream(device) if stream is None else stream
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                results = run()
    finally:
        if collects:
            gc.enable()
    return graph.replay, results


class AsksNothing(TorchDispatchMode):
    """Raises NotImplementedError for an operation by which the host asks a device for a number, or that copies between
    memory of the host that is not pinned and a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKS:
            raise NotImplementedError(
                f"the model asks the device in each step ({func.name()}), so that none can be recorded"
            )
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _COPIES:
            both = [x for x in (*args, out) if isinstance(x, Tensor)]
            host = [x for x in both if x.device.type == "cpu"]
            if host and len(host) < len(both) and not all(x.is_pinned() for x in host):
                raise NotImplementedError(
                    f"the model copies between the host and the device in each step ({func.name()}), so that none can "
                    "be recorded"
                )
        return out


_ASKS = tuple(
    getattr(torch.ops.aten, name).default for name in ("_local_scalar_dense", "item", "is_nonzero", "nonzero")
)
_COPIES = torch.ops.aten.to, torch.ops.aten._to_copy, torch.ops.aten.copy_


def check_records(name: str, device: torch.device) -> None:
    """Raises ValueError for a device that records nothing. name: what is on it."""
    if record is _RECORD and device.type != "cuda":
        raise ValueError(f"{name} must be on a CUDA device, got {device}")


class StepGraph:
    """One decoded token of every sequence per call, as a CUDA graph: the host launches the step as a whole.

        step = kvcompress.StepGraph(model, cache)      # a prompt is in the cache
        logits = step(ids)                             # [B, 1] -> [B, 1, vocabulary]

    model: attached, on a CUDA device, in evaluation mode. cache: one whose step needs nothing of the host from token to
    token: IterativeCache, QuantizedCache, PrunedCache without `every` and RemoteGap, QuestCache, StreamingCache, and
    DMCCache (DMC, DMS) and GatedCache without track, of a model without recurrent layers. Where tokens vote (Replay,
    H2O), every 16th is launched op by op; so is one now and then that moves a stream back. Pages are taken for as many
    steps as a page has slots, before the first of them; where that replaces tensors of the cache (its pages, tables or
    windows grow), the graph is recorded anew. What else changes the cache (further prompts, forks, crop) may come
    between calls. Tokens stand behind those of their own sequence, whatever padding the prompts had.
    Raises ValueError for a model that is not on a CUDA device and for a cache that has read nothing;
    NotImplementedError for a cache, a layer or a rotary embedding (dynamic, longrope) that needs the host in each step.
    A call raises RuntimeError where max_pages leaves no page for its token, which is not counted then.
    """

    def __init__(self, model: nn.Module, cache: CompressedCache) -> None:
        if not isinstance(cache, CompressedCache):
            raise TypeError(f"cache must be a cache of kvcompress, got {type(cache).__name__}")
        if cache.facts is None or not cache.get_seq_length():
            raise ValueError("cache must hold a prompt: use kvcompress.prefill(model, ids, cache) first")
        cache.facts.check_alone("StepGraph")
        device = next(model.parameters()).device
        check_records("model", device)
        cache.check_repeats()
        if cache.facts.asks_length:
            raise NotImplementedError(
                f"layers of {type(model).__name__} ask the host how many tokens came before, so that no step can be "
                "recorded"
            )
        for facts in cache.facts.values():
            if facts.query_rotary.asks_host:
                raise NotImplementedError(
                    f"layer {facts.index} rotates by frequencies that follow the length (dynamic, longrope): the model "
                    "asks the device for it in each step, so that none can be recorded"
                )
        self.model, self.cache, self.device = model, cache, device
        self.ids = torch.zeros(cache.batch_size, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.recordings = 0  # how often a step was recorded
        self._warm = 0
        self._replay: Callable[[], None] | None = None
        self._held: list[weakref.ref[Tensor]] = []  # what the recorded step works on; what is replaced is freed
        self._logits: Tensor | None = None

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        """ids: [B, 1], int64. Returns logits [B, 1, vocabulary], a tensor of its own."""
        if not isinstance(ids, Tensor) or ids.shape != self.ids.shape:
            got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"ids must be {tuple(self.ids.shape)}, one token of each sequence, got {got}")
        cache = self.cache
        if not cache.get_seq_length():
            raise ValueError("cache must hold a prompt, got one that was emptied")
        self.ids.copy_(ids)
        self._place(cache.seen_lengths())
        if self._warm >= WARM:
            cache.prepare_steps()
        if self._warm < WARM or cache.steps_ahead() < 1:
            self._warm += 1
            return self._step().clone()
        held = cache.held_tensors()
        if self._replay is None or not _same(held, self._held):
            self._replay = self._logits = None  # gives its memory back before the next one takes its own
            # the host counts the token now, the device below
            self._replay, self._logits = record(self._step, self.device)
            self._held = [weakref.ref(x) for x in cache.held_tensors()]
            self.recordings += 1
            self._replay()
        else:
            self._replay()
            cache.count_step()  # while the device works
        assert self._logits is not None
        return self._logits.clone()

    def _place(self, lengths: list[int]) -> None:
        """Models that add what they learned of a position look at it; others are given positions by the cache."""
        if min(lengths) == max(lengths):
            self.positions.fill_(lengths[0])
        else:
            self.positions.copy_(torch.tensor(lengths, device="cpu")[:, None])

    def _step(self) -> Tensor:
        return self.model(self.ids, position_ids=self.positions, **{CACHE: self.cache}).logits


def _same(some: list[Tensor], others: list[weakref.ref[Tensor]]) -> bool:
    """Whether these are the same tensors, as objects: memory is used again."""
    return len(some) == len(others) and all(x is y() for x, y in zip(some, others, strict=True))


_RECORD = record
