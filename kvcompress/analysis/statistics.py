"""What a model's attention is like: how few keys matter, how alike near queries are, and where mass lies."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import ops
from ..hf.facts import Facts
from ..hf.reading import plain_decoder, read, token_rows, tokens_of
from ..ops.softmax import Softmax
from ..retrofit.passes import TrainingPass, whole_layers
from ..support.checks import need, need_integer
from ..support.files import write_text
from ..support.progress import Progress, showing

FORMAT = "kvcompress.attention/1"
MASS = (0.5, 0.9, 0.99)  # of a row, that its largest weights hold
BLOCK_NUMBERS = 1 << 22  # weights that are held at once


@dataclass(frozen=True)
class Estimate:
    """mean: over the samples of each one's mean; NaN where none has any. error: its standard error, NaN for one sample.

    Both float64 of one shape.
    """

    mean: Tensor
    error: Tensor

    @classmethod
    def of(cls, samples: list[Tensor]) -> Estimate:
        """Of one tensor per sample, all of one shape; NaN is left out."""
        values = torch.stack(samples)
        counts = values.isfinite().sum(0)
        mean = values.nanmean(0)
        squares = (values - mean).square().nansum(0)
        error = (squares / (counts - 1).clamp(min=1) / counts.clamp(min=1)).sqrt()
        return cls(mean, error.masked_fill(counts < 2, float("nan")))


@dataclass(frozen=True)
class AttentionStatistics:
    """Of the layers that see all tokens, L of them, and their query heads; what `attention` measured.

    A[i, j] is the weight that the query at position i gives to the key at j <= i, softcap and a learned sink of the
    model included, and n = i + 1 the number of keys it sees.

    layers: their numbers in the model. samples: how many were read; tokens: of all of them. rows, head, tail, top_k,
    local: settings of `attention`. distances: d, powers of two below local.

    sparsity [L, Hq]: 1 - mean of #{j: A[i, j] > 1/n} / n (IntelLLM, figure 1c). A uniform row has no weight above 1/n
    and counts as wholly sparse: mass_share tells the two apart.
    sparsity_pooled [L, Hq]: 1 - the sum of the counts over the sum of n.
    mass_share [L, Hq, 3]: smallest share of the n keys that holds 50, 90 and 99 % of the row's weights.
    head_gravity [L, Hq]: mass of the row on the first `head` keys.
    tail_gravity [L, Hq]: mass on the last `tail` keys that the query sees, its own included; for the last query of a
    sample these are its last keys.
    center [L, Hq]: mean position of the keys, weighted by A, over i: 0 is the first key, 1 the query's own.

    Of pairs of the last `local` queries i and i + d of each sample, [L, Hq, len(distances)], NaN where there are none:
    cosine: of the queries before rotation (figure 1a); cosine_rotated: after it.
    similarity: 1 - Jensen-Shannon divergence in bits of their rows.
    overlap: Jaccard index of their top_k keys (figure 1b); rows of more than top_k keys alone.
    drift: distance of their centers, in tokens.
    """

    layers: tuple[int, ...]
    samples: int
    tokens: int
    rows: int | None
    head: int
    tail: int
    top_k: int
    local: int
    distances: tuple[int, ...]
    sparsity: Estimate
    sparsity_pooled: Estimate
    mass_share: Estimate
    head_gravity: Estimate
    tail_gravity: Estimate
    center: Estimate
    cosine: Estimate
    cosine_rotated: Estimate
    similarity: Estimate
    overlap: Estimate
    drift: Estimate

    def save(self, path: str | os.PathLike[str]) -> Path:
        """As JSON, whole or not at all; NaN is null. Returns the path."""

        def plain(x: object) -> object:
            if isinstance(x, Estimate):
                return {"mean": plain(x.mean), "error": plain(x.error)}
            if isinstance(x, Tensor):
                return plain(x.tolist())
            if isinstance(x, (list, tuple)):
                return [plain(part) for part in x]
            return None if isinstance(x, float) and math.isnan(x) else x

        content = {"format": FORMAT} | {field.name: plain(getattr(self, field.name)) for field in fields(self)}
        return write_text(path, json.dumps(content, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AttentionStatistics:
        """What save wrote. Raises ValueError for anything else, FileNotFoundError for no file."""

        def number(x: object) -> object:
            return [number(part) for part in x] if isinstance(x, list) else (math.nan if x is None else x)

        name = Path(path).name
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
                raise ValueError(f"it has no format {FORMAT!r}")
            for key, value in content.items():
                if isinstance(value, dict):
                    parts = (torch.tensor(number(value[part]), dtype=torch.float64) for part in ("mean", "error"))
                    content[key] = Estimate(*parts)
                elif isinstance(value, list):
                    content[key] = tuple(value)
            return cls(**content)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{name} must be what AttentionStatistics.save wrote: {error}") from None


def attention(
    model: nn.Module,
    samples: Iterable[Tensor | Sequence[int]],
    *,
    rows: int | None = None,
    head: int = 4,
    tail: int = 256,
    top_k: int = 32,
    local: int = 256,
    progress: Progress | bool = False,
) -> AttentionStatistics:
    """Measures the attention of every layer that sees all tokens, and of each of its query heads.

    model: attached or not, not converted; it is left as it was. samples: token ids [T] or [1, T] each, T at least 2, of
    any lengths. rows: queries of each sample that count for sparsity, mass, gravity and center, spread evenly up to the
    last one; None = all but the first, which sees one key. head, tail: keys whose mass is gravity. top_k: keys of a row
    that `overlap` compares. local: last queries of a sample that are compared with each other; at least 2. progress:
    called with the tokens read, or True for a bar.
    Rows are computed in blocks from queries and keys, in float32: memory is one layer's queries and keys, some blocks
    of at most 16 MiB of weights, and [local, T] of one query head, never [T, T]. Work: of each row its products and a
    sort.
    Raises ValueError for a converted model, one without layers that see all tokens, no samples, samples that are no
    token ids or of one token, and for NaN. Source: IntelLLM, section 3.2 and figure 1.
    """
    if rows is not None:
        need_integer("rows", rows, 1)
    for name, value, least in (("head", head, 0), ("tail", tail, 0), ("top_k", top_k, 1), ("local", local, 2)):
        need_integer(name, value, least)
    found: list[dict[str, Tensor]] = []
    tokens = 0
    whole = tokens_of(samples)
    with plain_decoder(model) as (decoder, facts), showing(progress, whole, label="measuring") as show:
        layers = whole_layers(facts)
        need(len(layers) > 0, "model must have a layer that sees all tokens, got none")
        settings = _Settings(rows, head, tail, top_k, local)
        for j, ids in enumerate(token_rows(decoder, samples)):
            need(len(ids) >= 2, f"samples[{j}] must have at least 2 tokens, got {len(ids)}")
            watch = _Watching(facts, settings)
            read(decoder, ids, watch)
            heads = {layer: len(watch.found[layer]["sparsity"]) for layer in layers}
            need(len(set(heads.values())) == 1, f"model must have as many query heads in each layer, got {heads}")
            one = {name: torch.stack([watch.found[layer][name] for layer in layers]) for name in watch.found[layers[0]]}
            need(bool(one["center"].isfinite().all()), f"the model must attend with numbers, got NaN in samples[{j}]")
            found.append(one)
            show(tokens := tokens + len(ids))
    need(len(found) > 0, "samples must hold at least one, got none")
    estimates = {name: Estimate.of([one[name] for one in found]) for name in found[0]}
    return AttentionStatistics(
        tuple(layers), len(found), tokens, rows, head, tail, top_k, local, settings.distances, **estimates
    )


@dataclass(frozen=True)
class _Settings:
    rows: int | None
    head: int
    tail: int
    top_k: int
    local: int

    @property
    def distances(self) -> tuple[int, ...]:
        return tuple(1 << power for power in range((self.local - 1).bit_length()))


class _Watching(TrainingPass):
    """The model's own attention, whose rows are measured on the way, layer by layer."""

    def __init__(self, facts: Facts, settings: _Settings) -> None:
        super().__init__(facts)
        self.settings = settings
        self.found: dict[int, dict[str, Tensor]] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        if self.facts[layer].is_local:
            return self.attend_locally(layer, queries, keys, values, softmax)
        q, k = self.queries(layer, queries), self.keys(layer, keys)
        self.found[layer] = _measured(queries[0], q[0], k[0], softmax, self.settings)
        return ops.attention(q, k, values, **softmax.options)[0]


def _measured(plain: Tensor, queries: Tensor, keys: Tensor, softmax: Softmax, settings: _Settings) -> dict[str, Tensor]:
    """Of one layer and sample; plain: queries [Hq, T, D] before rotation. Each value float64 [Hq, ...]."""
    T, G = queries.shape[1], queries.shape[0] // keys.shape[0]
    if settings.rows is None or settings.rows >= T - 1:
        chosen = torch.arange(1, T)
    else:
        chosen = torch.linspace(1, T - 1, settings.rows + 1, dtype=torch.float64)[1:].round().long()
    last = torch.arange(max(T - settings.local, 0), T)
    heads: list[dict[str, Tensor]] = []
    for h in range(len(queries)):
        q, k = queries[h].float(), keys[h // G].float()
        sink = None if softmax.sink_logits is None else softmax.sink_logits[h].float()
        weights = partial(_weights, q, k, softmax, sink)
        found = _of_rows(weights, chosen, T, settings)
        found |= _of_pairs(weights(last).cpu(), last, settings)
        found["cosine"] = _along(_cosines(plain[h, last]), settings.distances)
        found["cosine_rotated"] = _along(_cosines(q[last]), settings.distances)
        heads.append(found)
    return {name: torch.stack([found[name] for found in heads]) for name in heads[0]}


def divergence_bits(p: Tensor, r: Tensor) -> Tensor:
    """Jensen-Shannon divergence of probabilities [..., T], base 2: [...], 0..1."""
    logs = [torch.special.xlogy(x, x).sum(-1) for x in (p, r, (p + r) / 2)]
    return ((logs[0] + logs[1]) / 2 - logs[2]) / math.log(2)


def _weights(q: Tensor, k: Tensor, softmax: Softmax, sink: Tensor | None, places: Tensor) -> Tensor:
    """Rows [n, T] of the attention of one query head, 0 behind each query. sink: a logit that takes mass away."""
    places = places.to(q.device)
    logits = softmax.capped(q[places] @ k.T * softmax.scale)
    unseen = torch.arange(len(k), device=k.device) > places[:, None]
    logits = logits.masked_fill(unseen, float("-inf"))
    total = logits.logsumexp(-1, keepdim=True)
    return (logits - (total if sink is None else torch.logaddexp(total, sink))).exp()


def _of_rows(weights: Callable[[Tensor], Tensor], chosen: Tensor, T: int, settings: _Settings) -> dict[str, Tensor]:
    """Means over the chosen rows."""
    sums: dict[str, Tensor] = {}
    counted, seen = 0, 0
    for places in chosen.split(max(BLOCK_NUMBERS // T, 1)):
        A = weights(places)
        n, position = places.to(A.device) + 1, torch.arange(T, device=A.device)
        counts = (A > 1 / n[:, None]).sum(-1)
        mass = A.sum(-1)
        held = A.sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64)
        least = torch.stack([(held < share * held[:, -1:]).sum(-1) + 1 for share in MASS], -1)
        part = {
            "sparsity": 1 - counts / n,
            "mass_share": least / n[:, None],
            "head_gravity": A[:, : settings.head].sum(-1),
            "tail_gravity": A.masked_fill(position < n[:, None] - settings.tail, 0).sum(-1),
            "center": (A.double() @ position.double()) / mass / (n - 1),
        }
        for name, x in part.items():
            total = x.double().sum(0).cpu()
            sums[name] = sums[name] + total if name in sums else total
        counted, seen = counted + int(counts.sum()), seen + int(n.sum())
    means = {name: x / len(chosen) for name, x in sums.items()}
    return means | {"sparsity_pooled": torch.tensor(1 - counted / seen, dtype=torch.float64)}


def _of_pairs(A: Tensor, last: Tensor, settings: _Settings) -> dict[str, Tensor]:
    """Of the last rows A [n, T], which stand at the positions `last`: means over pairs of rows at each distance."""
    n, T = A.shape
    center = (A.double() @ torch.arange(T).double()) / A.sum(-1)
    k = settings.top_k
    enough = last >= k  # rows of more than k keys: the others hold all they see
    top = torch.zeros(n, T)
    top.scatter_(1, A.topk(min(k, T), -1).indices, 1.0)
    common = top @ top.T
    overlap = (common / (2 * k - common)).masked_fill(~(enough[:, None] & enough), float("nan"))
    alike = [
        1 - divergence_bits(A[d:] / A[d:].sum(-1, keepdim=True), A[:-d] / A[:-d].sum(-1, keepdim=True)).double().mean()
        if d < n
        else A.new_tensor(float("nan"), dtype=torch.float64)
        for d in settings.distances
    ]
    return {
        "similarity": torch.stack(alike),
        "overlap": _along(overlap, settings.distances),
        "drift": _along((center[:, None] - center).abs(), settings.distances),
    }


def _cosines(x: Tensor) -> Tensor:
    """[n, n] of rows [n, D]."""
    unit = torch.nn.functional.normalize(x.float(), dim=-1)
    return unit @ unit.T


def _along(pairs: Tensor, distances: Sequence[int]) -> Tensor:
    """float64 [len(distances)]: means of the diagonals of [n, n], of what is a number in them."""
    return torch.stack([pairs.diagonal(d).double().nanmean() for d in distances]).cpu()
