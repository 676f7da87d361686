from __future__ import annotations

import json
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
