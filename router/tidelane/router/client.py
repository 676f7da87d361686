"""The client's side of one request: what it has been sent so far, and what can still be said."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.types import Send

from tidelane.engine.http.errors import ApiError
from tidelane.router.headers import Header, to_client
from tidelane.router.retries import Refusal


class Client:
    """`begun`: something has been sent, so that no other backend may be asked."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def whole(self, status: int, headers: list[Header], body: bytes) -> None:
        length = (b"content-length", str(len(body)).encode())
        named = [(name, value) for name, value in to_client(headers) if name != b"content-length"]
        await self._start(status, [*named, length])
        await self._body(body, more=False)

    async def refused(self, refusal: Refusal) -> None:
        await self.whole(refusal.status, list(refusal.headers), refusal.body)

    async def begin(self, status: int, headers: list[Header]) -> None:
        await self._start(status, to_client(headers))

    async def piece(self, data: bytes) -> None:
        await self._body(data, more=True)

    async def end(self) -> None:
        await self._body(b"", more=False)

    async def break_off(self, error: ApiError) -> None:
        """A stream that cannot go on ends with one error event, as an engine's own."""
        # A line break first: what came before may have been cut anywhere.
        event = b"\n\ndata: " + msgspec.json.encode({"error": error.fields()}) + b"\n\n"
        await self._body(event, more=True)
        await self.end()

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


NOBODY: Final = 499  # nginx's status for a client that closed the connection
