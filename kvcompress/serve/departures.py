"""Clients that go away before they are answered, and those whom a server that stops leaves: requests end with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from .bodies import error_body

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
STOPPED = "the server has stopped"
PATIENCE = 5.0  # seconds for the last words to those who wait
_ends: ContextVar[list[Callable[[], None]]] = ContextVar("_ends")  # of the HTTP request that this task works for


def when_over(end: Callable[[], None]) -> None:
    """Has `end` called once the HTTP request that is being worked for is over, answered or not: its client may leave at
    any moment, also when an answer's stream is made and nobody has begun to read it."""
    _ends.get().append(end)


class Departures:
    """ASGI, around an app. What works for a client that has gone away is cancelled, unless its answer has begun: who
    streams hears of it alone. Where the server cancels an answer because it stops, the client is told: 503, or an
    error as the last event of a stream.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app
        self._open: set[asyncio.Task[Any]] = set()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, lambda: self._once_all_are_answered(receive), send)
            return
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        ends: list[Callable[[], None]] = []
        _ends.set(ends)
        try:
            await self._answer(scope, receive, send)
        finally:
            self._open.discard(task)
            for end in ends:
                end()

    async def _once_all_are_answered(self, receive: Receive) -> Message:
        message = await receive()
        if message["type"] == "lifespan.shutdown" and self._open:
            await asyncio.wait(self._open, timeout=PATIENCE)
        return message

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        messages: asyncio.Queue[Message] = asyncio.Queue()
        begun = ended = streams = False

        async def read() -> None:
            while True:
                messages.put_nowait(message := await receive())
                if message["type"] != "http.request":
                    return

        async def given() -> Message:
            message = await messages.get()
            if message["type"] != "http.request":
                messages.put_nowait(message)  # whoever asks again hears it again
            return message

        async def sent(message: Message) -> None:
            nonlocal begun, ended, streams
            begun, ended = True, message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                kinds = (value for name, value in message.get("headers", ()) if name.lower() == b"content-type")
                streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
            await send(message)

        work, reading = asyncio.ensure_future(self.app(scope, given, sent)), asyncio.create_task(read())
        try:
            await asyncio.wait((work, reading), return_when=asyncio.FIRST_COMPLETED)
            if not begun and not work.done():
                work.cancel()
            await asyncio.wait((work,))
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait((work,))
            if not ended and (streams or not begun):  # an answer whose length is told takes no more
                await self._tell(send, begun)
        finally:
            reading.cancel()
        if not work.cancelled():
            work.result()

    @staticmethod
    async def _tell(send: Send, begun: bool) -> None:
        answer = json.dumps(error_body(503, STOPPED))
        if not begun:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": (f"data: {answer}\n\n" if begun else answer).encode()})
