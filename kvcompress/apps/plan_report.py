"""`kvcompress plan`: what a reading plan costs beside one of fixed memory, and how it looks."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from ..caches.base import decoder_config, sizes_of
from ..caches.formats import FORMATS, Format, keys_and_values, slot_nbytes
from ..models import EXAMPLE, EXAMPLE_NAME
from ..planner import Plan, plan
from ..support import units
from ..support.checks import DTYPES, FLOATS, need_choice
from ..support.names import check_name

LINES = 20  # of the picture
WIDTH = 80


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides how many bytes its cache takes. dtype: float32, bfloat16 or float16, or a format of
    codes. trained_length: positions, None = not known."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    trained_length: int | None = None

    def nbytes(self, keys: int) -> int:
        """Of that many keys per KV head, summed over the layers, with their values; one sequence."""
        dtype = DTYPES.get(self.dtype, torch.bfloat16)
        form = None if self.dtype in DTYPES else Format(self.dtype, dtype)
        return keys * self.kv_heads * slot_nbytes(keys_and_values(self.head_dim, dtype, form))


def model_shape(
    model: str | None, layers: int | None, kv_heads: int | None, head_dim: int | None, dtype: str
) -> ModelShape | None:
    """From a model's config (name, folder, example or smollm2) and the settings that are not None, which come first.

    None where these do not say enough for bytes. Raises ValueError for a config that cannot be read or lacks a size, an
    unknown dtype, or settings for bytes that are not enough for them.
    """
    need_choice("dtype", dtype, (*DTYPES, *FORMATS, "auto"))
    chosen = None if dtype == "auto" else dtype
    if model == EXAMPLE_NAME:  # load_example_model gives float32
        model, chosen = str(EXAMPLE), chosen or "float32"
    if model is None:
        if layers is not None and kv_heads is not None and head_dim is not None:
            return ModelShape(layers, kv_heads, head_dim, chosen or "bfloat16")
        for name, value in (("kv_heads", kv_heads), ("head_dim", head_dim), ("dtype", chosen)):
            if value is not None:
                raise ValueError(
                    f"{name} must come with a model, or with all of layers, kv_heads and head_dim, got {value} alone"
                )
        return None
    try:
        located = check_name("model", model)
    except OSError as error:
        raise ValueError(str(error)) from None
    try:
        config = decoder_config(AutoConfig.from_pretrained(located))
        sizes = sizes_of(config)
    except (OSError, ValueError, AttributeError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(f"model must be the name or folder of a transformers model, got {model!r}: {reason}") from None
    own = getattr(config, "dtype", None)
    found: dict[str, int] = {}
    for name, wish in (("layers", layers), ("KV heads", kv_heads), ("head dim", head_dim)):
        size = wish or sizes[name]
        if not isinstance(size, int):
            option = name.replace(" ", "_").lower()
            raise ValueError(f"{option} must be given for {model!r}, whose layers differ: {size}")
        found[name] = size
    return ModelShape(
        found["layers"], found["KV heads"], found["head dim"],
        chosen or (str(own).removeprefix("torch.") if own in FLOATS else "bfloat16"),
        getattr(config, "max_position_embeddings", None),
    )  # fmt: skip


def run_plan(
    *, tokens: int, chunk_size: int, memory_size: int, schedule: str, dynamic: bool, initial_memory: int | None,
    min_chunk: int, strict: bool, share: float, model: str | None, layers: int | None, kv_heads: int | None,
    head_dim: int | None, dtype: str, console: Console,
) -> None:  # fmt: skip
    """Prints a plan's numbers beside those of a fixed memory of the same size, then its picture; fits 80 columns.

    Raises ValueError as plan and model_shape do; each begins with the name of the argument.
    """
    shape = model_shape(model, layers, kv_heads, head_dim, dtype)
    depth = shape.layers if shape is not None else layers or 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = plan(
            tokens, chunk_size=chunk_size, memory_size=memory_size, schedule=schedule, dynamic=dynamic,
            initial_memory=initial_memory, layers=depth, min_chunk=min_chunk, strict=strict,
        )  # fmt: skip
    fixed = plan(tokens, chunk_size=chunk_size, memory_size=memory_size, layers=depth)
    notes = [str(warning.message) for warning in caught]
    if schedule == "adaptive":
        notes.append("adaptive sizes are these on average; each layer's share follows from what it retains")
    if schedule == "square-sqrt" and depth == 1:
        notes.append("square-sqrt of one layer is linear; give --layers or --model")
    if _mean_met(fixed) < 0.99 * fixed.mean_memory:
        filling = sum(held < memory_size for held in fixed.stored)
        when = (
            "never full" if filling == len(fixed) else f"full only after {filling + 1:,} of {len(fixed):,} iterations"
        )
        notes.append(
            f"a fixed memory of {memory_size:,} is {when}; equation 4 takes it for full from the start, the ratio of "
            "attended pairs does not"
        )
    if shape is not None and shape.trained_length is not None and ours.largest_context > shape.trained_length:
        notes.append(
            f"{ours.largest_context:,} keys in sight are more than the {shape.trained_length:,} positions that the "
            "model was trained for; a smaller --chunk-size or --memory-size avoids this"
        )
    chunks = "shrinking chunks" if dynamic else "equal chunks"
    lines = [
        f"{tokens:,} tokens, schedule {schedule}, {chunks}",
        _table(ours, fixed, share, shape),
        _explanation(share),
    ]
    lines += [f"Note: {note}." for note in notes]
    for line in (*lines, "", *picture(ours, ascii_only=not console.encoding.lower().startswith("utf"))):
        console.print(line, highlight=False, markup=False)


def _table(plan: Plan, fixed: Plan, share: float, shape: ModelShape | None) -> Table:
    both = (plan, fixed)
    rows = [
        ("iterations", *(f"{len(x):,}" for x in both)),
        ("chunk: first, longest, last", *(f"{x.chunks[0]:,}  {max(x.chunks):,}  {x.chunks[-1]:,}" for x in both)),
        ("memory: first, last", *(f"{x.memory[0]:,}  {x.memory[-1]:,}" for x in both)),
        ("mean memory met (m-hat)", *(f"{x.mean_memory:,.1f}" for x in both)),
        ("largest context (positions)", *(f"{x.largest_context:,}" for x in both)),
        ("attended pairs", *(f"{float(x.attended_pairs):,.0f}" for x in both)),
        ('peak keys per row, prune="layer"', *(_peak(x, "layer") for x in both)),
        ('peak keys per row, prune="forward"', *(_peak(x, "forward") for x in both)),
    ]
    if shape is not None:
        for prune in ("layer", "forward"):
            sizes = (units.size(shape.nbytes(sum(x.peak_keys(prune)))) for x in both)
            rows.append((f'peak keys and values, prune="{prune}"', *sizes))
    rows += [
        ("ratio of keys (q of equation 4)", f"{plan.key_ratio(fixed):.3f}", "1"),
        (f"speed-up for --share {share:g}", f"{plan.speedup(share, fixed):.3f}", "1"),
        ("ratio of attended pairs", f"{plan.pair_ratio(fixed):.3f}", "1"),
    ]
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for column in ("this plan", "fixed memory"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _explanation(share: float) -> str:
    return (
        f"Equation 4 predicts 1 + share * (q - 1) where attention takes {share:.0%} of this plan's run time; the ratio "
        "of attended pairs is what attention itself can gain in a kernel that skips masked pairs. A row is one KV head "
        'of one layer; prune="layer" holds one layer\'s memory and chunk besides.'
    )


def _met(plan: Plan) -> list[float]:
    """Memory that each iteration meets, mean over the layers."""
    sizes = (sum(held) / len(plan.layer_stored) for held in zip(*plan.layer_stored, strict=True))
    return [0.0, *sizes][: len(plan)]


def _mean_met(plan: Plan) -> float:
    return sum(_met(plan)) / max(len(plan) - 1, 1)


def _peak(plan: Plan, prune: str) -> str:
    rows, besides = plan.peak_keys(prune)
    per_row = rows / len(plan.layer_stored)
    return f"{per_row:,.0f} + {besides:,} once" if besides else f"{per_row:,.0f}"


def picture(plan: Plan, *, ascii_only: bool = False) -> list[str]:
    """Bars of memory and chunk over the iterations, at most LINES of WIDTH columns; a bar of several is their mean."""
    memory_mark, chunk_mark = ("#", ".") if ascii_only else ("█", "░")
    n, met = len(plan), _met(plan)
    count = min(n, LINES)
    edges = [place * n // count for place in range(count + 1)] if count else [0]
    bars = []
    for begin, end in itertools.pairwise(edges):
        memory, chunk = (sum(sizes[begin:end]) / (end - begin) for sizes in (met, plan.chunks))
        bars.append((f"{begin:,}" if end - begin == 1 else f"{begin:,}-{end - 1:,}", memory, chunk))
    label = max([len("iterations"), *(len(name) for name, _, _ in bars)])
    head = f"{'iterations':<{label}} {'memory':>9} {'chunk':>9}  "
    cells = (WIDTH - len(head)) / max((memory + chunk for _, memory, chunk in bars), default=1)
    lines = [f"{head}keys in sight: {memory_mark * 3} memory {chunk_mark * 3} chunk"]
    for name, memory, chunk in bars:
        dark, whole = math.floor(memory * cells + 0.5), math.floor((memory + chunk) * cells + 0.5)
        bar = memory_mark * dark + chunk_mark * (whole - dark)
        lines.append(f"{name:>{label}} {memory:>9,.0f} {chunk:>9,.0f}  {bar}")
    return lines
