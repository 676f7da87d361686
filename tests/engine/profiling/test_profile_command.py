"""`tidelane profile` on a real engine with a tiny model: its figures mean little there, but all of it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from engine.core.models import save
from tidelane.cli.main import main
from tidelane.engine.estimation.estimates import Phase
from tidelane.engine.estimation.passes import decode_work, prefill_work
from tidelane.engine.estimation.profile import read_profile

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def command(tiny_model: Path, tmp_path: Path) -> list[str]:
    ours = sorted(os.sched_getaffinity(0))
    words = ["profile", "--model", f"file://{tiny_model}", "--model-store", str(tmp_path / "store")]
    return [*words, "--cores", f"{ours[0]},{ours[-1]}", "--kv-pool-memory", str(16 << 20)]


def test_it_writes_what_an_engine_finds(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--seconds", "10"]) == 0
    (path,) = (tmp_path / "store" / "profiles").iterdir()
    out, err = capsys.readouterr()
    assert err.splitlines() == ["Loading the model", "Warming up", "Timing passes"]
    assert str(path) in out
    assert "held out from the fit" in out

    profile = read_profile(path)
    assert (profile.key.units, profile.key.dtype, profile.key.layers) == (2, "float32", 4)
    assert profile.measured == datetime.now().astimezone().date()
    assert {phase: set(by_units) for phase, by_units in profile.times.items()} == {
        Phase.DECODE: {1, 2},
        Phase.PREFILL: {1, 2},
        Phase.FUSED: {2},
    }
    assert profile.errors.keys() == profile.times.keys()
    estimates = profile.estimates()
    for units in (1, 2):
        one, many = (estimates.seconds(Phase.DECODE, units, decode_work(n, 100 * n)) for n in (1, 64))
        assert 0 < one < many
        short, long = (estimates.seconds(Phase.PREFILL, units, prefill_work(((0, n),))) for n in (16, 1024))
        assert 0 < short < long


def test_too_little_time_is_said(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--seconds", "0.01"]) == 1
    assert "give it longer with --seconds" in capsys.readouterr().err
    assert not (tmp_path / "store" / "profiles").exists()


def test_interrupted_it_leaves_nothing(command: list[str], tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    words = [sys.executable, "-m", "tidelane.cli.main", *command, "--out", str(out)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith("Timing"):
                break
        child.send_signal(signal.SIGINT)
        said = child.stderr.read()
    assert child.returncode == 130
    assert said.splitlines() == ["tidelane profile: stopped; nothing was written"]
    assert list(tmp_path.glob("*p.json*")) == []


def test_what_cannot_be_is_said_before_the_model_is_loaded(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--out", str(tmp_path / "none" / "p.json")]) == 2
    assert f"there is no folder {tmp_path}/none" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--seconds", "nan"])
    assert "must be seconds, above 0" in capsys.readouterr().err


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--model", f"file://{tmp_path}/none"]) == 2
    assert "does not exist" in capsys.readouterr().err
