from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from engine.http.fake_loop import FakeLoop, Script
from engine.http.front_process import FrontProcess
from engine.http.sse import DONE, events
from tidelane.engine.request import FinishReason

BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 400}


@contextmanager
def raw_request(front: FrontProcess, **fields: Any) -> Iterator[socket.socket]:
    """A client that has sent a request, and may leave at any moment."""
    body = json.dumps(BODY | fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", front.port), timeout=20) as connection:
        connection.sendall(head.encode() + body)
        yield connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_token_is_aborted(
    front: FrontProcess, loop: FakeLoop, stream: bool
) -> None:
    loop.hold()
    with raw_request(front, stream=stream):
        (request,) = loop.wait_for_submissions(1)
    (abort,) = loop.wait_for_aborts(1)
    assert (abort.request_id, abort.reason) == (request.id, FinishReason.ABORTED)


def test_a_client_that_shuts_down_its_sending_side_counts_as_gone(front: FrontProcess, loop: FakeLoop) -> None:
    loop.hold()
    with raw_request(front) as connection:
        loop.wait_for_submissions(1)
        connection.shutdown(socket.SHUT_WR)
        loop.wait_for_aborts(1)
        assert connection.recv(1) == b""


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_tokens_come_is_aborted(front: FrontProcess, loop: FakeLoop, stream: bool) -> None:
    loop.hold()
    with raw_request(front, stream=stream):
        loop.wait_for_submissions(1)
        loop.step(3)
    loop.wait_for_aborts(1)
    loop.release()
    assert loop.running == []


def test_all_sequences_of_a_call_are_aborted(front: FrontProcess, loop: FakeLoop) -> None:
    loop.hold()
    with raw_request(front, stream=True, n=3, prompt=["a", "b"]):
        requests = loop.wait_for_submissions(6)
    aborts = loop.wait_for_aborts(6)
    assert sorted(abort.request_id for abort in aborts) == sorted(request.id for request in requests)


def test_cancelling_one_does_not_touch_another(front: FrontProcess, http: httpx.Client, loop: FakeLoop) -> None:
    loop.hold()
    loop.answer(Script(), Script(tokens=[40] * 30))
    with raw_request(front, stream=True) as leaver:
        loop.wait_for_submissions(1)
        with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
            loop.step(2)
            leaver.close()
            (abort,) = loop.wait_for_aborts(1)
            assert abort.request_id == loop.submitted[0].id
            loop.release()
            chunks = list(events(response))
    assert chunks[-1] == DONE
    assert sum(len(chunk["choices"][0]["text"]) for chunk in chunks[:-1]) == 30
    assert len(loop.aborted) == 1


def test_a_finished_request_is_not_aborted(http: httpx.Client, loop: FakeLoop) -> None:
    for stream in (True, False):
        assert http.post("/v1/completions", json=BODY | {"max_tokens": 3, "stream": stream}).status_code == 200
    assert http.get("/health").status_code == 200
    assert loop.aborted == []


async def test_clients_that_leave_at_random_disturb_nobody(front: FrontProcess, loop: FakeLoop) -> None:
    dice = random.Random(7)
    patience = [dice.choice([0, 1, 5, 20, None]) for _ in range(100)]
    loop.answer(*(Script(tokens=[40] * 50) for _ in patience))

    async def visit(events_wanted: int | None) -> bytes:
        body = json.dumps(BODY | {"stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        answer = b""
        while events_wanted is None or answer.count(b"data: ") < events_wanted:
            data = await reader.read(65536)
            if not data:
                break
            answer += data
        writer.transport.abort()
        return answer

    answers = await asyncio.gather(*map(visit, patience))
    for wanted, answer in zip(patience, answers, strict=True):
        if wanted is None:
            chunks = [line for line in answer.decode().splitlines() if line.startswith("data: {")]
            assert sum(len(json.loads(line[6:])["choices"][0]["text"]) for line in chunks) == 50
            assert answer.count(b"data: [DONE]") == 1
    loop.wait_until(lambda state: not state.running)
    stayed = patience.count(None)
    finished = len(loop.submitted) - len(loop.aborted)
    assert stayed <= finished <= len(loop.submitted) <= 100
    assert len({abort.request_id for abort in loop.aborted}) == len(loop.aborted)
