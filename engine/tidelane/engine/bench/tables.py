"""Reports as tables for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.table import Table

from tidelane.engine.bench.report import KindReport, Report, Spread
from tidelane.engine.slo import Slo


def latency_table(report: Report, title: str) -> Table:
    """One row for each kind of request."""
    table = Table(title=title, title_justify="left")
    table.add_column("requests")
    for heading in ("sent", "failed", "TTFT p50", "p99", "TPOT p50", "p99", "gap p99", "in SLO", "goodput"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kind in report.kinds:
        table.add_row(*_cells(kind))
    if report.slo is not None:
        table.add_section()
        table.add_row(*_target_cells(report.slo))
    return table


def notes(report: Report) -> list[str]:
    """What a reader must know besides the table."""
    lines = [
        f"{report.total.output_tokens} tokens in {report.ended_s:.1f} s: {report.output_tokens_per_s:.1f} a second",
        *report.details,
    ]
    if report.generator_was_late:
        lines.append(
            f"the load generator itself was late (sending p99 {seconds(report.lateness, 'p99_s')}, "
            f"its event loop p99 {seconds(report.loop_lag, 'p99_s')}): latencies above hold some of its own delay"
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


def _cells(kind: KindReport) -> list[str]:
    within, goodput = "-", "-"
    if kind.attainment is not None and kind.attainment.share is not None:
        within, goodput = f"{kind.attainment.share:.0%}", f"{kind.attainment.goodput_rps:.2f}/s"
    return [
        kind.kind,
        str(kind.requests),
        str(kind.requests - kind.completed),
        seconds(kind.ttft, "p50_s"),
        seconds(kind.ttft, "p99_s"),
        seconds(kind.tpot, "p50_s"),
        seconds(kind.tpot, "p99_s"),
        seconds(kind.gap, "p99_s"),
        within,
        goodput,
    ]


def _target_cells(slo: Slo) -> list[str]:
    ttft = f"≤ {duration(slo.ttft_s)}"
    if slo.ttft_per_1k_input_tokens_s:
        ttft += f" + {duration(slo.ttft_per_1k_input_tokens_s)}/1k"
    return ["target", "", "", "", ttft, "", f"≤ {duration(slo.tpot_s)}", "", f"≥ {slo.percentile}%", ""]
