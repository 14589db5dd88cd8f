"""Which heads of a model retrieve: DuoAttention's gates, and what a head loses that sees the first and latest alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..caches.pruned import PrunedCache
from ..heads import RECENT, SINKS, HeadProfile
from ..hf.facts import Facts
from ..hf.reading import plain_decoder, read, token_rows
from ..ops.softmax import Softmax
from ..pruners import KVzip
from ..reading.prefilling import prefill
from ..retrofit.passes import TrainingPass, whole_layers
from ..support.checks import need, need_choice, need_integer, need_number
from .passkeys import PassKeys

METHODS = ("gates", "mass", "kvzip")
Report = Callable[[int, float, float], None]


class _GatedPass(TrainingPass):
    """Each KV head's result: gate times what it attends to, and the rest of what it would see streaming. gates [L,
    Hkv], of whole layers in order."""

    def __init__(self, facts: Facts, layers: Sequence[int], gates: Tensor, sinks: int, recent: int) -> None:
        super().__init__(facts)
        self.gates = dict(zip(layers, gates, strict=True))
        self.sinks, self.recent = sinks, recent

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        if self.facts[layer].is_local:
            return self.attend_locally(layer, queries, keys, values, softmax)
        q, k = self.queries(layer, queries), self.keys(layer, keys)
        every = ops.attention(q, k, values, **softmax.options)[0]
        near = ops.attention(q, k, values, window=self.recent, sinks=self.sinks, **softmax.options)[0]
        gate = self.gates[layer].repeat_interleave(q.shape[1] // k.shape[1])[:, None, None].to(every.dtype)
        return gate * every + (1 - gate) * near


class _MassPass(TrainingPass):
    """The model's own attention; lost[layer]: [Hkv], what streaming would lose of it, mean over the queries that are
    asked, the most of a KV head's query heads."""

    def __init__(self, facts: Facts, asked: Tensor, sinks: int, recent: int) -> None:
        super().__init__(facts)
        self.asked, self.sinks, self.recent = asked, sinks, recent
        self.lost: dict[int, Tensor] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        if self.facts[layer].is_local:
            return self.attend_locally(layer, queries, keys, values, softmax)
        q, k = self.queries(layer, queries), self.keys(layer, keys)
        out, whole = ops.attention(q, k, values, **softmax.options)
        _, near = ops.attention(q, k, values, window=self.recent, sinks=self.sinks, **softmax.options)
        lost = (1 - (near - whole).exp())[0, :, self.asked.to(q.device)].clamp(0, 1).mean(-1)
        self.lost[layer] = lost.unflatten(0, (k.shape[1], -1)).amax(1).double().cpu()
        return out


def measure_heads(
    model: nn.Module,
    samples: Sequence[PassKeys],
    *,
    method: str = "gates",
    sinks: int = SINKS,
    recent: int = RECENT,
    steps: int = 2000,
    lr: float = 0.02,
    weight: float = 0.05,
    tokenizer: Any = None,
    report: Report | None = None,
) -> HeadProfile:
    """How much each KV head retrieves, for DuoAttention.

    model: attached or not, not converted; it is left as it was. samples: of pass_keys, read in turn, one in each step;
    longer than sinks + recent. method: "gates", the paper's: one gate for each KV head of a layer that sees all tokens,
    1 at first, mixes what the head attends to with what it would see of the first `sinks` and the last `recent` tokens;
    the gates alone are trained, so that the last hidden states at what is asked stay those of the model (mean of the
    squares) plus weight * mean |gate|; AdamW at `lr`, which rises over the first fifth of the steps and falls over the
    last, gates clamped to 0..1. "mass", training-free, a pass for each sample: the share of attention that streaming
    would lose at what is asked, the most of a KV head's query heads, mean over the samples. "kvzip", training-free, two
    readings of each sample: the most that a key of the head gets when the text is read again (KVzip), the most of all
    samples, as KVzip's authors score heads; tokenizer: of the words that ask for it, needed for that alone; sinks and
    recent only go into the profile. steps, lr and weight are for gates. report(step, distillation, mean gate) is called
    in each step of training.
    Raises ValueError for settings out of range, samples that streaming sees in full, layers that read others' keys, and
    models that are converted.
    Source: DuoAttention (Xiao et al. 2024, arXiv:2410.10819), section 2.3 and the settings of the authors' published
    patterns; the texts are ours.
    """
    need_choice("method", method, METHODS)
    need_integer("sinks", sinks, 0)
    need_integer("recent", recent, 1)
    need_integer("steps", steps, 1)
    need_number("lr", lr, 1e-12, 1e3)
    need_number("weight", weight, 0.0, 1e6)
    need(
        method != "kvzip" or tokenizer is not None,
        "tokenizer must be given with method='kvzip', which asks for the text once more in words, got None",
    )
    need(len(samples) > 0, "samples must hold at least one, got none")
    for j, sample in enumerate(samples):
        need(bool(sample.asked.any()), f"samples[{j}] must ask for something")
        need(
            len(sample.ids) > sinks + recent,
            f"samples[{j}] must be longer than sinks + recent = {sinks + recent}, got {len(sample.ids)} tokens",
        )
    with plain_decoder(model) as (decoder, facts):
        layers = whole_layers(facts)
        need(len(layers) > 0, "model must have a layer that sees all tokens, got none")
        for layer in layers:
            reads = facts[layer].reads
            need(reads is None, f"model must have layers of their own keys: layer {layer} reads those of layer {reads}")
        heads = [facts[layer].kv_heads for layer in layers]
        need(len(set(heads)) == 1, f"model must have as many KV heads in each layer that sees all tokens, got {heads}")
        rows = list(token_rows(decoder, [sample.ids for sample in samples]))
        if method == "kvzip":
            pruner = KVzip(num_sink_tokens=sinks).with_tokenizer(tokenizer)
            gates, how = _reread(model, rows, pruner), f"KVzip's scores, {len(samples)} texts"
        elif method == "mass":
            gates = _masses(decoder, facts, layers, rows, samples, sinks, recent)
            how = f"mass lost, {len(samples)} texts"
        else:
            gates = _trained(
                decoder, facts, layers, rows, samples, torch.ones(len(layers), heads[0]), sinks=sinks, recent=recent,
                steps=steps, lr=lr, weight=weight, report=report,
            )  # fmt: skip
            how = f"gates, {steps} steps, lr {lr:g}, weight {weight:g}, {len(samples)} texts"
    name = type(model).__name__
    return HeadProfile(tuple(map(tuple, gates.tolist())), sinks, recent, f"{name}, {how}")


def _masses(
    decoder: nn.Module, facts: Facts, layers: list[int], rows: list[Tensor], samples: Sequence[PassKeys], sinks: int,
    recent: int,
) -> Tensor:  # fmt: skip
    found = []
    for ids, sample in zip(rows, samples, strict=True):
        watch = _MassPass(facts, sample.asked, sinks, recent)
        read(decoder, ids, watch)
        found.append(torch.stack([watch.lost[layer] for layer in layers]))
    return torch.stack(found).mean(0)


def _reread(model: nn.Module, rows: list[Tensor], pruner: KVzip) -> Tensor:
    found = []
    for ids in rows:
        cache = PrunedCache(model.config, pruner, keep=len(ids) // 2)
        prefill(model, ids[None], cache)  # the best keys of a row are among those that stay
        found.append(torch.stack([layer.chooser.received.amax(1).double().cpu() for layer in cache.compressing]))
    return torch.stack(found).amax(0)


def _trained(
    decoder: nn.Module, facts: Facts, layers: list[int], rows: list[Tensor], samples: Sequence[PassKeys],
    gates: Tensor, *, sinks: int, recent: int, steps: int, lr: float, weight: float, report: Report | None,
) -> Tensor:  # fmt: skip
    gates = gates.to(rows[0].device).requires_grad_()
    optimizer = torch.optim.AdamW([gates], lr=lr, weight_decay=0.0)
    learns = [(p, p.requires_grad) for p in decoder.parameters()]
    fifth = max(steps // 5, 1)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, max((step + 1) / fifth, 0.1), max((steps - step) / fifth, 0.1))
    )
    try:
        for p, _ in learns:
            p.requires_grad_(False)
        for step in range(steps):
            ids, asked = rows[step % len(rows)], samples[step % len(rows)].asked.to(rows[0].device)
            target = read(decoder, ids, _GatedPass(facts, layers, torch.ones_like(gates), sinks, recent))[0, asked]
            with torch.enable_grad():
                hidden = read(decoder, ids, _GatedPass(facts, layers, gates, sinks, recent))[0, asked]
                distance = (hidden.float() - target.float()).square().mean()
                loss = distance + weight * gates.abs().mean()
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            rate.step()
            gates.data.clamp_(0, 1)
            if report is not None:
                report(step, float(distance), float(gates.detach().mean()))
    finally:
        for p, learned in learns:
            p.requires_grad_(learned)
    need(bool(gates.isfinite().all()), "the model must attend with numbers: a gate became NaN")
    return gates.detach().cpu()
