"""Bodies that are too long are refused before they are read."""

from __future__ import annotations

import json
from typing import Any

from .bodies import error_body
from .departures import Message, Receive, Send

MAX_BODY = 2_000_000  # bytes of a request's body; a prompt of text takes about 4 a token


class MaxBody:
    """ASGI, around an app, which gets a body in one piece. most: bytes; what is longer is answered with 413, whether
    its length is told or not, and its connection closed."""

    def __init__(self, app: Any, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        told = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        too_long = told.isdigit() and (len(told) > 18 or int(told) > self.most)
        body, more = bytearray(), True
        while more and not too_long:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client has gone away
            body += message.get("body", b"")
            more, too_long = message.get("more_body", False), len(body) > self.most
        if too_long:
            await self._refuse(send)
            return
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def given() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, given, send)

    async def _refuse(self, send: Send) -> None:
        said = f"body must have at most {self.most:,} bytes (--max-body of the server), got more"
        answer = json.dumps(error_body(413, said)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": answer})
