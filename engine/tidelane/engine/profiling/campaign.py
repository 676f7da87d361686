"""Measuring the probes, round by round, until all are done or the time is up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tidelane.engine.estimation.estimates import Estimates, Phase
from tidelane.engine.profiling.probes import Kind, Probe
from tidelane.engine.profiling.schedule import rounds
from tidelane.engine.profiling.stand import STEPS_ALONE, Slowdowns, Stand


@dataclass(frozen=True, slots=True)
class Measurements:
    """What each probe usually takes, in the order of `probes`; of a probe beside another, all slowdowns seen."""

    seconds: Mapping[Probe, float]
    slowdowns: Mapping[Probe, tuple[Slowdowns, ...]]


def measure(
    stand: Stand,
    probes: Sequence[Probe],
    prior: Estimates,
    *,
    budget_s: float,
    seed: int,
    clock: Callable[[], float],
    tell: Callable[[int, int], None],
) -> Measurements:
    """Takes at most `budget_s` and one launch. `prior` tells what fits; `tell` hears of (seconds gone, expected)."""
    planned = rounds(probes, lambda probe: expected_s(prior, probe), budget_s, seed)
    in_all_s = min(budget_s, sum(expected_s(prior, probe) for each in planned for probe in each))
    seconds: dict[Probe, list[float]] = defaultdict(list)
    slowdowns: dict[Probe, list[Slowdowns]] = defaultdict(list)
    begun_s = clock()
    for probe in (probe for each in planned for probe in each):
        gone_s = clock() - begun_s
        tell(round(gone_s), round(in_all_s))
        if gone_s >= budget_s:
            break
        if probe.kind is not Kind.BESIDE:
            seconds[probe].append(stand.seconds(probe))
        elif (seen := stand.slowdowns(probe)) is not None:
            slowdowns[probe].append(seen)
    return Measurements(
        usual_s({probe: seconds[probe] for probe in probes if probe in seconds}),
        {probe: tuple(slowdowns[probe]) for probe in probes if probe in slowdowns},
    )


def usual_s(times: Mapping[Probe, Sequence[float]]) -> dict[Probe, float]:
    """Of each probe the least of its times, and on top of that what is usual for its kind.

    What disturbs a pass only ever adds to it, so the least repeats best (Chen and Revels, arXiv 1608.04295). A few
    repetitions tell little of what is usual on top, but those of all probes of a kind together do.
    """
    on_top: dict[Kind, list[float]] = defaultdict(list)
    for probe, seen in times.items():
        on_top[probe.kind].append(median(seen) / min(seen))
    return {probe: min(seen) * median(on_top[probe.kind]) for probe, seen in times.items()}


def expected_s(prior: Estimates, probe: Probe) -> float:
    """What measuring it once should take."""
    if probe.kind is not Kind.BESIDE:
        return prior.seconds(Phase(probe.kind.value), probe.units, probe.work)
    step_s = prior.seconds(Phase.DECODE, probe.partition.decode_units, probe.decode)
    pass_s = prior.seconds(Phase.PREFILL, probe.partition.prefill_units, probe.prefill)
    alone_s = 2 * STEPS_ALONE * step_s + pass_s
    return alone_s + pass_s * prior.contention.prefill_slowdown + step_s * prior.contention.decode_slowdown
