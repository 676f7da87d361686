"""`make bench-engine` on a tiny model: its figures mean nothing there, but each case runs and gives what it says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from engine.core.models import save
from tidelane.engine.bench.decision_case import NOW_S, situations
from tidelane.engine.bench.engine import main
from tidelane.engine.scheduling.policies import policy

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
    cases = ("single-stream", "batching", "loop-work", "lanes", "handover")
    only = [word for case in cases for word in ("--only", case)]
    code = main(["--model", f"file://{tiny_model}", "--cores", cores, "--rounds", "2", "--json", str(out), *only])
    ratios = json.loads(out.read_text())
    assert code == 0  # misses count only when asked
    assert [ratio["name"].split(" ")[0] for ratio in ratios] == ["single-stream", "eight", "the", "p99", "prefill"]
    for ratio in ratios:
        assert len(ratio["over"]["samples"]) == len(ratio["under"]["samples"]) >= 2
        assert ratio["value"] > 0
    _, _, loop_work, lanes, handover = ratios
    # Of a model of no size the loop's work is most of the step, but never more than it.
    assert all(
        own < step for own, step in zip(loop_work["over"]["samples"], loop_work["under"]["samples"], strict=True)
    )
    assert "the prompt pays: TTFT lanes" in lanes["price"]
    assert "MB of KV" in handover["price"]
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", f"file://{tmp_path}/none"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_decisions_are_measured_for_each_policy(
    tiny_model: Path, cores: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ratios.json"
    words = ["--model", f"file://{tiny_model}", "--cores", cores, "--rounds", "1", "--only", "decisions"]
    assert main([*words, "--json", str(out)]) == 0
    ratios = json.loads(out.read_text())
    assert [ratio["name"].split(",")[0] for ratio in ratios] == [
        f"plan() of {name}" for name in ("lanes", "auto", "chunked") for _ in range(3)
    ]
    for middle, p99, growth in zip(ratios[::3], ratios[1::3], ratios[2::3], strict=True):
        assert (middle["under"]["samples"], p99["under"]["samples"]) == ([0.5], [1.0])
        assert 0 < middle["over"]["samples"][0] <= p99["over"]["samples"][0]
        assert growth["at_most"] == 4
    assert len(capsys.readouterr().out.splitlines()) == 9


def test_the_situations_are_what_they_say() -> None:
    both_idle, beside_slice, beside_step = situations(running=8, waiting=20)
    assert both_idle.flight.idle
    assert beside_slice.flight.prefill is not None
    assert beside_slice.flight.decode is None
    assert beside_step.flight.decode is not None
    assert len(beside_step.flight.decode.ids) == len(beside_step.decoding) == 8
    for state in (both_idle, beside_slice, beside_step):
        assert len(state.queued) == len(state.queued_by_due) == 20
        assert list(state.queued) == sorted(state.queued, key=lambda each: each.priority)
    # None of these has nothing to decide.
    assert policy("lanes").plan(both_idle, NOW_S).launches
    assert policy("lanes").plan(beside_slice, NOW_S).decode is not None
    assert policy("lanes").plan(beside_step, NOW_S).prefill is not None
