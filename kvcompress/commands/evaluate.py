"""`kvcompress eval`: tasks that users know, on their model, through any cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .options import Device, Dtype, Model, token_count

app = typer.Typer(
    no_args_is_help=True, help="Measure caches on tasks: RULER, needles, recall, turns, perplexity, long decoding."
)
Caches = Annotated[
    list[str] | None,
    typer.Option(
        "--cache",
        help="as lm-eval and CacheSpec have it, such as pruned,pruner=snapkv,keep=1/4; several: one table; not "
        "given: dense, or a converted model's own",
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(help="tokens of a prompt, such as 1k,4k; not given: what the model reaches, at most 4,096"),
]
Limit = Annotated[int, typer.Option(help="prompts of a task and length", min=1)]
Keep = Annotated[
    str | None,
    typer.Option(
        help="that every cache gets: a share of the dense cache's bytes, such as 1/4 or 25%, or bytes for a prompt, "
        "such as 512KiB: sets its size"
    ),
]
Texts = Annotated[
    list[Path] | None, typer.Option(help="UTF-8 files to take texts from; not given: the standard library's source")
]
Where = Annotated[
    str, typer.Option(help="where it stands: end (in the prompt), later (behind what was read), guide (known before)")
]
Raw = Annotated[
    bool,
    typer.Option("--raw", help="facts as comments of source code, no user's turns of the tokenizer's chat template"),
]
Seed = Annotated[int, typer.Option(help="draws the samples", min=0)]
Json = Annotated[Path | None, typer.Option("--json", help="file for all rows")]
Peers = Annotated[
    bool,
    typer.Option(
        "--peers",
        help="kvpress's presses too, on the same prompts at the same bytes, in an environment of its own, made once",
    ),
]
PeersPython = Annotated[Path | None, typer.Option(help="one that has kvpress already")]
PeersPress = Annotated[
    list[str] | None, typer.Option(help="such as SnapKV, or AdaKV(SnapKV); several; not given: twelve of them")
]


def _lengths(text: str | None) -> list[int] | None:
    if text is None:
        return None
    from ..support.units import tokens_of

    return [tokens_of("lengths", part) for part in text.split(",")]


def _run(
    make: Callable[[Any, Any, int], Sequence[Any]], *, model: str, cache: list[str] | None, lengths: str | None,
    keep: str | None, text: list[Path] | None, json: Path | None, device: str, dtype: str,
    by_depth: bool = False, figure: Path | None = None, peers: bool = False, peers_python: Path | None = None,
    peers_press: list[str] | None = None, **settings: Any,
) -> None:  # fmt: skip
    """make: the measures of (how texts become tokens, their source, a length)."""
    from ..evaluate.command import run_eval
    from ..evaluate.peers.exchange import PeerError

    try:
        run_eval(
            make, model=model, caches=cache or [], lengths=_lengths(lengths), keep=keep,
            text=tuple(text or ()), json=json, device=device, dtype=dtype, by_depth=by_depth, figure=figure,
            console=Console(), settings=settings, peers=peers, peers_python=peers_python,
            peers_press=tuple(peers_press or ()),
        )  # fmt: skip
    except (ValueError, FileNotFoundError, ConnectionError, ImportError) as error:
        raise typer.BadParameter(str(error)) from None
    except PeerError:  # said below the table, which has all that came
        raise typer.Exit(1) from None


@app.callback()
def evaluate() -> None:
    """Measure caches on tasks: RULER, needles, recall, turns, perplexity, long decoding."""


@app.command()
def ruler(
    tasks: Annotated[
        str | None,
        typer.Option(help="such as niah_single_1,vt,cwe; not given: all whose data are here or named"),
    ] = None,
    model: Model = "example",
    cache: Caches = None,
    lengths: Lengths = None,
    limit: Limit = 8,
    question: Where = "end",
    chat: Annotated[
        bool, typer.Option("--chat", help="prompts as a user's turn of the tokenizer's chat template")
    ] = False,
    keep: Keep = None,
    text: Texts = None,
    squad: Annotated[Path | None, typer.Option(help="SQuAD's dev-v2.0.json, for qa_1")] = None,
    hotpotqa: Annotated[Path | None, typer.Option(help="HotpotQA's hotpot_dev_distractor_v1.json, for qa_2")] = None,
    seed: Seed = 0,
    json: Json = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    peers: Peers = False,
    peers_python: PeersPython = None,
    peers_press: PeersPress = None,
) -> None:
    """RULER's 13 tasks: retrieval, tracing, aggregation, and questions over documents."""
    from ..evaluate.ruler.registry import MADE, READ, task_of

    files = {"squad": squad, "hotpotqa": hotpotqa}
    here = [*MADE, *(name for name, (option, _, _) in READ.items() if files[option] is not None)]
    for name, (option, _, what) in READ.items():
        if tasks is None and name not in here:
            typer.echo(f"{name} is left out: it needs --{option}, {what}", err=True)

    def make(tokenizer: Any, source: Any, length: int) -> Sequence[Any]:
        from ..evaluate.questions import ruler_measure
        from ..reading.framing import Framing

        framing = Framing(tokenizer, chat)
        return [
            ruler_measure(name, task_of(name, **files), framing, length, source, limit, seed, question)
            for name in (here if tasks is None else [name.strip() for name in tasks.split(",")])
        ]

    _run(make, model=model, cache=cache, lengths=lengths, keep=keep, text=text, json=json,
         device=device, dtype=dtype, peers=peers, peers_python=peers_python, peers_press=peers_press,
         question=question, chat=chat, limit=limit, seed=seed)  # fmt: skip


@app.command()
def needle(
    model: Model = "example",
    cache: Caches = None,
    lengths: Lengths = None,
    depths: Annotated[int, typer.Option(help="places of the fact, spread evenly", min=1)] = 5,
    limit: Annotated[int, typer.Option(help="prompts of a length and depth", min=1)] = 1,
    question: Where = "end",
    raw: Raw = False,
    keep: Keep = None,
    text: Texts = None,
    seed: Seed = 0,
    json: Json = None,
    figure: Annotated[Path | None, typer.Option(help="draw recall by length and depth into this file")] = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    peers: Peers = False,
    peers_python: PeersPython = None,
    peers_press: PeersPress = None,
) -> None:
    """Plant a fact in texts, at several lengths and depths, and ask for it."""

    def make(tokenizer: Any, source: Any, length: int) -> Sequence[Any]:
        from ..evaluate.questions import needle_measure
        from ..reading.framing import framing_of

        return [needle_measure(framing_of(tokenizer, raw), length, source, depths, limit, seed, question)]

    _run(make, model=model, cache=cache, lengths=lengths, keep=keep, text=text, json=json,
         device=device, dtype=dtype, peers=peers, peers_python=peers_python, peers_press=peers_press,
         by_depth=True, figure=figure, question=question, depths=depths, raw=raw, limit=limit, seed=seed)  # fmt: skip


@app.command()
def recall(
    model: Model = "example",
    cache: Caches = None,
    lengths: Lengths = None,
    questions: Annotated[int, typer.Option(help="facts of a prompt that are asked", min=1)] = 8,
    limit: Limit = 8,
    raw: Raw = False,
    keep: Keep = None,
    seed: Seed = 0,
    json: Json = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    peers: Peers = False,
    peers_python: PeersPython = None,
    peers_press: PeersPress = None,
) -> None:
    """Prompts of nothing but facts, of which some are asked afterwards, each of its own copy of the cache."""

    def make(tokenizer: Any, source: Any, length: int) -> Sequence[Any]:
        from ..evaluate.questions import recall_measure
        from ..reading.framing import framing_of

        return [recall_measure(framing_of(tokenizer, raw), length, questions, limit, seed)]

    _run(make, model=model, cache=cache, lengths=lengths, keep=keep, text=None, json=json,
         device=device, dtype=dtype, peers=peers, peers_python=peers_python, peers_press=peers_press,
         questions=questions, raw=raw, limit=limit, seed=seed)  # fmt: skip


@app.command()
def turns(
    model: Model = "example",
    cache: Caches = None,
    lengths: Lengths = None,
    questions: Annotated[int, typer.Option(help="facts of a text, all asked", min=1)] = 8,
    limit: Limit = 8,
    raw: Raw = False,
    keep: Keep = None,
    text: Texts = None,
    seed: Seed = 0,
    json: Json = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    peers: Peers = False,
    peers_python: PeersPython = None,
    peers_press: PeersPress = None,
) -> None:
    """Facts in a text, asked one after the other in one conversation, answers and all."""

    def make(tokenizer: Any, source: Any, length: int) -> Sequence[Any]:
        from ..evaluate.questions import turns_measure
        from ..reading.framing import framing_of

        return [turns_measure(framing_of(tokenizer, raw), length, source, questions, limit, seed)]

    _run(make, model=model, cache=cache, lengths=lengths, keep=keep, text=text, json=json,
         device=device, dtype=dtype, peers=peers, peers_python=peers_python, peers_press=peers_press,
         questions=questions, raw=raw, limit=limit, seed=seed)  # fmt: skip


@app.command()
def ppl(
    model: Model = "example",
    cache: Caches = None,
    lengths: Lengths = None,
    scored: Annotated[int, token_count("tokens behind a prompt that are scored, about", 2)] = 256,
    limit: Limit = 8,
    keep: Keep = None,
    text: Texts = None,
    seed: Seed = 0,
    json: Json = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    peers: Peers = False,
    peers_python: PeersPython = None,
    peers_press: PeersPress = None,
) -> None:
    """Bits per byte of what follows a prompt that was read through the cache."""

    def make(tokenizer: Any, source: Any, length: int) -> Sequence[Any]:
        from ..evaluate.losses import loss_measure
        from ..reading.framing import Framing

        return [loss_measure("ppl", Framing(tokenizer), length, scored, source, limit, seed)]

    _run(make, model=model, cache=cache, lengths=lengths, keep=keep, text=text, json=json,
         device=device, dtype=dtype, peers=peers, peers_python=peers_python, peers_press=peers_press,
         scored=scored, limit=limit, seed=seed)  # fmt: skip


@app.command()
def decode(
    model: Model = "example",
    cache: Caches = None,
    lengths: Lengths = None,
    limit: Limit = 4,
    keep: Keep = None,
    text: Texts = None,
    seed: Seed = 0,
    json: Json = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
) -> None:
    """Bits per byte of a long text that comes token by token; caches with every=... compress on the way.

    The first quarter of a text is its prompt, the rest is scored; bytes are those at its end.
    """

    def make(tokenizer: Any, source: Any, length: int) -> Sequence[Any]:
        from ..evaluate.losses import decode_measure
        from ..reading.framing import Framing

        return [decode_measure(Framing(tokenizer), length, source, limit, seed)]

    _run(make, model=model, cache=cache, lengths=lengths, keep=keep, text=text, json=json,
         device=device, dtype=dtype, limit=limit, seed=seed)  # fmt: skip
