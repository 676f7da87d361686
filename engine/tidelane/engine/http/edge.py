"""The outermost layer: when a request arrived, its id, and how it was answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ARRIVAL = "tidelane.arrival_s"
_ID = "tidelane.request_id"
_REQUEST_ID = b"x-request-id"
_MAX_ID_BYTES = 256


def arrival_s(scope: Scope) -> float:
    arrival: float = scope[_ARRIVAL]
    return arrival


def request_id(scope: Scope) -> bytes:
    found: bytes = scope[_ID]
    return found


class CountsResponses(Protocol):
    def response(self, status: int) -> None: ...


class Edge:
    """Stamps arrivals before anything else is done, echoes X-Request-ID (or makes one), counts responses."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: CountsResponses,
        monotonic_s: Callable[[], float],
        random_bits: Callable[[int], int],
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._monotonic_s = monotonic_s
        self._random_bits = random_bits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_ARRIVAL] = self._monotonic_s()
        given = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
        named = scope[_ID] = given[:_MAX_ID_BYTES] or f"{self._random_bits(128):032x}".encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.response(message["status"])
                message["headers"] = [*message.get("headers", ()), (_REQUEST_ID, named)]
            await send(message)

        await self._app(scope, receive, send_with_id)
