"""From outcomes to figures: latency against targets, attainment, goodput, and how late the generator was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidelane.engine.bench.load import LoadRun
from tidelane.engine.bench.outcome import Failure, Outcome
from tidelane.engine.slo import Attainment, Slo, percentile

# A generator this late (at its 99th percentile) blurs what it measures.
TRUSTED_LATENESS_S = 0.05

ALL = "all"


@dataclass(frozen=True, slots=True)
class Spread:
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """None of no values."""
        if not values:
            return None
        return Spread(percentile(values, 50), percentile(values, 90), percentile(values, 99), max(values))


@dataclass(frozen=True, slots=True)
class KindReport:
    """One kind of request, or all of them. TPOT is over answers of two tokens and more; gaps are over all tokens."""

    kind: str
    requests: int
    completed: int
    failures: Mapping[Failure, int]
    attainment: Attainment | None  # None: no targets were given
    ttft: Spread | None
    tpot: Spread | None
    gap: Spread | None
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """`duration_s` is how long requests arrived, `ended_s` when the last one ended. `kinds` starts with all."""

    duration_s: float
    ended_s: float
    slo: Slo | None
    kinds: tuple[KindReport, ...]
    lateness: Spread | None
    loop_lag: Spread | None
    details: tuple[str, ...]  # one example of each way to fail

    @property
    def total(self) -> KindReport:
        return self.kinds[0]

    @property
    def output_tokens_per_s(self) -> float:
        return self.total.output_tokens / self.ended_s if self.ended_s else 0.0

    @property
    def generator_was_late(self) -> bool:
        return any(
            spread is not None and spread.p99_s > TRUSTED_LATENESS_S for spread in (self.lateness, self.loop_lag)
        )


def summarise(run: LoadRun, duration_s: float, slo: Slo | None) -> Report:
    names = sorted({each.arrival.kind for each in run.outcomes})
    kinds = [_kind_report(ALL, run.outcomes, duration_s, slo)]
    if len(names) > 1:
        kinds += [
            _kind_report(name, [each for each in run.outcomes if each.arrival.kind == name], duration_s, slo)
            for name in names
        ]
    return Report(
        duration_s=duration_s,
        ended_s=max((each.ended_s for each in run.outcomes), default=0.0),
        slo=slo,
        kinds=tuple(kinds),
        lateness=Spread.of([each.lateness_s for each in run.outcomes]),
        loop_lag=Spread.of(run.loop_lag_s),
        details=_details(run.outcomes),
    )


def _kind_report(name: str, outcomes: Sequence[Outcome], duration_s: float, slo: Slo | None) -> KindReport:
    timelines = [timeline for each in outcomes if (timeline := each.timeline()) is not None]
    attainment = None
    if slo is not None:
        within = sum(timeline.meets(slo) for timeline in timelines)
        attainment = Attainment(len(outcomes), within, duration_s)
    return KindReport(
        kind=name,
        requests=len(outcomes),
        completed=sum(each.failure is None for each in outcomes),
        failures=Counter(each.failure for each in outcomes if each.failure is not None),
        attainment=attainment,
        ttft=Spread.of([timeline.ttft_s for timeline in timelines]),
        tpot=Spread.of([timeline.tpot_s for timeline in timelines if timeline.output_tokens > 1]),
        gap=Spread.of([gap for each in outcomes for gap in each.gaps_s]),
        input_tokens=sum(timeline.input_tokens for timeline in timelines),
        output_tokens=sum(each.output_tokens for each in outcomes),
    )


def _details(outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    examples: dict[Failure, str] = {}
    for each in outcomes:
        if each.failure is not None:
            examples.setdefault(each.failure, f"{each.failure}: {each.detail}")
    return tuple(examples.values())
