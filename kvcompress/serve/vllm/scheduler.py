"""vLLM's scheduler and KV cache manager, which ask an engine whether pages are there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request, RequestStatus

from ..bounds import most_whole
from ..order import LOOKED_AT
from .attention import CompressedSpec
from .engine import ENGINES, Engine

logger = init_logger(__name__)


class CompressedManager(FullAttentionManager):
    """A request holds as many of vLLM's blocks as its pages make; whether there are pages, the engine says."""

    def __init__(self, kv_cache_spec: CompressedSpec, **given: Any) -> None:
        super().__init__(kv_cache_spec, **given)
        self.engine = ENGINES[kv_cache_spec.engine]
        self._record_new_block_ids = False  # a block is no place in memory

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[Any], total_computed_tokens: int,
        num_local_computed_tokens: int, num_tokens_main_model: int, apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:  # fmt: skip
        if apply_admission_cap:
            return 0  # it asks again, with the tokens that come first
        if not self.engine.has_room(request_id, total_computed_tokens, num_tokens):
            return int(self.block_pool.get_num_free_blocks()) + 1
        return self._missing(request_id)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        held = self.req_to_blocks[request_id]
        new = self.block_pool.get_new_blocks(self._missing(request_id))
        if not held:
            self.engine.named(request_id, new[0].block_id)
        self.engine.grant(request_id, num_tokens)
        held.extend(new)
        return list(new)

    def free(self, request_id: str) -> None:
        held = self.req_to_blocks.get(request_id)
        self.engine.drop(request_id, held[0].block_id if held else None)
        super().free(request_id)

    def _missing(self, request_id: str) -> int:
        held = len(self.req_to_blocks.get(request_id, ()))
        if not held:
            return 1
        return max(min(self.engine.blocks_of(request_id) - held, self.block_pool.get_num_free_blocks()), 0)


def register_spec() -> None:
    """Tells vLLM which manager counts the pages of a CompressedSpec. May be called again."""
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # its own come first
    KVCacheSpecRegistry.register(CompressedSpec, CompressedManager, FullAttentionSpec)


class Again(Request):
    """A request that gave its pages up, of a cache that reads prompts whole: what it has written follows its prompt
    token by token, as it did before. least: tokens up to the one with which it goes on."""

    least = 0

    @property
    def num_tokens(self) -> int:
        every = len(self._all_token_ids)
        return min(every, max(self.num_prompt_tokens, self.num_computed_tokens + 1, self.least))

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens


class CompressedScheduler(Scheduler):
    """All that decode come first, each with a token in every step; of prompts so many tokens are read as surely find
    their pages. A request that has all pages and needs more ends with finish_reason "error"."""

    max_num_scheduled_tokens: int

    def __init__(self, vllm_config: Any, kv_cache_config: Any, **given: Any) -> None:
        self.engine: Engine = ENGINES[vllm_config.instance_id]
        self._key, self._scheduling = vllm_config.instance_id, False
        layers = vllm_config.compilation_config.static_forward_context
        caches = [layers[name].kv_cache for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
        self.engine.open(_bytes_of(caches), kv_cache_config.num_blocks)
        super().__init__(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **given)
        self.engine.known = self.requests
        # asks _mamba_block_aligned_split how many tokens of a prompt a step may have
        requests = self.engine.requests
        requests.most = most_whole(self.max_num_scheduled_tokens, self.max_num_running_reqs)
        if self.scheduler_config.enable_chunked_prefill and (requests.last or 0) > requests.most:
            raise ValueError(
                f"max_num_batched_tokens must be at least {requests.last + self.max_num_running_reqs - 1} with "
                f"{self.engine.settings.cache!r} and max_num_seqs = {self.max_num_running_reqs}, got "
                f"{self.max_num_scheduled_tokens}: a prompt's last {requests.last} tokens come in one step"
            )
        self.need_mamba_block_aligned_split = requests.prefixes.most > 0 or requests.whole

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.resumable:
            reason = "its prompt comes in parts of the client's own (resumable), which no compressed cache takes"
            self.engine.failed[request.request_id] = reason

    def schedule(self, throttle_prefills: bool = False) -> Any:
        engine, budget = self.engine, self.max_num_scheduled_tokens
        engine.start_step()
        decoding = set(engine.decoding)
        self.running.sort(key=lambda request: request.request_id not in decoding)
        engine.waiting = bool(self.waiting)
        self._order()
        self._scheduling = True
        try:
            self.max_num_scheduled_tokens = self._most_tokens(budget)
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens, self._scheduling = budget, False

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        failed, self.engine.failed = self.engine.failed, {}
        clients = {name: self.requests[name].client_index for name in failed if name in self.requests}
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        for name, reason in failed.items():
            logger.error("Request %s ends: %s", name, reason)
        self.finish_requests(failed.keys() & self.requests.keys(), RequestStatus.FINISHED_ERROR)
        for name, client in clients.items():
            mine = outputs.setdefault(client, EngineCoreOutputs())
            # what it wrote in this very step is of a pass that failed, also where that token was its last
            mine.outputs = [x for x in mine.outputs if x.request_id != name]
            mine.outputs.append(EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR))
        if not self.running:
            self.engine.settle()
        return outputs

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            self.engine.requests.lengths.note(request.num_output_tokens)
            self.engine.requests.ends(request.request_id, list(request.all_token_ids))
        return super()._free_request(request, *args, **kwargs)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        done: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)
        self.engine.requests.drop_prefixes()
        if reset_running_requests:
            self.engine.requests.swap.clear()
            for request in self.waiting:
                self._read_again(request)
        return done

    def _get_local_prefix_cache_hit(self, request: Any) -> tuple[Any, int, int, bool]:
        return self.kv_cache_manager.empty_kv_cache_blocks, self.engine.there(request.request_id), 0, False

    def _mamba_block_aligned_split(
        self, request: Any, num_new_tokens: int, num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:  # fmt: skip
        return self.engine.most_of(request.request_id, num_new_tokens)

    def shutdown(self) -> None:
        super().shutdown()
        ENGINES.pop(self._key, None)

    def _order(self) -> None:
        """Of those that wait, who gave its pages up stays in front."""
        front = list(itertools.islice(self.waiting, LOOKED_AT))
        names = [request.request_id for request in front if request.status != RequestStatus.PREEMPTED]
        following = iter(self.engine.order(names))
        for i, request in enumerate(front):
            if request.status != RequestStatus.PREEMPTED:
                self.waiting[i] = self.requests[next(following)]

    def _most_tokens(self, budget: int) -> int:
        """Tokens of this step: no more of prompts than surely find their pages."""
        engine, running = self.engine, [request.request_id for request in self.running]
        waiting = [request.request_id for request in self.waiting]
        most = engine.most_read(running, waiting, budget)
        if most == 0 and not running and waiting and engine.requests.drop_prefixes():  # its own, too
            most = engine.most_read(running, waiting, budget)
        if most == 0 and not running and self.waiting:  # nobody will give pages back
            name = self.waiting.peek_request().request_id
            engine.failed[name] = self._too_few(self.requests[name])
        if most is None or not (most or engine.decoding):  # those that are read must give pages up
            return budget
        return min(budget, len(engine.decoding) + most)

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        alone = self._scheduling and not self.running
        if self._scheduling and not alone:  # else all are to be read again, by new weights perhaps
            self.engine.give_up(request.request_id)
        super()._preempt_request(request, timestamp, drop_stale_output)
        if alone:
            self.engine.failed[request.request_id] = self._too_few(request)
            return
        self.engine.preempted += 1
        self.engine.settle()
        if request.request_id not in self.engine.requests.swap:
            self._read_again(request)
        elif isinstance(request, Again):
            request.least = self.engine.requests.swap.seen(request.request_id) + 1

    def _read_again(self, request: Any) -> None:
        """From its first token on."""
        if self.engine.whole and request.num_output_tokens:
            request.__class__, request.least = Again, 0

    def _too_few(self, request: Any) -> str:
        tokens = len(request._all_token_ids)
        return f"needs more than all {self.engine.requests.pages} pages of the KV cache after {tokens} tokens"


def _bytes_of(caches: Sequence[Tensor]) -> Tensor:
    """The memory of all layers, of which each layer's cache is a part. Raises RuntimeError where it is not one."""
    found = {(cache.device, cache.untyped_storage().data_ptr()) for cache in caches}
    if len(found) > 1:
        raise RuntimeError(
            f"vLLM's KV cache must be one allocation for all layers, as in vLLM 0.32.0, got {len(found)}: pages of "
            "compressed rows are any layer's"
        )
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=caches[0].device).set_(caches[0].untyped_storage())
