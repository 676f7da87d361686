"""What one replay came to: attainment, goodput, latencies, and how the device was used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidelane.engine.bench.report import Spread
from tidelane.engine.channel import RefusalReason
from tidelane.engine.sim.gaps import GapHistogram
from tidelane.engine.sim.shares import Share
from tidelane.engine.sim.world import Found, Replay
from tidelane.engine.slo import Slo, Timeline, percentile

_CURVE_PERCENTS = tuple(range(0, 101, 2))


@dataclass(frozen=True, slots=True)
class Figures:
    """`rate` and `goodput` are requests a second for each GPU. TPOT is over answers of two tokens and more.

    `aside` are the waits from the TTFT deadline to the start of prefill, of those that began after it; `refused_late`
    is the share that was refused as it came; it and `found` are None where they cannot be told. The curves are
    quantiles, evenly spread from the smallest value to the largest; None of no values.
    """

    rate: float
    attainment: float
    goodput: float
    ttft: Spread | None
    tpot: Spread | None
    gap: Spread | None
    aside: Spread | None
    refused_late: float | None
    ttft_curve: tuple[float, ...]
    tpot_curve: tuple[float, ...]
    shares: tuple[Share, ...]
    found: Found | None


def figures_of(replay: Replay, rate: float, slo: Slo) -> Figures:
    """Requests that were refused count as missed."""
    timelines = [answer.timeline for answer in replay.answers if answer.timeline is not None]
    attainment = sum(timeline.meets(slo) for timeline in timelines) / len(replay.answers)
    late = sum(answer.refusal is RefusalReason.WOULD_BE_LATE for answer in replay.answers)
    ttft_s = [timeline.ttft_s for timeline in timelines]
    tpot_s = [timeline.tpot_s for timeline in timelines if timeline.output_tokens > 1]
    return Figures(
        rate=rate,
        attainment=attainment,
        goodput=attainment * rate,
        ttft=Spread.of(ttft_s),
        tpot=Spread.of(tpot_s),
        gap=_gap_spread(replay.gaps),
        aside=Spread.of([wait_s for each in timelines if (wait_s := _aside_s(each, slo)) > 0]),
        refused_late=late / len(replay.answers),
        ttft_curve=curve(ttft_s),
        tpot_curve=curve(tpot_s),
        shares=replay.shares,
        found=replay.found,
    )


def _aside_s(timeline: Timeline, slo: Slo) -> float:
    return timeline.queue_s - slo.ttft_target_s(timeline.input_tokens)


def _gap_spread(gaps: GapHistogram) -> Spread | None:
    found = gaps.percentiles(50, 90, 99, 100)
    return None if found is None else Spread(*found)


def curve(values: Sequence[float]) -> tuple[float, ...]:
    """Quantiles, evenly spread from the smallest value to the largest; none of no values."""
    if not values:
        return ()
    ordered = sorted(values)
    return tuple(percentile(ordered, percent) for percent in _CURVE_PERCENTS)
