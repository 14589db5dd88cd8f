"""Gates trained on from a fit: so that the model says what it says with everything in sight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..dmc.costs import said_again
from ..dmc.method import dms_attention
from ..hf.facts import Facts
from ..hf.method import KEYWORD
from ..hf.reading import frozen, plain_decoder, token_rows
from ..logits import scaled
from ..ops.softmax import Softmax
from ..pruners import Gates, KVzip
from ..pruners.gate_forms import GateForm, LinearGate
from ..pruners.gates import QUERIES, as_gates
from ..retrofit.distillation import distance
from ..retrofit.passes import TrainingPass, whole_layers
from ..retrofit.regression import levels_of
from ..support.checks import need, need_integer, need_number, renamed
from .fitting import LEVELS, QueriesPass

SHARES = (1 / 4, 1 / 8)
WINDOW, SINKS = 64, 4  # tokens
_HIDDEN = -30.0  # a logit of a key that is as good as gone
_WARM, _COLD = 0.5, 0.15  # nats over which it is chance whether a key stays, at the first step and at the last
_TEMPERATURE = 0.3  # of the relaxed chance: the lower, the nearer a key is to all or nothing
_SLOW = 0.9  # how much of a threshold stays from step to step
_LEAST = 1e-3  # the least spread of a feature
_EDGE = 1e-6
Report = Callable[[int, float], None]


class _GatedPass(TrainingPass):
    """Attention in which keys behind the window weigh what gates let through. chance: which keys stay where what is
    said lies near the threshold; None = none, the likelier. said: float32 [B, Hkv, T] by number."""

    def __init__(
        self, facts: Facts, gates: _Learned, threshold: float, softness: float, window: int, sinks: int,
        chance: torch.Generator | None,
    ) -> None:  # fmt: skip
        super().__init__(facts)
        self.gates, self.threshold, self.softness, self.window, self.sinks = gates, threshold, softness, window, sinks
        self.chance = chance
        self.said: dict[int, Tensor] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        if layer not in self.gates.numbers:
            return self.attend_locally(layer, queries, keys, values, softmax)
        number = self.gates.numbers[layer]
        said = self.gates.says(number, self.facts[layer].own(queries))
        self.said[number] = said.detach()
        logits = (said - self.threshold) / self.softness
        if self.chance is not None:
            drawn = torch.rand(logits.shape, generator=self.chance, device=logits.device).clamp(_EDGE, 1 - _EDGE)
            logits = logits + drawn.logit()
        bias = functional.logsigmoid(logits / _TEMPERATURE).clamp_min(_HIDDEN)
        bias = functional.pad(bias[..., self.sinks :], (self.sinks, 0))
        q, k = self.queries(layer, queries), self.keys(layer, keys)
        return dms_attention(q, k, values, bias, self.window - 1, softmax)


class _Learned:
    """Weights on standardised queries. numbers: of layers that compress, by layer."""

    def __init__(self, gates: Gates, seen: dict[int, Tensor]) -> None:
        """seen: [T, Hq D] by layer, of some text."""
        self.numbers = {layer: number for number, layer in enumerate(seen)}
        self.means = [x.float().mean(0) for x in seen.values()]
        self.spreads = [x.float().std(0).clamp_min(_LEAST) for x in seen.values()]
        self.weights = [nn.Parameter(self._standard(i, layer)) for i, layer in enumerate(gates.layers)]

    def _standard(self, number: int, layer: GateForm) -> Tensor:
        mean, spread = self.means[number], self.spreads[number]
        weights, bias = (x.to(mean.device) for x in layer.tensors().values())
        return torch.cat([weights * spread, bias[:, None] + weights @ mean[:, None]], 1)

    def says(self, number: int, queries: Tensor) -> Tensor:
        x = (queries.transpose(1, 2).flatten(2).float() - self.means[number]) / self.spreads[number]
        weights = self.weights[number]
        return functional.linear(x, weights[:, :-1], weights[:, -1]).transpose(1, 2)

    def layers(self) -> tuple[LinearGate, ...]:
        """As Gates has them."""
        made = []
        for weights, mean, spread in zip(self.weights, self.means, self.spreads, strict=True):
            own, bias = weights.detach().split([len(mean), 1], 1)
            made.append(LinearGate.joined(torch.cat([own / spread, bias - (own / spread) @ mean[:, None]], 1).cpu()))
        return tuple(made)


@renamed(shares="keep")
@torch.inference_mode(False)
def train_gates(
    model: nn.Module,
    gates: Gates,
    samples: Sequence[Tensor],
    pruner: KVzip,
    *,
    steps: int = 200,
    lr: float = 1e-3,
    keep: Sequence[float] = SHARES,
    window: int = WINDOW,
    num_sink_tokens: int = SINKS,
    held_out: int = 4,
    seed: int = 0,
    report: Report | None = None,
) -> Gates:
    """Gates that were fitted, trained on: alone, with all weights of the model as they are.

    model: attached or not, not converted; it is left as it was. gates: where training begins. samples: int64 [T] each;
    the last held_out say levels (r2 is not known of what is no fit), the others are trained on in turn. pruner: KVzip
    with the words that ask for a text once more (with_tokenizer); every second step reads half a sample, these words
    and that half again.
    A step reads one text as GatedCache does, but by chance: a key behind the `window` newest and the first
    num_sink_tokens stays with the probability of a sigmoid of how far its gate lies above a threshold for each of
    `keep` in turn, which follows what gates say; chances are relaxed (concrete, from `seed`) and become certainties
    from step to step. The loss is the divergence from what the model says with everything in sight, mean over tokens;
    Adam at `lr`, which rises over 10 steps and falls to 0.
    report(step, nats) is called in each step with the loss, in nats a token.
    Memory: a forward and a backward pass of one text. Raises ValueError for settings out of range, gates of another
    model, a model without an output layer, and for NaN.
    Source: DMS, section 3 (distillation, relaxed decisions, dropped with delay); thresholds as in KVzap.
    """
    gates = as_gates(gates)
    need(gates.looks_at == QUERIES and gates.form == "linear", "gates must be linear ones of queries to be trained on, "
         f"got {gates.form} of {gates.looks_at}: those that others have published stay as they are")  # fmt: skip
    need(type(pruner) is KVzip, f"pruner must be a KVzip, got {type(pruner).__name__}")
    for name, value in (("steps", steps), ("window", window), ("held_out", held_out)):
        need_integer(name, value, 1, 1 << 30)
    need_integer("num_sink_tokens", num_sink_tokens, 0, 1 << 30)
    need_number("lr", lr, 1e-12, 1e3)
    need(len(keep) > 0, "keep must have at least one share, got none")
    for share in keep:
        need_number("keep", share, 1e-6, 1.0)
    need(len(samples) > held_out, f"samples must be more than the {held_out} that are held out, got {len(samples)}")
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    need(head is not None, f"model must predict tokens, got {type(model).__name__} without an output layer")
    with plain_decoder(model) as (decoder, facts):
        rows = list(token_rows(decoder, samples))
        check_lengths([len(row) for row in rows], pruner, window, num_sink_tokens)
        compressing = [layer for layer in whole_layers(facts) if facts[layer].reads is None]
        gates.check_model(decoder, [facts[layer] for layer in compressing])
        passed = QueriesPass(facts)
        decoder(input_ids=rows[0][None], use_cache=False, **{KEYWORD: passed})
        learned = _Learned(gates, {layer: passed.seen[layer] for layer in compressing})
        thresholds = {share: gates.threshold(share) for share in keep}
        with frozen(decoder, head), torch.enable_grad():
            for step, nats in _steps(
                decoder,
                facts,
                head,
                learned,
                rows[:-held_out],
                pruner,
                steps,
                lr,
                thresholds,
                window,
                num_sink_tokens,
                seed,
            ):
                if report is not None:
                    report(step, nats)
            levels = _levels(decoder, facts, learned, rows[-held_out:], thresholds, window, num_sink_tokens)
    cuts = "+".join(f"{share:g}" for share in keep)
    how = f"trained on: {steps} steps, lr {lr:g}, to {cuts}, window {window}, seed {seed}"
    return replace(gates, layers=learned.layers(), levels=levels, r2=(), measured=f"{gates.measured}; {how}")


def check_lengths(lengths: Sequence[int], pruner: KVzip, window: int, sinks: int) -> None:
    """Raises ValueError for samples of which nothing would be dropped, said again or not."""
    words = len(pruner.prompt) + len(pruner.suffix)
    least = max(sinks + window + 2, words + 2)
    for j, length in enumerate(lengths):
        need(length >= least, f"samples[{j}] must have at least {least} tokens, for {sinks} first and {window} last "
             f"ones that stay, and {words} that ask for a text again, got {length}")  # fmt: skip


@torch.no_grad()
def _levels(
    decoder: Any, facts: Facts, learned: _Learned, rows: Sequence[Tensor], thresholds: dict[float, float], window: int,
    sinks: int,
) -> tuple[float, ...]:  # fmt: skip
    """Of what gates say while they are gone by, at the middle one of the shares."""
    share = sorted(thresholds)[len(thresholds) // 2]
    said = []
    for ids in rows:
        passed = _GatedPass(facts, learned, thresholds[share], _COLD, window, sinks, None)
        decoder(input_ids=ids[None], use_cache=False, **{KEYWORD: passed})
        said += [x[..., sinks:].cpu() for x in passed.said.values()]
    return tuple(levels_of(said, LEVELS).tolist())


def _steps(
    decoder: Any, facts: Facts, head: Any, learned: _Learned, rows: list[Tensor], pruner: KVzip, steps: int, lr: float,
    thresholds: dict[float, float], window: int, sinks: int, seed: int,
) -> Iterator[tuple[int, float]]:  # fmt: skip
    shares, chance = list(thresholds), torch.Generator(rows[0].device).manual_seed(seed)
    optimizer = torch.optim.Adam(learned.weights, lr=lr, betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 - step / steps) * min(1.0, (step + 1) / 10))
    for step in range(steps):
        number = step // 2
        row = rows[number % len(rows)]
        share = shares[(number + number // len(rows)) % len(shares)]  # every row sees every share
        ids = said_again(pruner, row, len(row)) if step % 2 else row
        softness = _WARM * (_COLD / _WARM) ** (step / steps)
        with torch.no_grad():
            plain = decoder(input_ids=ids[None], use_cache=False, **{KEYWORD: QueriesPass(facts)}).last_hidden_state
            teacher = scaled(decoder.config, head(plain))
        passed = _GatedPass(facts, learned, thresholds[share], softness, window, sinks, chance)
        hidden = decoder(input_ids=ids[None], use_cache=False, **{KEYWORD: passed}).last_hidden_state
        found = distance(scaled(decoder.config, head(hidden)), teacher, ids[None])
        loss = found.divergence / found.tokens
        need(bool(loss.isfinite()), f"model must say numbers, got {float(loss.detach())} in step {step}")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned.weights, 1.0)
        optimizer.step()
        rate.step()
        every = torch.cat([x[..., sinks:].flatten() for x in passed.said.values()])
        border = float(every.kthvalue(max(round(len(every) * (1 - share)), 1)).values)
        thresholds[share] = _SLOW * thresholds[share] + (1 - _SLOW) * border
        yield step, float(loss.detach())
