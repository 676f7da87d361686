"""How requests fared lately: what the agent's slow loop and the status of a service are made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tidelane.engine.slo import Attainment, Slo, Timeline, percentile


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Over requests that ended in the last `window_s` seconds. Times are None when no request made a token."""

    window_s: float
    attainment: Attainment
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    token_gap_p99_s: float | None
    # The parts of TTFT, each at its own percentile: they do not add up to one of TTFT.
    queue_p90_s: float | None
    queue_p99_s: float | None
    queue_at_percentile_s: float | None
    prefill_p50_s: float | None
    prefill_at_percentile_s: float | None
    ttft_at_percentile_s: float | None
    tpot_at_percentile_s: float | None
    # TTFT over the target of the request's own length: above 1 is late, whatever the mix of lengths.
    ttft_target_ratio_at_percentile: float | None
    input_tokens_p50: int | None


class LatencyWindow:
    """A sliding window over ended requests; refused and failed ones count as having missed their SLO."""

    def __init__(self, clock: Callable[[], float], window_s: float = 60.0) -> None:
        self._clock = clock
        self._window_s = window_s
        self._started_s = clock()
        self._ended: deque[tuple[float, Timeline | None, Slo]] = deque()

    def add(self, timeline: Timeline | None, slo: Slo) -> None:
        self._ended.append((self._clock(), timeline, slo))

    def summary(self, slo_percentile: int) -> LatencySummary:
        now_s = self._clock()
        while self._ended and self._ended[0][0] < now_s - self._window_s:
            self._ended.popleft()
        made_tokens = [(timeline, slo) for _, timeline, slo in self._ended if timeline is not None]
        timelines = [timeline for timeline, _ in made_tokens]
        within = sum(timeline.meets(slo) for timeline, slo in made_tokens)
        # Until the window has filled once, rates are over the time that there was.
        window_s = max(1.0, min(self._window_s, now_s - self._started_s))

        def at(percent: float, values: list[float]) -> float | None:
            return percentile(values, percent) if values else None

        input_tokens = at(50, [t.input_tokens for t in timelines])
        ttft = [t.ttft_s for t in timelines]
        tpot = [t.tpot_s for t in timelines]
        queue = [t.queue_s for t in timelines]
        prefill = [t.prefill_s for t in timelines]
        return LatencySummary(
            window_s=window_s,
            attainment=Attainment(len(self._ended), within, window_s),
            ttft_p50_s=at(50, ttft),
            ttft_p99_s=at(99, ttft),
            tpot_p50_s=at(50, tpot),
            tpot_p99_s=at(99, tpot),
            token_gap_p99_s=at(99, [t.longest_gap_s for t in timelines]),
            queue_p90_s=at(90, queue),
            queue_p99_s=at(99, queue),
            queue_at_percentile_s=at(slo_percentile, queue),
            prefill_p50_s=at(50, prefill),
            prefill_at_percentile_s=at(slo_percentile, prefill),
            ttft_at_percentile_s=at(slo_percentile, ttft),
            tpot_at_percentile_s=at(slo_percentile, tpot),
            ttft_target_ratio_at_percentile=at(
                slo_percentile, [t.ttft_s / slo.ttft_target_s(t.input_tokens) for t, slo in made_tokens]
            ),
            input_tokens_p50=None if input_tokens is None else int(input_tokens),
        )
