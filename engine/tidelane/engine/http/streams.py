"""Answers over HTTP: server-sent events while tokens come, or one body at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from tidelane.engine.http.call import Call
from tidelane.engine.http.choice import Delta
from tidelane.engine.http.errors import ApiError

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class Writer(Protocol):
    """Puts a call's output into one route's shapes."""

    def events(self, delta: Delta) -> bytes:
        """Chunks for what is new of a choice; with `delta.finish`, the choice's terminal chunk last."""
        ...

    def closing_events(self) -> bytes:
        """The usage chunk if it was asked for, else nothing."""
        ...

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class EventStream(Response):
    """Sends a call's events as they come. Closes `resources`, and with them the call, however it ends."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, writer: Writer, resources: ExitStack) -> None:
        self._call = call
        self._writer = writer
        self._resources = resources
        self.status_code = 200
        self.background = None
        # Proxies must pass events on at once.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._resources:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._events():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        call = self._call
        while not call.closed:
            over = call.over
            data = b"".join(map(self._writer.events, call.take()))
            if call.error is not None:
                yield data + error_event(call.error)
                return
            if over:
                yield data + self._writer.closing_events() + DONE
                return
            if data:
                yield data
            await call.changed()


def error_event(error: ApiError) -> bytes:
    return event({"error": error.fields()})
