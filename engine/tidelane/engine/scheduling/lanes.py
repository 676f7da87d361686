"""Prefill and decode side by side, each on its lane, prefill in slices of layers.

Decode never waits for prefill: a finished prefill joins at the next step, and the border moves only to where both lanes
are free of what still runs. With one side empty the other has the whole device.
"""

from __future__ import annotations

import math

from tidelane.engine.lanes.partition import Partition
from tidelane.engine.scheduling.border import Border, learn, place_border, predicted_step_s
from tidelane.engine.scheduling.capacity import allot
from tidelane.engine.scheduling.mixed import MixedScheduler
from tidelane.engine.scheduling.plan import DecodeBatch, Plan, Prefilling, PrefillSlice, Queued, State
from tidelane.engine.scheduling.queue import next_spans
from tidelane.engine.slo import Slo, Timeline

# How long a slice may run when there is no decode step to end with: bounds how late a new decision can be.
LONE_SLICE_S = 0.25


class LanesScheduler:
    def __init__(self, *, max_running: int = 256, max_pass_tokens: int = 2048) -> None:
        self._max_running = max_running
        self._max_pass_tokens = max_pass_tokens
        self._border = Border()
        self._unsplit = MixedScheduler(max_running=max_running)

    @property
    def border(self) -> Border:
        return self._border

    def request_ended(self, timeline: Timeline, slo: Slo) -> None:
        missed_ttft = timeline.ttft_s > slo.ttft_target_s(timeline.input_tokens)
        self._border = learn(self._border, missed_tpot=timeline.tpot_s > slo.tpot_s, missed_ttft=missed_ttft)

    def plan(self, state: State, now_s: float) -> Plan:
        if not state.table.splits:
            return self._unsplit.plan(state, now_s)  # one core: nothing to give away
        flight = state.flight
        allotment = allot(state, decode_idle=flight.decode is None, max_running=self._max_running)
        waiting = [s for s in state.prefilling if s.id not in allotment.preempt and s.id not in flight.ids]
        has_prefill = bool(flight.prefill or state.paused or waiting or allotment.admit)
        has_decode = bool(flight.decode or allotment.decode)
        row = self._row(state, has_decode, has_prefill)

        decode = None
        if allotment.decode and flight.decode is None and _decode_fits(row, state):
            decode = DecodeBatch(tuple(s.id for s in allotment.decode))
        prefill = None
        if flight.prefill is None and _prefill_fits(row, state):
            prefill = self._slice(state, row, (*waiting, *allotment.admit), has_decode)
        return Plan(
            row,
            admit=tuple(q.id for q in allotment.admit),
            preempt=allotment.preempt,
            decode=decode,
            prefill=prefill,
        )

    def _row(self, state: State, has_decode: bool, has_prefill: bool) -> Partition:
        if not (has_decode and has_prefill):
            return state.table.whole
        tpot_s = min((s.tpot_s for s in state.decoding), default=state.objective.slo.tpot_s)
        self._border = place_border(self._border, state.table, state.measured.decode_step_s, tpot_s, state.objective)
        assert self._border.row is not None
        return self._border.row

    def _slice(
        self, state: State, row: Partition, waiting: tuple[Prefilling | Queued, ...], beside_decode: bool
    ) -> PrefillSlice | None:
        if state.paused is not None:
            job, spans, first = state.paused.job, state.paused.spans, state.paused.last_layer
        else:
            spans = next_spans(waiting, self._max_pass_tokens)
            if not spans:
                return None
            job, first = state.next_job, 0
        tokens = sum(span.tokens for span in spans)
        count = self._layers_per_slice(state, row, tokens, beside_decode)
        return PrefillSlice(job, spans, first, min(state.layers, first + count))

    def _layers_per_slice(self, state: State, row: Partition, tokens: int, beside_decode: bool) -> int:
        """As many layers as end with the decode step beside them (MuxWise: ceil(T_decode * layers / T_prefill))."""
        known = state.measured.prefill_token_layer_s
        if not known:
            return 1 if beside_decode else state.layers
        nearest = min(known, key=lambda units: abs(units - row.prefill_units))
        layer_s = known[nearest] * nearest / row.prefill_units * tokens
        step_s = predicted_step_s(row.decode_units, state.measured.decode_step_s)
        slice_s = step_s if beside_decode and step_s else LONE_SLICE_S
        return max(1, math.ceil(slice_s / layer_s))


def _decode_fits(row: Partition, state: State) -> bool:
    """Decode's part of `row` is free of the prefill slice that still runs."""
    return state.flight.prefill is None or row.decode_units + state.flight.prefill_units <= state.table.units


def _prefill_fits(row: Partition, state: State) -> bool:
    """Prefill's part of `row` is free of the decode step that still runs."""
    return state.flight.decode is None or state.flight.decode_units + row.prefill_units <= state.table.units
