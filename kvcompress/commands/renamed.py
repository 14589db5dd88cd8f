"""A group of commands that says what an option is called now: those that went before 0.1.0."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

UsageError: Any = typer.BadParameter.__base__  # click's, or that of the copy which typer brings

OPTIONS = {
    "--share": "--keep",
    "--shares": "--keep",
    "--bytes": "--keep",
    "--size": "--keep, where a share is the one that stays",
    "--budget": "--keep, where a share is the one that stays",
    "--memory": "--memory-size",
    "--memory-size": "--keep",
    "--chunk": "--chunk-size",
    "--target-cr": "--target-ratio",
    "--start-cr": "--start-ratio",
}
COMMANDS = {"needle": "eval needle"}


class Renamed(TyperGroup):
    """Of the whole command line: errors of the groups in it pass through."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            if hasattr(error, "possibilities") and error.ctx is not None:  # of an option that there is not
                known = {name for option in error.ctx.command.params for name in option.opts}
                now = OPTIONS.get(error.option_name.replace("_", "-"), "")
                if now.partition(",")[0] in known:
                    error.message, error.possibilities = f"{error.option_name} is {now} now.", None
                elif (error.option_name == "--keep" or now.startswith("--keep")) and "--cache" in known:
                    said = f"{error.option_name} is the cache's: --cache pruned,keep=0.5, say."
                    error.message, error.possibilities = said, None
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            if args[0] in COMMANDS:
                error.message = f"{args[0]} is {COMMANDS[args[0]]} now."
            raise
