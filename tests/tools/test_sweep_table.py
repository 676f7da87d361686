from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tools.sweep_table import comparisons, falls_to, goodput_at, main


def competitor(goodputs: dict[float, float], rate_at_90: float | None = None) -> dict[str, Any]:
    """By rate."""
    return {
        "points": [
            {"rate": rate, "attainment": goodput / rate, "goodput_per_gpu": goodput}
            for rate, goodput in goodputs.items()
        ],
        "rate_at_90": rate_at_90,
        "best_goodput_per_gpu": max(goodputs.values()),
    }


def test_the_rate_at_which_attainment_falls_is_between_two_points() -> None:
    points = competitor({1.0: 1.0, 2.0: 1.4, 4.0: 1.2})["points"]  # attainment 1, 0.7, 0.3
    assert falls_to(0.5, points) == pytest.approx(3.0)
    assert goodput_at(3.0, points) == pytest.approx(1.3)
    assert falls_to(0.2, points) is None


def test_auto_is_compared_where_it_stands_worst() -> None:
    policies = {
        "mixed/own": competitor({1.0: 1.0, 2.0: 1.0, 4.0: 0.5}),
        "chunked/own": competitor({1.0: 0.9, 2.0: 1.4, 4.0: 1.2}),
        "chunked/ours": competitor({1.0: 0.9, 2.0: 1.6, 4.0: 1.8}, 1.2),
        "disaggregated/ours": competitor({1.0: 0.4, 2.0: 0.5, 4.0: 0.6}, 0.5),
        "lanes/ours": competitor({1.0: 1.0, 2.0: 2.0, 4.0: 4.0}, 4.0),  # no baseline
        "auto/ours": competitor({1.0: 1.0, 2.0: 1.7, 4.0: 1.71}, 1.8),
    }
    assert {(each.text, each.where): each.ratio for each in comparisons(policies)} == {
        ("the best baseline, at the worst rate", "chunked/ours at 4/s"): pytest.approx(0.95),
        ("chunked/own where that falls to 50 %", "3/s"): pytest.approx(1.705 / 1.3),
        ("chunked/ours, rate at 90 %", ""): pytest.approx(1.5),
        ("disaggregated/ours, rate at 90 %", ""): pytest.approx(3.6),
        ("disaggregated/ours, best goodput", ""): pytest.approx(2.85),
    }


def test_what_was_not_simulated_is_not_compared() -> None:
    assert list(comparisons({"mixed/own": competitor({1.0: 1.0})})) == []
    (alone,) = comparisons({"auto/ours": competitor({1.0: 1.0}), "static/own": competitor({1.0: 0.0})})
    assert alone.ratio is None


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"header": {}, "policies": {}}'])
def test_what_is_no_report_is_told(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    monkeypatch.setattr("sys.argv", ["sweep_table", str(path)])
    assert main() == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"sweep_table: {path} is no report of `tidelane simulate --sweep --json`\n")
