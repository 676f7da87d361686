"""The figures as a table and as JSON, and which aims were missed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scale.scenario import Outcome


@dataclass(frozen=True)
class Aims:
    """On two cores, for 500 agents and 1,000 services."""

    all_placed_s: float = 90.0
    peak_mib: float = 300.0
    requests_per_service: float = 15.0


def missed(outcome: Outcome, aims: Aims) -> Sequence[str]:
    return list(_missed(outcome, aims))


def _missed(outcome: Outcome, aims: Aims) -> Iterator[str]:
    place = outcome.phase("place")
    per_service = place.total_requests / outcome.size.services
    if place.figures["all_placed_s"] > aims.all_placed_s:
        yield f"all placed after {place.figures['all_placed_s']:.1f} s, {aims.all_placed_s:.0f} s wanted"
    if outcome.peak_mib > aims.peak_mib:
        yield f"the operator took {outcome.peak_mib:.0f} MiB, {aims.peak_mib:.0f} MiB wanted"
    if per_service > aims.requests_per_service:
        yield f"{per_service:.1f} API requests for each service, {aims.requests_per_service:.0f} wanted"
    if outcome.phase("quiet").figures["writes"]:
        yield f"{outcome.phase('quiet').figures['writes']:.0f} writes while nothing changed"
    for phase in outcome.phases:
        for name in ("moved", "launches", "twice"):
            if phase.figures.get(name):
                yield f"{phase.name}: {name} {phase.figures[name]:.0f}, none wanted"


def table(outcome: Outcome) -> str:
    lines = [
        f"{outcome.size.agents} agents, {outcome.size.services} services, operator's peak {outcome.peak_mib:.0f} MiB",
        f"{'phase':<15}{'wall s':>8}{'CPU s':>8}{'load':>7}{'requests':>10}{'each':>7}",
    ]
    for phase in outcome.phases:
        each = phase.total_requests / outcome.size.services
        lines.append(
            f"{phase.name:<15}{phase.wall_s:>8.1f}{phase.cpu_s:>8.1f}{phase.load_average:>7.1f}"
            f"{phase.total_requests:>10}{each:>7.2f}"
        )
        lines.append("    " + ", ".join(f"{name} {value:.4g}" for name, value in phase.figures.items()))
        lines += [f"    {count:>7} {verb}" for verb, count in phase.requests.items()]
    return "\n".join(lines)


def document(outcome: Outcome, missed_aims: Sequence[str]) -> dict[str, Any]:
    return {**asdict(outcome), "missed": list(missed_aims)}
