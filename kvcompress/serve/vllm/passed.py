"""vLLM's own options, as they stand behind those of `kvcompress serve`: passed on, and some of them looked at."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from .settings import KEY

_INSTEAD = {  # what of kvcompress's says it
    "--config": "its options on the command line",
    "--kv-cache-memory-bytes": "--memory",
    "--num-gpu-blocks-override": "--memory",
}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "K": 1 << 10, "M": 1 << 20}  # of vLLM's counts


class Passed:
    """arguments: as they were given. Names are written with dashes here; vLLM takes underscores too.

    Raises ValueError for what another option says, and for text that is no option's.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        if self.arguments and not self.arguments[0].startswith("-"):
            raise ValueError(f"model must be given as --model, got {self.arguments[0]!r} by itself")
        self.names = [self._name(argument) for argument in self.arguments]
        for name in self.names:
            if name in _INSTEAD:
                raise ValueError(f"{name} must not be given to kvcompress serve: give {_INSTEAD[name]}")
            if name is not None and name.startswith("--additional-config."):
                raise ValueError(f"{name} must be a part of --additional-config, which is one JSON object")

    @staticmethod
    def _name(argument: str) -> str | None:
        name, dot, rest = argument.partition("=")[0].partition(".")
        return name.replace("_", "-") + dot + rest if name.startswith("--") else None

    def has(self, name: str) -> bool:
        return name in self.names

    def text(self, name: str) -> str | None:
        """The value of an option; None where it was not given. Raises ValueError for one that was given twice, or
        without a value."""
        found = [i for i, other in enumerate(self.names) if other == name]
        if not found:
            return None
        values = [self._value(i) for i in found]
        if len(values) > 1:
            raise ValueError(f"{name} must be given once, got {' and '.join(map(repr, values))}")
        return values[0]

    def _value(self, index: int) -> str:
        _, equals, value = self.arguments[index].partition("=")
        if equals:
            return value
        if index + 1 == len(self.arguments) or self.names[index + 1] is not None:
            raise ValueError(f"{self.names[index]} must have a value, got none")
        return self.arguments[index + 1]

    def without(self, name: str) -> list[str]:
        """The arguments but for an option and its value."""
        gone = {i for i, other in enumerate(self.names) if other == name}
        gone |= {i + 1 for i in gone if "=" not in self.arguments[i]}
        return [argument for i, argument in enumerate(self.arguments) if i not in gone]

    def count(self, name: str) -> int | None:
        """A number of tokens, as vLLM writes it: 8192, 8k (8,000), 8K (8,192)."""
        text = self.text(name)
        if text is None:
            return None
        match = re.fullmatch(r"(\d+)([kmKM]?)", text)
        if match is None or not int(match[1]):
            raise ValueError(f"{name} must be a number of tokens, such as 8192 or 8K, got {text!r}")
        return int(match[1]) * _UNITS[match[2]]

    def additional_config(self) -> dict[str, Any]:
        """Of other plugins. Raises ValueError for what is no object, or speaks to this one."""
        text = self.text("--additional-config")
        try:
            given = {} if text is None else json.loads(text)
        except json.JSONDecodeError:
            given = None
        if not isinstance(given, dict):
            raise ValueError(f"--additional-config must be a JSON object, got {text!r}")
        if KEY in given:
            raise ValueError(f"--additional-config must not have {KEY!r}, which --cache and --ratio say, got {text!r}")
        return given
