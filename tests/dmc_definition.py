"""DMC and DMS as algorithms over the tokens of one sequence: plain loops in float64, nothing of the package."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Row:
    """What one KV head holds: (key, value, position) of each entry, and the tokens of the newest one (DMC)."""

    entries: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    segment: list[tuple[float, Tensor, Tensor]] = field(default_factory=list)  # omega, key, value


@dataclass
class Result:
    """out: [Hq, T, D]. alpha: bool [Hkv, T]. rows: of each KV head after the last token."""

    out: Tensor
    alpha: Tensor
    rows: list[Row]
    lengths: list[list[int]]  # of each KV head after each token


@dataclass
class Logits:
    """scale: of products; None = 1/sqrt(D). softcap: logits l become softcap * tanh(l / softcap). sinks: a logit per
    query head of a key without value."""

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def probabilities(self, products: Tensor, head: int) -> Tensor:
        """Of the last dimension; of products that are -inf none."""
        logits = products if self.scale is None else products * self.scale
        if self.softcap is not None:
            capped = self.softcap * torch.tanh(logits / self.softcap)
            logits = torch.where(logits == float("-inf"), logits, capped)
        if self.sinks is not None:
            sink = self.sinks[head].double().expand(*logits.shape[:-1], 1)
            return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
        return logits.softmax(-1)


Turning = Tensor | tuple[Tensor, Tensor]  # frequencies, or cosines and sines [T, pairs] of every position


def rotated(x: Tensor, t: int, turning: Turning) -> Tensor:
    if isinstance(turning, tuple):
        cos, sin = (table[t].double() for table in turning)
    else:
        cos, sin = (t * turning).cos(), (t * turning).sin()
    half = len(cos)
    first, second, rest = x[:half], x[half : 2 * half], x[2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest])


def without(x: Tensor, neuron: int) -> Tensor:
    x = x.clone()
    x[neuron] = 0
    return x


def turned(x: Tensor, t: int, frequencies: Turning, neuron: int) -> Tensor:
    return without(rotated(without(x, neuron), t, frequencies), neuron)


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(min(-x, 700)))


def weight(q: Tensor, h: int, G: int, config) -> float:
    """q: the neurons of all query heads at one token."""
    if config.omega == "uniform":
        return 1.0
    logits = [float(x) for x in q[h * G : (h + 1) * G]]
    if config.share_heads == "mean":
        logits = [float(q.mean())]
    elif config.share_heads == "head0":
        logits = [float(q[0])]
    if config.gqa_omega == "mean_logit":
        omega = logistic(sum(logits) / len(logits) + config.shift)
    elif config.gqa_omega == "mean_sigmoid":
        omega = sum(logistic(x + config.shift) for x in logits) / len(logits)
    else:
        omega = logistic(logits[0] + config.shift)
    return max(omega, 2.0**-40) + config.omega_eps


def decision(k: Tensor, h: int, t: int, config, scale: float) -> bool:
    """k: the neurons of all KV heads at one token."""
    logit = float({"none": k[h], "mean": k.mean(), "head0": k[0]}[config.share_heads])
    return t > 0 and scale * logit - config.shift > config.decision_margin


def attended(q: Tensor, entries: list[tuple[Tensor, Tensor]], logits: Logits, head: int) -> Tensor:
    keys, values = (torch.stack(x) for x in zip(*entries, strict=True))
    products = keys @ q if logits.scale is not None else keys @ q / math.sqrt(len(q))
    return logits.probabilities(products, head) @ values


def local(q: Tensor, k: Tensor, v: Tensor, turning: Turning, logits: Logits, window: int | None) -> Tensor:
    """Plain attention of one sequence, q [Hq, T, D], k, v: [Hkv, T, D], to a window or to all."""
    q, k, v = (x.double() for x in (q, k, v))
    T, G = q.shape[1], q.shape[0] // k.shape[0]
    q, k = (torch.stack([torch.stack([rotated(x[t], t, turning) for t in range(T)]) for x in y]) for y in (q, k))
    i, j = torch.arange(T)[:, None], torch.arange(T)
    hidden = (j > i) | (j <= i - (window or T))
    out = []
    for head in range(q.shape[0]):
        products = (q[head] @ k[head // G].T).masked_fill(hidden, float("-inf"))
        out.append(logits.probabilities(products, head) @ v[head // G])
    return torch.stack(out)


def dmc(q: Tensor, k: Tensor, v: Tensor, config, frequencies: Turning, logits: Logits) -> Result:
    """q: [Hq, T, D], k, v: [Hkv, T, D], before rotation."""
    q, k, v = (x.double() for x in (q, k, v))
    (Hq, T, D), Hkv = q.shape, k.shape[0]
    n, G = config.neuron % D, Hq // Hkv
    rows = [Row() for _ in range(Hkv)]
    out, alpha = torch.zeros(Hq, T, D, dtype=torch.float64), torch.zeros(Hkv, T, dtype=torch.bool)
    lengths: list[list[int]] = [[] for _ in range(Hkv)]
    for t in range(T):
        for h, row in enumerate(rows):
            alpha[h, t] = decision(k[:, t, n], h, t, config, 1.0)
            new = (weight(q[:, t, n], h, G, config), without(k[h, t], n), v[h, t])
            if alpha[h, t]:
                row.segment.append(new)
                row.entries.pop()
            else:
                row.segment = [new]
            used = row.segment[-config.window :] if config.window else row.segment
            z = sum(omega for omega, _, _ in used)
            key, value = (sum(token[0] * token[i] for token in used) / z for i in (1, 2))
            row.entries.append((turned(key, t, frequencies, n), value))
            lengths[h].append(len(row.entries))
            for g in range(h * G, (h + 1) * G):
                out[g, t] = attended(turned(q[g, t], t, frequencies, n), row.entries, logits, g)
    return Result(out, alpha, rows, lengths)


def dms(q: Tensor, k: Tensor, v: Tensor, config, frequencies: Turning, logits: Logits) -> Result:
    """As dmc; entries are the tokens that the last query sees, oldest first."""
    q, k, v = (x.double() for x in (q, k, v))
    (Hq, T, D), Hkv = q.shape, k.shape[0]
    n, G = config.neuron % D, Hq // Hkv
    rows = [Row() for _ in range(Hkv)]
    out, alpha = torch.zeros(Hq, T, D, dtype=torch.float64), torch.zeros(Hkv, T, dtype=torch.bool)
    lengths: list[list[int]] = [[] for _ in range(Hkv)]
    after = 1 if config.dms_decides == "successor" else 0  # whose decision drops a token
    for h, row in enumerate(rows):
        for t in range(T):
            alpha[h, t] = decision(k[:, t, n], h, t, config, config.dms_scale)
            seen = [j for j in range(t + 1) if t - j <= config.dms_window or not alpha[h, j + after]]
            row.entries = [(turned(k[h, j], j, frequencies, n), v[h, j]) for j in seen]
            lengths[h].append(len(seen))
            for g in range(h * G, (h + 1) * G):
                out[g, t] = attended(turned(q[g, t], t, frequencies, n), row.entries, logits, g)
    return Result(out, alpha, rows, lengths)


def definition(q: Tensor, k: Tensor, v: Tensor, config, frequencies: Turning, logits: Logits | None = None) -> Result:
    turning = frequencies if isinstance(frequencies, tuple) else frequencies.double()
    return (dms if config.mode == "dms" else dmc)(q, k, v, config, turning, logits or Logits())
