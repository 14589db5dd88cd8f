"""`kvcompress analyze pod`: measures a model's layers and writes the plan of who shares whose keys."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..checks import need, need_choice
from ..hf.attach import base_model
from ..hf.config import decoder_config, sizes_of
from ..hf.method import saved_method
from ..models import load_example_model
from ..models.text import held_out_text
from ..pod.lead import Kinds
from ..pod.plan import PoDPlan, delta_for_share, lead_table, most_share
from ..pod.refine import refine
from ..pod.similarity import REDUCTIONS, measure_similarity
from ..retrofit.run import EXAMPLE_NAME, pretrained

LONGEST = 32_768
DEFAULT_DELTA = 0.5


def run_pod(
    *, out: Path, model: str, text: tuple[Path, ...], held_out: bool, samples: int, length: int | None, queries: int,
    delta: float | None, share: float | None, sinks: int, recent: int | None, reduce: str, distant_only: bool,
    refine_rounds: int, figure: Path | None, seed: int, device: str, console: Console,
) -> PoDPlan:  # fmt: skip
    """Measures, groups, prints and saves; returns the plan.

    Raises ValueError for settings that do not fit, FileNotFoundError for a missing text file or folder.
    """
    need(delta is None or share is None, f"share must not be given beside delta, got {share} and {delta}")
    need_choice("reduce", reduce, REDUCTIONS)
    need(model == EXAMPLE_NAME or not held_out, "held_out is the example model's; give --text for another model")
    need(not (text and held_out), "held_out must not be given beside text")
    need(model == EXAMPLE_NAME or len(text) > 0, "text must be given, one file at least, for a model but the example")
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    need_choice("device", device.partition(":")[0], kinds)
    need(out.parent.is_dir(), f"out must be in a folder that exists, got {out}")
    need(not out.is_dir(), f"out must be a file, got the folder {out}")
    need(figure is None or figure.is_dir() or not figure.exists(), f"figure must be a folder, got the file {figure}")
    need(delta is None or 0 <= delta <= 1, f"delta must be between 0 and 1, got {delta}")
    loaded, tokenizer = _load(model, device)
    config = decoder_config(loaded.config)
    reach = getattr(config, "max_position_embeddings", LONGEST)
    length = min(reach, LONGEST) if length is None else length
    need(length <= reach, f"length must be at most the {reach:,} positions that the model was made for, got {length:,}")
    recent = max(1, length // 8 - sinks) if recent is None else recent
    near = sinks + recent
    need(
        not refine_rounds or length > near,
        f"length must be above sinks + recent = {near:,} for refine to tell anything, got {length:,}",
    )
    rows, data = _texts(tokenizer, text, held_out, samples, length, seed)
    measured = measure_similarity(
        loaded, rows, queries=queries, distant_only=distant_only, sinks=sinks, recent=recent,
        progress=console.is_terminal,
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
    dtype = next(loaded.parameters()).dtype
    _print(plan, similarity, dtype, console)
    console.print(f"Plan written to {out}", highlight=False, markup=False, soft_wrap=True)
    if figure is not None:
        _draw(plan, dtype, figure)
        console.print(f"Figures written to {figure}", highlight=False, markup=False, soft_wrap=True)
    return plan


def _load(model: str, device: str) -> tuple[nn.Module, Any]:
    if model == EXAMPLE_NAME:
        return load_example_model(device=device)
    loaded = pretrained(AutoModelForCausalLM, model, dtype="auto")
    need(
        saved_method(base_model(loaded)) is None,
        f"model must not be converted yet, got {model!r}, whose config has kvcompress",
    )
    tokenizer = pretrained(AutoTokenizer, model)
    return loaded.to(device).eval(), tokenizer


def _texts(
    tokenizer: Any, text: tuple[Path, ...], held_out: bool, samples: int, length: int, seed: int
) -> tuple[list[Tensor], str]:
    """`samples` rows of `length` tokens, none twice, and what they are of."""
    rng = np.random.default_rng(seed)
    if text:
        from ..retrofit.data import text_windows

        windows = text_windows(tokenizer, text, length)
        count, name = len(windows), ", ".join(path.name for path in text)

        def row(j: int) -> Any:
            return windows[j]["input_ids"]
    elif not held_out:
        return _training_rows(samples, length, seed), "the example model's training data"
    else:
        source = np.frombuffer(held_out_text(), dtype=np.uint8)
        count, name = len(source) // length, "Python's standard library, held-out files"

        def row(j: int) -> Any:
            return source[j * length : (j + 1) * length].astype(np.int64)

    need(
        samples <= count,
        f"samples must be at most the {count:,} rows of {length:,} tokens in the text, got {samples:,}",
    )
    chosen = sorted(rng.choice(count, samples, replace=False).tolist())
    return [torch.as_tensor(row(j)) for j in chosen], name


def _training_rows(samples: int, length: int, seed: int) -> list[Tensor]:
    """Single documents of the mix that the example model was trained on: text alone asks for nothing far away."""
    from ..retrofit.data import example_rows

    rows = (row for row in example_rows(length, 1, seed) if row["position_ids"][-1] == length - 1)
    return [torch.as_tensor(row["input_ids"]) for row in itertools.islice(rows, samples)]


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
