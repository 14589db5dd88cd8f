"""Attention matching ("Fast KV Compaction via Attention Matching", arXiv:2602.16284), head by head, to be read.

A prompt of P tokens becomes a few slots of a KV head: keys that were chosen, and values and biases that are fitted so
that reference queries get from them what they got from all. Everything is of one sequence; H = KV heads, N = reference
queries of a KV head (all its query heads'), D = head dim.

What a reference query q gets from a prompt of which the slots S are left, with biases b, beside its own near tokens:
weights A = exp(b) p[S] / z, p its dense attention, z = what is left of its mass, exp(b) p[S] summed + 1 - p summed.
The difference of its output from the dense one is exactly linear in a change X of the values, A X: so X is a ridge
regression of that difference on A. Ridge pulls towards the original values (X = 0), as strong as reference queries that
are held out in turn say; where no X helps them, X is 0. The paper fits values to the numerator of attention alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

NAME = "attention_matching"
RIDGE = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)  # of the mean of the diagonal
ENOUGH = 0.8  # of what the best ridge wins: the strongest that wins as much is taken
BLOCK = 64  # neighbouring queries are held out together
LEAST, MOST = math.exp(-3), math.exp(3)  # of exp(bias), as in the paper
SINKS = 4  # first tokens of each head that stay


@dataclass(frozen=True)
class Recorded:
    """Of a layer in one pass: queries [H, G, n, D], keys and values [H, n, D], rotated, and the scaling of logits."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float


@dataclass(frozen=True)
class References:
    """Of a layer: attention [H, N, P] of reference queries on the prompt, outputs [H, N, D], held-out folds [N]."""

    attention: Tensor
    outputs: Tensor
    folds: Tensor


@dataclass(frozen=True)
class Slots:
    """Of a KV head: keys [n, D], values [n, D], biases [n]."""

    keys: Tensor
    values: Tensor
    biases: Tensor


# ---- the model ----


@dataclass
class Matching:
    """A model whose attention records what it computes, or reads slots in place of a prompt."""

    model: PreTrainedModel

    def __post_init__(self) -> None:
        self._recorded: dict[int, Recorded] = {}
        self._slots: list[list[Slots]] | None = None
        AttentionInterface.register(NAME, self._attend)
        self.model.set_attn_implementation(NAME)

    def _attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **others: Any
                ) -> tuple[Tensor, None]:  # fmt: skip
        _, heads, n, D = q.shape
        queries, keys, values = q[0].unflatten(0, (k.shape[1], -1)), k[0], v[0]
        logits = torch.einsum("hgnd,hmd->hgnm", queries, keys) * scaling
        logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
        if self._slots is None:
            self._recorded[module.layer_idx] = Recorded(queries, keys, values, scaling)
            out = logits.softmax(-1) @ values[:, None]
        else:
            outs = []
            for head, slots in enumerate(self._slots[module.layer_idx]):
                far = queries[head] @ slots.keys.T * scaling + slots.biases
                weights = torch.cat([far, logits[head]], -1).softmax(-1)
                outs.append(weights @ torch.cat([slots.values, values[head]]))
            out = torch.stack(outs)
        return out.reshape(1, heads, n, D).transpose(1, 2), None

    @torch.no_grad()
    def record(self, ids: list[int]) -> list[Recorded]:
        self._slots, self._recorded = None, {}
        self.model(input_ids=torch.tensor([ids]), use_cache=False)
        return [self._recorded[layer] for layer in sorted(self._recorded)]

    @torch.no_grad()
    def logits(self, prompt_tokens: int, following: list[int], slots: list[list[Slots]]) -> Tensor:
        """float32 [n, vocabulary] of what follows a prompt of which the slots of each layer and head are left."""
        self._slots = slots
        places = torch.arange(prompt_tokens, prompt_tokens + len(following))[None]
        ids = torch.tensor([following])
        return self.model(input_ids=ids, position_ids=places, use_cache=False).logits[0].float()

    # ---- reference queries ----

    def second_reading(self, prompt: list[int], behind: list[int]) -> list[References]:
        """The queries of what is read behind the prompt: the prompt itself once more, or another text."""
        P = len(prompt)
        found = []
        for one in self.record(prompt + behind):
            n = one.keys.shape[1]
            logits = torch.einsum("hgnd,hmd->hgnm", one.queries[:, :, P:], one.keys) * one.scaling
            logits = logits.masked_fill(torch.ones(n - P, n, dtype=torch.bool).triu(P + 1), -math.inf)
            weights = logits.softmax(-1)
            found.append(_references(weights[..., :P], weights @ one.values[:, None]))
        return found

    def replayed(self, recorded: list[Recorded], chunk: int = 256) -> list[References]:
        """The first reading's queries, turned in chunks to positions behind the prompt, as the pruner Replay does."""
        found, frequencies = [], self.model.model.rotary_emb.inv_freq
        for one in recorded:
            P = one.keys.shape[1]
            parts, outputs = [], []
            for first in range(0, P, chunk):
                n = min(chunk, P - first)
                own = slice(first, first + n)
                queries = turned(one.queries[:, :, own], P - first, frequencies)
                keys = torch.cat([one.keys, turned(one.keys[:, own], P - first, frequencies)], 1)
                logits = torch.einsum("hgnd,hmd->hgnm", queries, keys) * one.scaling
                logits = logits.masked_fill(torch.ones(n, P + n, dtype=torch.bool).triu(P + 1), -math.inf)
                weights = logits.softmax(-1)
                parts.append(weights[..., :P])
                outputs.append(weights @ torch.cat([one.values, one.values[:, own]], 1)[:, None])
            found.append(_references(torch.cat(parts, 2), torch.cat(outputs, 2)))
        return found


def _references(attention: Tensor, outputs: Tensor) -> References:
    folds = torch.arange(attention.shape[2]) // BLOCK % 2
    return References(attention.flatten(1, 2), outputs.flatten(1, 2), folds.repeat(attention.shape[1]))


def turned(x: Tensor, positions: int, frequencies: Tensor) -> Tensor:
    """x [..., D] rotated by so many positions more, in halves, as Llama does."""
    angles = positions * frequencies.double()
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


# ---- choosing ----


def chosen(scores: Tensor, slots: int, *, uniform: bool = False) -> list[list[Tensor]]:
    """Of scores [L, H, P] the best, `slots` in all: over all layers and heads, or as many in each."""
    L, H, P = scores.shape
    scores = scores.clone()
    scores[..., :SINKS] = math.inf
    keep = torch.zeros_like(scores, dtype=torch.bool)
    if uniform:
        keep.scatter_(2, scores.topk(max(slots // (L * H), 1)).indices, True)
    else:
        keep.view(-1)[scores.flatten().topk(slots).indices] = True
    return [[keep[layer, head].nonzero()[:, 0] for head in range(H)] for layer in range(L)]


# ---- fitting ----


def held_out(fold: Tensor, solve: Callable[[Tensor, float], Tensor], error: Callable[[Tensor, Tensor | None], float],
             ridges: tuple[float, ...] = RIDGE) -> float | None:  # fmt: skip
    """The strongest ridge with ENOUGH of what the best one wins on queries that are held out; None = none wins.
    solve(queries to fit, ridge); error(queries to judge, what was fitted or None)."""
    sides = [fold == 0, fold != 0]
    nothing = sum(error(side, None) for side in sides)
    won = {ridge: nothing - sum(error(~side, solve(side, ridge)) for side in sides) for ridge in ridges}
    best = max(won.values())
    return max(ridge for ridge, gain in won.items() if gain >= ENOUGH * best) if best > 0 else None


def fitted_values(weights: Tensor, missing: Tensor, fold: Tensor) -> Tensor:
    """X [n, D] that makes weights [N, n] @ X what is missing [N, D]."""
    A, Y = weights.double(), missing.double()
    eye = torch.eye(A.shape[1], dtype=A.dtype)

    def solve(some: Tensor, ridge: float) -> Tensor:
        gram = A[some].T @ A[some]
        scale = gram.diagonal().mean().clamp(min=1e-30)
        return torch.linalg.solve(gram + ridge * scale * eye, A[some].T @ Y[some])

    def error(some: Tensor, X: Tensor | None) -> float:
        return float((Y[some] if X is None else A[some] @ X - Y[some]).square().sum())

    ridge = held_out(fold, solve, error)
    return torch.zeros_like(missing[: A.shape[1]]) if ridge is None else solve(fold >= 0, ridge).float()


def fitted_biases(attention: Tensor, places: Tensor, fold: Tensor) -> Tensor:
    """[n]: with them the slots have the mass that the whole prompt has; least squares with bounds, by steps that are
    projected (the paper's), towards 0 by ridge."""
    A, y = attention[:, places].double(), attention.sum(1).double()

    def solve(some: Tensor, ridge: float, steps: int = 50) -> Tensor:
        gram, right = A[some].T @ A[some], A[some].T @ y[some]
        pull, v = ridge * gram.diagonal().mean(), torch.ones(A.shape[1], dtype=A.dtype)
        for _ in range(20):  # the largest eigenvalue; entries are positive
            v = torch.nn.functional.normalize(gram @ v, dim=0)
        step = 1 / (1.05 * (gram @ v).norm() + pull).clamp(min=1e-12)
        w = ahead = torch.ones(A.shape[1], dtype=A.dtype)
        t = 1.0
        for _ in range(steps):
            new = (ahead - step * (gram @ ahead - right + pull * (ahead - 1))).clamp(LEAST, MOST)
            faster = (1 + math.sqrt(1 + 4 * t * t)) / 2
            ahead, w, t = new + (t - 1) / faster * (new - w), new, faster
        return w

    def error(some: Tensor, w: Tensor | None) -> float:
        return float(((A[some].sum(1) if w is None else A[some] @ w) - y[some]).square().sum())

    ridge = held_out(fold, solve, error, RIDGE[2::2])
    return torch.zeros(len(places)) if ridge is None else solve(fold >= 0, ridge).log().float()


def compacted(keys: Tensor, values: Tensor, references: References, head: int, places: Tensor, *, biases: bool,
              fits: bool) -> Slots:  # fmt: skip
    """One KV head [P, D] with the tokens at `places` left."""
    attention, outputs = references.attention[head], references.outputs[head]
    left, bias = values[places], torch.zeros(len(places))
    if not len(places):
        return Slots(keys[places], left, bias)
    if biases:
        bias = fitted_biases(attention, places, references.folds)
    if fits:
        mass = attention[:, places] * bias.exp()
        sums = (mass.sum(1) + 1 - attention.sum(1)).clamp(min=1e-6)[:, None]
        now = (mass @ left + outputs - attention @ values) / sums
        left = left + fitted_values(mass / sums, outputs - now, references.folds)
    return Slots(keys[places], left, bias)


def merged(keys: Tensor, values: Tensor, references: References, head: int, places: Tensor) -> Slots:
    """Each token that goes is merged into the slot with the most similar key, weighed by its mean attention; the slot's
    bias is the logarithm of how much more it then stands for."""
    if not len(places):
        return Slots(keys[places], values[places], torch.zeros(0))
    mass = references.attention[head].mean(0).clamp(min=1e-12)
    unit = torch.nn.functional.normalize(keys, dim=-1)
    into = (unit @ unit[places].T).argmax(1)
    into[places] = torch.arange(len(places))

    def sums(x: Tensor) -> Tensor:
        return torch.zeros(len(places), *x.shape[1:]).index_add_(0, into, x)

    total = sums(mass)
    bias = (total / mass[places]).clamp(LEAST, MOST).log()
    return Slots(sums(mass[:, None] * keys) / total[:, None], sums(mass[:, None] * values) / total[:, None], bias)
