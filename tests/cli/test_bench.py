"""`tidelane bench` as a command: what it refuses, and Ctrl-C."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tidelane.cli import main

# However these tests were started: a shell's background jobs inherit that SIGINT is ignored.
HEARS_SIGINT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tidelane.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
BENCH = ("bench", "http://127.0.0.1:1", "--model", "x")


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
    told = f"tidelane bench: {trace}:1: output_length: 'nan', expected a number from 0 to 10000000\n"
    assert capsys.readouterr().err == told


@pytest.mark.slow  # a process of its own
def test_ctrl_c_ends_it_without_a_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-c", HEARS_SIGINT, "bench", url, "--model", "x"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = silent.accept()  # It asks for the server's targets, and gets no answer.
            with connection:
                process.send_signal(signal.SIGINT)
                _, told = process.communicate()
        assert process.returncode == 130
        assert "Traceback" not in told
