"""Classic continuous batching (Orca, OSDI 2022): one batch at a time, new prompts whole beside the decoding ones.

Every sequence in the batch waits for the longest prompt in it: the baseline that lanes exist to beat.
"""

from __future__ import annotations

from tidelane.engine.scheduling.capacity import allot
from tidelane.engine.scheduling.plan import DecodeBatch, Plan, PrefillSlice, State
from tidelane.engine.scheduling.queue import next_spans
from tidelane.engine.slo import Slo, Timeline


class MixedScheduler:
    def __init__(self, *, max_running: int = 256, max_pass_tokens: int = 8192) -> None:
        self._max_running = max_running
        self._max_pass_tokens = max_pass_tokens

    def plan(self, state: State, now_s: float) -> Plan:
        if not state.flight.idle:
            return Plan(state.table.whole)
        if state.paused is not None:  # left by a policy that slices by layers
            return Plan(state.table.whole, prefill=_rest(state.paused, state.layers))
        allotment = allot(state, decode_idle=True, max_running=self._max_running)
        waiting = [s for s in state.prefilling if s.id not in allotment.preempt]
        spans = next_spans((*waiting, *allotment.admit), self._max_pass_tokens)
        prefill = None
        if spans:
            prefill = PrefillSlice(state.next_job, spans, 0, state.layers)
        decode = DecodeBatch(tuple(s.id for s in allotment.decode)) if allotment.decode else None
        return Plan(
            state.table.whole,
            admit=tuple(q.id for q in allotment.admit),
            preempt=allotment.preempt,
            decode=decode,
            prefill=prefill,
            fused=prefill is not None and decode is not None,
        )

    def request_ended(self, timeline: Timeline, slo: Slo) -> None:
        """Nothing to learn: this policy has no choice to make."""


def _rest(paused: PrefillSlice, layers: int) -> PrefillSlice:
    return PrefillSlice(paused.job, paused.spans, paused.last_layer, layers)
