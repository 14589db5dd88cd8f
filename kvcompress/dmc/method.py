"""DMC and DMS on a model: how it attends while it is trained, and where its decisions go."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import ops
from ..positions import RotaryTables
from ..retrofit.documents import Documents, documents_of, rotated
from ..retrofit.method import Method, Pass
from .config import DMCConfig
from .gates import decisions_of, weights_of

if TYPE_CHECKING:
    from ..caches import CompressedCache


@dataclass
class DMCPass(Pass):
    """One forward pass. alpha, hard, bare: of each layer that it has gone through, as LastDecisions has them."""

    config: DMCConfig
    rotary: RotaryTables
    documents: Documents | None
    noise: ops.Noise | None  # None: hard decisions without noise
    with_gradient: bool  # whether anything is to be learned from this pass
    alpha: dict[int, Tensor] = field(default_factory=dict)
    hard: dict[int, Tensor] = field(default_factory=dict)
    bare: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        if self.config.neuron_scale > 0:
            out = self._annealed(queries, keys, values, scaling)
        else:
            out = self._compressed(layer, queries, keys, values, scaling)
        return out if self.documents is None else self.documents.join(out)

    def _split(self, *tensors: Tensor) -> list[Tensor]:
        return list(tensors) if self.documents is None else [self.documents.split(x) for x in tensors]

    def _rotate(self, x: Tensor) -> Tensor:
        return rotated(x, self.rotary, self.documents)

    def _scaled(self, x: Tensor, factor: float) -> Tensor:
        """x with its neuron times factor."""
        factors = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
        factors[self.config.neuron] = factor
        return x * factors

    def _annealed(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Plain attention with what is left of the neuron, before and after rotation."""
        q, k, v = self._split(queries, keys, values)
        m = self.config.neuron_scale
        q, k = (self._scaled(self._rotate(self._scaled(x, m)), m) for x in (q, k))
        return ops.attention(q, k, v, scale=scaling)[0]

    def _compressed(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        config, n = self.config, self.config.neuron
        B, Hkv, T, _ = keys.shape
        places = torch.arange(T, device=keys.device)[None] if self.documents is None else self.documents.within
        decisions = decisions_of(config, keys[..., n], places, layer=layer, noise=self.noise)
        if layer not in self.alpha:  # not in the second run of gradient checkpointing
            self.alpha[layer], self.hard[layer] = decisions.alpha, decisions.hard
            with torch.no_grad():
                bare = decisions if self.noise is None else decisions_of(config, keys[..., n], places, layer=layer)
            self.bare[layer] = bare.hard
        q, k, v, alpha, tempered = self._split(queries, keys, values, decisions.alpha, decisions.tempered)
        bias = ops.dmc_mask(tempered)
        # after rotation the neuron is zeroed in the queries alone: a product needs one zero
        q = self._scaled(self._rotate(self._scaled(q, 0.0)), 0.0)
        if config.mode == "dms":
            return dms_attention(q, self._rotate(self._scaled(k, 0.0)), v, bias, config.dms_window, scaling)
        (omega,) = self._split(weights_of(config, queries[..., n], Hkv))
        k, v, _ = ops.dmc_accumulate(k, v, alpha, omega, neuron=n, window=self._window(k.shape[2]))
        return ops.attention(q, self._rotate(k), v, key_bias=bias, scale=scaling)[0]

    def _window(self, tokens: int) -> int | None:
        window = self.config.window
        return None if window is None or window >= tokens else window


def dms_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, window: int, scaling: float) -> Tensor:
    """Rotated queries and keys; the bias weighs on keys that are more than `window` tokens old."""
    near = ops.attention(q, k, v, window=window + 1, scale=scaling)
    if q.shape[2] <= window + 1:
        return near[0]
    far = ops.attention(q, k, v, window=window + 1, complement=True, key_bias=bias, scale=scaling)
    return ops.merge_states(near, far)[0]


class DMCMethod(Method):
    """seed, draws: of the noise; draws counts training passes, and the trainer sets it when a run is resumed."""

    name = "dmc"

    def __init__(self, decoder: Any, config: DMCConfig) -> None:
        head_dim = getattr(decoder.config, "head_dim", None) or (
            decoder.config.hidden_size // decoder.config.num_attention_heads
        )
        config.place(head_dim)
        self.config = config
        self.seed, self.draws = 0, 0
        self.last: DMCPass | None = None
        self.rotary: RotaryTables | None = None
        self._store(decoder)

    @classmethod
    def restore(cls, decoder: nn.Module, saved: dict[str, Any]) -> DMCMethod:
        return cls(decoder, DMCConfig.from_dict(saved))

    @property
    def cache_name(self) -> str:
        return "kvcompress.DMCCache(model.config)"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"last": None}  # a graph of tensors can be neither copied nor saved

    def set_neuron_scale(self, decoder: Any, scale: float) -> None:
        self.config = replace(self.config, neuron_scale=scale)
        self._store(decoder)

    def _store(self, decoder: Any) -> None:
        decoder.config.kvcompress = self.config.to_dict()

    def begin(self, decoder: Any, given: dict[str, Any]) -> DMCPass:
        batch, documents = documents_of(decoder, given)
        if self.rotary is None:
            self.rotary = RotaryTables(decoder.rotary_emb)
        noise = None
        if decoder.training and self.config.neuron_scale == 0:
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            noise = ops.Noise(self.seed, offset=self.draws, sample=rank * batch)
            self.draws += 1
        learns = any(p.requires_grad for layer in decoder.layers for p in layer.self_attn.k_proj.parameters())
        with_gradient = torch.is_grad_enabled() and learns
        self.last = DMCPass(self.config, self.rotary, documents, noise, with_gradient)
        return self.last

    def check_cache(self, cache: CompressedCache) -> None:
        if self.config.neuron_scale > 0:
            raise ValueError(
                f"the model is still being annealed (neuron_scale {self.config.neuron_scale}): a cache needs 0"
            )
        from ..caches.dmc import DMCCache  # which imports this package

        if not isinstance(cache, DMCCache):
            raise ValueError(f"a model converted to DMC needs {self.cache_name}, got {type(cache).__name__}")
