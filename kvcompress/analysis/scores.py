"""What a key's attention is worth in each KV head, learned so that a cut cache says what the whole one says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .. import ops
from ..caches.base import trained_length_of
from ..caches.pruned import PrunedCache
from ..hf.config import cache_layers, recurs
from ..hf.facts import Facts
from ..hf.method import KEYWORD, Pass
from ..hf.reading import frozen, plain_decoder, read, token_rows
from ..logits import scaled
from ..ops.softmax import Softmax
from ..pruners import KVzip, ScoreProfile
from ..reading.prefilling import prefill
from ..retrofit.distillation import distance
from ..retrofit.passes import TrainingPass, whole_layers
from ..support.checks import need, need_integer, need_number, renamed

SHARES = (1 / 4, 1 / 4, 1 / 8)  # the first counts twice
_PARTS, _PART = 3, 96  # of a text that are said again, and tokens of each
_HIDDEN = -30.0  # a logit of a key that is as good as gone
_WARM, _COLD = 0.5, 0.15  # how softly a cut is made: nats of score between a key that stays and one that goes
_LEVEL = 0.1  # nats, the least spread of a head's logarithms that its powers are learned by
_FLAT = 0.01  # nats, below which what a cut costs counts no more
Report = Callable[[int, list[float], list[float]], None]


class Read(NamedTuple):
    """A layer's keys and values of a context, [1, Hkv, T, D]; keys rotated."""

    keys: Tensor
    values: Tensor


class _ContextPass(TrainingPass):
    """The model's own attention, which notes what is read."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.read: dict[int, Read] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        q, k = self.queries(layer, queries), self.keys(layer, keys)
        self.read[layer] = Read(k, values)
        return ops.attention(q, k, values, window=self.facts[layer].window, **softmax.options)[0]


class _BehindPass(Pass):
    """Tokens behind a context that was read: they see it, and themselves. biases: float32 [Hkv, T] by layer, what comes
    to the logits of the context's keys; a layer without one sees them as they are."""

    def __init__(self, facts: Facts, context: dict[int, Read], biases: dict[int, Tensor]) -> None:
        self.facts, self.context, self.biases = facts, context, biases

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        facts, own = self.facts[layer], self.context[layer]
        T, S = own.keys.shape[2], keys.shape[2]
        places = torch.arange(T, T + S, dtype=torch.int32, device=keys.device)[None]
        q, k = (
            rotary.rotate(x, places, T + S, [T])  # what frequencies follow was settled with the context
            for rotary, x in ((facts.query_rotary, queries), (facts.key_rotary, keys))
        )
        bias = self.biases.get(layer)
        if bias is not None:
            bias = nn.functional.pad(bias, (0, S))[None].to(keys.device)
        k, v = torch.cat([own.keys, k], 2), torch.cat([own.values, values], 2)
        return ops.attention(q, k, v, window=facts.window, key_bias=bias, **softmax.options)[0]


@dataclass(frozen=True)
class _Asked:
    """Tokens behind a context, int64 [S], and the model's last hidden states with all of it in sight, [1, S, hidden].
    labels: int64 [1, S], -100 where none counts."""

    ids: Tensor
    labels: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class _Text:
    """logs: float32 [layers, Hkv, T, 2], logarithms of most and mean of keys behind the first ones, which always stay.
    asked: how the text goes on, then parts of it said again."""

    context: dict[int, Read]
    logs: Tensor
    asked: list[_Asked]


@renamed(shares="keep")
@torch.inference_mode(False)
def measure_scores(
    model: nn.Module,
    samples: Sequence[Tensor],
    pruner: KVzip,
    *,
    continuation: int = 96,
    keep: Sequence[float] = SHARES,
    steps: int = 180,
    lr: float = 0.02,
    seed: int = 0,
    report: Report | None = None,
) -> ScoreProfile:
    """How KVzip's scores of a model's KV heads compare, for KVzip(mass=True, profile=...) with GlobalTopK.

    model: attached or not, not converted; it is left as it was. samples: token ids int64 [T] each, of plain text; some
    30 of 1,000 tokens do. They are read up to their last `continuation` tokens, which are how they go on. pruner: with
    the words that ask for a text once more (with_tokenizer).
    A step takes a sample and cuts it softly to one of the shares `keep` by the scores of all layers and heads: a key's
    logit gets the logarithm of a sigmoid of how far its score lies above the one that share of all are above; the
    sigmoid gets steeper from step to step. Then it asks for next tokens twice: as the text goes on, and as a part of it
    is said again (seed draws the parts); nothing is planted. The loss is the divergence from what the model says with
    everything in sight, each over what KVzip with mass loses; the powers and the factor of each head are trained, from
    KVzip's with mass on, by Adam at `lr`, which rises over 10 steps and falls to 0.
    report(step, lost, whole) is called in each step with the two, in nats a token, and what KVzip with mass loses there
    at a cut of middling softness.
    Memory: keys and values of all samples, dense. Time: a step is two forward and backward passes of 100 and 150
    tokens.
    Raises ValueError for settings out of range, samples that are too short or too long for the model, models without an
    output layer, that recur, with chunked attention, with layers that read others' keys or have other numbers of KV
    heads, whose output layer is followed by what is not known here, and converted ones; for NaN.
    Source: ours. Scores that compare over layers are what KVzip's section 3.3 takes for granted.
    """
    need(type(pruner) is KVzip, f"pruner must be a KVzip, got {type(pruner).__name__}")
    need_integer("continuation", continuation, 2)
    need_integer("steps", steps, 1)
    need_number("lr", lr, 1e-12, 1e3)
    need(len(keep) > 0, "keep must have at least one share, got none")
    for share in keep:
        need_number("keep", share, 1e-6, 1.0)
    need(len(samples) > 0, "samples must hold at least one, got none")
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    need(head is not None, f"model must predict tokens, got {type(model).__name__} without an output layer")
    with plain_decoder(model) as (decoder, facts):
        layers = whole_layers(facts)
        need(len(layers) > 0, "model must have a layer that sees all tokens, got none")
        for layer in sorted(facts):
            own = facts[layer]
            need(
                own.reads is None,
                f"model must have layers of their own keys: layer {layer} reads those of layer {own.reads}",
            )
            need(own.chunk is None, f"model must not attend in chunks, as layer {layer} does in those of {own.chunk}")
        need(not recurs(cache_layers(decoder.config)), "model must not have recurrent layers: what they have read they "
             "cannot take back")  # fmt: skip
        heads = [facts[layer].kv_heads for layer in layers]
        need(len(set(heads)) == 1, f"model must have as many KV heads in each layer that sees all tokens, got {heads}")
        least = continuation + _PART + pruner.num_sink_tokens + 1
        rows = list(token_rows(decoder, samples))
        for j, row in enumerate(rows):
            need(len(row) >= least, f"samples[{j}] must have at least {least} tokens, got {len(row)}")
            context = len(row) - continuation
            behind = max(
                continuation, *(replace(pruner, chunk=n).positions_behind(context) for n in (_PART, pruner.chunk))
            )
            reach = trained_length_of(decoder.config)
            need(context + behind <= reach, f"samples[{j}] must leave {behind} of the model's {reach:,} positions "
                 f"behind the {context:,} of its tokens that are read, got {len(row):,}")  # fmt: skip
        said = rows[0][:4]
        known = scaled(decoder.config, head(read(decoder, said, _ContextPass(facts))))
        theirs = model(input_ids=said[None], use_cache=False).logits
        known, theirs = known.float(), theirs.float()
        same = bool((known - theirs).norm() < 0.1 * theirs.norm())  # 16 bits round
        need(same, f"model must say what its output layer does, and {type(model).__name__} makes other logits of it")
        rng = np.random.default_rng(seed)
        texts = [_text(model, decoder, facts, layers, row, pruner, continuation, rng) for row in rows]
        fitted = _fitted(decoder, facts, layers, head, texts, pruner, keep, steps, lr, report)
    cuts = "+".join(f"{share:g}" for share in keep)
    read_ = f"{len(samples)} texts of {min(map(len, rows)):,} tokens, chunk {pruner.chunk}, cut to {cuts}"
    how = f"{type(model).__name__}, {steps} steps, lr {lr:g}, {read_}, seed {seed}"
    return replace(fitted, measured=how)


def _text(
    model: nn.Module, decoder: Any, facts: Facts, layers: list[int], row: Tensor, pruner: KVzip, continuation: int,
    rng: np.random.Generator,
) -> _Text:  # fmt: skip
    context, behind = row[:-continuation], row[-continuation:]
    passed = _ContextPass(facts)
    read(decoder, context, passed)
    parts = replace(pruner, chunk=_PART).reread(context, context[:0], True)
    whole = [part.tokens for part in parts if part.end - part.first == _PART]
    some = rng.choice(len(whole), min(_PARTS, len(whole)), replace=False).tolist()
    asked = []
    for ids, wanted in ((behind, continuation), *((whole[i], _PART) for i in some)):
        labels = torch.full_like(ids, -100)
        labels[-wanted:] = ids[-wanted:]
        asked.append(_Asked(ids, labels[None], _behind(decoder, facts, passed.read, ids, {})))
    heads = [facts[layer].kv_heads for layer in layers]
    return _Text(passed.read, _logs(model, context, heads, pruner), asked)


def _behind(decoder: Any, facts: Facts, context: dict[int, Read], ids: Tensor, biases: dict[int, Tensor]) -> Tensor:
    """Last hidden states [1, S, hidden] of tokens behind a context."""
    T = next(iter(context.values())).keys.shape[2]
    places = torch.arange(T, T + len(ids), device=ids.device)[None]
    given = {"position_ids": places} if facts.takes_positions else {}
    passed = _BehindPass(facts, context, biases)
    return decoder(input_ids=ids[None], use_cache=False, **given, **{KEYWORD: passed}).last_hidden_state


def _logs(model: nn.Module, context: Tensor, heads: list[int], pruner: KVzip) -> Tensor:
    """[layers, Hkv, T, 2] of what KVzip sees of each key behind the first ones."""
    ids = torch.cat([context, context[-1:]])[None]  # all but the last are read
    parts = []
    for numbers in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)):
        alone = replace(pruner, mass=True, profile=ScoreProfile(tuple((numbers,) * n for n in heads)))
        cache = PrunedCache(model.config, alone, keep=1.0, later="keep")
        prefill(model, ids, cache, attention_mask=torch.ones_like(ids))
        rows = []
        for layer in cache.compressing:
            held = layer.chooser.held
            assert held is not None and held.scores is not None
            rows.append(held.scores[:, pruner.num_sink_tokens : len(context)].to(context.device))
        parts.append(torch.stack(rows))
    return torch.stack(parts, -1).log()


def _fitted(
    decoder: Any, facts: Facts, layers: list[int], head: Any, texts: list[_Text], pruner: KVzip,
    shares: Sequence[float], steps: int, lr: float, report: Report | None,
) -> ScoreProfile:  # fmt: skip
    every = torch.cat([text.logs for text in texts], 2)
    mean, spread = every.mean(2), every.std(2).clamp_min(_LEVEL)  # [layers, Hkv, 2]
    del every
    start = torch.cat([spread, mean.sum(-1, keepdim=True)], -1)  # powers of 1 and no factor, of what is standardised
    numbers = start.clone().requires_grad_()
    logs = [(text.logs - mean[:, :, None]) / spread[:, :, None] for text in texts]
    optimizer = torch.optim.Adam([numbers], lr=lr, betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 - step / steps) * min(1.0, (step + 1) / 10))
    whole: dict[tuple[int, int, float], float] = {}  # what KVzip with mass loses

    def lost(j: int, number: int, share: float, softness: float, powers: Tensor) -> Tensor:
        scores = (logs[j] * powers[:, :, None, :-1]).sum(-1) + powers[:, :, None, -1]
        biases = dict(zip(layers, _cut(scores, pruner.num_sink_tokens, share, softness), strict=True))
        asked = texts[j].asked[number]
        hidden = _behind(decoder, facts, texts[j].context, asked.ids, biases)
        with torch.no_grad():
            teacher = scaled(decoder.config, head(asked.hidden))
        found = distance(scaled(decoder.config, head(hidden)), teacher, asked.labels)
        return found.divergence / found.tokens

    def step_of(step: int) -> tuple[list[float], list[float]]:
        j, epoch = step % len(texts), step // len(texts)
        share = shares[(j + epoch) % len(shares)]
        softness = _WARM * (_COLD / _WARM) ** (step / steps)
        parts: list[Tensor] = []
        found: tuple[list[float], list[float]] = [], []
        for number in (0, 1 + epoch % (len(texts[j].asked) - 1)):
            key = j, number, share
            if key not in whole:
                with torch.no_grad():
                    whole[key] = float(lost(*key, (_WARM * _COLD) ** 0.5, start))
            own = lost(*key, softness, numbers)
            need(bool(own.isfinite()), f"model must say numbers, got {float(own.detach())} behind samples[{j}]")
            parts.append(own / (whole[key] + _FLAT))
            found[0].append(float(own.detach()))
            found[1].append(whole[key])
        optimizer.zero_grad()
        sum(parts[1:], parts[0]).backward()
        nn.utils.clip_grad_norm_([numbers], 2.0)
        optimizer.step()
        rate.step()
        return found

    with frozen(decoder, head), torch.enable_grad():
        for step in range(steps):
            found = step_of(step)
            if report is not None:
                report(step, *found)
    powers = numbers.detach()[..., :-1] / spread
    factors = numbers.detach()[..., -1] - (powers * mean).sum(-1)
    rows = torch.cat([powers, factors[..., None]], -1).tolist()
    return ScoreProfile(tuple(tuple((a, b, c) for a, b, c in row) for row in rows))


def _cut(scores: Tensor, sinks: int, share: float, softness: float) -> Tensor:
    """float32 [layers, Hkv, sinks + T], logits' biases of a soft cut by logarithms of scores [layers, Hkv, T] over all
    layers and heads, to a share of all keys; the first ones stay."""
    heads, T = scores.shape[:-1].numel(), scores.shape[-1]
    stay = heads * ((T + sinks) * share - sinks)
    gone = min(max(round(scores.numel() - stay), 1), scores.numel())
    border = scores.detach().flatten().kthvalue(gone).values
    biases = nn.functional.logsigmoid((scores - border) / softness).clamp_min(_HIDDEN)
    return nn.functional.pad(biases, (sinks, 0))
