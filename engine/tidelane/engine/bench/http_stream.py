"""Just enough HTTP/1.1 to post a body and read the answer as it comes.

By hand on asyncio streams: the generator often shares its cores with the server, and a general client costs several
times more per event than the event itself.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit


class BrokenAnswer(ConnectionError):
    """The server's bytes are not a whole HTTP answer."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server's base address: everything before `/v1`."""

    host: str
    port: int
    tls: bool
    prefix: str

    @staticmethod
    def parse(url: str) -> Target:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r}: expected http://HOST:PORT or https://HOST:PORT")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return Target(parts.hostname, parts.port or (443 if tls else 80), tls, prefix)


class Answer:
    """`status`, and `pieces()`: the body as it comes."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def pieces(self) -> AsyncIterator[bytes]:
        """Raises BrokenAnswer if the body ends early."""
        try:
            if self.headers.get("transfer-encoding", "").lower() == "chunked":
                while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
                    yield (await self._reader.readexactly(size + 2))[:-2]
            elif "content-length" in self.headers:
                yield await self._reader.readexactly(int(self.headers["content-length"]))
            else:
                while piece := await self._reader.read(1 << 16):
                    yield piece
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise BrokenAnswer("the body ended before its end") from error

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])


@asynccontextmanager
async def exchange(
    target: Target, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> AsyncIterator[Answer]:
    """One request on a connection of its own, closed at the end: as a new user comes. Raises OSError if it cannot."""
    context = ssl.create_default_context() if target.tls else None
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=context, limit=1 << 20)
    try:
        lines = [f"{method} {target.prefix}{path} HTTP/1.1", f"Host: {target.host}:{target.port}", "Connection: close"]
        lines += [f"Content-Length: {len(body)}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        yield await _head(reader)
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> Answer:
    try:
        first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(first.split(" ")[1])
        fields = (line.partition(":") for line in rest if line)
        return Answer(status, {name.lower(): value.strip() for name, _, value in fields}, reader)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
        raise BrokenAnswer("the server closed the connection without an answer") from error
