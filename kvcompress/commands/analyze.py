"""`kvcompress analyze`: what a model says of how it can be compressed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..support.extras import need_packages
from .options import Device, Dtype, Model, token_count

app = typer.Typer(no_args_is_help=True, help="Measure a model to decide how to compress it.")


@contextmanager
def _said() -> Iterator[None]:
    """What is wrong is said as wrong options are; a package that is missing before anything is measured."""
    try:
        need_packages("analyze", "accelerate", "datasets")
        yield
    except (ValueError, FileNotFoundError, ConnectionError, ImportError) as error:
        raise typer.BadParameter(str(error)) from None


@app.callback()
def analyze() -> None:
    """Measure a model to decide how to compress it."""


@app.command()
def pod(
    out: Annotated[Path, typer.Option(help="file for the plan, JSON")],
    model: Model = "example",
    text: Annotated[
        list[Path] | None,
        typer.Option(help="text to measure on: .txt, .jsonl, .csv or .parquet; not needed for the example model"),
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="example model: measure on text that it was never trained on")
    ] = False,
    samples: Annotated[int, typer.Option(help="texts to read", min=1)] = 16,
    length: Annotated[
        int | None, token_count("tokens of a text; not given: what the model reaches, at most 32,768", 2)
    ] = None,
    queries: Annotated[int, token_count("last tokens of a text whose attention is compared")] = 16,
    delta: Annotated[
        float | None,
        typer.Option(help="least similarity within a block, 0 to 1; not given, nor --share: 0.5"),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(help="instead of --delta: least share of followers, 0 to (layers - 1) / layers"),
    ] = None,
    sinks: Annotated[int, token_count("first tokens whose keys every layer keeps", 0)] = 16,
    recent: Annotated[
        int | None,
        token_count("last tokens whose keys every layer keeps; not given: with sinks an eighth of length"),
    ] = None,
    reduce: Annotated[str, typer.Option(help="over the query heads of a KV head: mean or min")] = "mean",
    distant_only: Annotated[
        bool, typer.Option("--distant-only", help="compare attention to distant tokens alone")
    ] = False,
    refine: Annotated[
        int,
        typer.Option(help="rounds that move a block's border by a layer if that lowers the texts' loss", min=0),
    ] = 0,
    figure: Annotated[Path | None, typer.Option(help="folder for figures: similarity, blocks and memory")] = None,
    seed: Annotated[int, typer.Option(help="draws the texts", min=0)] = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
) -> None:
    """Measure how alike a model's layers attend, and choose which layers share their distant keys."""
    with _said():
        from ..analysis.pod import run_pod

        run_pod(
            out=out, model=model, text=tuple(text or ()), held_out=held_out, samples=samples, length=length,
            queries=queries, delta=delta, share=share, sinks=sinks, recent=recent, reduce=reduce,
            distant_only=distant_only, refine_rounds=refine, figure=figure, seed=seed, device=device, dtype=dtype,
            console=Console(width=80),
        )  # fmt: skip


@app.command()
def attention(
    out: Annotated[Path | None, typer.Option(help="file for the measurements, JSON")] = None,
    model: Model = "example",
    text: Annotated[
        list[Path] | None,
        typer.Option(help="text to measure on: .txt, .jsonl, .csv or .parquet; not needed for the example model"),
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="example model: measure on text that it was never trained on")
    ] = False,
    samples: Annotated[int, typer.Option(help="texts to read", min=1)] = 8,
    length: Annotated[
        int | None, token_count("tokens of a text; not given: what the model reaches, at most 32,768", 2)
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="queries of a text that are measured, spread evenly; not given: all", min=1)
    ] = None,
    head: Annotated[int, token_count("first keys whose mass is counted", 0)] = 4,
    tail: Annotated[int, token_count("last keys whose mass is counted", 0)] = 256,
    top_k: Annotated[int, typer.Option(help="strongest keys of a row that are compared", min=1)] = 32,
    local: Annotated[int, token_count("last queries of a text that are compared with each other", 2)] = 256,
    figure: Annotated[Path | None, typer.Option(help="folder for figures: sparsity, gravity and neighbours")] = None,
    seed: Annotated[int, typer.Option(help="draws the texts", min=0)] = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
) -> None:
    """Measure how sparse a model's attention is, where its mass lies, and how alike near queries are."""
    with _said():
        from ..analysis.run_attention import run_attention

        run_attention(
            out=out, model=model, text=tuple(text or ()), held_out=held_out, samples=samples, length=length, rows=rows,
            head=head, tail=tail, top_k=top_k, local=local, figure=figure, seed=seed, device=device, dtype=dtype,
            console=Console(width=100),
        )  # fmt: skip


@app.command()
def heads(
    out: Annotated[Path, typer.Option(help="file for the profile, JSON")],
    model: Model = "example",
    text: Annotated[
        list[Path] | None,
        typer.Option(help="text to plant pass keys in: .txt, .jsonl, .csv or .parquet; not for the example model"),
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="example model: text that it was never trained on")
    ] = False,
    samples: Annotated[int, typer.Option(help="texts to read", min=1)] = 16,
    length: Annotated[
        int | None, token_count("tokens of a text; not given: what the model reaches, at most 32,768", 2)
    ] = None,
    facts: Annotated[int, typer.Option(help="pass keys of a text", min=1)] = 5,
    method: Annotated[
        str, typer.Option(help="gates, trained as in DuoAttention; mass or kvzip, one or two passes for each text")
    ] = "gates",
    sinks: Annotated[int, token_count("first tokens that a streaming head sees", 0)] = 128,
    recent: Annotated[int, token_count("last tokens that a streaming head sees")] = 256,
    steps: Annotated[int, typer.Option(help="steps of training, of a text each", min=1)] = 2000,
    lr: Annotated[float, typer.Option(help="learning rate of the gates")] = 0.02,
    weight: Annotated[float, typer.Option(help="of the gates' mean in the loss", min=0.0)] = 0.05,
    seed: Annotated[int, typer.Option(help="draws the texts and the pass keys", min=0)] = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
) -> None:
    """Measure which heads look far back, for a cache in which the others keep the first and latest tokens alone."""
    with _said():
        from ..analysis.run_heads import run_heads

        run_heads(
            out=out, model=model, text=tuple(text or ()), held_out=held_out, samples=samples, length=length,
            facts=facts, method=method, sinks=sinks, recent=recent, steps=steps, lr=lr, weight=weight, seed=seed,
            device=device, dtype=dtype, console=Console(width=100),
        )  # fmt: skip


@app.command()
def budget(
    out: Annotated[Path, typer.Option(help="file for the profile, JSON")],
    model: Model = "example",
    text: Annotated[
        list[Path] | None,
        typer.Option(help="text to read: .txt, .jsonl, .csv or .parquet; not needed for the example model"),
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="example model: text that it was never trained on")
    ] = False,
    samples: Annotated[int, typer.Option(help="texts to read", min=1)] = 3,
    length: Annotated[
        int | None,
        token_count("tokens of a text, as prompts will have; not given: what model and pruner reach", 2),
    ] = None,
    pruner: Annotated[
        str, typer.Option(help="whose scores divide the budget, as in --cache: replay, snapkv:window=64")
    ] = "replay",
    keep: Annotated[str, typer.Option(help="what is divided: tokens, the share that stays, or bytes")] = "1/4",
    floor: Annotated[float, typer.Option(help="share of the mean that every row keeps in any case, 0 to 1")] = 0.1,
    seed: Annotated[int, typer.Option(help="draws the texts", min=0)] = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
) -> None:
    """Measure how layers and heads share a budget, for --cache pruned,keep=1k,budget=profiled:FILE."""
    with _said():
        from ..analysis.run_shares import run_shares

        run_shares(
            out=out, model=model, text=tuple(text or ()), held_out=held_out, samples=samples, length=length,
            pruner=pruner, keep=keep, floor=floor, seed=seed, device=device, dtype=dtype, console=Console(width=100),
        )  # fmt: skip


@app.command()
def scores(
    out: Annotated[Path, typer.Option(help="file for the profile, JSON")],
    model: Model = "example",
    text: Annotated[
        list[Path] | None,
        typer.Option(help="text to read: .txt, .jsonl, .csv or .parquet; not needed for the example model"),
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="example model: text that it was never trained on")
    ] = False,
    samples: Annotated[int, typer.Option(help="texts to read", min=1)] = 30,
    length: Annotated[
        int | None,
        token_count("tokens of a text; not given: 1,120, or what the model has positions to read twice", 256),
    ] = None,
    chunk: Annotated[int, token_count("tokens that KVzip reads again at once")] = 512,
    keep: Annotated[
        str, typer.Option(help="shares that stay, to which texts are cut in turn; one given twice counts twice")
    ] = "1/4,1/4,1/8",
    steps: Annotated[int, typer.Option(help="steps of training, of a text each", min=1)] = 180,
    lr: Annotated[float, typer.Option(help="learning rate")] = 0.02,
    seed: Annotated[int, typer.Option(help="draws the texts, and the parts that are said again", min=0)] = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
) -> None:
    """Measure how the scores of a model's heads compare, for pruner=kvzip,chunk=512,mass=true,profile=FILE."""
    with _said():
        from ..analysis.run_scores import run_scores

        run_scores(
            out=out, model=model, text=tuple(text or ()), held_out=held_out, samples=samples, length=length,
            chunk=chunk, keep=keep, steps=steps, lr=lr, seed=seed, device=device, dtype=dtype,
            console=Console(width=100),
        )  # fmt: skip
