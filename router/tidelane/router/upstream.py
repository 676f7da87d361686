"""HTTP/1.1 to a backend: one request on a connection of its own, and the answer as it comes.

A connection of its own, since one that was kept might end just as the next request goes out: nobody could tell then
whether the backend had begun with it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import h11

from tidelane.router.address import Address

Headers = Sequence[tuple[bytes, bytes]]

_READ_BYTES: Final = 1 << 16
# A backend whose node vanished says nothing more; the kernel asks after so long, so often, and gives up.
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_UNACKNOWLEDGED_MS: Final = 15_000


class CannotConnect(Exception):
    """Nothing has been sent: any backend may be asked."""


class BrokenOff(Exception):
    """The request was sent, and the connection ended before the answer did, or the answer is not HTTP."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request without what belongs to a connection: `Host`, `Content-Length`, `Connection`."""

    method: str
    target: bytes
    headers: Headers = ()
    body: bytes = b""


class Answer:
    """The head of an answer; `pieces()` gives its body, once."""

    def __init__(self, connection: h11.Connection, reader: asyncio.StreamReader, head: h11.Response) -> None:
        self.status = head.status_code
        self.headers: Headers = list(head.headers.raw_items())
        self._connection = connection
        self._reader = reader

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key.lower() == name), b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Each as soon as it is here. Raises BrokenOff."""
        while True:
            event = await _event(self._connection, self._reader)
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            else:
                return

    async def body(self, most_bytes: int) -> bytes:
        """Raises BrokenOff, also if there is more."""
        parts: list[bytes] = []
        size = 0
        async for piece in self.pieces():
            parts.append(piece)
            size += len(piece)
            if size > most_bytes:
                raise BrokenOff(f"an answer larger than {most_bytes} bytes")
        return b"".join(parts)


@asynccontextmanager
async def exchange(address: Address, outgoing: Outgoing, connect_timeout_s: float) -> AsyncIterator[Answer]:
    """Raises CannotConnect or BrokenOff. The connection ends with the block, and with it the work at the backend."""
    try:
        async with asyncio.timeout(connect_timeout_s):
            reader, writer = await asyncio.open_connection(address.host, address.port)
    except OSError as error:  # TimeoutError too
        raise CannotConnect(str(error) or f"no connection within {connect_timeout_s:g} s") from error
    try:
        _watch_peer(writer.get_extra_info("socket"))
        connection = h11.Connection(h11.CLIENT)
        writer.write(_sent(connection, address, outgoing))
        # Not drained: a backend may refuse before it has read all, and what it says then is worth reading.
        head = await _event(connection, reader)
        while isinstance(head, h11.InformationalResponse):
            head = await _event(connection, reader)
        if not isinstance(head, h11.Response):
            raise BrokenOff("the connection ended without an answer")
        yield Answer(connection, reader, head)
    finally:
        writer.transport.abort()


def _sent(connection: h11.Connection, address: Address, outgoing: Outgoing) -> bytes:
    headers = [(b"host", address.name.encode()), *outgoing.headers, (b"connection", b"close")]
    if outgoing.body:
        headers.append((b"content-length", str(len(outgoing.body)).encode()))
    request = h11.Request(method=outgoing.method, target=outgoing.target, headers=headers)
    parts = [connection.send(request)]
    if outgoing.body:
        parts.append(connection.send(h11.Data(data=outgoing.body)))
    parts.append(connection.send(h11.EndOfMessage()))
    return b"".join(part for part in parts if part)


async def _event(connection: h11.Connection, reader: asyncio.StreamReader) -> object:
    """The next; raises BrokenOff."""
    try:
        while True:
            event = connection.next_event()
            if event is not h11.NEED_DATA:
                return event
            connection.receive_data(await reader.read(_READ_BYTES))
    except (OSError, h11.RemoteProtocolError) as error:
        raise BrokenOff(str(error) or type(error).__name__) from error


def _watch_peer(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        peer.setsockopt(socket.IPPROTO_TCP, option, value)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
