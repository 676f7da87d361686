"""Launching again what another engine has launched: the same rows through the same layers on the same lane.

Which sequences share a launch decides in which order floats are summed, and with it the last bits of KV and, at a near
tie, the text. Who composes the batches decides by the time that launches take, so no two runs of concurrent requests
are alike by themselves. Of two runs with the same launches all bits must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidelane.engine.scheduling.plan import Plan, Scheduler, State


class Diverged(RuntimeError):
    """What was launched cannot be launched here: less, more or something else is there."""


@dataclass(frozen=True, slots=True)
class Step:
    """A plan, and what was there when it was made: tokens in the KV cache of each sequence that it admits or steps, and
    what was in flight."""

    plan: Plan
    there: Mapping[str, int]
    beside_decode: bool
    beside_prefill: bool


class Recorder:
    """`policy`, and all that it has planned."""

    def __init__(self, policy: Scheduler) -> None:
        self._policy = policy
        self.steps: list[Step] = []

    def plan(self, state: State, now_s: float) -> Plan:
        plan = self._policy.plan(state, now_s)
        if plan.launches or plan.admit or plan.preempt:
            flight = state.flight
            self.steps.append(Step(plan, _there(state, plan), flight.decode is not None, flight.prefill is not None))
        return plan


class Replay:
    """Plans `steps`, each as soon as all is there that it was made from."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self.done = 0

    def plan(self, state: State, now_s: float) -> Plan:
        """Raises Diverged if that will never be so."""
        busy = bool(state.queued or state.prefilling or state.decoding)
        if self.done == len(self._steps):
            if busy and state.flight.idle:
                raise Diverged("there is work left after the last launch that was recorded")
            return Plan(state.table.whole)
        step = self._steps[self.done]
        lacks = _lacks(step, state)
        if lacks is None:
            self.done += 1
            return step.plan
        if busy and state.flight.idle:
            raise Diverged(f"launch {self.done + 1} of {len(self._steps)} cannot be repeated: {lacks}")
        return Plan(state.table.whole)


def _there(state: State, plan: Plan) -> dict[str, int]:
    found = {job.id: job.cached for job in state.queued if job.id in plan.admit}
    stepping = plan.decode.ids if plan.decode is not None else ()
    return found | {each.id: each.context for each in state.decoding if each.id in stepping}


def _lacks(step: Step, state: State) -> str | None:
    """Why the step cannot be taken now."""
    plan, flight = step.plan, state.flight
    if flight.decode is not None and (plan.decode is not None or not step.beside_decode):
        return "a decode step is in flight"
    if flight.prefill is not None and (plan.prefill is not None or not step.beside_prefill):
        return "a prefill slice is in flight"
    queued = {job.id: job.cached for job in state.queued}
    decoding = {each.id: each.context for each in state.decoding}
    prefilling = {job.id: job.computed for job in state.prefilling}
    expected = [(name, queued, step.there[name]) for name in plan.admit]
    expected += [(name, decoding, step.there[name]) for name in (plan.decode.ids if plan.decode is not None else ())]
    if plan.prefill is not None and plan.prefill.first_layer == 0:
        expected += [(s.id, queued if s.id in plan.admit else prefilling, s.start) for s in plan.prefill.spans]
    for name, here, tokens in expected:
        if here.get(name) != tokens:
            return f"{name} had {tokens} tokens there, and has {here.get(name, 'no place')} now"
    for name in plan.preempt:
        if name not in decoding and name not in prefilling:
            return f"{name} has no place to lose"
    if plan.prefill is not None and plan.prefill.first_layer:
        paused = state.paused
        if paused is None or (paused.job, paused.last_layer) != (plan.prefill.job, plan.prefill.first_layer):
            return f"pass {plan.prefill.job} does not stand before layer {plan.prefill.first_layer}"
    return None
