"""A context larger than the pool, beside whatever a policy does: the same for all policies.

Its passes are prefill of a kind of their own, a decode step too: one span, with nobody else. They come in slices of
layers, when no prompt wants prefill and no decode step would be late for it; or, that its wait be bounded, once others
have had OTHERS_TURNS times as long as its last slice took.
"""

from __future__ import annotations

from msgspec.structs import replace

from tidelane.engine.estimation.estimates import Phase
from tidelane.engine.estimation.passes import NO_WORK, prefill_work
from tidelane.engine.scheduling.budget import step_budget_s
from tidelane.engine.scheduling.fused import batch_work
from tidelane.engine.scheduling.plan import Decision, Plan, PrefillSlice, Span, State, Streaming
from tidelane.engine.scheduling.refusal import Paced

# Of the TTFT target, what a slice takes, which whoever comes may have to wait for, and what a pass is to take: all its
# older KV comes up for each.
SLICE_PART_OF_TTFT = 0.08
PASS_PART_OF_TTFT = 0.5
SMALLEST_PASS = 64
OTHERS_TURNS = 3.0


class WithStreams:
    """`scheduler`, and the sequence that streams in what is left. `lanes`: it goes on with a pass that stands between
    two slices beside decode; else one batch is computed at a time."""

    def __init__(self, scheduler: Paced, *, lanes: bool) -> None:
        self._scheduler = scheduler
        self._lanes = lanes

    def plan(self, state: State, now_s: float) -> Plan:
        plan = self._scheduler.plan(state, now_s)
        stream = state.stream
        if stream is None or state.flight.prefill is not None or state.paused is not None or plan.preempt:
            return plan
        if plan.prefill is not None and not _overdue(stream, now_s):
            return plan
        if self._lanes and state.table.splits:
            return self._on_a_lane(state, stream, plan, now_s)
        return _in_turn(state, stream, plan, now_s) if state.flight.idle else plan

    def pace(self, state: State, now_s: float) -> float:
        return self._scheduler.pace(state, now_s)

    def _on_a_lane(self, state: State, stream: Streaming, plan: Plan, now_s: float) -> Plan:
        """As any pass that has begun goes on there."""
        shown = self._scheduler.plan(replace(state, paused=_at_hand(state, stream)), now_s)
        if shown.prefill is None:
            return plan
        units = shown.partition.prefill_units
        layers = _layers(state, shown.prefill, units, SLICE_PART_OF_TTFT * state.objective.slo.ttft_s)
        first, last = shown.prefill.first_layer, shown.prefill.last_layer
        return replace(shown, prefill=replace(shown.prefill, last_layer=min(last, first + max(1, layers))))


def pass_s(state: State, units: int, work: PrefillSlice) -> float:
    """Of all layers of this pass, alone on `units`."""
    computed_s = state.estimates.seconds(Phase.PREFILL, units, prefill_work((s.start, s.stop) for s in work.spans))
    stream = state.stream
    if stream is None or work.spans[0].id != stream.id:
        return computed_s
    # Its older KV comes up while what came before is attended.
    return max(computed_s, stream.read_s) * stream.pace


def _in_turn(state: State, stream: Streaming, plan: Plan, now_s: float) -> Plan:
    """Between two of the passes that the policy plans: a slice that leaves the next decode step in time."""
    if stream.had_last and plan.launches:
        return plan
    work, units = _at_hand(state, stream), state.table.units
    limit_s = SLICE_PART_OF_TTFT * state.objective.slo.ttft_s
    if plan.decode is not None:
        steps = set(plan.decode.ids)
        stepping = tuple(each for each in state.decoding if each.id in steps)
        budget_s = step_budget_s(stepping, state.objective, now_s)
        if budget_s is not None:
            limit_s = min(limit_s, budget_s - state.estimates.seconds(Phase.DECODE, units, batch_work(stepping)))
    layers = _layers(state, work, units, limit_s)
    if layers < 1 and plan.launches and not _overdue(stream, now_s):
        return plan
    first = work.last_layer
    last = min(state.layers, first + max(1, layers))
    prefill = PrefillSlice(work.job, work.spans, first, last)
    slice_s = pass_s(state, units, work) * (last - first) / state.layers
    why = Decision(
        "a context larger than the pool goes on", len(state.decoding), len(state.queued), limit_s, slice_s=slice_s
    )
    return Plan(state.table.whole, prefill=prefill, why=why)


def _at_hand(state: State, stream: Streaming) -> PrefillSlice:
    """Its pass, which stands before its next slice."""
    if stream.paused is not None:
        return stream.paused
    limit_s = PASS_PART_OF_TTFT * state.objective.slo.ttft_s / stream.pace
    usual = state.estimates.most_tokens(
        Phase.PREFILL, state.table.units, NO_WORK, stream.computed, limit_s, stream.most_tokens
    )
    tokens = min(stream.tokens - stream.computed, stream.most_tokens, max(SMALLEST_PASS, usual))
    span = Span(stream.id, stream.computed, stream.computed + tokens)
    return PrefillSlice(state.next_job, (span,), 0, 0)


def _layers(state: State, work: PrefillSlice, units: int, limit_s: float) -> int:
    """How many take `limit_s`; 0: not one."""
    return max(0, int(limit_s * state.layers / pass_s(state, units, work)))


def _overdue(stream: Streaming, now_s: float) -> bool:
    return now_s - stream.idle_since_s >= OTHERS_TURNS * stream.slice_s
