"""Reports of `tidelane simulate --sweep --json` as Markdown tables, and how auto stands to the baselines in each.

python tools/sweep_table.py a.json b.json >> docs/measurements/simulated-goodput.md
"""

from __future__ import annotations

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
    for name in sys.argv[1:]:
        print("\n".join(lines(json.loads(Path(name).read_text()))))
    return 0


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    header, policies = report["header"], report["policies"]
    rates = [point["rate"] for point in next(iter(policies.values()))["points"]]
    traffic = f"{header['trace']}, {header['requests']} requests"
    yield f"\n### {traffic}: {header['model']} on {header['gpu']}, {_targets(header)}\n"
    yield f"`{header['command']}`\n"
    at = " | ".join(f"at {rate:.3g}/s" for rate in rates)
    yield f"| policy/order | rate at 90 % | at 99 % | {at} | best | tuned to |"
    yield f"|---|---|---|{'---|' * len(rates)}---|---|"
    for policy, figures in policies.items():
        goodputs = " | ".join(f"{point['goodput_per_gpu']:.3g}" for point in figures["points"])
        sustained = f"{_rate(figures['rate_at_90'])} | {_rate(figures['rate_at_99'])}"
        best = f"{figures['best_goodput_per_gpu']:.3g}"
        yield f"| {policy} | {sustained} | {goodputs} | {best} | {figures['tuned_to'] or ''} |"
    yield ""
    for comparison in comparisons(policies):
        yield f"- {comparison.text}: {'-' if comparison.ratio is None else format(comparison.ratio, '.2f')}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ratio`: how many times better auto with our order is; None where one of the two has no such figure."""

    text: str
    ratio: float | None


def comparisons(policies: Mapping[str, Any]) -> Iterator[Comparison]:
    """Those for which both sides were simulated."""
    if OURS not in policies:
        return
    ours = policies[OURS]
    baselines = {name: each for name, each in policies.items() if name.partition("/")[0] in BASELINES}
    if baselines:
        yield _least(ours["points"], baselines)
    if AS_SHIPPED in policies:
        rate = falls_to(0.5, policies[AS_SHIPPED]["points"])
        ratio = rate and goodput_at(rate, ours["points"]) / goodput_at(rate, policies[AS_SHIPPED]["points"])
        where = f" ({rate:.3g}/s)" if rate else ""
        yield Comparison(f"goodput over {AS_SHIPPED} where that falls to 50 %{where}", ratio)
    for name in ("chunked/ours", "disaggregated/ours"):
        if name in policies:
            yield Comparison(f"rate at 90 % over {name}", _over(ours["rate_at_90"], policies[name]["rate_at_90"]))
    if "disaggregated/ours" in policies:
        best = ours["best_goodput_per_gpu"], policies["disaggregated/ours"]["best_goodput_per_gpu"]
        yield Comparison("best goodput over disaggregated/ours", _over(*best))


def _least(points: Sequence[Mapping[str, Any]], baselines: Mapping[str, Any]) -> Comparison:
    """At the rate where auto stands worst against whichever baseline is the best there."""
    found = []
    for at, point in enumerate(points):
        best = max(baselines, key=lambda name: float(baselines[name]["points"][at]["goodput_per_gpu"]))
        theirs = baselines[best]["points"][at]["goodput_per_gpu"]
        if theirs > 0:
            found.append((point["goodput_per_gpu"] / theirs, best, point["rate"]))
    if not found:
        return Comparison("goodput over the best baseline", None)
    ratio, best, rate = min(found)
    return Comparison(f"goodput over the best baseline, at the worst rate ({best} at {rate:.3g}/s)", ratio)


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


def _targets(header: Mapping[str, Any]) -> str:
    slo = header["slo"]
    allowance = f" + {1000 * slo['ttft_per_1k_input_tokens_s']:g} ms per 1,000 input tokens"
    return f"TTFT {1000 * slo['ttft_s']:g} ms{allowance}, TPOT {1000 * slo['tpot_s']:g} ms"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3g}"


if __name__ == "__main__":
    sys.exit(main())
