"""Reports as tables for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rich.table import Table

from tidelane.engine.bench.exposition import LaneUse
from tidelane.engine.bench.report import KindReport, Report, Spread
from tidelane.engine.slo import Attainment, Slo


def latency_table(report: Report, title: str) -> Table:
    """One column for each kind of request, and the targets last."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for kind in report.kinds:
        table.add_column(kind.kind, justify="right")
    table.add_column("target", justify="right")
    targets = _targets(report.slo)
    for name, cell in _ROWS:
        table.add_row(name, *(cell(kind) for kind in report.kinds), targets.get(name, ""))
    return table


def lane_table(use: LaneUse, title: str) -> Table:
    """How the device was really split while the traffic ran."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for kind, name in _USES:
        table.add_row(name, f"{use.share(kind):.0%} of the time")
    moved = ", ".join(f"{count:.0f} to {border}" for border, count in sorted(use.moves_to.items()) if count)
    table.add_row("moves of the border", f"{use.moves:.0f}" + (f" ({moved})" if moved else ""))
    return table


_USES = (
    ("split", "decode and prefill, each on its lane"),
    ("decode_alone", "decode alone"),
    ("prefill_alone", "prefill alone"),
    ("mixed", "both in one batch"),
    ("idle", "idle"),
)


def notes(report: Report) -> list[str]:
    """What a reader must know besides the table."""
    lines = [
        f"{report.total.output_tokens} tokens in {report.ended_s:.1f} s: {report.output_tokens_per_s:.1f} a second",
        *report.details,
    ]
    if report.generator_was_late:
        lines.append(
            f"The load generator itself was late (sending p99 {seconds(report.lateness, 'p99_s')}, "
            f"its event loop p99 {seconds(report.loop_lag, 'p99_s')}): latencies above hold some of its own delay."
        )
    return lines


def as_json(report: Report) -> dict[str, Any]:
    """Every field of the report, with the figures that are worked out from them."""
    whole = dataclasses.asdict(report)
    for kind, plain in zip(report.kinds, whole["kinds"], strict=True):
        plain["failures"] = {failure.value: count for failure, count in kind.failures.items()}
        if kind.attainment is not None:
            plain["attainment"] |= {"share": kind.attainment.share, "goodput_rps": kind.attainment.goodput_rps}
    whole["output_tokens_per_s"] = report.output_tokens_per_s
    whole["generator_was_late"] = report.generator_was_late
    return whole


def seconds(spread: Spread | None, at: str) -> str:
    return "-" if spread is None else duration(getattr(spread, at))


def duration(value_s: float) -> str:
    """Three digits, in the unit that suits."""
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else f"{value_s:.2f} s"


def _attained(attainment: Attainment | None) -> str:
    return "-" if attainment is None or attainment.share is None else f"{attainment.share:.0%}"


def _goodput(attainment: Attainment | None) -> str:
    return "-" if attainment is None else f"{attainment.goodput_rps:.2f}/s"


_ROWS: tuple[tuple[str, Callable[[KindReport], str]], ...] = (
    ("requests", lambda kind: str(kind.requests)),
    ("failed", lambda kind: str(kind.requests - kind.completed)),
    ("tokens in", lambda kind: str(kind.input_tokens)),
    ("tokens out", lambda kind: str(kind.output_tokens)),
    ("TTFT p50", lambda kind: seconds(kind.ttft, "p50_s")),
    ("TTFT p99", lambda kind: seconds(kind.ttft, "p99_s")),
    ("TPOT p50", lambda kind: seconds(kind.tpot, "p50_s")),
    ("TPOT p99", lambda kind: seconds(kind.tpot, "p99_s")),
    ("token gap p99", lambda kind: seconds(kind.gap, "p99_s")),
    ("within targets", lambda kind: _attained(kind.attainment)),
    ("goodput", lambda kind: _goodput(kind.attainment)),
)


def _targets(slo: Slo | None) -> dict[str, str]:
    """By the row they belong to."""
    if slo is None:
        return {}
    ttft = f"≤ {duration(slo.ttft_s)}"
    if slo.ttft_per_1k_input_tokens_s:
        ttft += f" + {duration(slo.ttft_per_1k_input_tokens_s)}/1k in"
    return {"TTFT p99": ttft, "TPOT p99": f"≤ {duration(slo.tpot_s)}", "within targets": f"≥ {slo.percentile}%"}
