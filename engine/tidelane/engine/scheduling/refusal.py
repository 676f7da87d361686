"""Which requests to refuse as they come, since by prediction their first token would be late.

Only once, at the first plan after it came, and before anyone is told that it was accepted: what has been accepted is
served, however late it will be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from msgspec.structs import replace

from tidelane.engine.estimation.estimates import Phase
from tidelane.engine.estimation.passes import prefill_work
from tidelane.engine.request import FLEX_RANK
from tidelane.engine.scheduling.order import on_time
from tidelane.engine.scheduling.plan import Decision, Late, Plan, Prefilling, Queued, Scheduler, State

# Nobody is told to stay away for longer: what a prediction says of a queue that far ahead is no more than a guess.
LONGEST_RETRY_S = 60.0
# Of its target, what a promise to be on time counts on. The rest is for what no prediction here counts: the pass that
# runs when one comes (0.08 of the TTFT target), and that many short passes take longer than a long one.
PROMISED_PART = 0.9


class Paced(Scheduler, Protocol):
    """A scheduler that can tell how fast it works prompts off."""

    def pace(self, state: State, now_s: float) -> float:
        """Seconds that a second of whole-device prefill takes now."""
        ...


class EarlyRefusal:
    """`scheduler`, for what is left once those that would be late have been refused, if the objective asks for it."""

    def __init__(self, scheduler: Paced) -> None:
        self._scheduler = scheduler

    def plan(self, state: State, now_s: float) -> Plan:
        late: tuple[Late, ...] = ()
        if state.newcomers and state.objective.refuse_late:
            late = late_newcomers(state, now_s, self._scheduler.pace(state, now_s))
        if not late:
            return self._scheduler.plan(state, now_s)
        plan = self._scheduler.plan(_without(state, late), now_s)
        if plan.why is None:
            why = Decision("late by prediction: refused", len(state.decoding), len(state.queued) - len(late))
            return replace(plan, refuse=late, why=why)
        return replace(plan, refuse=late)


def late_newcomers(state: State, now_s: float, pace: float) -> tuple[Late, ...]:
    """Whom of `state.newcomers` the order sets aside.

    Not `flex` work, which has no deadline; nor one that could not be promised to be on time even on an idle device: no
    later try could do better. While prefill cannot be launched at all, nothing can be predicted.
    """
    if not state.can_prefill:
        return ()
    newcomers = {job.id: job for job in state.newcomers if _may_be_refused(job, now_s)}
    if not newcomers:
        return ()
    begin_s, landed = _after_flight(state, now_s, pace)
    found: list[Late] = []
    clock_s = begin_s
    for rank in range(FLEX_RANK):
        # All of them: who is beyond the order's horizon is not late for that.
        chosen, clock_s = on_time(landed, rank, now_s, clock_s, pace, len(state.queued))
        kept = {job.id for job in chosen}
        aside = [job for job in newcomers.values() if job.priority[0] == rank and job.id not in kept]
        found += [_late(job, now_s, clock_s, pace) for job in aside]
    return tuple(found)


def _may_be_refused(job: Queued, now_s: float) -> bool:
    """Whether one like it could be promised to be on time if it came when the device is idle."""
    return job.priority[0] < FLEX_RANK and now_s + job.work_s <= job.priority[1] + PROMISED_PART * _target_s(job)


def _target_s(job: Queued) -> float:
    return job.ttft_due_s - job.priority[1]


def _late(job: Queued, now_s: float, free_s: float, pace: float) -> Late:
    """One like it, come when those that are served in time (until `free_s`) leave it just enough of its target, would
    be on time and make nobody else late.
    """
    took_s = job.work_s * pace
    target_s = _target_s(job)
    promised_s = PROMISED_PART * target_s
    # Else no queue is short enough at this pace; when decode will have less to do, nobody knows.
    wait_s = free_s + took_s - promised_s - now_s if took_s <= promised_s else LONGEST_RETRY_S
    retry_after_s = min(LONGEST_RETRY_S, max(1.0, math.ceil(wait_s)))
    return Late(job.id, job.tokens, free_s + took_s - job.priority[1], target_s, retry_after_s)


def _after_flight(state: State, now_s: float, pace: float) -> tuple[float, State]:
    """When the prefill pass that runs, or stands between two slices, should end, and what is left to prefill then.

    When the slice in flight began is not known here: it counts as half done.
    """
    flight, paused = state.flight.prefill, state.paused
    at_hand = flight or paused
    if at_hand is None:
        return now_s, state
    done_layers = at_hand.last_layer if flight is None else (at_hand.first_layer + at_hand.last_layer) / 2
    work = prefill_work((span.start, span.stop) for span in at_hand.spans)
    left_s = state.estimates.seconds(Phase.PREFILL, state.table.units, work) * (1 - done_layers / state.layers)
    stops = {span.id: span.stop for span in at_hand.spans}
    prefilling = [_advanced(sequence, stops.get(sequence.id, sequence.computed)) for sequence in state.prefilling]
    rest = tuple(sequence for sequence in prefilling if sequence.computed < sequence.tokens)
    idle = replace(state.flight, prefill=None, prefill_units=0)
    return now_s + left_s * pace, replace(state, flight=idle, paused=None, prefilling=rest)


def _advanced(sequence: Prefilling, computed: int) -> Prefilling:
    left = sequence.tokens - sequence.computed
    if computed == sequence.computed or not left:
        return sequence
    return replace(sequence, computed=computed, work_s=sequence.work_s * (sequence.tokens - computed) / left)


def _without(state: State, late: Iterable[Late]) -> State:
    gone = {each.id for each in late}

    def left(jobs: tuple[Queued, ...]) -> tuple[Queued, ...]:
        return tuple(job for job in jobs if job.id not in gone)

    return replace(
        state, newcomers=left(state.newcomers), queued=left(state.queued), queued_by_due=left(state.queued_by_due)
    )
