"""PoD and its baselines on a model: how it attends while it is trained."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..hf.documents import Documents, Group
from ..hf.facts import Facts
from ..hf.method import Call, Method
from ..ops.softmax import Softmax
from ..retrofit.passes import TrainingPass, documents_of, learns
from .cache import PoDCache
from .config import PoDConfig
from .kinds import kinds_of
from .lead import check_kinds, need_alike

REENTRANT = (
    "gradient checkpointing with use_reentrant=True loses the gradients that followers send to their lead: use "
    "gradient_checkpointing_kwargs={'use_reentrant': False}"
)


class PoDPass(TrainingPass):
    """One forward pass. leads: of the layers that others follow, for each group of documents, rotated queries and keys,
    the values and the softmax.
    gates: of each layer in which a head follows, float32 [B, Hq, T] without gradient, NaN at padding."""

    def __init__(
        self, config: PoDConfig, facts: Facts, documents: Documents | None, gates: dict[int, Tensor],
        *, with_gradient: bool,
    ) -> None:  # fmt: skip
        super().__init__(facts, documents, with_gradient=with_gradient)
        self.config, self.gates = config, gates
        self.leads: dict[int, list[tuple[Tensor, Tensor, Tensor, Softmax]]] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        if self.facts[layer].is_local:
            return self.attend_locally(layer, queries, keys, values, softmax)
        number, config = itertools.count(), self.config

        def attend(group: Group | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            q, k = self.queries(layer, q, group), self.keys(layer, k, group)
            return self._attend(layer, next(number), q, k, v, softmax)

        out, *gate = self.over_documents(attend, queries, keys, values)
        if gate and layer not in self.gates:
            found = gate[0].detach()
            if self.documents is not None:
                found = found.masked_fill(~self.documents.valid[:, None], torch.nan)
            self.gates[layer] = found
        if not torch.is_grad_enabled():  # nothing runs twice: what no layer above needs may go
            for a in [a for a in self.leads if config.last_follower(a) <= layer]:
                del self.leads[a]
        return out

    def _attend(
        self, layer: int, group: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Of the documents of group number `group`: what they attend to, and the gates [B, Hq, T] where any follows."""
        config = self.config
        if config.mode == "window":
            return (ops.attention(q, k, v, window=config.recent, sinks=config.sinks, **softmax.options)[0],)
        groups = self.leads.setdefault(layer, []) if config.last_follower(layer) > layer else None
        if groups is not None and len(groups) == group:  # not in the second run of checkpointing
            if self.recomputes:
                raise RuntimeError(REENTRANT)
            groups.append((q, k, v, softmax))
        if set(config.lead[layer]) == {layer}:
            return (ops.attention(q, k, v, **softmax.options)[0],)
        lead_q, lead_k, lead_v = self._lead_states(layer, group, q, k, v, softmax)
        if config.mode == "cla":
            return (ops.attention(q, lead_k, lead_v, **softmax.options)[0],)
        out, _, gate = ops.pod_attention(
            q, k, v, lead_q, lead_k, sinks=config.sinks, recent=config.recent, **softmax.options
        )
        return out, gate

    def _lead_states(
        self, layer: int, group: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Queries, keys and values of each KV head's lead; the layer's own where the head leads itself."""
        heads = self.config.lead[layer]
        states = {layer: (q, k, v)}
        for a in set(heads) - {layer}:
            if not self.leads.get(a):  # given up in a pass that seemed to need no gradient
                raise RuntimeError(REENTRANT)
            lead_q, lead_k, lead_v, theirs = self.leads[a][group]
            states[a] = lead_q, lead_k, lead_v
            if self.config.mode == "pod":
                need_alike(layer, a, softmax, theirs)
        if len(set(heads)) == 1:
            return tuple(states[heads[0]])
        G = q.shape[1] // k.shape[1]
        return tuple(
            torch.cat([states[a][i][:, head * n : (head + 1) * n] for head, a in enumerate(heads)], 1)
            for i, n in enumerate((G, 1, 1))
        )


class PoDMethod(Method):
    """last_gates: the gates of the last forward pass, by layer."""

    title, config_class, cache_class = "PoD", PoDConfig, PoDCache
    config: PoDConfig

    def __init__(self, config: PoDConfig) -> None:
        super().__init__(config)
        self.last_gates: dict[int, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"last_gates": {}}

    def check_facts(self, decoder: nn.Module, facts: Facts) -> None:
        kinds = kinds_of(decoder, facts)
        heads = next(facts[kind].kv_heads for kind in kinds if kind is not None)
        if heads != len(self.config.lead[0]):
            raise ValueError(f"lead must have the {heads} KV heads of this model, got {len(self.config.lead[0])}")
        if self.config.mode != "window":
            check_kinds(self.config.lead, kinds)

    def begin(self, call: Call) -> PoDPass:
        # the gates alone are kept: the states of leads go with the pass
        self.last_gates = {}
        documents = documents_of(call)
        return PoDPass(self.config, call.facts, documents, self.last_gates, with_gradient=learns(call))
