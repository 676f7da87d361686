"""Whether a service would meet other targets, by simulation where there is one, else by what it last measured. Pure.

A simulation of the targets in force must come near what is measured, or that of others is not believed either.

The status of a service holds, for the last window with requests, TTFT and TPOT at the median and at the percentile of
its SLO, and the share of requests within the targets in force. From these, without a model of the engine:

- Where the measured TTFT at q % is within a target, at least q % of requests are; where it is not, fewer than q %. So
  for TPOT. Of two such shares, the lesser bounds from above the share of requests within both, and their sum less 100 %
  from below (the Fréchet bounds).
- Targets that are all as loose or looser keep at least the measured share within them, tighter ones keep at most it.

All of that is of rounded figures, of the slowest replica, and by the least target that a prompt can have. It does not
say what the engine would do differently: it schedules by its targets, so a tighter TPOT costs TTFT. Simulation does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Self

from tidelane.operator.forecasts import Answer, Forecast, Unanswered
from tidelane.operator.quantities import format_duration, parse_duration_s
from tidelane.operator.resources import Status
from tidelane.operator.targets import Targets

_MEDIAN: Final = 50
# How far, in percent of requests, a simulation of what is in force may be from what is measured.
_BELIEVABLE: Final = 10
# And by which factor its latencies may be: under loose targets attainment is the same whatever they are.
_BELIEVABLE_FACTOR: Final = 2.0


class Outlook(StrEnum):
    MEET = "WouldMeet"
    BREACH = "WouldBreach"
    UNKNOWN = "Unknown"


class Basis(StrEnum):
    """What an outlook follows from."""

    SIMULATED = "Simulated"
    BOUNDS = "Bounds"
    NONE = "None"


@dataclass(frozen=True, slots=True)
class Prediction:
    """`at_least` and `at_most` bound the share of requests within the targets, in percent; `forecast` is what was
    simulated."""

    outlook: Outlook
    message: str
    at_least: int = 0
    at_most: int = 100
    basis: Basis = Basis.BOUNDS
    forecast: Forecast | None = None


@dataclass(frozen=True, slots=True)
class Simulated:
    """The answers about the targets in force and about those wanted; None: not known yet."""

    now: Answer | None
    then: Answer | None


@dataclass(frozen=True, slots=True)
class Shares:
    """Bounds of a share of requests, in percent."""

    at_least: int
    at_most: int


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one kind, at some percentiles."""

    at: Mapping[int, float]

    def within(self, target_s: float) -> Shares:
        """Those of requests within a target."""
        return Shares(
            max((percent for percent, seconds in self.at.items() if seconds <= target_s), default=0),
            # Fewer than that, and all shares are rounded down.
            min((percent - 1 for percent, seconds in self.at.items() if seconds > target_s), default=100),
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What a service last measured, and the targets that it did so under."""

    ttft: Latency
    tpot: Latency
    attainment: int
    under: Targets

    @classmethod
    def of(cls, status: Status) -> Self | None:
        """None: nothing yet, or nothing that can be read."""
        slo = status.get("effectiveSLO", {})
        if not ("ttft" in status and "tpot" in status and "attainment" in status and "percentile" in slo):
            return None
        try:
            ttft, tpot = {slo["percentile"]: status["ttft"]}, {slo["percentile"]: status["tpot"]}
            if "ttftMedian" in status and "tpotMedian" in status:
                ttft[_MEDIAN], tpot[_MEDIAN] = status["ttftMedian"], status["tpotMedian"]
            return cls(_latency(ttft), _latency(tpot), status["attainment"], Targets.parse({"slo": slo}))
        except ValueError:
            return None


def predict(status: Status, wanted: Targets, simulated: Simulated | None = None) -> Prediction:
    """`wanted` are whole targets, as `merge` makes them. `simulated` None: nobody has asked for that."""
    if simulated is None:
        return _bounded(status, wanted)
    why = _unbelievable(status, simulated)
    if why is None and isinstance(simulated.now, Forecast) and isinstance(simulated.then, Forecast):
        return _simulated(simulated.now, simulated.then, wanted)
    bounded = _bounded(status, wanted)
    return replace(bounded, message=f"{bounded.message}; not simulated: {why}")


def _simulated(now: Forecast, then: Forecast, wanted: Targets) -> Prediction:
    assert wanted.percentile is not None
    met = then.attainment >= wanted.percentile
    told = f"simulated: {then.attainment} % within, {now.attainment} % within those in force; {_replicas(now, then)}"
    outlook = Outlook.MEET if met else Outlook.BREACH
    return Prediction(outlook, told, then.attainment, then.attainment, Basis.SIMULATED, then)


def _replicas(now: Forecast, then: Forecast) -> str:
    if then.replicas is None:
        return "a few replicas more would not help"
    if now.replicas is None or now.replicas == then.replicas:
        return f"{then.replicas} replicas needed"
    return f"{then.replicas} replicas needed instead of {now.replicas}"


def _unbelievable(status: Status, simulated: Simulated) -> str | None:
    """Why bounds are to be told instead; None: there is nothing against the simulation."""
    for answer in (simulated.then, simulated.now):
        if answer is None:
            return "under way"
        if isinstance(answer, Unanswered):
            return answer.why
    assert isinstance(simulated.now, Forecast)
    measured = status.get("attainment")
    if measured is not None and abs(measured - simulated.now.attainment) > _BELIEVABLE:
        return f"it gives {simulated.now.attainment} % for the targets in force, not {measured} %"
    return _wrong_latency(Seen.of(status), simulated.now)


def _wrong_latency(seen: Seen | None, now: Forecast) -> str | None:
    if seen is None:
        return None
    percent = seen.under.percentile
    assert percent is not None
    for name, simulated_s, latency in (("TTFT", now.ttft_s, seen.ttft), ("TPOT", now.tpot_s, seen.tpot)):
        measured_s = latency.at[percent]
        if simulated_s and measured_s and not 1 / _BELIEVABLE_FACTOR <= measured_s / simulated_s <= _BELIEVABLE_FACTOR:
            return f"it gives a {name} of {format_duration(float(f'{simulated_s:.2g}'))} for the targets in force"
    return None


def _bounded(status: Status, wanted: Targets) -> Prediction:
    seen = Seen.of(status)
    if seen is None:
        return Prediction(Outlook.UNKNOWN, "no requests measured yet", basis=Basis.NONE)
    assert wanted.ttft_s is not None
    assert wanted.tpot_s is not None
    assert wanted.percentile is not None
    assert seen.under.percentile is not None
    percent, needed = seen.under.percentile, wanted.percentile
    ttft, tpot = seen.ttft.within(wanted.ttft_s), seen.tpot.within(wanted.tpot_s)
    if wanted.ttft_per_1k_input_tokens_s:
        # Only the least part of a prompt's target is known.
        ttft = Shares(ttft.at_least, 100)
    at_least, at_most = max(0, ttft.at_least + tpot.at_least - 100), min(ttft.at_most, tpot.at_most)
    gaps_unknown = wanted.max_token_gap_s is not None
    if gaps_unknown:
        at_least = 0
    if _no_tighter(wanted, seen.under):
        at_least = max(at_least, seen.attainment)
    if _no_tighter(seen.under, wanted):
        at_most = min(at_most, seen.attainment)
    at_least = min(at_least, at_most)
    told = (
        f"measured at p{percent}: TTFT {_against(seen.ttft.at[percent], wanted.ttft_s)}, TPOT "
        f"{_against(seen.tpot.at[percent], wanted.tpot_s)}; {seen.attainment} % within the targets in force"
    )
    if at_most < needed:
        return Prediction(Outlook.BREACH, told, at_least, at_most)
    # Each target on its own, as people read percentiles.
    each_within = min(ttft.at_least, tpot.at_least) >= needed and not gaps_unknown
    if at_least >= needed or each_within:
        return Prediction(Outlook.MEET, told, at_least, at_most)
    return Prediction(Outlook.UNKNOWN, f"{told}; too little to tell {needed} %", at_least, at_most)


def _latency(written: Mapping[int, str]) -> Latency:
    return Latency({percent: parse_duration_s(text) for percent, text in written.items()})


def _against(measured_s: float, target_s: float) -> str:
    return f"{format_duration(measured_s)} ({format_duration(target_s)} wanted)"


def _no_tighter(these: Targets, than: Targets) -> bool:
    """Whether every request within the second is within the first."""
    gap, other_gap = these.max_token_gap_s, than.max_token_gap_s
    return (
        (these.ttft_s or 0) >= (than.ttft_s or 0)
        and (these.ttft_per_1k_input_tokens_s or 0) >= (than.ttft_per_1k_input_tokens_s or 0)
        and (these.tpot_s or 0) >= (than.tpot_s or 0)
        and (gap is None or (other_gap is not None and gap >= other_gap))
    )
