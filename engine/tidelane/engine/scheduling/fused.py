"""Passes that hold decode and prefill together, on the whole device: mixed batching and chunked prefill."""

from __future__ import annotations

from tidelane.engine.estimation.estimates import Phase
from tidelane.engine.estimation.passes import PassWork, decode_work, prefill_work
from tidelane.engine.scheduling.capacity import Filling, Growth
from tidelane.engine.scheduling.plan import Decision, DecodeBatch, Decoding, Plan, PrefillSlice, Span, State


def fused_plan(state: State, growth: Growth, filling: Filling, reason: str, budget_s: float | None = None) -> Plan:
    """One pass through all layers; only decode or only prefill if that is all there is."""
    decode = DecodeBatch(tuple(s.id for s in growth.decode)) if growth.decode else None
    prefill = PrefillSlice(state.next_job, filling.spans, 0, state.layers) if filling.spans else None
    why = None
    if decode is not None or prefill is not None:
        work = batch_work(growth.decode) + prefill_work((span.start, span.stop) for span in filling.spans)
        step_s = state.estimates.seconds(Phase.FUSED, state.table.units, work)
        why = Decision(reason, len(state.decoding), len(state.queued), budget_s, step_s)
    return Plan(
        state.table.whole,
        admit=filling.admit,
        preempt=growth.preempt,
        decode=decode,
        prefill=prefill,
        fused=decode is not None and prefill is not None,
        why=why,
    )


def finish_pass(state: State) -> Plan:
    """What a policy that slices by layers has left unfinished, to its end."""
    assert state.paused is not None
    paused = state.paused
    rest = PrefillSlice(paused.job, paused.spans, paused.last_layer, state.layers)
    why = Decision("finishing a pass that was begun in slices", len(state.decoding), len(state.queued))
    return Plan(state.table.whole, prefill=rest, why=why)


def batch_work(decoding: tuple[Decoding, ...]) -> PassWork:
    return decode_work(len(decoding), sum([sequence.context for sequence in decoding]))


def largest_chunk(state: State, decode: PassWork, budget_s: float, most: int) -> int:
    """The most tokens of one prompt, none of which are done, whose pass with `decode` takes `budget_s`; 0 if none."""
    return state.estimates.most_tokens(Phase.FUSED, state.table.units, decode, 0, budget_s, most)


class TimeLeft:
    """Room in a pass with `decode`, as long as it is predicted to take no more than `limit_s`."""

    def __init__(self, state: State, decode: PassWork, limit_s: float) -> None:
        self._estimates = state.estimates
        self._units = state.table.units
        self._limit_s = limit_s
        self._work = decode

    def most_tokens(self, start: int, most: int) -> int:
        return self._estimates.most_tokens(Phase.FUSED, self._units, self._work, start, self._limit_s, most)

    def take(self, span: Span) -> None:
        self._work += prefill_work(((span.start, span.stop),))
