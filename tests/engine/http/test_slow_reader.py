from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.http.fake_loop import Script
from engine.http.front_process import SERVED_NAME, FrontProcess
from engine.http.sse import DONE, parse
from engine.http.tiny_model import facts_of

TOKENS = 12_000


@pytest.fixture
def roomy_front(model_folder: Path, tmp_path: Path) -> Iterator[FrontProcess]:
    front = FrontProcess(tmp_path, facts_of(model_folder, SERVED_NAME, 10**6, 10**6))
    try:
        front.wait_until_ready()
        yield front
    finally:
        front.stop()


def test_a_stream_that_nobody_reads_is_bounded_and_told(roomy_front: FrontProcess) -> None:
    roomy_front.loop.answer(Script(tokens=[40] * TOKENS))
    # Alternatives make each event large, so that the sockets' own buffers fill.
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True, "logprobs": True}
    raw = json.dumps(body | {"top_logprobs": 20, "max_tokens": TOKENS}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(("127.0.0.1", roomy_front.port))
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        client.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        (abort,) = roomy_front.loop.wait_for_aborts(1)
        assert abort.request_id == roomy_front.loop.submitted[0].id
        assert roomy_front.http.get("/ready").status_code == 200
        with client.makefile("r", encoding="utf-8", newline="\r\n") as file:
            lines = [line for line in file.read().splitlines() if line.startswith("data: ")]
    chunks = list(parse(lines))
    assert chunks[-1]["error"]["code"] == "slow_reader"
    assert DONE not in chunks
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
