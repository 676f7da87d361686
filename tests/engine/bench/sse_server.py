"""A chat server of a few lines: answers as it is told, event by event, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

# What to write for one request: bytes are written as they are; None waits for `release`.
Script = Sequence[bytes | None]

SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class SseServer:
    def __init__(self, script: Callable[[dict[str, Any]], Script]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.release = asyncio.Event()
        self.open = 0
        self.most_open = 0
        self._script = script
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[SseServer]:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with self._server:
            yield self
            self.release.set()
            await asyncio.gather(*self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):  # a client may leave early
            await self._answer(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        for piece in self._script(body):
            if piece is None:
                await self.release.wait()
            else:
                writer.write(piece)
                await writer.drain()
        self.open -= 1


def piece(*events: object) -> bytes:
    """One HTTP chunk that holds these events."""
    data = b"".join(
        b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n" for event in events
    )
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def text(content: str, completion_tokens: int | None = None) -> dict[str, Any]:
    usage = None if completion_tokens is None else {"prompt_tokens": 7, "completion_tokens": completion_tokens}
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None}], "usage": usage}


def closing(completion_tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": completion_tokens}}


DONE = b"[DONE]"
ROLE: dict[str, Any] = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}


def refusal(status: int, message: str) -> bytes:
    body = json.dumps({"error": {"message": message, "type": "overloaded"}}).encode()
    return f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
