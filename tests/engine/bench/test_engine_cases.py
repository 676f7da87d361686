"""`make bench-engine` on a tiny model: its figures mean nothing there, but each case runs and gives what it says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from engine.core.models import save
from tidelane.engine.bench.engine import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def cores() -> str:
    """Two, if need be the same one twice."""
    ours = sorted(os.sched_getaffinity(0))
    return f"{ours[0]},{ours[-1]}"


def test_each_case_gives_its_ratio(
    tiny_model: Path, cores: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ratios.json"
    cases = ("single-stream", "batching", "loop-work", "lanes")
    only = [word for case in cases for word in ("--only", case)]
    code = main(["--model", f"file://{tiny_model}", "--cores", cores, "--rounds", "2", "--json", str(out), *only])
    ratios = json.loads(out.read_text())
    assert code == 0  # misses count only when asked
    assert [ratio["name"].split(" ")[0] for ratio in ratios] == ["single-stream", "eight", "the", "p99"]
    for ratio in ratios:
        assert len(ratio["over"]["samples"]) == len(ratio["under"]["samples"]) == 2
        assert ratio["value"] > 0
    _, _, loop_work, lanes = ratios
    # Of a model of no size the loop's work is most of the step, but never more than it.
    assert all(
        own < step for own, step in zip(loop_work["over"]["samples"], loop_work["under"]["samples"], strict=True)
    )
    assert "the prompt pays: TTFT lanes" in lanes["price"]
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", f"file://{tmp_path}/none"]) == 2
    assert "does not exist" in capsys.readouterr().err
