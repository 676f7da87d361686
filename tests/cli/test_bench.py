"""`tidelane bench` as a command: what it refuses, and Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine.bench.sse_server import DONE, END, ROLE, SSE_HEAD, SseServer, closing, piece, text
from tidelane.cli import main

# However these tests were started: a shell's background jobs inherit that SIGINT is ignored.
HEARS_SIGINT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tidelane.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
BENCH = ("bench", "--url", "http://127.0.0.1:1", "--model", "x")


def test_a_wrong_mix_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([*BENCH, "--mix", "chat:rate=1,in=20-10,out=8"])
    assert ended.value.code == 2
    told = "argument --mix: chat: a length of 20-10 tokens; expected 1 <= low <= high"
    assert told in capsys.readouterr().err


def test_a_broken_trace_is_told_by_line_and_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "chats.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": NaN}\n')
    assert main.main([*BENCH, "--trace", str(trace)]) == 2
    told = f"tidelane bench: {trace}:1: output_length: 'nan', expected a number from 1 to 10000000\n"
    assert capsys.readouterr().err == told


async def test_its_report_has_the_form_of_a_simulated_one(tmp_path: Path) -> None:
    trace = tmp_path / "mine.jsonl"
    trace.write_text("".join(f'{{"at_s": {n / 50}, "input_tokens": {5 + n}, "output_tokens": 1}}\n' for n in range(20)))
    script = (SSE_HEAD, piece(ROLE, text("a", 1), closing(1), DONE), END)
    async with SseServer(lambda body: script).running() as server:
        words = ("bench", "--url", server.url, "--model", "m", "--trace", str(trace), "--format", "jsonl")
        targets = ("--slo", "ttft=10s,tpot=1s", "--limit", "10", "--speedup", "2", "--gpus", "2")
        files = ("--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"))
        assert await asyncio.to_thread(main.main, [*words, *targets, *files]) == 0
    plain = json.loads((tmp_path / "a.json").read_text())
    assert plain["header"]["requests"] == 10
    assert plain["header"]["slo"]["ttft_s"] == 10.0
    (point,) = plain["policies"]["served"]["points"]
    assert point["rate"] == pytest.approx(10 / 1.0 / 2 * 2)  # ten within the second that a trace lasts at least
    assert point["attainment"] == 1.0
    assert point["goodput_per_gpu"] == point["rate"]
    assert plain["report"]["kinds"][0]["completed"] == 10
    page = (tmp_path / "a.html").read_text()
    assert page.count("<figure>") == 4
    assert "http-equiv" not in page


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--limit", "3"), "--limit: is of a trace: give --trace too"),
        (("--slo", "ttft=1s"), "--slo: tpot is missing: write ttft=200ms,ttftPer1k=100ms,tpot=50ms"),
        (("--json", "/nowhere/a.json"), "--json: /nowhere/a.json: there is no folder /nowhere: make it first"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_traffic(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*BENCH, *words]) == 2
    assert capsys.readouterr().err == f"tidelane bench: {told}\n"


@pytest.mark.slow  # a process of its own
def test_ctrl_c_ends_it_without_a_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-c", HEARS_SIGINT, "bench", "--url", url, "--model", "x"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = silent.accept()  # It asks for the server's targets, and gets no answer.
            with connection:
                process.send_signal(signal.SIGINT)
                _, told = process.communicate()
        assert process.returncode == 130
        assert "Traceback" not in told
