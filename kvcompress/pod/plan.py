"""Which layer leads which: blocks of layers that attend alike, and the file that says so."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..caches.base import decoder_config, sizes_of
from ..checks import need, need_choice, need_integer
from .lead import Lead, LeadTable, check_lead, follower_share
from .similarity import REDUCTIONS

FORMAT = "kvcompress pod plan 1"
Similarity = Tensor | Sequence[Sequence[Sequence[float]]]


def _checked(similarity: Similarity) -> Tensor:
    """float64 [Hkv, L, L], symmetric, between 0 and 1, 1 on the diagonal; on the CPU."""
    sim = torch.as_tensor(similarity, dtype=torch.float64).detach().cpu()
    need(
        sim.ndim == 3 and sim.shape[1] == sim.shape[2] and sim.numel() > 0,
        f"similarity must be [Hkv, L, L], got shape {tuple(sim.shape)}",
    )
    good = (sim >= 0) & (sim <= 1)
    if not bool(good.all()):
        c, a, b = (~good).nonzero()[0].tolist()
        raise ValueError(f"similarity must be between 0 and 1, got {float(sim[c, a, b])} at [{c}, {a}, {b}]")
    need(bool((sim == sim.mT).all()), "similarity must be symmetric")
    need(bool((sim.diagonal(dim1=1, dim2=2) == 1).all()), "similarity must be 1 on the diagonal")
    return sim


def lead_table(similarity: Similarity, delta: float) -> Lead:
    """Blocks of layers for each KV head: lead[l][c] is the lowest layer of the block of layer l, KV head c.

    similarity: [Hkv, L, L]. Layers are walked upwards; one joins the open block if it is at least delta similar to
    every layer in it, else it opens the next: the fewest blocks there can be. delta 0: one block; above 1: all lead.
    Raises ValueError for another shape, values outside 0..1 (NaN among them), and a delta that is NaN.
    Source: PoD, Algorithm 1; equality joins.
    """
    sim = _checked(similarity)
    need(not math.isnan(delta), f"delta must be a number, got {delta}")
    heads = []
    for alike in (sim >= delta).tolist():
        lead: list[int] = []
        for layer in range(len(alike)):
            first = lead[-1] if lead else 0
            joins = layer > 0 and all(alike[layer][other] for other in range(first, layer))
            lead.append(first if joins else layer)
        heads.append(lead)
    return tuple(zip(*heads, strict=True))


def delta_for_share(similarity: Similarity, target: float) -> float:
    """The largest delta, an entry of similarity, with which at least `target` of all (layer, KV head) follow.

    Raises ValueError for a target that no blocks reach: at most (L - 1) / L can follow.
    """
    sim = _checked(similarity)
    L = sim.shape[1]
    most = (L - 1) / L
    need(0 <= target <= most, f"share must be between 0 and (layers - 1) / layers = {most:.4g}, got {target}")
    rows, columns = torch.tril_indices(L, L, -1)
    entries = sim[:, rows, columns].unique().tolist() if L > 1 else [1.0]
    low, high = 0, len(entries) - 1  # entries[low] always reaches the target: more layers join as delta falls
    while low < high:
        middle = (low + high + 1) // 2
        if follower_share(lead_table(sim, entries[middle])) >= target:
            low = middle
        else:
            high = middle - 1
    return entries[low]


@dataclass(frozen=True)
class PoDPlan(LeadTable):
    """Who leads whom, and what that was found from.

    lead: [L][Hkv], lead[l][c] the layer whose distant keys (l, c) reads: the lowest of its block, itself if it leads.
    sinks, recent: tokens that keep their own keys everywhere, the first and the last (the query among them).
    query_heads, head_dim, model: what it is for; the model's name for the record. delta: None = not from a threshold.
    reduce: over the query heads of a KV head. samples, queries (rows of each), sample_length, data, distant_only,
    standard_error (the largest of an entry, None = not known), refined (borders moved since, see refine), similarity
    [Hkv][L][L] (None = not kept): for the record.
    Raises ValueError for a field that cannot be; for a lead table, the offending layer and KV head.
    """

    lead: Lead
    sinks: int
    recent: int
    query_heads: int
    head_dim: int
    model: str = ""
    delta: float | None = None
    reduce: str = "mean"
    samples: int = 0
    queries: int = 0
    sample_length: int = 0
    data: str = ""
    distant_only: bool = False
    standard_error: float | None = None
    refined: int = 0
    similarity: Sequence[Sequence[Sequence[float]]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lead", check_lead(self.lead))
        for name, least in (
            ("sinks", 0), ("recent", 1), ("query_heads", 1), ("head_dim", 1), ("samples", 0), ("queries", 0),
            ("sample_length", 0), ("refined", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            need(not isinstance(value, bool), f"{name} must be an integer, got {value!r}")
            need_integer(name, value, least)
        need(
            self.query_heads % self.kv_heads == 0,
            f"query_heads must be a multiple of the lead table's {self.kv_heads} KV heads, got {self.query_heads}",
        )
        for name in ("model", "data", "reduce"):
            value = getattr(self, name)
            need(isinstance(value, str), f"{name} must be a text, got {value!r}")
        need_choice("reduce", self.reduce, REDUCTIONS)
        need(isinstance(self.distant_only, bool), f"distant_only must be true or false, got {self.distant_only!r}")
        for name in ("delta", "standard_error"):
            value = getattr(self, name)
            good = value is None or (isinstance(value, (int, float)) and 0 <= value < math.inf)
            need(good and not isinstance(value, bool), f"{name} must be a number of at least 0 or None, got {value!r}")
        if self.similarity is not None:
            sim = _checked(self.similarity)
            shape = (self.kv_heads, self.layers, self.layers)
            need(tuple(sim.shape) == shape, f"similarity must have shape {shape} as lead, got {tuple(sim.shape)}")
            object.__setattr__(self, "similarity", tuple(tuple(map(tuple, head)) for head in sim.tolist()))

    @property
    def layers(self) -> int:
        return len(self.lead)

    @property
    def kv_heads(self) -> int:
        return len(self.lead[0])

    def blocks(self, head: int) -> list[range]:
        """The layers of each block of a KV head, upwards."""
        need(0 <= head < self.kv_heads, f"head must be between 0 and {self.kv_heads - 1}, got {head}")
        starts = [layer for layer in range(self.layers) if self.lead[layer][head] == layer]
        return [range(a, b) for a, b in zip(starts, [*starts[1:], self.layers], strict=True)]

    def saved(self, tokens: int) -> float:
        """Share of a dense cache's bytes that is not needed at that many tokens: keys alone are dropped."""
        need_integer("tokens", tokens, 1)
        return 0.5 * self.share * max(0, tokens - self.window) / tokens

    def dense_nbytes(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Keys and values of a dense cache of one sequence."""
        need_integer("tokens", tokens, 0)
        return 2 * self.layers * self.kv_heads * tokens * self.head_dim * dtype.itemsize

    def nbytes(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Keys and values of this plan's cache of one sequence, as its formula has it."""
        dropped = self.followers * max(0, tokens - self.window) * self.head_dim * dtype.itemsize
        return self.dense_nbytes(tokens, dtype) - dropped

    def check_model(self, config: Any) -> None:
        """Raises ValueError if the plan is not for a model of this config (model.config), naming what differs."""
        config = decoder_config(config)
        theirs = sizes_of(config) | {"query heads": config.num_attention_heads}
        ours = {
            "layers": self.layers, "KV heads": self.kv_heads, "query heads": self.query_heads,
            "head dim": self.head_dim,
        }  # fmt: skip
        for name, size in ours.items():
            need(
                size == theirs[name],
                f"plan must be of this model: it has {size} {name}, the model {theirs[name]}"
                + (f"; it was made for {self.model}" if self.model else ""),
            )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """As JSON, whole or not at all: under a temporary name in the same folder, then renamed. Returns the path."""
        path = Path(path)
        temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            temporary.write_text(json.dumps({"format": FORMAT} | asdict(self), allow_nan=False) + "\n")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PoDPlan:
        """What save wrote. Raises ValueError for anything else, FileNotFoundError for no file."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"plan must be a file, got {path}")
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path.name} must be a plan in JSON: {error}") from None
        need(isinstance(saved, dict), f"{path.name} must be a plan, got a JSON {type(saved).__name__}")
        kind = saved.pop("format", None)
        need(kind == FORMAT, f"format of {path.name} must be {FORMAT!r}, got {kind!r}")
        known = [field.name for field in fields(cls)]
        for name in known:
            need(name in saved, f"{path.name} must have the field {name}")
        for name in saved:
            need(name in known, f"{path.name} must have the fields {', '.join(known)} alone, got {name}")
        try:
            return cls(**saved)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(f"{path.name} is no valid plan: {error}") from None
