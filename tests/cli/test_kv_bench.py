"""`tidelane kv-bench` as a command: what it refuses, and a whole run on a tiny model, whose figures mean nothing."""

from __future__ import annotations

import errno
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.core.models import save
from tidelane.cli import kv_bench, main


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--folder", "/nowhere"), "--folder: /nowhere is no folder: make it first"),
        (("--json", "/nowhere/a.json"), "--json: /nowhere/a.json: there is no folder /nowhere: make it first"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["kv-bench", *words]) == 2
    assert capsys.readouterr().err == f"tidelane kv-bench: {told}\n"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.slow
def test_every_figure_is_told_and_nothing_stays_on_the_disk(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = tmp_path / "kv.json", tmp_path / "disk"
    folder.mkdir()
    sizes = ("--history-tokens", "160", "--rounds", "2", "--steps", "5")
    words = ("--model", f"file://{tiny_model}", "--folder", str(folder), *sizes, "--json", str(out))
    assert main.main(["kv-bench", *words]) == 0
    assert not list(folder.iterdir())
    plain = json.loads(out.read_text())
    device, host, disk, loads, fetches, gaps = plain["ratios"]
    assert [ratio["at_least"] for ratio in (device, host, disk, loads, fetches)] == [None, 5, 3, 0.8, 0.8]
    assert gaps["at_most"] == 1.1
    for ratio, over, under in (
        *((turn, 6, 2) for turn in (device, host, disk)), (loads, 6, 6), (fetches, 6, 6), (gaps, 2, 2)
    ):  # fmt: skip
        assert (len(ratio["over"]["samples"]), len(ratio["under"]["samples"])) == (over, under)
        assert min(ratio["over"]["samples"] + ratio["under"]["samples"]) > 0
    assert "4 at once" in fetches["price"]
    assert "copied" in gaps["price"]
    assert plain["setting"]["model"] == f"file://{tiny_model}"
    assert plain["command"] == shlex.join(["tidelane", "kv-bench", *words[:-2]])
    told = capsys.readouterr().out
    assert told.count("NO") == sum(ratio["met"] is False for ratio in plain["ratios"])


@pytest.mark.slow
def test_figures_that_cannot_be_written_are_shown(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kv_bench, "write_whole", full)
    sizes = ("--history-tokens", "160", "--rounds", "2", "--steps", "5")
    words = ("--model", f"file://{tiny_model}", "--folder", str(tmp_path), *sizes, "--json", str(tmp_path / "a.json"))
    assert main.main(["kv-bench", *words]) == 1
    told = capsys.readouterr()
    assert "loads over memcpy" in told.out
    assert "the figures above could not be written: [Errno 28] No space left on device" in told.err


@pytest.mark.slow
def test_a_history_that_the_model_cannot_hold(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["kv-bench", "--model", f"file://{tiny_model}", "--history-tokens", "4090"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "tidelane kv-bench: a history of 4090 tokens and a turn of 61 do not fit the model's context of 4096: "
        "ask for a shorter history"
    )


@pytest.mark.slow
def test_sigterm_leaves_nothing_on_the_disk(tiny_model: Path, tmp_path: Path) -> None:
    words = ("kv-bench", "--model", f"file://{tiny_model}", "--folder", str(tmp_path), "--rounds", "100000")
    command = [sys.executable, "-m", "tidelane.cli.main", *words, "--history-tokens", "160"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(line.startswith("Turns of a conversation, round 1 ") for line in process.stderr)
        assert list(tmp_path.iterdir())
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in told
    assert not list(tmp_path.iterdir())
