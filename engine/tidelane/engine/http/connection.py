"""A client's connection: uvicorn's, with bounds on how many there are and on how long one may say nothing.

Their bound stands below the number of files that the process may open. Beyond that number nothing can be accepted, and
asyncio spends its time on logging that.
"""

from __future__ import annotations

import asyncio
import resource
from functools import partial

import h11
from typing_extensions import override
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from tidelane.engine.http.config import Limits
from tidelane.engine.http.errors import Unavailable

# asyncio accepts so many in one turn, before any of them is counted. (The kernel's queue may be longer.)
ACCEPTS_PER_TURN = 16
# For what is not a client: sockets to the core, libraries, and accepted connections that are about to be refused.
_OTHER_FILES = 200


def raise_open_files() -> int:
    """Lets this process open as many files as it may at all. Returns how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections_within(limits: Limits, open_files: int) -> int:
    """How many clients may be connected at once: what `limits` say, or fewer with so few files."""
    return max(1, min(limits.connections, open_files - _OTHER_FILES))


def bounded(most: int, head_timeout_s: float) -> type[asyncio.Protocol]:
    """What uvicorn takes for a protocol class: it calls it for each connection."""
    return partial(Connection, most, head_timeout_s)  # type: ignore[return-value]


class Connection(H11Protocol):
    """Refused with 503 where there are `most` already; closed when the head of a request does not come in time.

    uvicorn's own bound would refuse requests instead, on every connection, for as long as idle ones are open; and its
    own timer runs only after an answer, until the next byte.

    A client that shuts down its sending side counts as gone, and gets no answer: on the wire nothing tells it from one
    that left, whose work must end at once.
    """

    def __init__(
        self,
        most: int,
        head_timeout_s: float,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._most = most
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.write(_refusal(self._most))
            transport.close()
        else:
            self._watch_head()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watch()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        # Answered before its request has ended: what is left of that counts as part of the next head.
        if self.conn.their_state is not h11.IDLE and self.conn.our_state is not h11.DONE:
            self._stop_watch()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self.timeout_keep_alive_handler)

    def _stop_watch(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _refusal(most: int) -> bytes:
    error = Unavailable(
        f"{most} connections are open, the most this server takes.", code="too_many_connections", retry_after_s=1
    )
    body = error.body()
    head = [f"HTTP/1.1 {error.status} Service Unavailable", *(f"{k}: {v}" for k, v in error.headers().items())]
    head += ["content-type: application/json", f"content-length: {len(body)}", "connection: close", "", ""]
    return "\r\n".join(head).encode() + body
