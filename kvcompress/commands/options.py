"""Options that every command which loads a model has."""

from __future__ import annotations

from typing import Annotated

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
