"""From measurements to a profile, and how good it is: by points that no part of a fit had seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from statistics import fmean, median

from tidelane.engine.estimation.estimates import Contention, Estimates, Phase
from tidelane.engine.estimation.fit import Sample, fit
from tidelane.engine.estimation.guard import LARGEST_SLOWDOWN, Cell, GuardTable, cell_of
from tidelane.engine.estimation.passes import PassTimes, RelativeError
from tidelane.engine.estimation.profile import Profile, ProfileKey
from tidelane.engine.profiling.campaign import Measurements
from tidelane.engine.slo import percentile

# Each point is held out once, with a tenth of them at a time: what is left to fit says nearly as much as all.
FOLDS = 10


class TooFewPoints(ValueError):
    """More time is needed: the message says for what."""


@dataclass(frozen=True, slots=True)
class Finding:
    """How far predictions were from points held out, and the prior's from the same. `units` None: all of the phase."""

    phase: Phase
    units: int | None
    points: int
    error: RelativeError
    prior: RelativeError

    @property
    def gain(self) -> float:
        """How many times nearer than the prior, by the median."""
        return self.prior.median / self.error.median if self.error.median else float("inf")


@dataclass(frozen=True, slots=True)
class Verdict:
    """`findings` by phase and units, and after those of a phase the one on all of it."""

    profile: Profile
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class _Errors:
    """Relative errors of predictions for points held out, one for each point."""

    ours: tuple[float, ...]
    prior: tuple[float, ...]

    def finding(self, phase: Phase, units: int | None) -> Finding:
        return Finding(phase, units, len(self.ours), _summary(self.ours), _summary(self.prior))


def judge(key: ProfileKey, measured: date, found: Measurements, prior: Estimates) -> Verdict:
    """Raises TooFewPoints if some lane has too few to hold any out."""
    samples: dict[Phase, dict[int, list[Sample]]] = {phase: defaultdict(list) for phase in Phase}
    for probe, seconds in found.seconds.items():
        samples[Phase(probe.kind.value)][probe.units].append((probe.work, seconds))
    times: dict[Phase, dict[int, PassTimes]] = {}
    errors: dict[Phase, dict[int, RelativeError]] = {}
    findings: list[Finding] = []
    for phase, by_units in samples.items():
        held_out = {units: _held_out(phase, units, points, prior) for units, points in sorted(by_units.items())}
        if not held_out:
            raise TooFewPoints(f"nothing was measured of {phase.value} passes")
        times[phase] = {units: fit(by_units[units]) for units in held_out}
        here = [each.finding(phase, units) for units, each in held_out.items()]
        errors[phase] = {units: each.error for units, each in zip(held_out, here, strict=True)}
        findings += [*here, _together(held_out.values()).finding(phase, None)]
    profile = Profile(key, measured, times, contention(found, prior), errors, guards(found))
    return Verdict(profile, tuple(findings))


def contention(found: Measurements, prior: Estimates) -> Contention:
    """Means, and the largest slowdown of decode beside any pass. The prior's where nothing was measured.

    Of each pair the median over its repetitions: one stall of the machine is not what lanes do to each other.
    """
    decode = [_slowdown([each.decode for each in seen]) for seen in found.slowdowns.values()]
    prefill = [_slowdown([each.prefill for each in seen]) for seen in found.slowdowns.values()]
    return Contention(fmean(decode), fmean(prefill), max(decode)) if decode else prior.contention


def guards(found: Measurements) -> GuardTable:
    """The largest of each cell, over medians as for `contention`."""
    table: dict[int, dict[Cell, float]] = defaultdict(dict)
    for probe, seen in found.slowdowns.items():
        cells, cell = table[probe.units], cell_of(probe.decode, probe.prefill)
        cells[cell] = max(cells.get(cell, 1.0), _slowdown([each.decode for each in seen]))
    return GuardTable(table)


def _slowdown(seen: Sequence[float]) -> float:
    return min(max(median(seen), 1.0), LARGEST_SLOWDOWN)


def _held_out(phase: Phase, units: int, samples: Sequence[Sample], prior: Estimates) -> _Errors:
    if len(samples) < FOLDS:
        raise TooFewPoints(f"{len(samples)} points of {phase.value} passes on {units} units are too few")
    ours: list[float] = []
    priors: list[float] = []
    for fold in range(FOLDS):
        times = fit([sample for at, sample in enumerate(samples) if at % FOLDS != fold])
        for work, seconds in samples[fold::FOLDS]:
            ours.append(abs(times.seconds(work) / seconds - 1))
            priors.append(abs(prior.seconds(phase, units, work) / seconds - 1))
    return _Errors(tuple(ours), tuple(priors))


def _together(errors: Iterable[_Errors]) -> _Errors:
    each = list(errors)
    return _Errors(
        tuple(error for one in each for error in one.ours), tuple(error for one in each for error in one.prior)
    )


def _summary(errors: Sequence[float]) -> RelativeError:
    return RelativeError(median(errors), percentile(errors, 90))
