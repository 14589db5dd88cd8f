"""DMC and DMS on a model: how it attends while it is trained, and where its decisions go."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import ops
from ..hf.documents import Documents, Group
from ..hf.facts import Facts
from ..hf.method import Call, Method, PassCache
from ..ops.softmax import Softmax
from ..retrofit.passes import TrainingPass, documents_of, learns, whole_layers
from ..retrofit.ranks import place_among_ranks
from .cache import DMCCache
from .config import DMCConfig
from .gates import decisions_of, weights_of
from .merged import MergedShare
from .neurons import NeuronRows, neuron_rows, zero_neurons


class DMCPass(TrainingPass):
    """One forward pass. alpha, hard, bare: of each converted layer that it has gone through, as LastDecisions has them.

    noise: None = hard decisions without noise. detached: a layer's decisions were made where nothing can be learned
    from them, though something is to be. asked: whether a loss has looked at its decisions.
    """

    def __init__(
        self, config: DMCConfig, facts: Facts, documents: Documents | None, noise: ops.Noise | None,
        *, with_gradient: bool,
    ) -> None:  # fmt: skip
        super().__init__(facts, documents, with_gradient=with_gradient)
        self.config, self.noise = config, noise
        self.detached, self.asked = False, False
        self.alpha: dict[int, Tensor] = {}
        self.hard: dict[int, Tensor] = {}
        self.bare: dict[int, Tensor] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        if self.facts[layer].is_local:
            return self.attend_locally(layer, queries, keys, values, softmax)
        if self.config.neuron_scale > 0:
            return self._annealed(layer, queries, keys, values, softmax)
        return self._compressed(layer, queries, keys, values, softmax)

    def _scaled(self, x: Tensor, factor: float) -> Tensor:
        """x with its neuron times factor."""
        factors = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
        factors[self.config.neuron] = factor
        return x * factors

    def _annealed(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """Plain attention with what is left of the neuron, before and after rotation."""
        m = self.config.neuron_scale

        def attend(group: Group | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
            q = self._scaled(self.queries(layer, self._scaled(q, m), group), m)
            k = self._scaled(self.keys(layer, self._scaled(k, m), group), m)
            return (ops.attention(q, k, v, **softmax.options)[0],)

        return self.over_documents(attend, queries, keys, values)[0]

    def _compressed(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        config, n = self.config, self.config.neuron
        B, Hkv, T, _ = keys.shape
        places = torch.arange(T, device=keys.device)[None] if self.documents is None else self.documents.within
        decisions = decisions_of(config, keys[..., n], places, layer=layer, noise=self.noise)
        if layer not in self.alpha:  # not in the second run of gradient checkpointing
            self.alpha[layer], self.hard[layer] = decisions.alpha, decisions.hard
            self.detached |= self.recomputes
            with torch.no_grad():
                bare = decisions if self.noise is None else decisions_of(config, keys[..., n], places, layer=layer)
            self.bare[layer] = bare.hard
        parts = [queries, keys, values, decisions.tempered]
        if config.mode == "dmc":
            parts += [decisions.alpha, weights_of(config, queries[..., n], Hkv)]

        def attend(group: Group | None, q: Tensor, k: Tensor, v: Tensor, tempered: Tensor, *merging: Tensor):  # type: ignore[no-untyped-def]
            bias = self._bias(tempered)
            # after rotation the neuron is zeroed in the queries alone: a product needs one zero
            q = self._scaled(self.queries(layer, self._scaled(q, 0.0), group), 0.0)
            if config.mode == "dms":
                k = self.keys(layer, self._scaled(k, 0.0), group)
                return (dms_attention(q, k, v, bias, config.dms_window, softmax),)
            k, v, _ = ops.dmc_accumulate(k, v, *merging, neuron=n, window=self._window(k.shape[2]))
            return (ops.attention(q, self.keys(layer, k, group), v, key_bias=bias, **softmax.options)[0],)

        return self.over_documents(attend, *parts)[0]

    def _bias(self, tempered: Tensor) -> Tensor:
        """Of each key: how much of it the decision leaves that is about it. A first token always stays."""
        if self.config.dms_decides == "successor":
            return ops.dmc_mask(tempered)
        return functional.pad(functional.logsigmoid(-tempered[..., 1:]), (1, 0))

    def _window(self, tokens: int) -> int | None:
        window = self.config.window
        return None if window is None or window >= tokens else window


def dms_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, window: int, softmax: Softmax) -> Tensor:
    """Rotated queries and keys; the bias weighs on keys that are more than `window` tokens old."""
    near = ops.attention(q, k, v, window=window + 1, **softmax.options)
    if q.shape[2] <= window + 1:
        return near[0]
    far = ops.attention(q, k, v, window=window + 1, complement=True, key_bias=bias, **softmax.rest.options)
    return ops.merge_states(near, far)[0]


class DMCMethod(Method):
    """seed, step, sequences: of the noise. sequences counts those that this rank has drawn for since the step began, so
    that a step draws the same however its sequences are divided into passes and ranks of equal size.

    merged: how much whole steps merge. layers: numbers of those that are converted; none before the model is attached.
    """

    title, config_class, cache_class = "DMC", DMCConfig, DMCCache
    config: DMCConfig

    def __init__(self, config: DMCConfig) -> None:
        super().__init__(config)
        self.seed, self.step, self.sequences = 0, 0, 0
        self.merged = MergedShare()
        self.layers: tuple[int, ...] = ()
        self.last: DMCPass | None = None
        self._rows: NeuronRows | None = None
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"last": None}  # a graph of tensors can be neither copied nor saved

    def check_facts(self, decoder: nn.Module, facts: Facts) -> None:
        self.layers = tuple(converted_layers(decoder, facts))
        for layer in self.layers:
            self.config.place(facts[layer].head_dim)

    def rows(self, decoder: Any, facts: Facts) -> NeuronRows:
        """Of the linear layers that feed the neurons, found once. Raises ValueError where there are none."""
        if self._rows is None:
            self._rows = neuron_rows(decoder, facts, self.config)
        return self._rows

    def fit_base(self, decoder: Any, facts: Facts) -> None:
        if self.config.neuron_scale == 0:
            zero_neurons(decoder, self.rows(decoder, facts))

    def set_neuron_scale(self, decoder: Any, scale: float) -> None:
        self.config = replace(self.config, neuron_scale=scale)
        self.store(decoder)

    def begin_step(self, step: int) -> None:
        """An optimizer step begins, of as many passes as come before the next; collective over the ranks of a run."""
        self.step, self.sequences = step, 0
        self.merged.close()

    def begin(self, call: Call) -> DMCPass:
        documents, batch = documents_of(call), call.tokens.shape[0]
        noise = None
        if call.decoder.training and self.config.neuron_scale == 0:
            self._check_asked()
            rank, ranks = place_among_ranks()
            noise = ops.Noise(self.seed, offset=self.step, sample=ranks * self.sequences + rank * batch)
            self.sequences += batch
        self.last = DMCPass(self.config, call.facts, documents, noise, with_gradient=learns(call))
        return self.last

    def _check_asked(self) -> None:
        """Warns once where a training pass is over whose decisions no loss has seen."""
        last = self.last
        if self._warned or last is None or last.noise is None or not last.with_gradient or last.asked:
            return
        if self.config.stride is None:
            self._warned = True
            warnings.warn(
                f"a model converted to {self.title} is trained, and nothing asks for its decisions: without the loss "
                "on the ratio (DMCRecipe.loss, or CompressionLoss of last_decisions) it will stop compressing",
                stacklevel=2,
            )

    def check_cache(self, cache: PassCache) -> None:
        if self.config.neuron_scale > 0:
            raise ValueError(
                f"the model is still being annealed (neuron_scale {self.config.neuron_scale}): a cache needs 0"
            )
        super().check_cache(cache)


def converted_layers(decoder: Any, facts: Facts) -> list[int]:
    """The layers of a model that DMC converts: those that see all tokens.

    Raises ValueError where one of them cannot be, with the reason.
    """
    layers = whole_layers(facts)
    name = type(decoder).__name__
    if not layers:
        raise ValueError(f"{name} is not supported by DMC: none of its layers sees all tokens")
    heads = facts[layers[0]].kv_heads
    for layer, found in facts.items():
        reason = None
        if found.is_local:
            continue
        if found.reads is not None:
            reason = f"reads the keys of layer {found.reads}"
        elif found.value_dim != found.head_dim:
            reason = (
                f"has keys of {found.head_dim} and values of {found.value_dim} numbers (keys made from latents, MLA)"
            )
        elif found.beside:
            reason = "adds positions to its products (ALiBi), of which merged tokens would have the average"
        elif found.indexer is not None:
            reason = "chooses the tokens that it attends to by an indexer"
        elif found.normed:
            reason = "norms its keys behind their rotation, which would norm an average again"
        elif found.kv_heads != heads:
            reason = (
                f"has {found.kv_heads} KV heads, layer {layers[0]} has {heads}: decisions are of one number of heads"
            )
        if reason is not None:
            raise ValueError(f"{name} is not supported by DMC: layer {layer} {reason}")
    return layers
