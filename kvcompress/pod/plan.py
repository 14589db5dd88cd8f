"""Which layer leads which: blocks of layers that attend alike, and the file that says so."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..hf.config import decoder_config, sizes_of
from ..support.checks import need, need_choice, need_integer
from ..support.files import read_json, write_text
from .lead import Kinds, Lead, LeadTable, check_kinds, check_lead, follower_share
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


def _kinds(given: Sequence[int | None] | None, layers: int) -> Kinds:
    """Of so many layers; None = all alike."""
    kinds = (0,) * layers if given is None else tuple(given)
    good = all(kind is None or (isinstance(kind, int) and not isinstance(kind, bool)) for kind in kinds)
    need(len(kinds) == layers and good, f"kinds must be a number or None for each of {layers} layers, got {given!r}")
    return kinds


def lead_table(similarity: Similarity, delta: float, kinds: Sequence[int | None] | None = None) -> Lead:
    """Blocks of layers for each KV head: lead[l][c] is the lowest layer of the block of layer l, KV head c.

    similarity: [Hkv, L, L]. Layers are walked upwards; one joins the open block if it is at least delta similar to
    every layer in it, else it opens the next: the fewest blocks there can be. delta 0: one block; above 1: all lead.
    kinds: of the layers (LayerSimilarity.kinds), None = all alike; those of one kind are walked among themselves, and a
    layer of no kind leads itself.
    Raises ValueError for another shape, values outside 0..1 (NaN among them), and a delta that is NaN.
    Source: PoD, Algorithm 1; equality joins.
    """
    sim = _checked(similarity)
    need(not math.isnan(delta), f"delta must be a number, got {delta}")
    own, heads = _kinds(kinds, sim.shape[1]), []
    for alike in (sim >= delta).tolist():
        lead: list[int] = []
        blocks: dict[int, list[int]] = {}  # the open one of each kind
        for layer, kind in enumerate(own):
            block = [] if kind is None else blocks.setdefault(kind, [])
            if not all(alike[layer][other] for other in block):
                block.clear()
            block.append(layer)
            lead.append(block[0])
        heads.append(lead)
    return tuple(zip(*heads, strict=True))


def most_share(kinds: Sequence[int | None]) -> float:
    """The largest share of (layer, KV head) that can follow: all but the lowest layer of each kind."""
    layers = [kind for kind in kinds if kind is not None]
    return (len(layers) - len(set(layers))) / max(len(layers), 1)


def delta_for_share(similarity: Similarity, target: float, kinds: Sequence[int | None] | None = None) -> float:
    """The largest delta, an entry of similarity, with which at least `target` of all (layer, KV head) follow, of layers
    that can. kinds: as for lead_table.

    Raises ValueError for a target that no blocks reach: at most (L - 1) / L can follow, where all are of one kind.
    """
    sim = _checked(similarity)
    L = sim.shape[1]
    own = _kinds(kinds, L)
    most = most_share(own)
    need(0 <= target <= most, f"share must be between 0 and (layers - 1) / layers = {most:.4g}, got {target}")
    pairs = [(a, b) for a in range(L) for b in range(a) if own[a] is not None and own[a] == own[b]]
    rows, columns = torch.tensor(pairs).T if pairs else (None, None)
    entries = sim[:, rows, columns].unique().tolist() if pairs else [1.0]
    low, high = 0, len(entries) - 1  # entries[low] always reaches the target: more layers join as delta falls
    while low < high:
        middle = (low + high + 1) // 2
        if follower_share(lead_table(sim, entries[middle], own), own) >= target:
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
    [Hkv][L][L] (None = not kept): for the record. kinds: of the layers, see LayerSimilarity; None = all can share;
    bytes and shares are of the layers that can.
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
    kinds: Sequence[int | None] | None = None

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
        if self.kinds is not None:
            object.__setattr__(self, "kinds", _kinds(self.kinds, self.layers))
        check_kinds(self.lead, self.sharing)
        if self.similarity is not None:
            sim = _checked(self.similarity)
            shape = (self.kv_heads, self.layers, self.layers)
            need(tuple(sim.shape) == shape, f"similarity must have shape {shape} as lead, got {tuple(sim.shape)}")
            object.__setattr__(self, "similarity", tuple(tuple(map(tuple, head)) for head in sim.tolist()))

    @property
    def layers(self) -> int:
        """L."""
        return len(self.lead)

    @property
    def kv_heads(self) -> int:
        """Hkv, of every layer."""
        return len(self.lead[0])

    @property
    def sharing(self) -> Kinds:
        """kinds, with a number for each layer that can share; 0 for all where kinds is None."""
        return _kinds(self.kinds, self.layers)

    @property
    def share(self) -> float:
        """Share of (layer, KV head) that follow, of layers that can, and of their distant keys that need not be kept:
        phi."""
        return follower_share(self.lead, self.sharing)

    def blocks(self, head: int) -> list[list[int]]:
        """The layers of each block of a KV head, upwards; not those that cannot share."""
        need(0 <= head < self.kv_heads, f"head must be between 0 and {self.kv_heads - 1}, got {head}")
        blocks: dict[int, list[int]] = {}
        for layer, kind in enumerate(self.sharing):
            if kind is not None:
                blocks.setdefault(self.lead[layer][head], []).append(layer)
        return list(blocks.values())

    def saved(self, tokens: int) -> float:
        """Share of a dense cache's bytes that is not needed at that many tokens: keys alone are dropped."""
        need_integer("tokens", tokens, 1)
        return 0.5 * self.share * max(0, tokens - self.window) / tokens

    def dense_nbytes(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Keys and values of a dense cache of one sequence, of the layers that can share."""
        need_integer("tokens", tokens, 0)
        return (
            2 * sum(kind is not None for kind in self.sharing) * self.kv_heads * tokens * self.head_dim * dtype.itemsize
        )

    def nbytes(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Keys and values of this plan's cache of one sequence, as its formula has it."""
        dropped = self.followers * max(0, tokens - self.window) * self.head_dim * dtype.itemsize
        return self.dense_nbytes(tokens, dtype) - dropped

    def check_model(self, config: Any) -> None:
        """Raises ValueError if the plan is not for a model of this config (model.config), naming what differs."""
        config = decoder_config(config)
        theirs: dict[str, Any] = sizes_of(config) | {"query heads": config.num_attention_heads}
        ours = {
            "layers": self.layers, "KV heads": self.kv_heads, "query heads": self.query_heads,
            "head dim": self.head_dim,
        }  # fmt: skip
        for name, size in ours.items():
            fits = size in theirs[name] if isinstance(theirs[name], list) else size == theirs[name]
            need(
                fits,
                f"plan must be of this model: it has {size} {name}, the model {theirs[name]}"
                + (f"; it was made for {self.model}" if self.model else ""),
            )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """As JSON, whole or not at all: under a temporary name in the same folder, then renamed. Returns the path."""
        return write_text(path, json.dumps({"format": FORMAT} | asdict(self), allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PoDPlan:
        """What save wrote. Raises ValueError for anything else, FileNotFoundError for no file."""
        saved, path = read_json(path, "plan", FORMAT), Path(path)
        known = [field.name for field in fields(cls)]
        for name in known:
            need(name in saved or name == "kinds", f"{path.name} must have the field {name}")
        for name in saved:
            need(name in known, f"{path.name} must have the fields {', '.join(known)} alone, got {name}")
        try:
            return cls(**saved)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(f"{path.name} is no valid plan: {error}") from None
