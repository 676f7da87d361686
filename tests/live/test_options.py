"""The tools that measure for minutes say at once what is wrong with their options: one once did so after all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def refused(tool: str, *options: str) -> str:
    # Long enough for imports on a busy machine, too short for any measurement.
    done = subprocess.run(
        [sys.executable, "-m", f"tools.live.{tool}", *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize("tool", ["against_simulation", "goodput", "colocation"])
def test_figures_that_could_not_be_written_are_not_measured(tool: str, tmp_path: Path) -> None:
    assert "there is no folder" in refused(tool, "--json", str(tmp_path / "missing" / "figures.json"))


def test_pictures_that_could_not_be_written_are_not_recorded(tmp_path: Path) -> None:
    assert "there is no folder" in refused("pictures", "--out", str(tmp_path / "missing"))


@pytest.mark.parametrize("tool", ["against_simulation", "goodput", "colocation", "pictures"])
def test_wrong_targets(tool: str) -> None:
    assert "'0.5ms' is no duration" in refused(tool, "--slo", "ttft=1s,tpot=0.5ms")


@pytest.mark.parametrize(
    ("tool", "option", "modes"),
    [
        ("against_simulation", "--modes", "Lanes,Mixed"),
        ("against_simulation", "--modes", "Disaggregated"),  # which one engine in the simulator cannot be
        ("goodput", "--modes", "Lanes,Mixed"),
        ("colocation", "--mode", "Mixed"),
        ("pictures", "--modes", "Lanes,Mixed"),
    ],
)
def test_an_unknown_mode(tool: str, option: str, modes: str) -> None:
    said = refused(tool, option, modes)
    assert f"{modes.split(',')[-1]}: choose from " in said
    assert "MixedBatch, " in said


@pytest.mark.parametrize(
    ("tool", "option", "value"),
    [("goodput", "--repeats", "0"), ("colocation", "--seconds", "nan"), ("against_simulation", "--minutes", "-1")],
)
def test_numbers_that_measure_nothing(tool: str, option: str, value: str) -> None:
    assert f"argument {option}: {value} must be" in refused(tool, option, value)
