"""vLLM's own model classes, whose attention layers hand over queries and keys as they are before rotation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.worker.workspace import is_workspace_manager_initialized, lock_workspace

from ...hf.facts import LayerFacts
from ...hf.probe import like
from ...hf.seam import is_rotary
from ...ops.softmax import Softmax
from ...positions import NormedTables, parts
from ..recorded import Recordings
from ..slots import Slots
from .attention import CompressedAttention, Metadata, softmax_of
from .config import PREFIX
from .engine import ENGINES, Engine
from .scheduler import register_spec
from .settings import Settings
from .states import States

_ROTARY = "vllm.model_executor.layers.rotary_embedding."


def __getattr__(name: str) -> Any:
    """The class of a model of vLLM's over compressed caches, by that one's name behind PREFIX."""
    theirs = ModelRegistry.models.get(name.removeprefix(PREFIX))
    if not name.startswith(PREFIX) or theirs is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = type(name, (Compressed, theirs.load_model_cls()), {"__module__": __name__})
    return globals()[name]


class Unrotated(nn.Module):
    """In the place of a rotary embedding."""

    def forward(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return query, key


class Compressed:
    """Of a model class of vLLM's: makes its engine, and its attention layers that engine's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        register_spec()
        model, cache = vllm_config.model_config, vllm_config.cache_config
        settings = Settings.asked(vllm_config.additional_config, model.hf_config)
        assert settings is not None
        # first: vLLM changes those of transformers' classes that it runs itself
        engine = Engine(settings, model.hf_config, model.dtype, cache.block_size)
        names = model.hf_config.architectures
        model.hf_config.architectures = [name.removeprefix(PREFIX) for name in names]  # by which it knows its weights
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        model.hf_config.architectures = names
        modules: list[Any] = list(self.modules())  # type: ignore[attr-defined]
        found = {
            extract_layer_index(child.layer_name): (module, name, child)
            for module in modules for name, child in module.named_children() if isinstance(child, Attention)
        }  # fmt: skip
        if sorted(found) != sorted(engine.facts):
            raise ValueError(
                f"{type(self).__name__} must attend by vLLM's Attention in layers {sorted(engine.facts)}, got "
                f"{sorted(found)}"
            )
        turning = _stilled(getattr(self, "model", None))
        for index, (module, name, attention) in sorted(found.items()):
            facts = engine.facts[index]
            _check(attention, facts, engine.softmax[index])
            rotary = {key: child for key, child in module.named_children() if _is_rotary(child)}
            if facts.rotates and not (facts.beside or rotary or turning):
                raise ValueError(f"layer {index} must rotate by a module beside its attention in vLLM, got none")
            for key, child in rotary.items():
                engine.facts[index] = _as_rotated(facts, child) if facts.rotates else facts
                setattr(module, key, Unrotated())
            for tables in (facts.query_rotary, facts.key_rotary):
                if isinstance(tables, NormedTables):  # a norm follows the rotation, by vLLM's weights
                    tables.norm.weight = getattr(module, tables.norm.place).weight
            setattr(module, name, CompressedAttention(attention, index, vllm_config))
        odd = [x for x in self.modules() if _is_rotary(x)]  # type: ignore[attr-defined]
        layers = vllm_config.compilation_config.static_forward_context
        recurrent = {name: x for name, x in layers.items() if isinstance(x, MambaBase)}
        ours = (CompressedAttention, MambaBase)
        odd += [x for x in layers.values() if isinstance(x, AttentionLayerBase) and not isinstance(x, ours)]
        if odd:
            raise ValueError(
                f"layers must attend by vLLM's Attention and rotate beside it, got {type(odd[0]).__name__}"
            )
        if recurrent:
            engine.states = States(recurrent, vllm_config)
            engine.bounds.beside += -(-engine.states.nbytes // engine.page_nbytes)
            self.register_forward_pre_hook(_tell)  # type: ignore[attr-defined]
        if settings.cuda_graphs:
            engine.recorded_most = vllm_config.scheduler_config.max_num_seqs
        self._engine = engine
        ENGINES[vllm_config.instance_id] = engine

    def __call__(self, input_ids: Tensor, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        """A step of those who decode alone is taken by a recording, where such were asked for."""
        engine, whole = self._engine, super().__call__  # type: ignore[misc]
        if engine.recorded is None:
            return whole(input_ids, positions, *args, **kwargs)
        if not hasattr(self, "_recorded"):
            assert engine.requests.slots is not None
            model = functools.partial(whole, *args, **kwargs)
            self._recorded = Recorded(self, model, engine.requests.slots, input_ids, positions)
        return self._recorded.step(engine, input_ids, positions)


class Recorded:
    """Steps of a model of vLLM's over input_ids [n] and positions [..., n]."""

    def __init__(
        self, model: Any, whole: Callable[..., Any], slots: Slots, input_ids: Tensor, positions: Tensor
    ) -> None:
        """whole: the call of the model as vLLM has it."""
        most = slots.sizes[-1]
        self.model = whole
        if is_workspace_manager_initialized():
            lock_workspace()  # as vLLM does where it records: what grows later moves
        self.ids, self.places = input_ids.new_zeros(most), positions.new_zeros(*positions.shape[:-1], most)
        self.recordings = Recordings(model, slots, input_ids.device, self._run)

    def step(self, engine: Engine, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [n, hidden]."""
        n = len(input_ids)
        self.ids[:n], self.places[..., :n] = input_ids, positions
        assert engine.recorded is not None
        hidden = self.recordings.step(engine.recorded)
        engine.end()
        return hidden[:n]

    def _run(self, size: int) -> Tensor:
        hidden: Tensor = self.model(input_ids=self.ids[:size], positions=self.places[..., :size])
        return hidden


def _tell(*_: Any) -> None:
    """Recurrent layers, of whose cache vLLM does not know, are told of the step."""
    told = get_forward_context().attn_metadata
    if isinstance(told, dict):
        for metadata in [x for x in told.values() if isinstance(x, Metadata)][:1]:
            told.update(metadata.states)


def _stilled(model: Any) -> bool:
    """The rotary embeddings of a model whose code is transformers' own rotate by nothing. Whether there is one."""
    rotary = [x for x in model.modules() if is_rotary(x)] if isinstance(model, PreTrainedModel) else []
    for module in rotary:
        module.register_forward_hook(_still)
    return bool(rotary)


def _still(module: nn.Module, args: Any, out: Any) -> Any:
    cos, sin = parts(out)
    return like(out, torch.ones_like(cos), torch.zeros_like(sin))


def _is_rotary(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_ROTARY) and hasattr(module, "rotary_dim")


def _check(attention: Any, facts: LayerFacts, softmax: Softmax) -> None:
    """Raises ValueError where vLLM's layer is not what transformers' is."""
    target, window, own = attention.kv_sharing_target_layer_name, attention.sliding_window, softmax_of(attention.impl)
    if facts.window is not None and window == facts.window + 1:  # so vLLM reads Cohere's config
        window = facts.window
    near = softmax.scale == 1 or math.isclose(own.scale, softmax.scale, rel_tol=1e-4)  # 1: queries are scaled (OPT)
    for name, here, there in (
        ("query heads", attention.num_heads, facts.query_heads), ("KV heads", attention.num_kv_heads, facts.kv_heads),
        ("head dim", attention.head_size, facts.head_dim), ("value dim", attention.head_size_v, facts.value_dim),
        ("window", window, facts.window), ("chunk", getattr(attention, "attention_chunk_size", None), facts.chunk),
        ("layer to read", None if target is None else extract_layer_index(target), facts.reads),
        ("ALiBi", getattr(attention.impl, "alibi_slopes", None) is not None, facts.beside > 0),
        ("scale", own.scale, own.scale if near else softmax.scale), ("softcap", own.softcap, softmax.softcap),
        ("sinks", own.sink_logits is not None, softmax.sink_logits is not None),
    ):  # fmt: skip
        if here != there:
            raise ValueError(f"layer {facts.index} has {name} {here} in vLLM, and {there} in transformers")


def _as_rotated(facts: LayerFacts, rotary: Any) -> LayerFacts:
    """facts, in the order in which vLLM's rotary embedding pairs coordinates. Raises ValueError where it rotates
    otherwise."""
    if facts.query_rotary.asks_host and getattr(rotary, "is_neox_style", True) == (facts.order is None):
        return facts  # whose frequencies follow the length, and in vLLM one length
    dtype, device = torch.get_default_dtype(), next(rotary.buffers()).device
    last = min(1000, getattr(rotary, "max_position_embeddings", 8) - 1)
    at = torch.arange(8, dtype=torch.int32, device=device) * last // 7
    x = torch.arange(8 * facts.head_dim, device=device).sin().to(dtype).view(1, 1, 8, -1)
    own = rotary(at.long(), x[0, 0].clone(), x[0, 0].clone())[0]
    for order in (facts.order, None):
        ours = replace(facts, order=order)
        wanted, got = (
            ours.query_rotary.rotate(ours.framed(x), at[None], last + 1, [last + 1]),
            ours.framed(own[None, None]),
        )
        if (wanted - got).norm() <= (1e-3 if dtype == torch.float32 else 5e-2) * got.norm():
            return ours
    raise ValueError(f"layer {facts.index} rotates otherwise in vLLM ({type(rotary).__name__}) than in transformers")
