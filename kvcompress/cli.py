"""The `kvcompress` command."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import typer
from rich.console import Console
from typer.models import OptionInfo

from .commands import dmc as _dmc  # noqa: F401  registers its command
from .commands import pod as _pod  # noqa: F401
from .commands.analyze import app as analyze
from .commands.evaluate import app as evaluate
from .commands.fit import app as fit
from .commands.options import CacheDtype, Device, Dtype, Model, token_count
from .commands.passing import Passing
from .commands.renamed import Renamed
from .commands.retrofit import app as retrofit

app = typer.Typer(cls=Renamed, no_args_is_help=True, add_completion=False)
app.add_typer(analyze, name="analyze")
app.add_typer(evaluate, name="eval")
app.add_typer(fit, name="fit")
app.add_typer(retrofit, name="retrofit")
Command = TypeVar("Command", bound=Callable[..., None])
# option of the argument that a ValueError begins with, where they differ in more than dashes
OPTIONS = {"prompt_length": "--tokens"}


_WRITTEN = "as lm-eval and CacheSpec have it, such as pruned,pruner=snapkv,keep=1/4"
_CACHE = _WRITTEN + "; dense: no compression"
CACHE = typer.Option(help=_CACHE)
CACHE_OR_OWN = typer.Option(
    help=_CACHE + "; not given: a converted model's own, else pruned to 1,024 tokens, or iterative where the model's "
    "length may not do"
)
CHAT_CACHE = typer.Option(
    help=_WRITTEN + "; pruned,keep=1.0: nothing is dropped (dense is refused); not given: a converted model's own, "
    "else iterative, half of the model's length, at most 4,096 tokens"
)
AS_JSON = typer.Option("--json", help="print JSON and nothing else")


def _version(asked: bool) -> None:
    if asked:
        from . import __version__

        typer.echo(f"kvcompress {__version__}")
        raise typer.Exit


def _say(message: Warning | str, *where: Any, **source: Any) -> None:
    """A warning without the line of source that it comes from."""
    typer.echo(f"warning: {message}", err=True)


def _named(command: Command) -> Command:
    """Errors name the option of the argument that their message begins with, or of the file that they are about."""
    options = {}  # by the argument's name
    for name, hint in get_type_hints(command, include_extras=True).items():
        info = next((x for x in getattr(hint, "__metadata__", ()) if isinstance(x, OptionInfo)), None)
        if info is not None:
            options[name] = next(iter(info.param_decls or ()), f"--{name.replace('_', '-')}")

    @functools.wraps(command)
    def run(**given: Any) -> None:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = cast(Any, _say)
                command(**given)
        except ImportError as error:  # a package that only an extra brings, or transformers' own wish for one
            raise typer.BadParameter(str(error)) from None
        except (ValueError, OSError) as error:
            name = next(iter(str(error).split()), "")
            if isinstance(error, OSError):
                if error.filename is None and not isinstance(error, (FileNotFoundError, ConnectionError)):
                    raise
                if error.filename is not None:
                    name = next((x for x in given if str(given[x]) == str(error.filename)), name)
            if name and f"{name}=" in str(given.get("cache")):  # as in --cache quantized,dtype=int8
                name = "cache"
            option = options.get(name) or OPTIONS.get(name)
            raise typer.BadParameter(str(error), param_hint=option) from None

    return cast(Command, run)


@app.callback()
def kvcompress(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="show it")] = False,
) -> None:
    """Attention over a compressed key-value cache. TOKENS are 1024, or 1k."""


@app.command()
@_named
def info(
    model: Annotated[
        str | None, typer.Option(help="folder or name of a transformers model, or example, or smollm2: its cache")
    ] = None,
    dtype: CacheDtype = "auto",
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Show what is installed here, and what a model's cache takes."""
    from .apps.info import run_info

    run_info(model=model, dtype=dtype, as_json=as_json, console=Console())


@app.command()
@_named
def generate(
    text: Annotated[str | None, typer.Argument(help="the prompt; not given: --file, or standard input")] = None,
    file: Annotated[Path | None, typer.Option(help="UTF-8 text, the prompt")] = None,
    question: Annotated[
        str, typer.Option(help="follows the prompt; chooses what is kept of it where the cache takes a guide")
    ] = "",
    model: Model = "example",
    cache: Annotated[str | None, CACHE_OR_OWN] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="the text as it is, no user's turn of the tokenizer's chat template"),
    ] = False,
    max_new_tokens: Annotated[int, token_count("tokens to write")] = 64,
    save: Annotated[Path | None, typer.Option(help="file for the text's cache, before the question is asked")] = None,
    load: Annotated[Path | None, typer.Option(help="a saved one, in place of a text")] = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    as_json: Annotated[bool, AS_JSON] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="the text alone")] = False,
) -> None:
    """Let a model answer, or go on from, a text that is read through a compressed cache."""
    from .apps.write_text import run_generate

    run_generate(
        text=text, file=file, question=question, raw=raw, model=model, cache=cache, max_new_tokens=max_new_tokens,
        save=save, saved=load, device=device, dtype=dtype, as_json=as_json, quiet=quiet, console=Console(),
    )  # fmt: skip


@app.command()
@_named
def chat(
    model: Model = "example",
    cache: Annotated[str | None, CHAT_CACHE] = None,
    max_new_tokens: Annotated[int, token_count("tokens of an answer, at most")] = 256,
    device: Device = "cpu",
    dtype: Dtype = "auto",
) -> None:
    """Talk with a model over one cache: /memory, /save FILE, /load FILE, /reset, /help, /quit."""
    from .apps.chat import run_chat

    run_chat(
        model=model, cache=cache, max_new_tokens=max_new_tokens, device=device, dtype=dtype, lines=sys.stdin,
        console=Console(), prompt=sys.stdin.isatty(),
    )  # fmt: skip


@app.command()
@_named
def bench(
    model: Model = "example",
    cache: Annotated[list[str] | None, typer.Option(help=_CACHE + "; several; not given: four of them")] = None,
    tokens: Annotated[int, token_count("of the prompt", 65)] = 2048,
    max_new_tokens: Annotated[int, token_count("tokens to write")] = 32,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Measure tokens per second and bytes of caches, for a model on this machine."""
    from .apps.bench import run_bench

    run_bench(
        model=model, caches=cache or [], tokens=tokens, max_new_tokens=max_new_tokens, device=device,
        dtype=dtype, as_json=as_json, console=Console(),
    )  # fmt: skip


@app.command()
@_named
def recommend(
    text: Annotated[list[Path], typer.Option(help="UTF-8 file of what the model is to read; several: one text")],
    keep: Annotated[
        str,
        typer.Option(
            help="that a cache gets: a share of the dense cache's bytes, such as 1/4 or 25%, or bytes for a piece of "
            "--tokens, such as 64MiB"
        ),
    ] = "1/4",
    model: Model = "example",
    tokens: Annotated[
        int | None, token_count("of a piece, as long as your prompts; not given: half of the text, at most 2,048")
    ] = None,
    pieces: Annotated[int, typer.Option(help="of the text, spread evenly over it", min=1)] = 4,
    cache: Annotated[list[str] | None, typer.Option(help="a further cache, " + _CACHE + "; several")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="the text as it is, no user's turn of the tokenizer's chat template")
    ] = False,
    json: Annotated[Path | None, typer.Option("--json", help="file for all figures")] = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
) -> None:
    """Measure a handful of caches on your text and machine, at the same bytes, and say which to take."""
    from .evaluate.recommend import run_recommend

    run_recommend(
        model=model, text=tuple(text), keep=keep, tokens=tokens, pieces=pieces, caches=cache or [],
        raw=raw, json_file=json, device=device, dtype=dtype, console=Console(),
    )  # fmt: skip


@app.command()
@_named
def demo(
    tokens: Annotated[int, token_count("length of the text, in bytes", 128)] = 131_072,
    depth: Annotated[float, typer.Option(help="where the fact is planted: 0 start, 1 end", min=0.0, max=1.0)] = 0.3,
    chunk_size: Annotated[int, token_count("tokens read per iteration")] = 512,
    memory_size: Annotated[int, token_count("tokens kept per layer and head", 5)] = 256,
    dense_tokens: Annotated[int, token_count("longest text for the dense model, 0 = skip it", 0)] = 16_384,
    seed: Annotated[int, typer.Option(help="draws the fact")] = 0,
    model: Model = "example",
    quick: Annotated[bool, typer.Option("--quick", help="16,384 tokens, 1,024 for the dense model: seconds")] = False,
    device: Device = "cpu",
    dtype: Dtype = "auto",
) -> None:
    """Read a long text through a small memory and ask for a fact in it; fails if the answer is wrong."""
    from .demo import run_demo

    if quick:
        tokens, dense_tokens = min(tokens, 16_384), min(dense_tokens, 1_024)
    right = run_demo(
        tokens=tokens, depth=depth, chunk_size=chunk_size, memory_size=memory_size, dense_tokens=dense_tokens,
        seed=seed, model=model, device=device, dtype=dtype, console=Console(),
    )  # fmt: skip
    if not right:
        typer.echo("the compressed reading gave a wrong answer", err=True)
        raise typer.Exit(1)


@app.command()
@_named
def plan(
    tokens: Annotated[int, token_count("tokens that are read: all but a prompt's last one")],
    chunk_size: Annotated[int, token_count("tokens read per iteration, on average")] = 1024,
    memory_size: Annotated[int, token_count("tokens kept per layer and KV head at the end")] = 1024,
    schedule: Annotated[
        str, typer.Option(help="how memory grows: fixed, linear, square, sqrt, square-sqrt or adaptive")
    ] = "linear",
    dynamic: Annotated[bool, typer.Option("--dynamic", help="chunks shrink as memory grows")] = False,
    initial_memory: Annotated[
        int | None,
        token_count("memory after the first iteration; not given: memory size / iterations, but at least 64", 0),
    ] = None,
    min_chunk: Annotated[int, token_count("shortest chunk with --dynamic")] = 1,
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
        str | None,
        typer.Option(
            help="folder or name of a transformers model, or example, or smollm2, for bytes: its config alone"
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="layers of the model", min=1)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads of a layer", min=1)] = None,
    head_dim: Annotated[int | None, typer.Option(help="head dimension", min=1)] = None,
    dtype: CacheDtype = "auto",
) -> None:
    """Show how IterativeCache would read a prompt: chunks and memory by iteration, and the gain over a fixed memory."""
    from .apps.plan_report import run_plan

    run_plan(
        tokens=tokens, chunk_size=chunk_size, memory_size=memory_size, schedule=schedule, dynamic=dynamic,
        initial_memory=initial_memory, min_chunk=min_chunk, strict=strict, share=share, model=model, layers=layers,
        kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, console=Console(width=80),
    )  # fmt: skip


@app.command(cls=Passing)
@_named
def serve(
    context: typer.Context,
    model: Model = "example",
    cache: Annotated[str | None, typer.Option(help=_CACHE + "; not given: a converted model's own, else dense")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="of all requests' caches, such as 8GiB; not given: 0.8 of what is free on the GPU beside the weights; "
            "without a GPU half of what is free in memory"
        ),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            help="of DMC, DMS and gates: tokens per slot, before any was measured; not given: 1, or by the gates' keep",
            min=1.0,
        ),
    ] = None,
    swap: Annotated[
        str | None,
        typer.Option(
            help="of the host's memory, for requests that give their pages up, such as 1GiB; 0: these are read again; "
            "not given: an eighth of --memory"
        ),
    ] = None,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="steps in which all requests decode are launched as a whole on a GPU")
    ] = False,
    host: Annotated[str, typer.Option(help="address to listen at")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen at", min=1, max=65535)] = 8000,
    dtype: Dtype = "auto",
) -> None:
    """Serve a model through compressed caches: vLLM's OpenAI server, whose own options are passed on (extra vllm)."""
    from .serve.vllm.launch import run_serve

    run_serve(
        model=model, cache=cache, memory=memory, ratio=ratio, swap=swap, cuda_graphs=cuda_graphs, dtype=dtype,
        host=host, port=port, passed=context.args,
    )  # fmt: skip
