"""`kvcompress analyze attention`: measures a model's attention, prints it by layer, writes JSON and figures."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..hf.config import decoder_config
from ..support.checks import need
from ..support.extras import need_packages
from .statistics import AttentionStatistics, attention
from .texts import check_source, length_within, load_plain, texts


def run_attention(
    *, out: Path | None, model: str, text: tuple[Path, ...], held_out: bool, samples: int, length: int | None,
    rows: int | None, head: int, tail: int, top_k: int, local: int, figure: Path | None, seed: int, device: str,
    dtype: str, console: Console,
) -> AttentionStatistics:  # fmt: skip
    """Measures, prints and saves; returns what was measured.

    Raises ValueError for settings that do not fit, FileNotFoundError for a missing text file or folder.
    """
    if figure is not None:
        need_packages("figure", "matplotlib")
    check_source(model, text, held_out, device)
    need(out is None or out.parent.is_dir(), f"out must be in a folder that exists, got {out}")
    need(out is None or not out.is_dir(), f"out must be a file, got the folder {out}")
    need(figure is None or figure.is_dir() or not figure.exists(), f"figure must be a folder, got the file {figure}")
    loaded, tokenizer = load_plain(model, device, dtype)
    chosen, data = texts(tokenizer, text, held_out, samples, length_within(decoder_config(loaded.config), length), seed)
    measured = attention(loaded, chosen, rows=rows, head=head, tail=tail, top_k=top_k, local=local, progress=True)
    if out is not None:
        measured.save(out)
    _print(measured, data, console)
    if out is not None:
        console.print(f"Measurements written to {out}", highlight=False, markup=False, soft_wrap=True)
    if figure is not None:
        _draw(measured, figure)
        console.print(f"Figures written to {figure}", highlight=False, markup=False, soft_wrap=True)
    return measured


def _print(measured: AttentionStatistics, data: str, console: Console) -> None:
    console.print(
        f"{measured.samples:,} texts, {measured.tokens:,} tokens ({data}); means over heads",
        highlight=False, markup=False,
    )  # fmt: skip
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    columns = (
        "layer", "keys below 1/n", "hold 90 %", f"first {measured.head}", f"last {measured.tail}", "center",
        "next query alike", "next row alike",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    values = (
        measured.sparsity.mean, measured.mass_share.mean[..., 1], measured.head_gravity.mean,
        measured.tail_gravity.mean, measured.center.mean, measured.cosine.mean[..., 0],
        measured.similarity.mean[..., 0],
    )  # fmt: skip
    for place, layer in enumerate(measured.layers):
        means = [float(x[place].nanmean()) for x in values]
        table.add_row(str(layer), *(f"{x:.1%}" for x in means[:4]), *(f"{x:.2f}" for x in means[4:]))
    console.print(table)
    console.print(
        "keys below 1/n: weigh less than a uniform row's; hold 90 %: keys that hold 90 % of a row's mass; first, last: "
        "mass on these keys; center: of the mass, 0 = first key, 1 = the query's own; next query, next row: cosine of "
        "neighbouring queries, and 1 - divergence of their rows in bits, among the last ones.",
        highlight=False, markup=False,
    )  # fmt: skip


def _draw(measured: AttentionStatistics, folder: Path) -> None:
    from .. import plots

    folder.mkdir(parents=True, exist_ok=True)
    plots.save(plots.attention_sparsity(measured), folder / "sparsity.png")
    plots.save(plots.attention_gravity(measured), folder / "gravity.png")
    plots.save(plots.attention_neighbours(measured), folder / "neighbours.png")
