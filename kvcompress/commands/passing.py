"""A command that passes on the options which it does not know: each of its own is given once."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class Passing(TyperCommand):
    """Unknown options, in their order, are the context's `args`. Of its own ones the last would count, and hide that
    another was meant: they are refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["context_settings"] = {"allow_extra_args": True, "ignore_unknown_options": True}
        super().__init__(*args, **kwargs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for name in (name for option in self.params for name in option.opts):
            values = [
                repr(value) if equals else repr(next(iter(args[i + 1 :]), ""))
                for i, (given, equals, value) in enumerate(argument.partition("=") for argument in args)
                if given == name
            ]
            if len(values) > 1:
                raise typer.BadParameter(f"must be given once, got {' and '.join(values)}", param_hint=name)
        return super().parse_args(ctx, args)
