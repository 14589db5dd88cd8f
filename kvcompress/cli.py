"""The `kvcompress` command."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Attention over a compressed key-value cache.")


@app.callback()
def main() -> None:
    """Keeps `demo` a subcommand of its own."""


@app.command()
def demo(
    tokens: Annotated[int, typer.Option(help="length of the text, in bytes", min=128)] = 131_072,
    depth: Annotated[float, typer.Option(help="where the fact is planted: 0 start, 1 end", min=0.0, max=1.0)] = 0.3,
    chunk_size: Annotated[int, typer.Option(help="tokens read per iteration", min=1)] = 512,
    memory_size: Annotated[int, typer.Option(help="tokens kept per layer and head", min=5)] = 256,
    dense_tokens: Annotated[int, typer.Option(help="longest text for the dense model, 0 = skip it", min=0)] = 16_384,
    seed: Annotated[int, typer.Option(help="draws the fact")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
) -> None:
    """Read a long text through a small memory and ask for a fact in it; fails if the answer is wrong."""
    from .demo import run_demo

    try:
        right = run_demo(
            tokens=tokens,
            depth=depth,
            chunk_size=chunk_size,
            memory_size=memory_size,
            dense_tokens=dense_tokens,
            seed=seed,
            device=device,
            console=Console(),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not right:
        typer.echo("the compressed reading gave a wrong answer", err=True)
        raise typer.Exit(1)
