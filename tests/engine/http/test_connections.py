"""Clients that only take up room: too many of them, or silent ones, must not keep others from their answers."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from engine.http.front_process import SERVED_NAME, FrontProcess
from engine.http.tiny_model import facts_of
from tidelane.engine.http.config import Limits
from tidelane.engine.http.connection import bounded, connections_within

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_front_with_few_files_refuses_clients_before_it_runs_out(model_folder: Path, tmp_path: Path) -> None:
    front = FrontProcess(tmp_path, facts_of(model_folder, SERVED_NAME), open_files=230)
    try:
        front.wait_until_ready()
        with ExitStack() as clients:
            silent = [clients.enter_context(socket.create_connection(("127.0.0.1", front.port))) for _ in range(300)]
            silent[-1].settimeout(20)
            answer = httpx.Response(503, content=read_all(silent[-1]).partition(b"\r\n\r\n")[2])
            assert answer.json()["error"]["code"] == "too_many_connections"
            assert answer.json()["error"]["message"] == "30 connections are open, the most this server takes."
            # The one that the test's own client has open is among those that were let in.
            assert front.http.get("/health").status_code == 200
        assert "out of system resource" not in (tmp_path / "front.log").read_text()
    finally:
        front.stop()


def test_a_front_may_open_as_many_files_as_there_may_be(shared_front: FrontProcess) -> None:
    soft, hard = resource.prlimit(shared_front.process.pid, resource.RLIMIT_NOFILE)
    assert soft == hard


@pytest.mark.parametrize(("open_files", "most"), [(10**6, 4096), (1024, 824), (100, 1)])
def test_clients_leave_files_for_the_rest(open_files: int, most: int) -> None:
    assert connections_within(Limits(), open_files) == most


@asynccontextmanager
async def serving(most: int, head_timeout_s: float) -> AsyncIterator[int]:
    """A server on `bounded` connections that says "ok"; its port."""
    config = uvicorn.Config(
        PlainTextResponse("ok"), http=bounded(most, head_timeout_s), lifespan="off", ws="none", log_config=None
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    listener = socket.create_server(("127.0.0.1", 0))
    await server.startup([listener])
    await server.on_tick(0)
    try:
        yield listener.getsockname()[1]
    finally:
        await server.shutdown([listener])


async def test_a_client_that_sends_no_request_in_time_is_closed() -> None:
    async with serving(10, 0.2) as port:
        for begun in (b"", HEALTH[:20]):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begun)
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()


@pytest.mark.parametrize(
    "before",
    [b"", HEALTH, HEALTH.replace(b"Host: x", b"Host: x\r\nContent-Length: 1000")],
    ids=["first", "second", "body"],
)
async def test_a_client_that_sends_byte_by_byte_is_closed_as_well(before: bytes) -> None:
    async with serving(10, 0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(before)
        if before:
            await reader.readuntil(b"ok")
        ended = asyncio.create_task(reader.read())
        for _ in range(500):
            if ended.done():
                break
            writer.write(b"x")
            await asyncio.sleep(0.02)  # the client's slowness
        assert ended.done()
        writer.close()


async def test_an_idle_connection_that_was_of_use_is_kept() -> None:
    async with serving(10, 0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(HEALTH[:20])
            writer.write(HEALTH[20:])
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.4)  # twice the time that a head may take
        writer.close()


async def test_a_place_is_free_again_when_a_client_has_left() -> None:
    async with serving(1, 60) as port:
        _, first = await asyncio.open_connection("127.0.0.1", port)
        reader, second = await asyncio.open_connection("127.0.0.1", port)
        refusal = await reader.read()
        assert refusal.startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n")
        second.close()
        first.close()
        answer = refusal
        async with asyncio.timeout(10):
            while answer == refusal:  # until the server has seen them leave
                reader, third = await asyncio.open_connection("127.0.0.1", port)
                third.write(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
                answer = await reader.read()
                third.close()
        assert answer.startswith(b"HTTP/1.1 200")


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))
