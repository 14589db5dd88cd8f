"""Families whose attention modules never ask AttentionInterface: what such a module does in a pass of ours.

Each function below is the forward of one of transformers' modules as it would be if it asked: its own projections, the
attention of the pass, its own output projection. Every other forward pass runs the module's own code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .answering import answer
from .argument import cache_of
from .now import THREAD
from .probe import MaskTicket

# (queries [B, Hq, T, D], keys, values [B, Hkv, T, D], what gives ALiBi's slopes [Hq], **options) -> [B, T, Hq D]
Attention = Callable[..., Tensor]


def _file(module: nn.Module) -> Any:
    return sys.modules[type(module).__module__]


def _falcon(
    module: Any, attention: Attention, hidden_states: Tensor, alibi: Any, attention_mask: Any, position_ids: Any = None,
    *, position_embeddings: Any, **given: Any,
) -> Tensor:  # fmt: skip
    q, k, v = (x.transpose(1, 2) for x in module._split_heads(module.query_key_value(hidden_states)))
    if module.new_decoder_architecture:  # which repeats each KV head for its queries
        group = module.num_heads // module.num_kv_heads
        k, v = k[:, ::group], v[:, ::group]
    if alibi is None:
        q, k = _file(module).apply_rotary_pos_emb(q, k, *position_embeddings)
        return module.dense(attention(q, k, v))

    def slopes() -> Tensor:  # which eager attention adds twice
        own = _alibi_of_two(module, module.num_heads) * module.inv_norm_factor
        return 2 * own if module.config._attn_implementation == "eager" else own

    return module.dense(attention(q, k, v, slopes, dropout=_dropout(module, module.attention_dropout.p)))


def _bloom(
    module: Any, attention: Attention, hidden_states: Tensor, residual: Tensor, alibi: Any, attention_mask: Any,
    **given: Any,
) -> Tensor:  # fmt: skip
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    out = attention(
        q, k, v, lambda: _alibi_of_two(module, module.num_heads), scaling=module.inv_norm_factor,
        dropout=_dropout(module, module.attention_dropout.p),
    )  # fmt: skip
    return _file(module).dropout_add(module.dense(out), residual, module.hidden_dropout, module.training)


def _mpt(module: Any, attention: Attention, hidden_states: Tensor, position_bias: Tensor, **given: Any) -> Tensor:
    both = module.Wqkv(hidden_states)
    if module.clip_qkv:
        both = both.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, v = (x.unflatten(2, (module.n_heads, module.head_dim)).transpose(1, 2) for x in both.chunk(3, dim=2))
    out = attention(
        q, k, v, lambda: position_bias[:, 0, -1] - position_bias[:, 0, -2], scaling=module.softmax_scale,
        dropout=_dropout(module, module.attn_dropout_p),
    )  # fmt: skip
    return module.out_proj(out)


def _gpt_neo(module: Any, attention: Attention, hidden_states: Tensor, **given: Any) -> Tensor:
    q, k, v = _projected(module, hidden_states)
    window = module.config.window_size if module.attention_type == "local" else None
    mask = None if window is None else MaskTicket(lambda b, h, query, key: (key <= query) & (key > query - window))
    out = attention(q, k, v, scaling=1.0, dropout=_dropout(module, module.attn_dropout.p), mask=mask)
    return module.resid_dropout(module.out_proj(out))


def _bart_like(
    module: Any, attention: Attention, hidden_states: Tensor, attn_prompt: Any = None, **given: Any
) -> Tensor:
    if attn_prompt is not None:
        raise ValueError("its layers attend to a prompt of their own beside the tokens (use_prompt)")
    q, k, v = _projected(module, hidden_states)
    out = attention(q, k, v, scaling=module.scaling, dropout=_dropout(module, module.dropout))
    return module.out_proj(out)


def _projected(module: Any, hidden_states: Tensor) -> list[Tensor]:
    """[B, H, T, D] each."""
    every = (module.q_proj, module.k_proj, module.v_proj)
    return [x(hidden_states).unflatten(2, (module.num_heads, module.head_dim)).transpose(1, 2) for x in every]


def _alibi_of_two(module: nn.Module, heads: int) -> Tensor:
    """float32 [Hq], the slopes: the biases of the second of two keys."""
    mask = torch.ones(1, 2, dtype=torch.int64, device="cpu")
    return _file(module).build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1]


def _dropout(module: nn.Module, p: float) -> float:
    return p if module.training else 0.0


class _Family(NamedTuple):
    """forward: of the module, (module, attention, hidden states, ...). output: the linear layer behind attention.
    results: how many the module gives, of which all but the first are None here."""

    forward: Callable[..., Tensor]
    output: str
    results: int = 2


FAMILIES = {
    "FalconAttention": _Family(_falcon, "dense"),
    "BloomAttention": _Family(_bloom, "dense"),
    "MptAttention": _Family(_mpt, "out_proj"),
    "GPTNeoSelfAttention": _Family(_gpt_neo, "out_proj"),
    "XGLMAttention": _Family(_bart_like, "out_proj"),
    "TrOCRAttention": _Family(_bart_like, "out_proj"),
    "MvpAttention": _Family(_bart_like, "out_proj"),
    "LEDDecoderAttention": _Family(_bart_like, "out_proj", results=3),
}
_MODEL_TYPES = {"falcon", "bloom", "mpt", "gpt_neo", "xglm", "trocr", "mvp", "led"}


def own_family(module: nn.Module) -> _Family | None:
    """None for a module that is none of these; code from elsewhere may have a class of the same name."""
    ours = (x for x in type(module).__mro__ if x.__module__.startswith("transformers.models."))
    return next((FAMILIES[x.__name__] for x in ours if x.__name__ in FAMILIES), None)


class OwnForward:
    """Stands on one module for its forward. implementation: of a decoder's attention, by a config, as it was before
    attach."""

    def __init__(self, module: nn.Module, family: _Family, implementation: Callable[[Any], str | None]) -> None:
        place = "_old_forward" if "_old_forward" in vars(module) else "forward"  # accelerate calls what it found before
        self.module, self.family, self.before = module, family, vars(module).get(place)
        object.__setattr__(module, place, self)
        self.config = vars(module).get("config")
        if self.config is not None:
            object.__setattr__(module, "config", _ConfigBefore(self.config, implementation))

    def __call__(self, *args: Any, **given: Any) -> Any:
        now = THREAD.now
        across = given.get("key_value_states") is not None  # to an encoder, whose keys are not ours
        if now.ours and not across:
            out = self.family.forward(self.module, self._attention(_cache_in(given)), *args, **given)
            return out, *[None] * (self.family.results - 1)  # nobody asks for the attention weights
        if now.watcher is None or across:
            return self._as_before(*args, **given)
        output = getattr(self.module, self.family.output)
        hook = output.register_forward_pre_hook(self._watched)
        try:
            return self._as_before(*args, **given)
        finally:
            hook.remove()

    def _as_before(self, *args: Any, **given: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **given)
        return type(self.module).forward(self.module, *args, **given)

    def _watched(self, output: nn.Module, args: tuple[Any, ...]) -> None:
        THREAD.now.watcher(number_of(self.module), args[0].unflatten(-1, (-1, self.module.head_dim)))

    def _attention(self, cache: Any) -> Attention:
        layer = number_of(self.module)

        def attention(
            q: Tensor, k: Tensor, v: Tensor, slopes: Callable[[], Tensor] | None = None, *,
            scaling: float | None = None, dropout: float = 0.0, mask: Any = None,
        ) -> Tensor:  # fmt: skip
            if cache is not None:
                k, v = cache.update(k, v, layer)
            THREAD.now.layer = layer
            scaling = q.shape[3] ** -0.5 if scaling is None else scaling
            options = {"scaling": scaling, "dropout": dropout, "alibi_slopes": slopes}
            out = answer(self.module, q, k, v, mask, options)[1]
            assert out is not None
            return out.flatten(2)

        return attention

    def undo(self) -> None:
        """The module is as it was."""
        for place in ("forward", "_old_forward"):
            if vars(self.module).get(place) is self:
                if place == "forward" and self.before is None:
                    delattr(self.module, place)
                else:  # accelerate has come since
                    own = MethodType(type(self.module).forward, self.module)
                    object.__setattr__(self.module, place, self.before or own)
        if self.config is not None:
            object.__setattr__(self.module, "config", self.config)


class _ConfigBefore:
    """A config to code that asks it by which implementation a module attends."""

    def __init__(self, config: Any, implementation: Callable[[Any], str | None]) -> None:
        self.__dict__.update(_config=config, _implementation=implementation)

    @property
    def _attn_implementation(self) -> str | None:
        return self._implementation(self._config)

    def __getattr__(self, name: str) -> Any:
        if name in ("_config", "_implementation"):  # while it is copied
            raise AttributeError(name)
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


class NoMask:
    """What the decoders of these families get for a mask in a pass of ours, and hand to their attention modules; those
    with indexers, whose scores it leaves as they are, too."""

    ndim, dtype = 0, None

    def __getitem__(self, index: Any) -> NoMask:
        return self

    def __radd__(self, scores: Tensor) -> Tensor:
        return scores

    def to(self, *args: Any, **given: Any) -> NoMask:
        return self


def needs_no_mask(config: Any) -> bool:
    """Whether a decoder of this config is of these families."""
    return getattr(config, "model_type", None) in _MODEL_TYPES


def _cache_in(given: dict[str, Any]) -> Any:
    """The cache among the arguments of an attention module."""
    return given["layer_past"] if "layer_past" in given else cache_of(given)


def number_of(module: nn.Module) -> Any:
    """Of its layer, None for a module that does not know it."""
    return getattr(module, "layer_idx", getattr(module, "layer_id", None))


def own_forward(module: nn.Module, implementation: Callable[[Any], str | None]) -> OwnForward | None:
    """What now stands on a module of one of these families; None for any other."""
    family = own_family(module)
    return None if family is None else OwnForward(module, family, implementation)
