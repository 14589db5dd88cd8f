"""Stop strings: what a request writes ends in front of the first of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any


class Stopping:
    """A queue of a request's text as its server reads it: what another queue gives, up to a stop string.

    inner: gives text in pieces, anything else between them, None at the end. stops: none empty. stopped: called when
    one has come, with the number of pieces so far. Text that may be the beginning of one waits for what follows it.
    """

    def __init__(self, inner: asyncio.Queue[Any], stops: Sequence[str], stopped: Callable[[int], None]) -> None:
        self._inner, self._stops, self._stopped, self._pieces = inner, list(stops), stopped, 0
        self._ready: deque[Any] = deque()
        self._held = ""

    async def get(self) -> Any:
        while not self._ready:
            self._take(await self._inner.get())
        return self._ready.popleft()

    def get_nowait(self) -> Any:
        """Raises asyncio.QueueEmpty where nothing is there yet."""
        while not self._ready:
            self._take(self._inner.get_nowait())
        return self._ready.popleft()

    def _take(self, item: Any) -> None:
        if type(item) is not str:  # reasoning and calls of tools are text of other types
            self._give(self._held)
            self._held = ""
            self._ready.append(item)
            return
        text, self._pieces = self._held + item, self._pieces + 1
        if (end := min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)) is not None:
            self._stopped(self._pieces)
            self._give(text[:end])
            self._ready.append(None)
            return
        waits = max(self._begun(text, stop) for stop in self._stops)
        self._give(text[: len(text) - waits])
        self._held = text[len(text) - waits :]

    def _give(self, text: str) -> None:
        if text:
            self._ready.append(text)

    @staticmethod
    def _begun(text: str, stop: str) -> int:
        """How many last characters may be the beginning of a stop string."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
