"""`kvcompress analyze pod`: measures a model's layers and writes the plan of who shares whose keys."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..hf.config import decoder_config, sizes_of
from ..pod.lead import Kinds
from ..pod.plan import PoDPlan, delta_for_share, lead_table, most_share
from ..pod.refine import refine
from ..pod.similarity import REDUCTIONS, measure_similarity
from ..support.checks import need, need_choice
from ..support.extras import need_packages
from .texts import check_source, length_within, load_plain, texts

DEFAULT_DELTA = 0.5


def run_pod(
    *, out: Path, model: str, text: tuple[Path, ...], held_out: bool, samples: int, length: int | None, queries: int,
    delta: float | None, share: float | None, sinks: int, recent: int | None, reduce: str, distant_only: bool,
    refine_rounds: int, figure: Path | None, seed: int, device: str, dtype: str, console: Console,
) -> PoDPlan:  # fmt: skip
    """Measures, groups, prints and saves; returns the plan.

    Raises ValueError for settings that do not fit, FileNotFoundError for a missing text file or folder.
    """
    if figure is not None:
        need_packages("figure", "matplotlib")
    need(delta is None or share is None, f"share must not be given beside delta, got {share} and {delta}")
    need_choice("reduce", reduce, REDUCTIONS)
    check_source(model, text, held_out, device)
    need(out.parent.is_dir(), f"out must be in a folder that exists, got {out}")
    need(not out.is_dir(), f"out must be a file, got the folder {out}")
    need(figure is None or figure.is_dir() or not figure.exists(), f"figure must be a folder, got the file {figure}")
    need(delta is None or 0 <= delta <= 1, f"delta must be between 0 and 1, got {delta}")
    loaded, tokenizer = load_plain(model, device, dtype)
    config = decoder_config(loaded.config)
    length = length_within(config, length)
    recent = max(1, length // 8 - sinks) if recent is None else recent
    near = sinks + recent
    need(
        not refine_rounds or length > near,
        f"length must be above sinks + recent = {near:,} for refine to tell anything, got {length:,}",
    )
    rows, data = texts(tokenizer, text, held_out, samples, length, seed)
    measured = measure_similarity(
        loaded, rows, queries=queries, distant_only=distant_only, sinks=sinks, recent=recent,
        progress=True,
    )  # fmt: skip
    similarity = measured.similarity(reduce)
    if share is not None:
        delta = delta_for_share(similarity, share, measured.kinds)
    elif delta is None:
        delta = DEFAULT_DELTA
    error = measured.standard_error(reduce).max().item()
    head_dim = sizes_of(config)["head dim"]
    if isinstance(head_dim, list):  # that of the layers that were measured
        head_dim = head_dim[next(kind for kind in measured.kinds or (0,) if kind is not None)]
    plan = PoDPlan(
        lead=lead_table(similarity, delta, measured.kinds), sinks=sinks, recent=recent,
        query_heads=config.num_attention_heads, head_dim=head_dim, model=model, delta=delta, reduce=reduce,
        samples=measured.samples,
        queries=min(queries, length), sample_length=length, data=data, distant_only=distant_only,
        standard_error=error if measured.samples > 1 else None, similarity=similarity.tolist(),
        kinds=None if set(measured.kinds or ()) <= {0} else measured.kinds,
    )  # fmt: skip
    plan.save(out)  # what was measured stays if what follows fails
    if refine_rounds and plan.followers:
        plan = refine(
            loaded, plan, rows, rounds=refine_rounds, report=lambda line: console.print(line, highlight=False)
        )  # fmt: skip
        plan.save(out)
    held = next(loaded.parameters()).dtype
    _print(plan, similarity, held, console)
    console.print(f"Plan written to {out}", highlight=False, markup=False, soft_wrap=True)
    if figure is not None:
        _draw(plan, held, figure)
        console.print(f"Figures written to {figure}", highlight=False, markup=False, soft_wrap=True)
    return plan


# ---- what is printed and drawn ----


def _lengths(plan: PoDPlan) -> list[int]:
    """Powers of two from the near tokens on, five of them, and the samples' own length."""
    first = 1 << (plan.window - 1).bit_length()
    return sorted({*(first << k for k in range(5)), plan.sample_length})


def _deltas(similarity: Tensor, kinds: Kinds) -> str:
    """The largest delta with which a quarter, half, ... of all follow."""
    reached = [share for share in (0.25, 0.5, 0.75, 0.9) if share <= most_share(kinds)]
    return ", ".join(f"{share:g}: {delta_for_share(similarity, share, kinds):.4g}" for share in reached)


def _pairs(similarity: Tensor, kinds: Kinds, *, neighbours: bool = False) -> list[float]:
    """Similarities of layers that can share, of those next to each other alone or of all."""
    found: list[float] = []
    for kind in {kind for kind in kinds if kind is not None}:
        layers = [layer for layer, own in enumerate(kinds) if own == kind]
        for place, layer in enumerate(layers[1:], 1):
            for other in layers[place - 1 : place] if neighbours else layers[:place]:
                found += similarity[:, layer, other].tolist()
    return found


def _named(block: list[int]) -> str:
    """Layers of a block: 2-5, or 1,3,5 where others are between them."""
    if len(block) > 1 and block == list(range(block[0], block[-1] + 1)):
        return f"{block[0]}-{block[-1]}"
    return ",".join(map(str, block))


def _print(plan: PoDPlan, similarity: Tensor, dtype: torch.dtype, console: Console) -> None:
    error = "unknown (one sample)" if plan.standard_error is None else f"{plan.standard_error:.3f} at most"
    sharing = sum(kind is not None for kind in plan.sharing)
    chosen = f"{plan.refined} borders moved" if plan.delta is None else f"delta {plan.delta:.4g}"
    lines = [
        f"{plan.samples:,} texts of {plan.sample_length:,} tokens ({plan.data}), their last {plan.queries} queries",
        f"similarity: {min(_pairs(similarity, plan.sharing), default=1.0):.3f} to 1, standard error {error}",
        f"{chosen}: {plan.followers} of {sharing * plan.kv_heads} (layer, KV head) follow, phi = {plan.share:.3f}",
        f"delta for a share of {_deltas(similarity, plan.sharing)}",
        "blocks of layers",
    ]
    if sharing < plan.layers:
        lines.insert(1, f"{sharing} of {plan.layers} layers see all tokens; the others stay as they are")
    for line in lines:
        console.print(line, highlight=False, markup=False)
    for head in range(plan.kv_heads):
        names = "  ".join(_named(block) for block in plan.blocks(head))
        console.print(f"  KV head {head}: {names}", highlight=False, markup=False)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("tokens", "dense, MiB", "PoD, MiB", "saved"):
        table.add_column(column, justify="right", no_wrap=True)
    for tokens in _lengths(plan):
        dense, ours = (nbytes(tokens, dtype) / 2**20 for nbytes in (plan.dense_nbytes, plan.nbytes))
        table.add_row(f"{tokens:,}", f"{dense:,.1f}", f"{ours:,.1f}", f"{plan.saved(tokens):.1%}")
    console.print(table)
    if plan.followers == 0:
        neighbours = _pairs(similarity, plan.sharing, neighbours=True)
        console.print(
            f"No layer follows another, and nothing is shared: neighbours are {max(neighbours, default=0):.3f} similar "
            "at most. Take a smaller --delta, or --share.",
            highlight=False, markup=False,
        )  # fmt: skip
        return
    console.print(
        f"Keys and values of one sequence in {str(dtype).removeprefix('torch.')}. Every layer keeps {plan.sinks} first "
        f"and {plan.recent:,} last keys, and all values; {plan.share:.1%} of the keys between are dropped, page by "
        "page: a cache holds up to a page per row and its tables more. A model needs training before it can do without "
        "them.",
        highlight=False, markup=False,
    )  # fmt: skip


def _draw(plan: PoDPlan, dtype: torch.dtype, folder: Path) -> None:
    from .. import plots

    folder.mkdir(parents=True, exist_ok=True)
    plots.save(plots.similarity_heatmap(plan), folder / "similarity.png")
    plots.save(plots.block_map(plan), folder / "blocks.png")
    plots.save(plots.memory_curve(plan, dtype=dtype), folder / "memory.png")
