"""Reports of `tidelane simulate --sweep --json` as Markdown.

A table of each, or one line of each with how auto stands to the baselines:

    python tools/sweep_table.py a.json b.json
    python tools/sweep_table.py --summary a.json b.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

OURS = "auto/ours"
AS_SHIPPED = "chunked/own"
BASELINES = ("mixed", "chunked", "static", "disaggregated")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--summary", action="store_true", help="one line for each report")
    args = parser.parse_args()
    try:
        reports = [_read(path) for path in args.reports]
    except ValueError as error:
        print(f"sweep_table: {error}", file=sys.stderr)
        return 2
    print("\n".join(summary(reports) if args.summary else (line for report in reports for line in table(report))))
    return 0


def _read(path: Path) -> Mapping[str, Any]:
    """Raises ValueError on what is no report of a sweep."""
    try:
        report: Mapping[str, Any] = json.loads(path.read_text())
        list(table(report))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RuntimeError) as error:
        raise ValueError(f"{path} is no report of `tidelane simulate --sweep --json`") from error
    if OURS not in report["policies"]:
        raise ValueError(f"{path} does not hold {OURS}: simulate it too")
    return report


def table(report: Mapping[str, Any]) -> Iterator[str]:
    header, policies = report["header"], report["policies"]
    rates = [point["rate"] for point in next(iter(policies.values()))["points"]]
    yield f"\n### {_title(header)}\n"
    yield f"`{header['command']}`\n"
    at = " | ".join(f"at {rate:.3g}/s" for rate in rates)
    yield f"| policy/order | rate at 90 % | at 99 % | {at} | best | tuned to |"
    yield f"|---|---|---|{'---|' * len(rates)}---|---|"
    for policy, figures in policies.items():
        goodputs = " | ".join(f"{point['goodput_per_gpu']:.3g}" for point in figures["points"])
        sustained = f"{_number(figures['rate_at_90'])} | {_number(figures['rate_at_99'])}"
        best = f"{figures['best_goodput_per_gpu']:.3g}"
        yield f"| {policy} | {sustained} | {goodputs} | {best} | {figures['tuned_to'] or ''} |"
    yield ""
    for each in comparisons(policies):
        yield f"- {OURS} over {each.text}: {_number(each.ratio)}{f' ({each.where})' if each.where else ''}"


def summary(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The columns are those that the first report has."""
    columns = [each.text for each in comparisons(reports[0]["policies"])]
    yield f"| {OURS} over | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for report in reports:
        found = {each.text: each for each in comparisons(report["policies"])}
        cells = (found.get(column, Comparison(column, None)) for column in columns)
        ratios = (f"{_number(each.ratio)}{f' ({each.where})' if each.where else ''}" for each in cells)
        yield f"| {_title(report['header'])} | {' | '.join(ratios)} |"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ratio`: how many times better auto is with our order; None where one of the two has no such figure."""

    text: str
    ratio: float | None
    where: str = ""


def comparisons(policies: Mapping[str, Any]) -> Iterator[Comparison]:
    """Those for which both sides were simulated."""
    if OURS not in policies:
        return
    ours = policies[OURS]
    baselines = {name: each for name, each in policies.items() if name.partition("/")[0] in BASELINES}
    if baselines:
        yield _least(ours["points"], baselines)
    if AS_SHIPPED in policies:
        theirs = policies[AS_SHIPPED]["points"]
        rate = falls_to(0.5, theirs)
        ratio = goodput_at(rate, ours["points"]) / goodput_at(rate, theirs) if rate else None
        yield Comparison(f"{AS_SHIPPED} where that falls to 50 %", ratio, f"{rate:.3g}/s" if rate else "")
    for name in ("chunked/ours", "disaggregated/ours"):
        if name in policies:
            yield Comparison(f"{name}, rate at 90 %", _over(ours["rate_at_90"], policies[name]["rate_at_90"]))
    if "disaggregated/ours" in policies:
        best = ours["best_goodput_per_gpu"], policies["disaggregated/ours"]["best_goodput_per_gpu"]
        yield Comparison("disaggregated/ours, best goodput", _over(*best))


def _least(points: Sequence[Mapping[str, Any]], baselines: Mapping[str, Any]) -> Comparison:
    """At the rate where auto stands worst against whichever baseline is the best there."""
    found = []
    for at, point in enumerate(points):
        best = max(baselines, key=lambda name: float(baselines[name]["points"][at]["goodput_per_gpu"]))
        theirs = baselines[best]["points"][at]["goodput_per_gpu"]
        if theirs > 0:
            found.append((point["goodput_per_gpu"] / theirs, f"{best} at {point['rate']:.3g}/s"))
    return Comparison("the best baseline, at the worst rate", *min(found, default=(None, "")))


def falls_to(level: float, points: Sequence[Mapping[str, Any]]) -> float | None:
    """The rate at which attainment falls to `level`, straight between the points; None if it does not."""
    for low, high in pairwise(points):
        if low["attainment"] >= level > high["attainment"]:
            part = (low["attainment"] - level) / (low["attainment"] - high["attainment"])
            return float(low["rate"] + part * (high["rate"] - low["rate"]))
    return None


def goodput_at(rate: float, points: Sequence[Mapping[str, Any]]) -> float:
    """Straight between the points around `rate`, which must lie among them."""
    low, high = next((low, high) for low, high in pairwise(points) if low["rate"] <= rate <= high["rate"])
    part = (rate - low["rate"]) / (high["rate"] - low["rate"])
    return float(low["goodput_per_gpu"] + part * (high["goodput_per_gpu"] - low["goodput_per_gpu"]))


def _over(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def _title(header: Mapping[str, Any]) -> str:
    slo = header["slo"]
    allowance = f" + {1000 * slo['ttft_per_1k_input_tokens_s']:g} ms per 1,000 input tokens"
    targets = f"TTFT {1000 * slo['ttft_s']:g} ms{allowance}, TPOT {1000 * slo['tpot_s']:g} ms"
    return f"{header['trace']}, {header['requests']} requests: {header['model']} on {header['gpu']}, {targets}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
