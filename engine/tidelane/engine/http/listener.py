"""Where connections come in: the socket, and the server that accepts them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from typing_extensions import override

# Connections that the kernel keeps until they are accepted; more at once must try again.
_BACKLOG = 2048


def listen(host: str, port: int, stall_s: float) -> socket.socket:
    """A socket whose connections end when a peer takes nothing for `stall_s`, or is no longer there. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    # Accepted sockets inherit all of these. NODELAY: asyncio would set it, but only on sockets that name a protocol;
    # without it the second write of an answer waits for the acknowledgement of the first, which peers delay by 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A peer that acknowledges nothing, keeps its window shut, or vanished while its request waits would hold a
    # connection for ever.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(stall_s))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s) * 1000)
    return listener


class Server(uvicorn.Server):
    """uvicorn's, which leaves signals to whoever runs it."""

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio has made the kernel's queue as short as its own turn.
        for listener in sockets or ():
            listener.listen(_BACKLOG)

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
