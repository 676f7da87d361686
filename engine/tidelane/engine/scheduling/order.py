"""In which order prompts are prefilled: first come, or so that as many as possible meet their TTFT."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain
from typing import Protocol

import msgspec

from tidelane.engine.request import FLEX_RANK
from tidelane.engine.scheduling.plan import Queued, State, Waiting

# Deadlines beyond the first this many do not bear on what to start now.
HORIZON = 512
# Who has waited this long past its deadline gets every PROMOTION_PASSES-th pass, so that its wait is bounded.
PROMOTED_AFTER_S = 30.0
PROMOTION_PASSES = 8


class Arranged(msgspec.Struct, frozen=True):
    """Whom to prefill, in turn; `late`: the first of them will miss its deadline anyway."""

    jobs: Iterator[Waiting]
    late: bool = False


class Order(Protocol):
    def arrange(self, state: State, now_s: float, pace: float) -> Arranged:
        """All that wait for prefill and are not in flight. `pace`: seconds that a second of whole-device work takes."""
        ...


class FirstCome:
    """By tier, then by arrival; those that hold blocks before those that do not."""

    def arrange(self, state: State, now_s: float, pace: float) -> Arranged:
        return Arranged(chain(_idle_prefilling(state), state.queued))


class MooreHodgson:
    """Earliest deadline first; whenever one would be late, the longest so far is set aside (Moore, Management Science
    15, 1968): on one machine no order has more jobs on time.

    Tiers are strict: a lower one counts only with the time that the higher ones leave. `flex` has no deadlines. Those
    set aside follow in order of arrival, before `flex`; one that has been late for long gets every eighth pass.
    """

    def arrange(self, state: State, now_s: float, pace: float) -> Arranged:
        prefilling = _idle_prefilling(state)
        first: list[Waiting] = []
        clock_s = now_s
        for rank in range(FLEX_RANK):
            chosen, clock_s = on_time(state, rank, now_s, clock_s, pace)
            first += chosen
        rest = _rest(prefilling, state.queued, first)
        overdue = _overdue(state, prefilling, now_s)
        if overdue is not None:
            first = [overdue, *(job for job in first if job is not overdue)]
            rest = (job for job in rest if job is not overdue)
        return Arranged(chain(first, rest), late=not first)


def on_time(
    state: State, rank: int, now_s: float, begin_s: float, pace: float, horizon: int = HORIZON
) -> tuple[list[Waiting], float]:
    """Those of one tier that are not set aside, by deadline, if its prefill begins at `begin_s`; and when the last of
    them is done. Of the queued, the first `horizon` are looked at."""
    return _moore_hodgson(_jobs(state.queued_by_due, _idle_prefilling(state), rank, now_s, horizon), begin_s, pace)


def _overdue(state: State, prefilling: Sequence[Waiting], now_s: float) -> Waiting | None:
    """Of all tiers the one that is latest, begun or not, so that none makes it wait for ever."""
    if state.next_job % PROMOTION_PASSES:
        return None
    by_due = state.queued_by_due
    firsts = (bisect_left(by_due, rank, key=_rank) for rank in range(FLEX_RANK))
    waiting: list[Waiting] = [*(by_due[at] for at in firsts if at < len(by_due)), *prefilling]
    late = [job for job in waiting if now_s - job.ttft_due_s > PROMOTED_AFTER_S and job.priority[0] < FLEX_RANK]
    return min(late, key=lambda job: job.ttft_due_s, default=None)


def _rank(job: Queued) -> int:
    return job.priority[0]


def _idle_prefilling(state: State) -> list[Waiting]:
    flight = state.flight.prefill
    busy = {span.id for span in flight.spans} if flight is not None else ()
    return [sequence for sequence in state.prefilling if sequence.id not in busy]


def _jobs(
    by_due: Sequence[Queued], prefilling: Sequence[Waiting], rank: int, now_s: float, horizon: int
) -> list[Waiting]:
    """Of one tier, those whose deadline is still to come, by deadline."""
    first = bisect_right(by_due, (rank, now_s), key=_due_key)
    last = bisect_left(by_due, (rank + 1, float("-inf")), lo=first, key=_due_key)
    jobs: list[Waiting] = list(by_due[first : min(last, first + horizon)])
    held = [s for s in prefilling if s.priority[0] == rank and s.ttft_due_s > now_s]
    if held:
        jobs = sorted((*held, *jobs), key=lambda job: job.ttft_due_s)
    return jobs


def _due_key(job: Queued) -> tuple[int, float]:
    return (job.priority[0], job.ttft_due_s)


def _moore_hodgson(jobs: Iterable[Waiting], start_s: float, pace: float) -> tuple[list[Waiting], float]:
    """The jobs that stay, by deadline, and when the last of them is done."""
    clock_s = start_s
    longest: list[tuple[float, int, Waiting]] = []
    for number, job in enumerate(jobs):
        took_s = job.work_s * pace
        if start_s + took_s > job.ttft_due_s:
            continue  # late even alone
        clock_s += took_s
        heappush(longest, (-took_s, number, job))
        if clock_s > job.ttft_due_s:
            clock_s += heappop(longest)[0]
    longest.sort(key=lambda entry: entry[1])
    return [job for _, _, job in longest], clock_s


def _rest(prefilling: Sequence[Waiting], queued: Sequence[Queued], first: Sequence[Waiting]) -> Iterator[Waiting]:
    chosen = {job.id for job in first}
    return (job for job in chain(prefilling, queued) if job.id not in chosen)
