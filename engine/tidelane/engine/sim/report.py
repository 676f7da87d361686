"""A comparison as JSON for programs and as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from tidelane.engine.bench.report import Spread
from tidelane.engine.bench.tables import duration
from tidelane.engine.sim.figures import Figures
from tidelane.engine.sim.sweep import LEVELS, Result
from tidelane.engine.slo import Slo


@dataclass(frozen=True, slots=True)
class Header:
    """What was compared, so that it can be run again. `notes` are what a reader must know besides."""

    trace: str
    requests: int
    model: str
    gpu: str
    gpus: int
    slo: Slo
    seed: int
    versions: Mapping[str, str]
    command: str
    notes: tuple[str, ...] = ()


def as_json(header: Header, results: Sequence[Result]) -> dict[str, Any]:
    """Rates and goodput are requests a second for each GPU."""
    return {
        "header": asdict(header),
        "policies": {result.contestant.name: _policy(result) for result in results},
    }


def attainment_table(header: Header, results: Sequence[Result]) -> Table:
    """One row for each contestant, one column for each rate."""
    table = _table(f"{header.trace}: {header.model} on {header.gpu}; within targets at a rate of")
    for point in results[0].points:
        table.add_column(f"{point.rate:.3g}/s", justify="right")
    for result in results:
        table.add_row(result.contestant.name, *(f"{point.attainment:.1%}" for point in result.points))
    return table


def goodput_table(results: Sequence[Result]) -> Table:
    """What each contestant can sustain, and the setting at its best."""
    table = _table("Rates that can be sustained, and goodput, for each GPU")
    refined = any(result.rates_at for result in results)
    for level in LEVELS if refined else ():
        table.add_column(f"at {level:.0%}", justify="right")
    for name in ("best", "GPUs"):
        table.add_column(name, justify="right")
    table.add_column("tuned to", no_wrap=True)
    for result in results:
        table.add_row(
            result.contestant.name,
            *(_rate(result.rates_at.get(level)) for level in LEVELS if refined),
            f"{result.best.goodput:.3g}/s",
            str(result.gpus),
            result.best_setting.name,
        )
    return table


def latency_table(results: Sequence[Result], at: int) -> Table:
    """Latencies at one point of the grid."""
    table = _table(f"Latencies at {results[0].points[at].rate:.3g}/s")
    for name in ("TTFT p50", "p99", "TPOT p50", "p99", "gap p99", "aside", "429", "found"):
        table.add_column(name, justify="right")
    for result in results:
        point = result.points[at]
        table.add_row(
            result.contestant.name,
            *(_cell(each, part) for each in (point.ttft, point.tpot) for part in ("p50_s", "p99_s")),
            _cell(point.gap, "p99_s"),
            _cell(point.aside, "max_s"),
            "-" if point.refused_late is None else f"{point.refused_late:.1%}",
            "-" if point.found is None else f"{point.found.cached_tokens / point.found.prompt_tokens:.1%}",
        )
    return table


def telling_point(results: Sequence[Result]) -> int:
    """The point of the grid where contestants differ most."""

    def difference(at: int) -> float:
        attainments = [result.points[at].attainment for result in results]
        return max(attainments) - min(attainments)

    return max(range(len(results[0].points)), key=difference)


def _policy(result: Result) -> dict[str, Any]:
    return {
        "rate_at_90": _rounded(result.rates_at.get(0.9)),
        "rate_at_99": _rounded(result.rates_at.get(0.99)),
        "best_goodput_per_gpu": _rounded(result.best.goodput),
        "gpus": result.gpus,
        "tuned_to": result.best_setting.name or None,
        "points": [_point(point) for point in result.points],
    }


def _point(point: Figures) -> dict[str, Any]:
    return {
        "rate": _rounded(point.rate),
        "attainment": _rounded(point.attainment),
        "goodput_per_gpu": _rounded(point.goodput),
        "ttft_ms": _milliseconds(point.ttft),
        "tpot_ms": _milliseconds(point.tpot),
        "tbt_ms": _milliseconds(point.gap),
        "refused_late": _rounded(point.refused_late),
        "found": None if point.found is None else asdict(point.found),
        "aside_wait_s": None
        if point.aside is None
        else {"p50": _rounded(point.aside.p50_s), "max": _rounded(point.aside.max_s)},
    }


def _milliseconds(spread: Spread | None) -> dict[str, float | None] | None:
    if spread is None:
        return None
    return {
        "p50": _rounded(spread.p50_s * 1000),
        "p90": _rounded(spread.p90_s * 1000),
        "p99": _rounded(spread.p99_s * 1000),
    }


def _rounded(value: float | None) -> float | None:
    """Six significant digits."""
    return None if value is None else float(f"{value:.6g}")


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("policy/order", no_wrap=True)
    return table


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3g}/s"


def _cell(spread: Spread | None, part: str) -> str:
    return "-" if spread is None else duration(getattr(spread, part))
