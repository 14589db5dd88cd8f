"""`kvcompress fit`: what is learned of a model without training it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..support.extras import need_packages
from .options import Device, Dtype, Model, token_count

Text = Annotated[
    list[Path] | None,
    typer.Option(help="text to fit on: .txt, .jsonl, .csv or .parquet; not needed for the example model"),
]
Samples = Annotated[int, typer.Option(help="texts to read; an eighth of them, at most 8, are held out", min=2)]
Length = Annotated[
    int | None,
    token_count("tokens of a text; not given: 1,024, or what the model has positions to read twice", 64),
]

app = typer.Typer(no_args_is_help=True, help="Fit a model for a compressed cache in minutes, without training.")


@app.callback()
def fit() -> None:
    """Fit a model for a compressed cache in minutes, without training."""


@app.command()
def dms(
    out: Annotated[Path, typer.Option(help="folder for the fitted model, which must not exist")],
    model: Model = "example",
    text: Text = None,
    target_ratio: Annotated[float, typer.Option(help="tokens per cache entry, beyond the window", min=1.0)] = 2.0,
    window: Annotated[int, token_count("newest tokens that are never dropped", 0)] = 64,
    samples: Samples = 48,
    length: Length = None,
    neuron: Annotated[
        int | None,
        typer.Option(help="coordinate of the keys that carries decisions; not given: the one whose loss costs least"),
    ] = None,
    seed: Annotated[int, typer.Option(help="draws the texts", min=0)] = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
) -> None:
    """Make a model whose KV heads drop what KVzip would drop, token by token as they come (DMS).

    Each head's decision becomes a linear map of what enters attention, fitted to KVzip's scores of the text by ridge
    regression. The folder is a model that from_pretrained loads, and that retrofit dmc trains on.
    """
    try:
        need_packages("fit", "accelerate", "datasets")
        from ..dmc.run_fit import run_fit

        run_fit(
            out=out, model=model, text=tuple(text or ()), ratio=target_ratio, window=window, samples=samples,
            length=length, neuron=neuron, seed=seed, device=device, dtype=dtype, console=Console(width=80),
        )  # fmt: skip
    except (ValueError, FileNotFoundError, ConnectionError, ImportError) as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def gates(
    out: Annotated[Path, typer.Option(help="folder for the gates, which must not exist")],
    model: Model = "example",
    text: Text = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="example model: text that it was never trained on")
    ] = False,
    samples: Samples = 48,
    length: Length = None,
    pruner: Annotated[
        str, typer.Option(help="whose scores are fitted, as in --cache: kvzip:mass=true, kvzip, replay")
    ] = "kvzip:mass=true",
    steps: Annotated[
        int,
        typer.Option(
            help="of training behind the fit, a text each: so that a cut cache says what a whole one says", min=0
        ),
    ] = 0,
    lr: Annotated[float, typer.Option(help="learning rate of these steps")] = 1e-3,
    levels_of: Annotated[
        str | None,
        typer.Option(
            help="gates that are there, such as nvidia/KVzap-mlp-Qwen3-8B: they stay as they are, and their levels, by "
            "which keep finds its threshold, are those of the text"
        ),
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="file for a figure: R2 of layers and heads")] = None,
    seed: Annotated[int, typer.Option(help="draws the texts", min=0)] = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
) -> None:
    """Make gates: a token's own queries say whether it stays, for --cache gated,gates=FOLDER,keep=1/4.

    Each KV head's gate is a linear map, fitted to a pruner's scores of the text by ridge regression. The model is left
    as it is.
    """
    try:
        need_packages("fit", "accelerate", "datasets")
        from ..gates.run_fit import run_fit

        run_fit(
            out=out, model=model, text=tuple(text or ()), held_out=held_out, samples=samples, length=length,
            pruner=pruner, steps=steps, lr=lr, levels_of=levels_of, figure=figure, seed=seed, device=device,
            dtype=dtype, console=Console(width=100),
        )  # fmt: skip
    except (ValueError, FileNotFoundError, ConnectionError, ImportError) as error:
        raise typer.BadParameter(str(error)) from None
