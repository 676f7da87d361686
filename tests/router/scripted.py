"""A backend whose bytes are the test's: what real engines say only when something goes wrong, and when.

What it says when all goes well is that of the front; the tests of `test_real_fronts.py` run against real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from tidelane.engine.load import Load, Outlook
from tidelane.engine.slo import Slo

PATIENCE_S = 20.0

SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
    b"cache-control: no-cache\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(text: str) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"index": 0, "text": text}]}) + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(status: int, body: object, *headers: str) -> bytes:
    content = msgspec.json.encode(body)
    lines = [f"HTTP/1.1 {status} Said", f"content-length: {len(content)}", "content-type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def error(status: int, code: str, *headers: str) -> bytes:
    return whole(status, {"error": {"message": code, "type": "t", "param": None, "code": code}}, *headers)


@dataclass
class Call:
    """One request as it came in, and the connection to answer it on."""

    head: bytes
    body: bytes
    writer: asyncio.StreamWriter
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # by the other side

    def header(self, name: str) -> str | None:
        for line in self.head.decode("latin-1").split("\r\n")[1:]:
            key, _, value = line.partition(": ")
            if key.lower() == name:
                return value
        return None

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    def reset(self) -> None:
        self.writer.transport.abort()


Answering = Callable[[Call], Awaitable[None]]


async def _ok(call: Call) -> None:
    call.say(whole(200, {"id": "cmpl-1"}))


class ScriptedBackend:
    """Answers `/load` with `load`, and all else by `answering`, after which the connection ends."""

    def __init__(self, model: str = "chat") -> None:
        self.answering: Answering = _ok
        self.calls: list[Call] = []
        self.hanging = False  # says nothing to `/load`
        self.load: Load | None = Load(
            model, 1, ready=True, draining=False, slo=Slo(1.0, 0.1), max_context_tokens=2048, kv_tokens=4096,
            kv_free_tokens=4096, kv_kept_tokens=4096, outlook=Outlook({}, {}, 1000.0, 0.01, 0.001),
        )  # fmt: skip
        self._server: asyncio.Server | None = None
        self._came = asyncio.Condition()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.name = f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Connections are refused from now on, and open ones reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for call in self.calls:
            call.reset()

    def say(self, **fields: object) -> None:
        """What its load says from now on."""
        assert self.load is not None
        self.load = msgspec.structs.replace(self.load, **fields)

    def answer(self, data: bytes) -> None:
        async def say(call: Call) -> None:
            call.say(data)

        self.answering = say

    async def called(self, times: int = 1) -> Call:
        async with asyncio.timeout(PATIENCE_S), self._came:
            await self._came.wait_for(lambda: len(self.calls) >= times)
        return self.calls[times - 1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            call = Call(head, b"", writer)
            call.body = await reader.readexactly(int(call.header("content-length") or 0))
            if head.startswith(b"GET /load "):
                if self.hanging:
                    await reader.read()
                writer.write(whole(404, {}) if self.load is None else whole(200, self.load))
            else:
                await self._take(call, reader)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _take(self, call: Call, reader: asyncio.StreamReader) -> None:
        async with self._came:
            self.calls.append(call)
            self._came.notify_all()

        async def watch() -> None:
            try:
                while await reader.read(4096):
                    pass
            except ConnectionError:
                pass
            call.ended.set()

        watching = asyncio.create_task(watch())
        try:
            await self.answering(call)
        finally:
            watching.cancel()
