"""What policies ask: how long would this take on that many units? Frozen; learning makes a new one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tidelane.engine.estimation.guard import Cell, GuardTable, cell_of
from tidelane.engine.estimation.interpolation import at_units
from tidelane.engine.estimation.passes import PassTimes, PassWork

# One residual moves a correction by this share of itself, and counts as no more than a factor of 1.5; corrections
# themselves stay within a factor of 2. So a stalled step cannot ruin the model, and a wrong model is put right in
# some twenty steps.
LEARNING_RATE = 0.1
LARGEST_RESIDUAL = math.log(1.5)
LARGEST_CORRECTION = math.log(2.0)
# What is off by less is as good as true: nothing is learned from it, and answers worked out before stay at hand.
SMALLEST_RESIDUAL = 0.002


class Phase(StrEnum):
    DECODE = "decode"
    PREFILL = "prefill"
    FUSED = "fused"


@dataclass(frozen=True, slots=True)
class Contention:
    """What lanes cost each other though their units are disjoint: memory bandwidth and caches are shared.

    `decode_slowdown` and `prefill_slowdown` are means, at least 1. `guard` is the largest slowdown of decode seen,
    by which predictions are multiplied when a target depends on them.
    """

    decode_slowdown: float = 1.15
    prefill_slowdown: float = 1.05
    guard: float = 1.2


@dataclass(frozen=True, slots=True)
class Estimates:
    """Predicted seconds of decode steps, prefill and fused passes.

    `times` gives each phase's pass times by units; units that it lacks are interpolated (straight between logarithms,
    nearest beyond the ends by the square root of the ratio). It must know decode and prefill; without fused passes of
    its own, one costs what prefill costs and decode's reading of KV on top. `corrections` are logarithms of factors, by
    phase and units; units without one take the nearest's, as most of a model's error is common to all.
    `guards` are the slowdowns of decode seen beside prefill.
    """

    times: Mapping[Phase, Mapping[int, PassTimes]]
    contention: Contention = Contention()
    corrections: Mapping[tuple[Phase, int], float] = field(default_factory=dict)
    guards: GuardTable = field(default_factory=GuardTable)
    # Answers worked out once: a decision asks some fifty times about a dozen places. They follow from the fields above.
    _times_at: dict[tuple[Phase, int], PassTimes] = field(default_factory=dict, init=False, repr=False, compare=False)
    _found_at: dict[tuple[Phase, int], tuple[PassTimes, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for phase in (Phase.DECODE, Phase.PREFILL):
            if not self.times.get(phase):
                raise ValueError(f"times must hold the phase {phase.value!r}")

    def seconds(self, phase: Phase, units: int, work: PassWork) -> float:
        """Alone on the device: without contention and guard."""
        times, factor = self._at(phase, units)
        return times.seconds(work) * factor

    def correction_factor(self, phase: Phase, units: int) -> float:
        """By which `seconds` differ from `times`, by what was learned."""
        return math.exp(self._correction(phase, units))

    def most_tokens(self, phase: Phase, units: int, beside: PassWork, start: int, limit_s: float, most: int) -> int:
        """The most tokens of a prompt, `start` of which are done, for which a pass with `beside` takes `limit_s`."""
        times, factor = self._at(phase, units)
        return times.most_tokens(beside, start, limit_s / factor, most)

    def _at(self, phase: Phase, units: int) -> tuple[PassTimes, float]:
        place = (phase, units)
        found = self._found_at.get(place)
        if found is None:
            times = self._times_at.get(place)
            if times is None:
                times = self._times_at[place] = self._find_times(phase, units)
            found = self._found_at[place] = (times, self.correction_factor(phase, units))
        return found

    def guarded_decode_s(self, units: int, work: PassWork, cell: Cell | None) -> float:
        """The longest that a decode step on `units` should take while the rest of the device prefills what puts both in
        `cell`; None: nothing."""
        alone_s = self.seconds(Phase.DECODE, units, work)
        if cell is None:
            return alone_s
        return alone_s * self.guards.factor(units, cell, self.contention.guard)

    def learned(self, phase: Phase, units: int, work: PassWork, share: float, seconds: float) -> Estimates:
        """After a pass, or `share` of its layers, took `seconds` alone on the device."""
        expected_s = self.seconds(phase, units, work) * share
        if not (expected_s > 0 and seconds > 0):
            return self
        residual = _bounded(math.log(seconds / expected_s), LARGEST_RESIDUAL)
        if abs(residual) < SMALLEST_RESIDUAL:
            return self
        correction = _bounded(self._correction(phase, units) + LEARNING_RATE * residual, LARGEST_CORRECTION)
        after = replace(self, corrections={**self.corrections, (phase, units): correction})
        after._keep_times_of(self)
        return after

    def learned_beside(self, units: int, work: PassWork, beside: PassWork, seconds: float) -> Estimates:
        """After a decode step took `seconds` on `units` while the rest of the device prefilled `beside`."""
        alone_s = self.seconds(Phase.DECODE, units, work)
        if not (alone_s > 0 and seconds > 0):
            return self
        guards = self.guards.observed(units, cell_of(work, beside), seconds / alone_s, self.contention.guard)
        after = replace(self, guards=guards)
        after._keep_times_of(self)
        return after

    def _keep_times_of(self, before: Estimates) -> None:
        """Both have the same `times`, so what was interpolated from them stays true."""
        object.__setattr__(self, "_times_at", before._times_at)

    def _find_times(self, phase: Phase, units: int) -> PassTimes:
        by_units = self.times.get(phase)
        if by_units:
            return at_units(by_units, units)
        prefill, decode = at_units(self.times[Phase.PREFILL], units), at_units(self.times[Phase.DECODE], units)
        return replace(
            prefill,
            context_s=max(prefill.context_s, decode.context_s),
            sequence_s=max(prefill.sequence_s, decode.sequence_s),
        )

    def _correction(self, phase: Phase, units: int) -> float:
        exact = self.corrections.get((phase, units))
        if exact is not None:
            return exact
        learned = [(abs(math.log(at / units)), at) for of, at in self.corrections if of is phase]
        return self.corrections[phase, min(learned)[1]] if learned else 0.0


def _bounded(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)
