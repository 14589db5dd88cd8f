"""What PrunedCache does, written out with loops over rows and tokens, in the dtype of the model: the tests' oracle."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Row:
    """What one KV head holds: raw keys, values, true positions; the first `far` of them are the far segment."""

    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    place: list[int] = field(default_factory=list)
    far: int = 0
    received: list[float] = field(default_factory=list)

    def keep(self, chosen: list[int], far: int) -> None:
        for name in ("k", "v", "place", "received"):
            values = getattr(self, name)
            setattr(self, name, [values[j] for j in chosen])
        self.far = far


class Definition:
    """score(rows, queries) -> one list of floats per row and which first and last tokens are sure; see the tests.

    choose(scores, keep, first, last): sets per row. blank: unused ids (constant: the distance); None: true positions.
    """

    def __init__(self, model, score, keep, *, every=None, blank=None, shared=False, constant=False, window=None):
        self.model, self.score, self.keep, self.every = model, score, keep, every
        self.blank, self.shared, self.constant, self.window = blank, shared or constant, constant, window
        config = model.config
        self.heads, self.group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
        self.D = config.head_dim
        self.rows = [[Row() for _ in range(self.heads)] for _ in model.model.layers]
        self.queries: list[list[tuple[Tensor, int]]] = [[] for _ in model.model.layers]  # [Hq, D], true position
        self.voted = [0] * len(self.rows)
        self.seen = 0

    def turn(self, x: Tensor, places: list[int]) -> Tensor:
        """x [n, D] or [D], turned to n places."""
        angle = torch.tensor(places)[:, None] * self.model.model.rotary_emb.inv_freq.double().repeat(2)
        half = torch.cat([-x[..., self.D // 2 :], x[..., : self.D // 2]], -1)
        return x * angle.cos() + half * angle.sin()

    def logits(self, row: Row, q: Tensor, place: int) -> Tensor:
        """Of every key of the row that the query at this true position sees; places rise."""
        seen = sum(at <= place for at in row.place)
        if not seen:
            return torch.empty(0, dtype=q.dtype)
        slots = [0 if self.shared else j for j in range(row.far)]
        keys = self.turn(torch.stack(row.k[:seen]), (slots + row.place[row.far :])[:seen])
        if self.constant:
            far = self.blank
        elif self.blank is not None and row.far:
            far = (min(row.far, 1) if self.shared else row.far) + self.blank + place - row.place[row.far]
        else:
            far = place
        queries = self.turn(q, ([far] * row.far + [place] * (len(row.k) - row.far))[:seen])
        return (queries * keys).sum(1) / self.D**0.5

    def attention(self, row: Row, q: Tensor, place: int) -> Tensor:
        return self.logits(row, q, place).softmax(0)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits of the last of these tokens [n], one call."""
        base, n = self.model.model, len(tokens)
        h = base.embed_tokens(tokens[None])
        for number, layer in enumerate(base.layers):
            rows, x = self.rows[number], layer.input_layernorm(h)
            attention = layer.self_attn
            if n > 1 and self.every and len(rows[0].k) > self.keep:
                self.compress(number, self.queries[number])
            q, k, v = (
                p(x)[0].unflatten(-1, (-1, self.D)) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            out = torch.zeros(n, self.heads * self.group, self.D, dtype=h.dtype)
            for i in range(n):
                self.queries[number].append((q[i], self.seen + i))
                for r, row in enumerate(rows):
                    row.k.append(k[i, r])
                    row.v.append(v[i, r])
                    row.place.append(self.seen + i)
                    row.received.append(0.0)
                    for g in range(r * self.group, (r + 1) * self.group):
                        out[i, g] = self.attention(row, q[i, g], self.seen + i) @ torch.stack(row.v)
            h = h + attention.o_proj(out.flatten(1)[None])
            h = h + layer.mlp(layer.post_attention_layernorm(h))
            over = len(rows[0].k) - self.keep
            if n > 1 and over > 0:
                self.compress(number, self.queries[number][-n:])
            elif n == 1 and self.every and over > self.every - 1:
                self.compress(number, self.queries[number])
        self.seen += n
        return self.model.lm_head(base.norm(h))[0, -1]

    def compress(self, number: int, queries: list[tuple[Tensor, int]]) -> None:
        rows = self.rows[number]
        for q, place in self.queries[number][self.voted[number] :]:  # H2O's sums
            for r, row in enumerate(rows):
                for g in range(r * self.group, (r + 1) * self.group):
                    for j, p in enumerate(self.attention(row, q[g], place).tolist()):
                        row.received[j] += p
        self.voted[number] = len(self.queries[number])
        chosen, near = self.score(self, rows, queries, self.keep)
        if getattr(self.score, "forgets", False):  # queries whose own keys may be gone ask no more
            del self.queries[number][:-near]
            self.voted[number] = near
        for row, places in zip(rows, chosen, strict=True):
            row.keep(sorted(places), len(places) - near if self.blank is not None else 0)


def best(scores: list[float], count: int, places: range) -> list[int]:
    """The best of these places; ties go to the lower one."""
    return sorted(places, key=lambda j: (-scores[j], j))[:count]


def column_sums(definition, row, r, queries, lo=0, hi=None):
    """For every key the sum of the softmax over keys lo..hi-1 that each query of the row's heads sees."""
    T = len(row.k)
    hi = T if hi is None else hi
    total = [0.0] * T
    for q, place in queries:
        for g in range(r * definition.group, (r + 1) * definition.group):
            logits = definition.logits(row, q[g], place)
            end = min(hi, len(logits))
            if end > lo:
                for j, p in enumerate(logits[lo:end].softmax(0).tolist()):
                    total[lo + j] += p
    return total


def snapkv(window, kernel):
    def choose(definition, rows, queries, keep):
        W = min(window, len(queries), keep)
        chosen = []
        for r, row in enumerate(rows):
            T = len(row.k)
            sums = column_sums(definition, row, r, queries[-W:])[: T - W]
            half = kernel // 2
            pooled = [sum(sums[max(t - half, 0) : t + half + 1]) for t in range(T - W)]
            chosen.append(best(pooled, keep - W, range(T - W)) + list(range(T - W, T)))
        return chosen, W

    choose.forgets = True
    return choose


def h2o(ratio=0.5):
    def choose(definition, rows, queries, keep):
        recent = int(keep * ratio)
        return [
            best(row.received, keep - recent, range(len(row.k) - recent)) + list(range(len(row.k) - recent, len(row.k)))
            for row in rows
        ], recent

    return choose


def tova(near=0):
    def choose(definition, rows, queries, keep):
        sums = [column_sums(definition, row, r, queries[-1:]) for r, row in enumerate(rows)]
        shared = [sum(column) for column in zip(*sums, strict=True)]
        T = len(shared)
        return [best(shared, keep - near, range(T - near)) + list(range(T - near, T)) for _ in rows], near

    return choose


def cge(l_comp, l_near, l_head, window, order, keep_head=True, shared_heads=False):
    """intelllm: section 5's reference, over the definition's logits."""
    first = [True]

    def choose(definition, rows, queries, keep):
        assert keep == l_comp + l_near
        head = l_head if keep_head or first[0] else 0
        scores = []
        for r, row in enumerate(rows):
            T = len(row.k)
            lo, hi = (head, T) if order == "local" else (0, T - l_near)
            scores.append(column_sums(definition, row, r, queries[-min(window, l_near) :], lo, hi))
        if shared_heads:
            scores = [[sum(column) for column in zip(*scores, strict=True)]] * len(rows)
        chosen = []
        for row, score in zip(rows, scores, strict=True):
            T = len(row.k)
            top = best(score, l_comp - l_head if keep_head else l_comp, range(head, T - l_near))
            chosen.append((list(range(head)) if keep_head else []) + top + list(range(T - l_near, T)))
        definition.calls = getattr(definition, "calls", 0) + 1
        if definition.calls % len(definition.rows) == 0:
            first[0] = False
        return chosen, l_near

    return choose
