"""The `kvcompress` command."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from .analysis.cli import app as analyze
from .dmc import cli as _dmc  # noqa: F401  registers its command
from .pod import cli as _pod  # noqa: F401
from .retrofit.cli import app as retrofit

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Attention over a compressed key-value cache.")
app.add_typer(analyze, name="analyze")
app.add_typer(retrofit, name="retrofit")
# option of the argument that a ValueError begins with, where they differ in more than dashes
OPTIONS = {"prompt_length": "--tokens", "chunk_size": "--chunk", "memory_size": "--memory"}


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


@app.command()
def plan(
    tokens: Annotated[int, typer.Option(help="length of the prompt, in tokens", min=1)],
    chunk: Annotated[int, typer.Option(help="tokens read per iteration, on average", min=1)] = 1024,
    memory: Annotated[int, typer.Option(help="tokens kept per layer and KV head at the end", min=1)] = 1024,
    schedule: Annotated[
        str, typer.Option(help="how memory grows: fixed, linear, square, sqrt, square-sqrt or adaptive")
    ] = "linear",
    dynamic: Annotated[bool, typer.Option("--dynamic", help="chunks shrink as memory grows")] = False,
    initial_memory: Annotated[
        int | None, typer.Option(help="memory after the first iteration; not given: memory / iterations", min=0)
    ] = None,
    min_chunk: Annotated[int, typer.Option(help="shortest chunk with --dynamic", min=1)] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="fail if a chunk would be shorter than that")] = False,
    share: Annotated[
        float,
        typer.Option(
            help="attention's part of the run time under this plan: 1 gives the most that can be gained",
            min=0.0,
            max=1.0,
        ),
    ] = 1.0,
    model: Annotated[
        str | None, typer.Option(help="name or folder of a transformers model, for bytes; its config is enough")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="layers of the model", min=1)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads of a layer", min=1)] = None,
    head_dim: Annotated[int | None, typer.Option(help="head dimension", min=1)] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; not given: the model's, else bfloat16")
    ] = None,
) -> None:
    """Show how a prompt would be read: chunks and memory by iteration, and the gain over a fixed memory."""
    from .plan_report import run_plan

    try:
        run_plan(
            tokens=tokens, chunk_size=chunk, memory_size=memory, schedule=schedule, dynamic=dynamic,
            initial_memory=initial_memory, min_chunk=min_chunk, strict=strict, share=share, model=model, layers=layers,
            kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, console=Console(width=80),
        )  # fmt: skip
    except ValueError as error:
        name = str(error).split()[0]
        raise typer.BadParameter(str(error), param_hint=OPTIONS.get(name, f"--{name.replace('_', '-')}")) from None
