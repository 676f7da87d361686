"""Figures from outcomes, by values worked out by hand."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from tidelane.engine.bench.load import LoadRun
from tidelane.engine.bench.outcome import Failure, Outcome
from tidelane.engine.bench.report import KindReport, Spread, summarise
from tidelane.engine.bench.steady import steady_step_s
from tidelane.engine.bench.tables import as_json, latency_table, notes
from tidelane.engine.bench.traffic import Arrival
from tidelane.engine.slo import Attainment, Slo

SLO = Slo(ttft_s=0.5, tpot_s=0.1, ttft_per_1k_input_tokens_s=1.0, percentile=90)


def outcome(
    *token_times_s: float,
    at_s: float = 0.0,
    late_s: float = 0.0,
    kind: str = "chat",
    output_tokens: int | None = None,
    failure: Failure | None = None,
    detail: str = "",
) -> Outcome:
    return Outcome(
        arrival=Arrival(at_s, 100, 8, kind),
        sent_s=at_s + late_s,
        ended_s=max(token_times_s, default=at_s + late_s),
        token_times_s=token_times_s,
        input_tokens=100,
        output_tokens=len(token_times_s) if output_tokens is None else output_tokens,
        failure=failure,
        detail=detail,
    )


def test_a_timeline_starts_when_the_request_was_really_sent() -> None:
    timeline = outcome(2.0, 2.1, 2.4, at_s=1.0, late_s=0.75).timeline()
    assert timeline is not None
    assert timeline.ttft_s == pytest.approx(0.25)
    assert timeline.tpot_s == pytest.approx(0.2)
    assert timeline.longest_gap_s == pytest.approx(0.3)
    assert timeline.input_tokens == 100


def test_tokens_without_text_count_towards_tpot() -> None:
    timeline = outcome(1.0, 1.4, output_tokens=5).timeline()
    assert timeline is not None
    assert timeline.tpot_s == pytest.approx(0.1)


def test_what_failed_has_no_timeline() -> None:
    assert outcome(1.0, failure=Failure.BROKEN_STREAM).timeline() is None
    assert outcome().timeline() is None


def test_the_report_judges_by_the_targets() -> None:
    met = outcome(0.59, 0.68, 0.77)  # TTFT may be 0.5 s + 0.1 s for 100 tokens
    late = outcome(1.7, 1.8, at_s=1.0)
    slow = outcome(2.1, 2.3, at_s=2.0, kind="long")
    failed = outcome(at_s=3.0, kind="long", failure=Failure.REFUSED, detail="429: 9 requests are waiting already")
    report = summarise(LoadRun((met, late, slow, failed), ()), 10.0, SLO)

    assert [kind.kind for kind in report.kinds] == ["all", "chat", "long"]
    total, chat, long = report.kinds
    assert total.attainment == Attainment(requests=4, within_slo=1, window_s=10.0)
    assert total.attainment.share == 0.25
    assert total.attainment.goodput_rps == pytest.approx(0.1)
    assert chat.attainment == Attainment(2, 1, 10.0)
    assert long == KindReport(
        kind="long",
        requests=2,
        completed=1,
        failures={Failure.REFUSED: 1},
        attainment=Attainment(2, 0, 10.0),
        ttft=Spread.of([2.1 - 2.0]),
        tpot=Spread.of([2.3 - 2.1]),
        gap=Spread.of([2.3 - 2.1]),
        input_tokens=100,
        output_tokens=2,
    )
    assert total.ttft is not None
    assert total.ttft.p50_s == pytest.approx(0.59)
    assert total.ttft.p99_s == pytest.approx(0.7)
    assert total.output_tokens == 7
    assert report.ended_s == 3.0
    assert report.output_tokens_per_s == pytest.approx(7 / 3)
    assert report.details == ("refused: 429: 9 requests are waiting already",)


def test_one_kind_alone_is_told_once_and_without_targets_nothing_is_judged() -> None:
    report = summarise(LoadRun((outcome(0.5),), ()), 1.0, None)
    assert [kind.kind for kind in report.kinds] == ["all"]
    assert report.total.attainment is None
    assert report.total.tpot is None  # one token has no time per output token
    assert report.total.gap is None


def test_no_request_at_all_is_a_report_of_nothing() -> None:
    report = summarise(LoadRun((), ()), 1.0, SLO)
    assert report.total.requests == 0
    assert report.total.attainment == Attainment(0, 0, 1.0)
    assert report.output_tokens_per_s == 0.0
    assert not report.generator_was_late


@pytest.mark.parametrize(("late_s", "lag_s", "told"), [(0.06, 0.0, True), (0.0, 0.06, True), (0.04, 0.04, False)])
def test_a_late_generator_is_reported(late_s: float, lag_s: float, told: bool) -> None:
    report = summarise(LoadRun((outcome(1.0, 1.1, late_s=late_s),), (lag_s,)), 1.0, SLO)
    assert report.generator_was_late is told
    assert any("load generator itself was late" in line for line in notes(report)) is told


def test_a_spread_is_by_nearest_rank() -> None:
    assert Spread.of([float(n) for n in range(1, 101)]) == Spread(50.0, 90.0, 99.0, 100.0)
    assert Spread.of([]) is None


def test_json_holds_the_figures() -> None:
    report = summarise(LoadRun((outcome(0.6, 0.7), outcome(failure=Failure.TIMEOUT)), (0.001,)), 2.0, SLO)
    plain = json.loads(json.dumps(as_json(report)))
    assert plain["slo"]["ttft_s"] == 0.5
    assert plain["kinds"][0]["attainment"] == {
        "requests": 2, "within_slo": 1, "window_s": 2.0, "share": 0.5, "goodput_rps": 0.5,
    }  # fmt: skip
    assert plain["kinds"][0]["failures"] == {"timeout": 1}
    assert plain["kinds"][0]["ttft"]["p99_s"] == 0.6
    assert plain["generator_was_late"] is False


def test_the_table_fits_a_narrow_terminal() -> None:
    report = summarise(LoadRun((outcome(0.6, 0.7), outcome(1.2, 1.3, kind="long")), ()), 2.0, SLO)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(latency_table(report, "title"))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    assert ["requests", "2", "1", "1", ""] in rows
    assert ["TTFT p99", "1.20 s", "600 ms", "1.20 s", "≤ 500 ms + 1.00 s/1k in"] in rows
    assert ["TPOT p50", "100 ms", "100 ms", "100 ms", ""] in rows
    assert ["within targets", "50%", "100%", "0%", "≥ 90%"] in rows
    assert ["goodput", "0.50/s", "0.50/s", "0.00/s", ""] in rows


def test_the_step_is_that_of_the_time_when_all_streams_decode() -> None:
    first = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]  # alone until 2.0, where it had the machine for itself
    second = [2.0, 3.0, 4.0, 5.0]
    assert steady_step_s([first, second]) == 1.0
    with pytest.raises(ValueError, match="fewer than three"):
        steady_step_s([[0.0, 1.0], [1.0, 2.0]])
