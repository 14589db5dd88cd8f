"""transformers' continuous batching over compressed caches: model.generate_batch and managers."""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import RequestState

from ..caches.graphs import check_records
from ..caches.spec import CacheSpec
from ..caches.store import PoolSettings
from ..hf.argument import CACHE
from ..hf.attach import attach, base_model, detach, facts_of
from ..hf.config import decoder_config
from ..hf.facts import Facts
from ..hf.method import method_of
from ..hf.now import coming
from ..support.checks import MOST_INT32, need_integer, renamed
from ..support.units import Tokens, tokens_of
from .apart import Apart
from .memory import check_free, free_nbytes, memory_nbytes, swap_nbytes
from .recorded import Recordings
from .requests import Requests
from .scheduler import PageScheduler
from .served import cache_maker, spec_of
from .served_pass import ServedPass
from .slots import Slots, sizes_to_record

_ATTRIBUTE, _CACHED = "init_continuous_batching", "_cached_continuous_batching_manager"  # of a model
NAN = "the model's logits hold NaN: a layer's weights or inputs do, or overflowed"
SECONDS = 10.0  # over which tokens/s are counted
METRICS = (
    "pages", "pages_in_use", "peak_pages", "page_nbytes", "running", "waiting", "peak_running", "preempted",
    "swapped", "prefix_pages", "prefix_tokens", "tokens_per_second",
)  # fmt: skip
# fields of a ContinuousBatchingConfig that must be unset or this
_FIXED: dict[str, tuple[Any, ...]] = {
    "num_blocks": (None,), "use_async_batching": (None, False), "use_cuda_graph": (None, False),
    "varlen_compile_config": (None,), "decode_compile_config": (None,), "default_compile_level": (0,),
    "cpu_offload_space": (None, 0.0),
}  # fmt: skip


class _Bookkeeping:
    """In PagedAttentionCache's place, where transformers asks a cache: pages are Requests' to count."""

    max_blocks_per_request = max_decode_fast_path_length = read_cache_limit = 0
    max_tokens_read = bytes_per_sector = 1
    use_prefix_sharing = allow_block_sharing = False

    def __init__(self, served: Requests, max_batch_tokens: int) -> None:
        self.served, self.max_batch_tokens, self.num_blocks = served, max_batch_tokens, served.pages
        self.cache_allocators = {
            "full_attention": SimpleNamespace(
                index=0, write_trash_index=0, read_trash_index=0, block_table={}, bytes_per_block=1,
                blocks_per_sector=1, get_seqlen_k=lambda past, count: count,
            )
        }  # fmt: skip

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self.served.drop(request_id)

    def free_all_requests(self) -> None:
        self.served.drop_all()

    def extend_read_and_write_indices(self, *args: Any) -> None:
        """There is nothing to index."""

    def mark_complete_blocks(self, *args: Any) -> None:
        """No block is shared."""


class _Runner(ModelRunner):
    """nan: bool [n], whether the last pass's logits of a token hold NaN; None before the first."""

    nan: Tensor | None = None

    def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
        self.nan = scores[0].isnan().any(-1)
        super()._sample(scores, output_ids)


class _Recorded:
    """In a model's place, for passes in which all requests decode (`current`): one token of each, a batch [n, 1]."""

    current: ServedPass

    def __init__(self, model: Any, slots: Slots, device: torch.device) -> None:
        self.model, self.slots = model, slots
        self.tokens = torch.zeros(2, slots.sizes[-1], 1, dtype=torch.long, device=device)  # ids and positions
        self.recordings = Recordings(model, slots, device, self._run)

    def _supports_logits_to_keep(self) -> bool:
        """As transformers asks the model, once for all its passes."""
        asked = getattr(self.model, "_supports_logits_to_keep", None)
        return asked is not None and bool(asked())

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor | None = None, **other: Any
    ) -> Any:
        """input_ids, position_ids: [1, n]. logits_to_keep: int [m], of these tokens; None = all. Returns what has
        logits, [1, m, V]."""
        n = input_ids.shape[1]
        self.tokens[0, :n], self.tokens[1, :n] = input_ids.T, position_ids.T
        self.current.turn = -1
        logits = self.recordings.step(self.current)[None]
        return SimpleNamespace(logits=logits[:, :n] if logits_to_keep is None else logits[:, logits_to_keep])

    def try_out(self, facts: Facts) -> None:
        """Raises NotImplementedError for a model whose step cannot be recorded."""
        self.current = ServedPass(facts, None, ())
        self.current.size, self.current.turn = self.slots.sizes[0], -1
        with coming(self.current), torch.inference_mode():
            self.recordings.try_out(self.current)

    def _run(self, size: int) -> Tensor:
        """Logits [size, V]."""
        ids, places = self.tokens[:, :size]
        cache = self.slots.caches[size]  # which says that no token came before: a mask would cost the host
        logits: Tensor = self.model(input_ids=ids, position_ids=places, use_cache=True, **{CACHE: cache}).logits
        return logits[:, -1]


class _Processor(ContinuousBatchProcessor):
    """One pass after another, as transformers has it, each a ServedPass."""

    scheduler: PageScheduler

    def __init__(self, *, served: Requests, **given: Any) -> None:
        super().__init__(**given)
        self.served = served
        # pages change on the stream of whoever calls, before a pass and after it: the pass must be on the same
        self.inputs_and_outputs.compute_stream = None
        self.model_runner = _Runner(
            logit_processor=self.logit_processor, cb_config=self.cb_config, cache=self.cache,
            inputs_and_outputs=self.inputs_and_outputs, do_sample=self.do_sample, return_logprobs=self.return_logprobs,
        )  # fmt: skip
        self.recorded: _Recorded | None = None
        self.failed: dict[str, str] = {}
        self.new_tokens: deque[tuple[float, int]] = deque()  # when, and how many
        self.begun: float | None = None  # when the first pass did

    def prepare_next_batch(self) -> bool:
        more: bool = super().prepare_next_batch()
        if not more:
            self.served.settle()  # who left last gives its pages back now
        return more

    @torch.no_grad()
    def _generation_step(self, model: nn.Module) -> None:
        given, served = self.inputs_and_outputs.get_model_kwargs(), self.served
        self.begun = self.begun or time.monotonic()
        current = served.begin(self.scheduler.parts, waiting=bool(self.scheduler.waiting_requests))
        names = ("input_ids", "position_ids", "logits_indices", "logits_processor_args")
        inputs = {name: given[name] for name in names} | {"use_cache": False}
        with coming(current):
            self.model_runner.compute_batch(self._runs(model, current), inputs)
        self.inputs_and_outputs.retrieve_device_outputs()
        served.end()
        self.failed = dict(current.failed)
        assert self.model_runner.nan is not None
        asked = [future for future in self.inputs_and_outputs.requests_in_batch if future.has_new_token]
        for future, nan in zip(asked, self.model_runner.nan.tolist(), strict=False):
            if nan:
                name = future.state.request_id
                self.failed.setdefault(name, f"request {name} cannot go on: {NAN}")
        self._count(len(asked))

    def _runs(self, model: nn.Module, current: ServedPass) -> Any:
        """What runs a pass of the model."""
        served = self.served
        if served.recurs:
            return Apart(model, served, current)
        if served.slots is None or current.size is None:
            return model
        if self.recorded is None:
            self.recorded = _Recorded(model, served.slots, served.store.refs.device)
        self.recorded.current = current
        return self.recorded

    def update_batch(self) -> None:
        ios, failed = self.inputs_and_outputs, self.failed
        if failed:
            batch = ios.requests_in_batch
            asked = [future for future in batch if future.has_new_token]
            good = [i for i, future in enumerate(asked) if future.state.request_id not in failed]
            ios.output_ids[:, : len(good)] = ios.output_ids[:, good]
            ios.requests_in_batch = [future for future in batch if future.state.request_id not in failed]
            for future in batch:
                if (reason := failed.get(future.state.request_id)) is not None:
                    self.scheduler.fail(future.state, RuntimeError(reason))
                    self.scheduler.finish_request(future.state.request_id)
                    self.scheduler.block_new_requests = False
            self.failed = {}
        super().update_batch()

    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        name = state.request_id
        if name in self.scheduler.active_requests and self.scheduler.active_requests[name] is not state:
            self.output_router.fail_and_deliver(state, error)  # what another request of this id wrote is not its own
        else:
            super()._handle_request_error(error, state)

    def fail_all_requests(self, error: Exception) -> None:
        super().fail_all_requests(error)
        self.served.drop_all()
        self.served.settle()

    def _count(self, tokens: int) -> None:
        now = time.monotonic()
        self.new_tokens.append((now, tokens))
        while self.new_tokens[0][0] < now - SECONDS:
            self.new_tokens.popleft()


class _Asked:
    """A model as transformers' manager asks for it when it is made, by a config that names no kinds of layers: it would
    refuse those that its own pages do not know, and what it decides by the others is turned off here."""

    config = PreTrainedConfig(num_hidden_layers=1)

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def eval(self) -> _Asked:
        self._model.eval()
        return self


class ServedManager(ContinuousBatchingManager):
    """transformers' manager, whose requests' caches are compressed."""

    def __init__(
        self, batching: Batching, generation_config: GenerationConfig, config: ContinuousBatchingConfig, hints: Any
    ) -> None:
        for name, allowed in _FIXED.items():
            if (value := getattr(config, name)) not in allowed:
                hint = ": give it cuda_graphs=True" if name == "use_cuda_graph" else ""
                raise ValueError(f"{name} must be {allowed[-1]} with kvcompress.serve.batching, got {value!r}{hint}")
        super().__init__(_Asked(batching.model), generation_config, config, hints)
        self.model = batching.model
        if self.distributed_helper.tp_size > 1:  # ranks would count pages of their own, and part ways
            raise ValueError("model must be on one device to be served, got one that is divided by tensor parallelism")
        self.batching = batching
        config = self.continuous_batching_config
        config.use_async_batching, config.allow_block_sharing = False, False
        config.max_batch_tokens = config.max_batch_tokens or batching.batch_tokens
        config.max_requests_per_batch = min(config.max_requests_per_batch, batching.requests, config.max_batch_tokens)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """The model's attention stays what attach made of it."""

    def start(self) -> None:
        """Raises RuntimeError once its Batching is closed: the model attends as it did before."""
        if vars(self.model).get(_ATTRIBUTE) != self.batching._manager:
            raise RuntimeError("the manager's Batching is closed: make another by kvcompress.serve.batching")
        super().start()

    def add_request(
        self, input_ids: list[int], request_id: str | None = None, max_new_tokens: int | None = None, *args: Any,
        **given: Any,
    ) -> str | None:  # fmt: skip
        """transformers', but that without max_new_tokens an answer is as long as model.generate's."""
        if max_new_tokens is None:
            max_new_tokens = self._longest_answer(len(input_ids))
        added: str | None = super().add_request(input_ids, request_id, max_new_tokens, *args, **given)
        return added

    def _longest_answer(self, prompt: int) -> int:
        configs = (self.generation_config, self.model.generation_config)
        for config in configs:
            if config.max_new_tokens is not None:
                return int(config.max_new_tokens)
        for config in configs:
            if config.max_length is not None:
                return int(config.max_length) - prompt
        return min(20, (getattr(self.model.config, "max_position_embeddings", None) or MOST_INT32) - prompt)

    def _forget(self, request: str) -> None:
        with self.output_router._lock:
            self.output_router.result_handlers.pop(request, None)

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        if self.batch_processor is not None:
            return super()._create_batch_processor()
        config, model = self.continuous_batching_config, self.model
        served = self.batching.served
        served.drop_all()  # prefixes too: the model may have been trained since
        self.batching._hits_before, self.batching._swapped_before = served.prompts.hits, served.swap.count
        cache = _Bookkeeping(served, config.max_batch_tokens)

        self.batching.processor = processor = _Processor(
            served=served, cache=cache, config=model.config.get_text_config(),
            generation_config=self.generation_config, continuous_batching_config=config,
            logit_processor=self.logit_processor, input_queue=self.input_queue if self.is_tp_driver else None,
            cancel_queue=self.cancel_queue if self.is_tp_driver else None, output_router=self.output_router,
            background_thread_status=self.background_thread_status, model_device=model.device, model_dtype=model.dtype,
            distributed_helper=self.distributed_helper,
            scheduler=PageScheduler(
                cache, served, config.max_requests_per_batch, self.output_router.fail_and_deliver, self._forget
            ),
        )  # fmt: skip
        return processor


class Batching:
    """What batching returns, and takes its arguments: model, cache, pages, memory, page_size, requests, batch_tokens,
    prefixes, swap, cuda_graphs. As a context manager it is undone at the end. Raises as batching does. served: the
    requests and their pages.
    """

    def __init__(
        self, model: Any, cache: str | CacheSpec | None, pages: int | None, memory: int | str | None, page_size: int,
        requests: int, batch_tokens: Tokens, prefixes: int | None, swap: int | str | None, cuda_graphs: bool,
    ) -> None:  # fmt: skip
        need_integer("requests", requests, 1)
        batch_tokens = tokens_of("batch_tokens", batch_tokens, requests)
        if pages is not None and memory is not None:
            raise ValueError(f"pages must not be given beside memory, got {pages!r} and {memory!r}")
        self.memory = None if memory is None else memory_nbytes(memory)
        self.model, self.requests, self.batch_tokens = model, requests, batch_tokens
        self.page_size, self.dtype = PoolSettings(page_size).page_size, model.dtype
        self.prefixes, self._hits_before, self._swapped_before = prefixes, 0, 0
        self.swap = None if swap is None else swap_nbytes(swap)
        if cuda_graphs:
            check_records("model", model.device)
            if self.page_size == 1:
                raise ValueError("page_size must be at least 2 with cuda_graphs, got 1")
        self.cuda_graphs = cuda_graphs
        self.spec = spec_of(cache, decoder_config(model.config))
        self.processor: _Processor | None = None
        self._last: ServedManager | None = None
        if _ATTRIBUTE in vars(model):
            raise RuntimeError("model is served already: close() the Batching before")
        self._make = cache_maker(self.spec, model.config, self.page_size)
        attach(model)
        try:
            self.served = self._requests(pages)
            if self.served.slots is not None:
                _Recorded(model, self.served.slots, self.served.store.refs.device).try_out(self.served.facts)
        except BaseException:
            detach(model)
            raise
        object.__setattr__(model, _ATTRIBUTE, self._manager)

    def _requests(self, pages: int | None) -> Requests:
        model, decoder = self.model, base_model(self.model)
        facts, method = facts_of(decoder), method_of(decoder)
        facts.check_alone("kvcompress.serve.batching")
        counted = self._pages_within if pages is None else pages
        return Requests(
            decoder, facts, method, self._make, counted, model.dtype, model.device, prefixes=self.prefixes,
            swap=self.swap, recorded=sizes_to_record(self.requests) if self.cuda_graphs else (),
        )  # fmt: skip

    def _pages_within(self, page_nbytes: int) -> int:
        """Pages of so many bytes within the memory."""
        free = free_nbytes(self.model.device)
        nbytes = free // 2 if self.memory is None else self.memory
        check_free(nbytes, free, self.model.device)
        if nbytes < page_nbytes:
            raise ValueError(f"memory must be at least a page, {page_nbytes} bytes, got {nbytes}")
        return min(nbytes // page_nbytes, MOST_INT32)

    @property
    def pages(self) -> int:
        """Of all requests together."""
        return self.served.pages

    @torch.no_grad()
    def _manager(
        self, generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None, workload_hints: Any = None,
    ) -> ServedManager:  # fmt: skip
        """In the place of the model's init_continuous_batching, whose arguments it takes."""
        if self.model.dtype != self.dtype:
            raise ValueError(f"model must be of {self.dtype}, as when batching() was called, got {self.model.dtype}")
        if self._last is not None and self._last.is_running():
            raise RuntimeError("a manager of this model's requests is running: stop() it before another is made")
        generation = generation_config or self.model.generation_config
        if generation.eos_token_id is None:
            generation.eos_token_id = -1  # as transformers has it: none
        config = continuous_batching_config or ContinuousBatchingConfig()
        self._last = ServedManager(self, generation, config, workload_hints)
        return self._last

    def metrics(self) -> dict[str, float]:
        """Of the last manager: pages, pages_in_use, peak_pages (most in use at once), page_nbytes; running and waiting
        requests, peak_running (most at once), preempted (how often one gave its pages up), swapped (how often what it
        held was kept); prefix_pages (that only
        prefixes hold), prefix_tokens (of prompts, that were not read since a prefix had them); tokens_per_second over
        the last 10 s, or since the first request. Before that numbers are 0, but pages and page_nbytes."""
        own = {"pages": self.pages, "page_nbytes": self.served.bounds.page_nbytes}
        numbers = dict.fromkeys(METRICS, 0.0) | own
        if self.processor is not None:
            scheduler, now = self.processor.scheduler, time.monotonic()
            since = max(now - SECONDS, self.processor.begun or 0.0)
            recent = [tokens for at, tokens in list(self.processor.new_tokens) if at > since]
            numbers |= {
                "pages_in_use": self.served.used,
                "peak_pages": scheduler.peak_pages,
                "running": len(scheduler.active_requests),
                "waiting": len(scheduler.waiting_requests),
                "peak_running": scheduler.peak,
                "preempted": scheduler.preempted,
                "swapped": self.served.swap.count - self._swapped_before,
                "prefix_pages": self.served.kept,
                "prefix_tokens": self.served.prompts.hits - self._hits_before,
                "tokens_per_second": sum(recent) / (now - since),
            }
        return numbers

    def close(self) -> None:
        """The model's own continuous batching is back. A manager that still runs is stopped, and its requests fail."""
        if vars(self.model).get(_ATTRIBUTE) != self._manager:
            return
        object.__delattr__(self.model, _ATTRIBUTE)
        if self._last is not None and self._last.is_running():
            self._last.stop(block=True, hard_stop=True)
        if isinstance(getattr(self.model, _CACHED, None), ServedManager):  # for a next session, which would not be ours
            self.model.destroy_cached_continuous_batching_manager()
        detach(self.model)

    def __enter__(self) -> Batching:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@renamed(keep="in the cache's text ('pruned,keep=1/4')")
def batching(
    model: Any, cache: str | CacheSpec | None = None, *, pages: int | None = None, memory: int | str | None = None,
    page_size: int = 64, requests: int = 64, batch_tokens: Tokens = 2048, prefixes: int | None = None,
    swap: int | str | None = None, cuda_graphs: bool = False,
) -> Batching:  # fmt: skip
    """Makes a model's continuous batching (generate_batch, init_continuous_batching) hold compressed caches, all
    requests' in one store of pages.

        with kvcompress.serve.batching(model, "dmc", memory="8GiB"):
            results = model.generate_batch(prompts, generation_config=GenerationConfig(max_new_tokens=64))

    model: a transformers model; it is attached until the end. cache: as CacheSpec writes it: dense, dmc (DMS too),
    pruned or streaming; None = a converted model's own, else dense. Greedy tokens are those that model.generate gives
    each prompt alone with this cache. memory: of all pages, bytes or a text such as "8GiB"; or pages: how many they
    are, of all requests, layers and KV heads together; neither: half of what is free on the model's device. A page
    holds page_size keys and values of one KV head, a power of two; windows of streaming, DMS and gates count as pages.
    requests: most at once; what else each keeps (the newest entry of DMC, recurrent states) comes on top. batch_tokens:
    of a pass; longer prompts are read in parts, but those of a pruned cache, or of recurrent layers that begin anew in
    every call of several tokens, which must fit. prefixes: most that are kept of prompts that begin alike, so as not to
    be read again, each with what a request keeps beside pages; 0 = none, None = 16, but none where prompts must fit;
    the one that was asked for longest ago goes first, also where pages run out.
    swap: bytes of the host's memory, as memory says them, for what requests hold that give their pages up; None = an
    eighth of the pages', 0 = they are read again.
    cuda_graphs: whether passes in which all requests decode are launched as a whole, recorded once for each of some
    sizes of the batch; they take a page, and tables and windows for as many requests as there may be. For dense,
    quantized and DMC caches, and pruned ones that ask nothing while decoding, of models on a GPU without recurrent
    layers; NotImplementedError for others.
    Without max_new_tokens an answer is as long as that of model.generate (20 tokens, where no config says otherwise).
    Out of pages, the request that came last waits, and goes on from what swap kept of it; one that cannot fit alone
    fails with an error that says so. Raises ValueError for caches, settings and models that cannot be served,
    RuntimeError for a model that is.
    """
    return Batching(model, cache, pages, memory, page_size, requests, batch_tokens, prefixes, swap, cuda_graphs)
