"""Docstrings are plain text: what Markdown would read as its own is escaped before the pages are made of them.

An extension of Griffe, which mkdocstrings asks (mkdocs.yml).
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Function, Module, Object

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|])")
ARGUMENT = re.compile(r"(?:(?<=^)|(?<=\. ))((?:\w|\\_)+(?:, (?:\w|\\_)+)*): ", re.MULTILINE)


def escaped(text: str) -> str:
    """Markdown that shows the text; indented blocks stay code, arguments stand out."""
    parts = re.split(r"((?:^(?: {4}.*)?\n)+)", text, flags=re.MULTILINE)  # every second one is indented, or blank
    for i in range(0, len(parts), 2):
        parts[i] = ARGUMENT.sub(r"**\1**: ", SPECIAL.sub(r"\\\1", parts[i]))
    return "".join(parts)


class PlainDocstrings(Extension):
    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if isinstance(obj, (Class, Function, Module)) and obj.docstring:
            obj.docstring.value = escaped(obj.docstring.value)
