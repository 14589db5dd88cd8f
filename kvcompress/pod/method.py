"""PoD and its baselines on a model: how it attends while it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import ops
from ..positions import RotaryTables
from ..retrofit.documents import Documents, documents_of, rotated
from ..retrofit.method import Method, Pass
from .config import PoDConfig

if TYPE_CHECKING:
    from ..caches import CompressedCache


REENTRANT = (
    "gradient checkpointing with use_reentrant=True loses the gradients that followers send to their lead: use "
    "gradient_checkpointing_kwargs={'use_reentrant': False}"
)


@dataclass
class PoDPass(Pass):
    """One forward pass. leads: rotated queries and keys, and the values, of the layers that others follow. gates: of
    each layer in which a head follows, float32 [B, Hq, T] without gradient, NaN at padding."""

    config: PoDConfig
    rotary: RotaryTables
    documents: Documents | None
    with_gradient: bool  # whether anything is to be learned from this pass
    gates: dict[int, Tensor] = field(default_factory=dict)
    leads: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        q, k, v = queries, keys, values
        if self.documents is not None:
            q, k, v = (self.documents.split(x) for x in (q, k, v))
        out = self._attend(layer, self._rotate(q), self._rotate(k), v, scaling)
        return out if self.documents is None else self.documents.join(out)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        config = self.config
        if config.mode == "window":
            return ops.attention(q, k, v, window=config.recent, sinks=config.sinks, scale=scaling)[0]
        if config.last_follower(layer) > layer and layer not in self.leads:  # not in the second run of checkpointing
            if self.with_gradient and not torch.is_grad_enabled():
                raise RuntimeError(REENTRANT)
            self.leads[layer] = (q, k, v)
        if set(config.lead[layer]) == {layer}:
            return ops.attention(q, k, v, scale=scaling)[0]
        lead_q, lead_k, lead_v = self._lead_states(layer, q, k, v)
        if not torch.is_grad_enabled():  # nothing runs twice: what no layer above needs may go
            for a in [a for a in self.leads if config.last_follower(a) <= layer]:
                del self.leads[a]
        if config.mode == "cla":
            return ops.attention(q, lead_k, lead_v, scale=scaling)[0]
        out, _, gate = ops.pod_attention(
            q, k, v, lead_q, lead_k, sinks=config.sinks, recent=config.recent, scale=scaling
        )
        if layer not in self.gates:
            self._note(layer, gate.detach())
        return out

    def _note(self, layer: int, gate: Tensor) -> None:
        if self.documents is not None:
            gate = self.documents.join(gate).masked_fill(~self.documents.valid[:, None], torch.nan)
        self.gates[layer] = gate

    def _lead_states(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of each KV head's lead; the layer's own where the head leads itself."""
        groups = self.config.led_by(layer)
        if any(
            a != layer and a not in self.leads for a, _ in groups
        ):  # given up in a pass that seemed to need no gradient
            raise RuntimeError(REENTRANT)
        if len(groups) == 1:
            return self.leads[groups[0][0]]
        G, states = q.shape[1] // k.shape[1], {a: self.leads[a] for a, _ in groups if a != layer} | {layer: (q, k, v)}
        heads = self.config.lead[layer]
        return tuple(
            torch.cat([states[a][i][:, head * n : (head + 1) * n] for head, a in enumerate(heads)], 1)
            for i, n in enumerate((G, 1, 1))
        )

    def _rotate(self, x: Tensor) -> Tensor:
        return rotated(x, self.rotary, self.documents)


class PoDMethod(Method):
    """last_gates: the gates of the last forward pass, by layer."""

    name = "pod"

    def __init__(self, decoder: Any, config: PoDConfig) -> None:
        config.check_model(decoder.config)
        kinds = getattr(decoder.config, "layer_types", None)
        if kinds is not None and config.mode != "window":
            for layer, row in enumerate(config.lead):
                for head, a in enumerate(row):
                    if kinds[a] != kinds[layer]:
                        raise ValueError(
                            f"lead must be of the layer's own kind of attention, got layer {a} ({kinds[a]}) at (layer "
                            f"{layer}, head {head}), which is of {kinds[layer]}"
                        )
        self.config = config
        self.last_gates: dict[int, Tensor] = {}
        self.rotary: RotaryTables | None = None
        decoder.config.kvcompress = config.to_dict()

    @classmethod
    def restore(cls, decoder: nn.Module, saved: dict[str, Any]) -> PoDMethod:
        return cls(decoder, PoDConfig.from_dict(saved))

    @property
    def cache_name(self) -> str:
        return "kvcompress.PoDCache(model.config)"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"last_gates": {}}

    def begin(self, decoder: Any, given: dict[str, Any]) -> PoDPass:
        _, documents = documents_of(decoder, given)
        if self.rotary is None:
            self.rotary = RotaryTables(decoder.rotary_emb)
        with_gradient = torch.is_grad_enabled() and any(p.requires_grad for p in decoder.parameters())
        # the gates alone are kept: the states of leads go with the pass
        self.last_gates = {}
        return PoDPass(self.config, self.rotary, documents, with_gradient, self.last_gates)

    def check_cache(self, cache: CompressedCache) -> None:
        if type(cache).__name__ != "PoDCache":
            raise ValueError(f"a model converted to PoD needs {self.cache_name}, got {type(cache).__name__}")
