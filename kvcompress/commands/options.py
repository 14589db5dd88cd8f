"""Options that every command which loads a model has."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Model = Annotated[str, typer.Option(help="folder or name of a transformers model, or example, or smollm2")]
Dtype = Annotated[
    str,
    typer.Option(
        help="of the weights: float32, bfloat16, float16, or auto: as the model's files say, the example's float32"
    ),
]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
CacheDtype = Annotated[
    str, typer.Option(help="float32, bfloat16, float16, codes (int8 or k8v4), or auto: the model's, else bfloat16")
]


def token_count(help: str, least: int = 1) -> Any:
    """An option that counts tokens, 1024 or 1k."""

    def read(given: Any) -> int:
        from ..support.units import tokens_of

        try:
            return tokens_of("it", given, least)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return typer.Option(help=help, parser=read, min=least, metavar="TOKENS")
