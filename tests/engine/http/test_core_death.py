"""When the core dies no client may hang, and no front may stay."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from engine.http.fake_loop import PATIENCE_S, Script
from engine.http.front_process import FrontProcess
from engine.http.sse import DONE, events
from engine.http.tiny_model import facts_of, write_model_folder
from tidelane.engine.http.config import EX_CONFIG
from tidelane.engine.http.listener import listen

BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 50}


def test_each_open_stream_gets_one_error_and_ends(own_front: FrontProcess, tmp_path: Path) -> None:
    own_front.loop.hold()
    own_front.loop.answer(Script(tokens=[40] * 50))
    with (
        own_front.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as running,
        own_front.http.stream("POST", "/v1/completions", json=BODY | {"stream": True, "n": 2}) as waiting,
    ):
        own_front.loop.step(3)
        own_front.kill_core()
        for response in (running, waiting):
            chunks = list(events(response))
            assert [chunk for chunk in chunks if chunk == DONE or "error" in chunk] == chunks[-1:]
            assert chunks[-1]["error"]["code"] == "engine_stopped"
    assert own_front.process.wait(2) == 0
    assert "WARNING tidelane.engine.http.front requests that end without" in (tmp_path / "front.log").read_text()


def test_open_requests_without_a_stream_are_503(own_front: FrontProcess) -> None:
    own_front.loop.hold()
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(own_front.http.post("/v1/completions", json=BODY)))
    client.start()
    own_front.loop.wait_for_submissions(1)
    own_front.kill_core()
    client.join(PATIENCE_S)
    assert [answer.status_code for answer in answers] == [503]
    assert answers[0].json()["error"]["code"] == "engine_stopped"
    assert "retry-after" in answers[0].headers


def test_what_the_core_said_last_still_arrives(own_front: FrontProcess) -> None:
    own_front.loop.hold()
    own_front.loop.answer(Script(tokens=[40] * 5, per_message=5))
    with own_front.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
        own_front.loop.wait_for_submissions(1)
        own_front.loop.step()
        own_front.kill_core()
        chunks = list(events(response))
    assert chunks[-1] == DONE
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


def test_a_front_that_cuts_nobody_off_ends_without_a_warning(own_front: FrontProcess, tmp_path: Path) -> None:
    assert own_front.http.post("/v1/completions", json=BODY).status_code == 200
    own_front.kill_core()
    assert own_front.process.wait(PATIENCE_S) == 0
    log = (tmp_path / "front.log").read_text()
    assert "the core is gone" in log
    assert "WARNING" not in log


def test_the_port_is_closed_at_once_and_the_process_gone_within_two_seconds(own_front: FrontProcess) -> None:
    own_front.loop.hold()
    stuck = socket.create_connection(("127.0.0.1", own_front.port))
    with stuck:
        # A client that neither finishes its request nor leaves must not keep the front.
        stuck.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n")
        assert own_front.http.get("/health").status_code == 200
        died_s = time.monotonic()
        own_front.kill_core()
        own_front.process.wait(PATIENCE_S)
        assert time.monotonic() - died_s < 2.0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", own_front.port))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_group_leave_it_to_the_core(own_front: FrontProcess, number: signal.Signals) -> None:
    own_front.loop.hold()
    with own_front.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
        own_front.process.send_signal(number)
        own_front.loop.release()
        assert list(events(response))[-1] == DONE
    assert own_front.process.poll() is None


def test_a_port_in_use_ends_it_with_a_reason(model_folder: Path, own_front: FrontProcess, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tidelane.engine.http", "--channel", str(tmp_path / "other"), "--host", "127.0.0.1"]
    argv += ["--port", str(own_front.port), "--lifeline-fd", "0", "--served-name", "tiny"]
    ended = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{own_front.port}" in ended.stderr


@pytest.mark.parametrize(
    ("file", "content"), [("tokenizer.json", "{}"), ("tokenizer.json", None), ("chat_template.jinja", "{% if %}")]
)
def test_a_model_without_a_usable_tokenizer_is_a_configuration_error(
    tmp_path: Path, file: str, content: str | None
) -> None:
    write_model_folder(tmp_path)
    facts = facts_of(tmp_path, "tiny")
    (tmp_path / file).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / file).write_text(content)
    front = FrontProcess(tmp_path, facts)
    try:
        assert front.process.wait(PATIENCE_S) == EX_CONFIG
        front.loop.wait_until(lambda state: state.front_failed is not None)
        reason = front.loop.front_failed
        assert reason is not None
        assert reason.startswith("cannot load the model's tokenizer: ")
    finally:
        front.stop()
    assert reason in (tmp_path / "front.log").read_text()


def test_the_listeners_sockets_do_not_delay_small_writes() -> None:
    with (
        listen("127.0.0.1", 0, 60.0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_it_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, tidelane.engine.http.front; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[]"
