"""How a chat ended is told apart: the story's judgement of streams hangs on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typing_extensions import override

from pods.chat_client import chat

TOKEN = b'data: {"choices": [{"delta": {"content": "one"}}]}\n\n'
# By the model that is asked for: status and body.
BODIES = {
    "whole": (200, TOKEN + TOKEN + b"data: [DONE]\n\n"),
    "failing": (200, TOKEN + b'data: {"error": {"code": "engine_lost"}}\n\n'),
    "broken": (200, TOKEN),
    "busy": (503, b"draining"),
}


class Scripted(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        status, body = next(answer for name, answer in BODIES.items() if name in asked)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Scripted) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("whole", (2, "done")),
        ("failing", (1, "error: engine_lost")),
        ("broken", (1, "cut: no ending")),
        ("busy", (0, "refused: 503 draining")),
    ],
)
def test_each_ending_has_a_name(url: str, model: str, expected: tuple[int, str]) -> None:
    assert chat(url, model, tokens=8) == expected


def test_nobody_there_is_a_refusal() -> None:
    received, end = chat("http://127.0.0.1:1", "whole", tokens=8)
    assert (received, end.partition(":")[0]) == (0, "refused")
