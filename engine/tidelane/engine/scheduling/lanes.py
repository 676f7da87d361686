"""Prefill and decode side by side, each on its own lane, prefill in slices of layers.

Decode gets the smallest lane whose predicted step, times the guard, keeps every decoding request within its TPOT
budget; prefill gets the rest, in slices that end with the step (MuxWise, arXiv 2504.14489). Decode never waits for
a whole prompt: a finished prefill joins at the next step, and the border moves with whichever lane is free first. With
one side empty the other has the whole device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import msgspec
from msgspec.structs import replace

from tidelane.engine.estimation.estimates import Phase
from tidelane.engine.estimation.guard import Cell, cell_of
from tidelane.engine.estimation.passes import NO_WORK, PassWork, decode_work, prefill_work
from tidelane.engine.lanes.partition import Partition
from tidelane.engine.request import FLEX_RANK
from tidelane.engine.scheduling.budget import slack_s, step_budget_s
from tidelane.engine.scheduling.capacity import Filling, Growth, fill, grow
from tidelane.engine.scheduling.chunked import ChunkedScheduler
from tidelane.engine.scheduling.fused import TimeLeft, batch_work, fused_plan, largest_chunk
from tidelane.engine.scheduling.order import PROMOTED_AFTER_S, Order
from tidelane.engine.scheduling.plan import (
    Decision,
    DecodeBatch,
    Decoding,
    Plan,
    PrefillSlice,
    Span,
    State,
    Waiting,
)
from tidelane.engine.scheduling.streams import pass_s

# A pass takes this part of the TTFT target: all prompts in it are answered at its end, and what comes while it runs
# waits for that. If that is less than the fewest tokens worth a pass, it takes those, or what fits the larger part.
PASS_PART_OF_TTFT = 0.08
LARGEST_PART_OF_TTFT = 0.25
SMALLEST_PASS = 256
TINIEST_PASS = 64
LARGEST_PASS = 8192
# A fused chunk is at least so large that decode costs no more than this part of it, if the TPOT budget allows.
DECODE_PART_OF_CHUNK = 0.15
# The smallest chunk worth fusing.
SMALLEST_CHUNK = 64
# To fuse while a step runs, prefill must wait for its end: worth it only for more than this.
SWITCH_GAIN = 1.1
# After a prompt has joined, a decode step on the whole device must fit in this part of the TPOT target. `flex` work
# must leave room for what may come.
FULL_PART_OF_TPOT = 0.95
FULL_PART_OF_TPOT_FOR_FLEX = 0.6
# Where no lane keeps the budget, steps on the whole device make up for slower ones only if they are faster than this.
CATCHING_UP_PART_OF_TPOT = 0.9
# Of what a typical pass costs on a lane, to tell how fast prompts are worked off there.
TYPICAL_PASS = prefill_work(((0, 1024),))


class _Pass(msgspec.Struct, frozen=True):
    """A prefill pass that could be begun, or gone on with; `seconds` are those of all layers, beside decode if any."""

    job: int
    spans: tuple[Span, ...]
    admit: tuple[str, ...]
    first_layer: int
    seconds: float


class _Chunk(msgspec.Struct, frozen=True):
    """Tokens to prefill in one pass with a decode step, which takes `seconds`, and the rate of the best split."""

    tokens: int
    seconds: float
    lanes_tokens_s: float

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.seconds


class LanesScheduler:
    """`fixed` holds the border where it is (a static split), and with `apart` also while one side is empty: the lanes
    are devices of their own. `fuse` allows a fused chunk where, by prediction, it prefills faster than the best split.
    """

    def __init__(
        self,
        order: Order,
        *,
        fixed: Partition | None = None,
        apart: bool = False,
        fuse: bool = False,
        max_running: int = 256,
    ) -> None:
        self._order = order
        self._fixed = fixed
        self._apart = apart
        self._fuse = fuse
        self._max_running = max_running
        self._one_unit = ChunkedScheduler(order, max_running=max_running)

    def plan(self, state: State, now_s: float) -> Plan:
        if not state.table.splits:
            return self._one_unit.plan(state, now_s)  # nothing to give away
        flight, units = state.flight, state.table.units
        if (flight.decode and flight.prefill) or units in (flight.decode_units, flight.prefill_units):
            return Plan(state.table.whole)
        if (flight.prefill and not state.decoding) or (flight.decode and not _waits(state)):
            return Plan(state.table.whole)  # one side is at work, and the other has nothing to do
        if flight.idle and not _waits(state):
            return self._decode_alone(state, now_s)
        now = self._look(state, now_s)
        if flight.prefill is not None:
            return self._decode_beside(state, now, units - flight.prefill_units)
        if flight.decode is not None:
            return self._prefill_beside(state, now, units - flight.decode_units, now_s)
        return self._both_idle(state, now, now_s)

    def pace(self, state: State, now_s: float) -> float:
        """On the prefill lane beside what decodes, or in fused chunks where those are to be had."""
        if not state.table.splits:
            return self._one_unit.pace(state, now_s)
        if not state.decoding:
            return 1.0
        now = self._look(state, now_s)
        chunk = self._chunk(state, now)
        if chunk is not None:
            return self._chunk_pace(state, chunk)
        return self._lane_pace(state, now.row.prefill_units, beside_decode=True)

    # ---- the four situations ----------------------------------------------------------------------------------

    def _decode_alone(self, state: State, now_s: float) -> Plan:
        """Nothing to prefill, which is most steps of a light load: no lanes to weigh."""
        growth, whole = grow(state), self._alone(state)
        stepping, step_s = growth.decode, _alone_s(state, whole.decode_units, growth.decode)
        budget_s = step_budget_s(stepping, state.objective, now_s)
        if budget_s is not None and step_s > budget_s:
            stepping = _without_flex(stepping)
            step_s = _alone_s(state, whole.decode_units, stepping)
        if not stepping:
            return Plan(whole, preempt=growth.preempt)
        why = Decision(
            "nothing to prefill: decode on the whole device", len(state.decoding), len(state.queued), budget_s, step_s
        )
        return Plan(whole, preempt=growth.preempt, decode=DecodeBatch(tuple(s.id for s in stepping)), why=why)

    def _decode_beside(self, state: State, now: _Look, free_units: int) -> Plan:
        """A slice is running: decode takes its lane, or as much of it as is free."""
        if not now.stepping:
            return Plan(state.table.whole, preempt=now.growth.preempt)
        widest = max(row.decode_units for row in state.table.splits if row.decode_units <= free_units)
        units = min(widest, now.row.decode_units)
        why = now.decision("decode goes on beside a slice", step_s=now.step_s(state, units))
        return Plan(
            Partition(units, state.flight.prefill_units),
            preempt=now.growth.preempt,
            decode=DecodeBatch(tuple(s.id for s in now.stepping)),
            why=why,
        )

    def _prefill_beside(self, state: State, now: _Look, free_units: int, now_s: float) -> Plan:
        """A step is running: prefill takes its lane, or as much of it as is free."""
        units = min(now.row.prefill_units, free_units)
        if now.tight or self._chunk(state, now, gain=SWITCH_GAIN) is not None:
            return Plan(state.table.whole)  # the next step may need the whole device: wait for this one
        work = self._pass(state, now, units, now_s, beside_decode=True)
        if work is None:
            return Plan(state.table.whole)
        step_s = now.step_s(state, now.row.decode_units)
        prefill, slice_s = self._slice(state, work, step_s)
        why = now.decision("prefill goes on beside decode", step_s=step_s, slice_s=slice_s)
        return Plan(Partition(state.flight.decode_units, units), admit=work.admit, prefill=prefill, why=why)

    def _both_idle(self, state: State, now: _Look, now_s: float) -> Plan:
        whole = self._alone(state)
        preempt = now.growth.preempt
        if not now.stepping:
            work = self._pass(state, now, whole.prefill_units, now_s, beside_decode=False)
            if work is None:
                return Plan(whole, preempt=preempt)
            prefill = PrefillSlice(work.job, work.spans, work.first_layer, state.layers)
            why = now.decision("nothing decodes: prefill on the whole device", slice_s=work.seconds)
            return Plan(whole, admit=work.admit, preempt=preempt, prefill=prefill, why=why)
        chunk = self._chunk(state, now)
        if chunk is not None:
            return self._fused(state, now, chunk, now_s)
        decode = DecodeBatch(tuple(s.id for s in now.stepping))
        if now.tight and slack_s(now.stepping, now_s) < now.step_s(state, now.row.decode_units):
            step_s = now.step_s(state, whole.decode_units)
            why = now.decision("no lane keeps the TPOT target: this step on the whole device", step_s=step_s)
            return Plan(whole, preempt=preempt, decode=decode, why=why)
        work = self._pass(state, now, now.row.prefill_units, now_s, beside_decode=True)
        if work is None:
            step_s = now.step_s(state, whole.decode_units)
            why = now.decision("no one may join: decode on the whole device", step_s=step_s)
            return Plan(whole, preempt=preempt, decode=decode, why=why)
        step_s = now.step_s(state, now.row.decode_units)
        prefill, slice_s = self._slice(state, work, step_s)
        why = now.decision("the smallest decode lane within the TPOT budget", step_s, slice_s)
        return Plan(now.row, admit=work.admit, preempt=preempt, decode=decode, prefill=prefill, why=why)

    # ---- what they are made of --------------------------------------------------------------------------------

    def _alone(self, state: State) -> Partition:
        """What each phase may use while the other has nothing to do."""
        return self._fixed if self._fixed is not None and self._apart else state.table.whole

    def _look(self, state: State, now_s: float) -> _Look:
        growth = grow(state)
        stepping = growth.decode if state.flight.decode is None else state.decoding
        budget_s = step_budget_s(stepping, state.objective, now_s)
        beside = _beside(state)
        work = batch_work(stepping)
        row = self._row(state, budget_s, work, cell_of(work, beside))
        if row is None:
            stepping = _without_flex(stepping)
            work = batch_work(stepping)
            row = self._row(state, budget_s, work, cell_of(work, beside))
        cell = cell_of(work, beside)
        tight = row is None and self._fixed is None and _whole_catches_up(state, work)
        row = row or self._rows(state)[-1]
        return _Look(growth, stepping, work, cell, budget_s, row, tight, len(state.decoding), len(state.queued))

    def _row(self, state: State, budget_s: float | None, work: PassWork, cell: Cell) -> Partition | None:
        """The smallest decode lane on which the step keeps its budget, if one does."""
        rows = self._rows(state)
        if budget_s is None:
            return rows[0]
        for row in rows:
            if _step_s(state, row.decode_units, work, cell) <= budget_s:
                return row
        return None

    def _rows(self, state: State) -> tuple[Partition, ...]:
        """What there is to choose from, by rising decode share."""
        return (self._fixed,) if self._fixed is not None else _splits_within_bounds(state)

    def _pass(self, state: State, now: _Look, units: int, now_s: float, *, beside_decode: bool) -> _Pass | None:
        """What prefill would do next on `units`."""
        if not state.can_prefill:
            return None
        seconds = state.estimates.seconds
        slower = state.estimates.contention.prefill_slowdown if beside_decode else 1.0
        if state.paused is not None:
            paused = state.paused
            all_s = pass_s(state, units, paused) * slower
            return _Pass(paused.job, paused.spans, (), paused.last_layer, all_s)
        found = self._jobs(state, now_s, self._lane_pace(state, units, beside_decode=beside_decode))
        if found is None:
            return None
        start, jobs = found
        room = self._pass_tokens(state, units, start, beside_decode=beside_decode)
        filling = fill(state, now.growth, jobs, room, max_running=self._max_running)
        if not filling.spans:
            return None
        all_s = seconds(Phase.PREFILL, units, prefill_work((s.start, s.stop) for s in filling.spans)) * slower
        return _Pass(state.next_job, filling.spans, filling.admit, 0, all_s)

    def _lane_pace(self, state: State, units: int, *, beside_decode: bool) -> float:
        """How much longer a prompt takes on `units` than alone on all that prefill may have."""
        seconds = state.estimates.seconds
        slower = state.estimates.contention.prefill_slowdown if beside_decode else 1.0
        whole_s = seconds(Phase.PREFILL, self._alone(state).prefill_units, TYPICAL_PASS)
        return seconds(Phase.PREFILL, units, TYPICAL_PASS) * slower / whole_s

    def _chunk_pace(self, state: State, chunk: _Chunk) -> float:
        alone = prefill_work(((0, chunk.tokens),))
        return chunk.seconds / state.estimates.seconds(Phase.PREFILL, state.table.units, alone)

    def _pass_tokens(self, state: State, units: int, start: int, *, beside_decode: bool) -> int:
        """How many a pass on `units` takes, if `start` of its prompt are done."""
        slower = state.estimates.contention.prefill_slowdown if beside_decode else 1.0
        ttft_s = state.objective.slo.ttft_s / slower

        def most(part: float, tokens: int) -> int:
            return state.estimates.most_tokens(Phase.PREFILL, units, NO_WORK, start, part * ttft_s, tokens)

        usual = most(PASS_PART_OF_TTFT, LARGEST_PASS)
        if usual >= SMALLEST_PASS:
            return usual
        return max(TINIEST_PASS, most(LARGEST_PART_OF_TTFT, SMALLEST_PASS))

    def _may_join(self, state: State, newcomer: Waiting, now_s: float) -> bool:
        """With it in the batch, decode alone on the whole device still keeps the TPOT target.

        What is beyond that would make everyone late. Where nobody decodes, or the target is out of reach even for one
        alone, there is no one to harm; and nobody but `flex` waits for ever.
        """
        flex = newcomer.priority[0] >= FLEX_RANK
        if not state.decoding or (not flex and now_s - newcomer.ttft_due_s > PROMOTED_AFTER_S):
            return True
        limit_s = (FULL_PART_OF_TPOT_FOR_FLEX if flex else FULL_PART_OF_TPOT) * state.objective.slo.tpot_s
        seconds, units = state.estimates.seconds, self._alone(state).decode_units
        alone = decode_work(1, newcomer.tokens)
        if seconds(Phase.DECODE, units, batch_work(state.decoding) + alone) <= limit_s:
            return True
        return not flex and seconds(Phase.DECODE, units, alone) > limit_s

    def _jobs(self, state: State, now_s: float, pace: float) -> tuple[int, Iterator[Waiting]] | None:
        """Who is to be prefilled, in turn, and how far the first of them is; None if no one is or may be."""
        arranged = self._order.arrange(state, now_s, pace)
        first = next(arranged.jobs, None)
        if first is None or not self._may_join(state, first, now_s):
            return None
        return first.computed, chain((first,), arranged.jobs)

    def _chunk(self, state: State, now: _Look, gain: float = 1.0) -> _Chunk | None:
        """The chunk to fuse with the step, if it prefills `gain` times as fast as the best split, or if no split keeps
        the budget. A pass that has begun in slices goes on so."""
        if not self._fuse or state.paused is not None or now.budget_s is None:
            return None
        if not (state.queued or state.prefilling):
            return None
        seconds, units = state.estimates.seconds, state.table.units
        tokens = self._chunk_tokens(state, now, now.budget_s)
        if tokens < SMALLEST_CHUNK:
            return None
        fused_s = seconds(Phase.FUSED, units, now.work + prefill_work(((0, tokens),)))
        pass_tokens = self._pass_tokens(state, now.row.prefill_units, 0, beside_decode=True)
        alone_s = seconds(Phase.PREFILL, now.row.prefill_units, prefill_work(((0, pass_tokens),)))
        lanes_tokens_s = pass_tokens / (alone_s * state.estimates.contention.prefill_slowdown)
        chunk = _Chunk(tokens, fused_s, lanes_tokens_s)
        within_budget = now.step_s(state, now.row.decode_units) <= now.budget_s
        return chunk if chunk.tokens_s > gain * lanes_tokens_s or not within_budget else None

    def _slice(self, state: State, work: _Pass, step_s: float) -> tuple[PrefillSlice, float]:
        """As many layers as end with the decode step beside them: ceil(T_decode * layers / T_prefill), as in MuxWise.

        All of them where there is no border to move.
        """
        layer_s = work.seconds / state.layers
        count = state.layers if self._apart else max(1, math.ceil(step_s / layer_s))
        last = min(state.layers, work.first_layer + count)
        return PrefillSlice(work.job, work.spans, work.first_layer, last), (last - work.first_layer) * layer_s

    def _chunk_tokens(self, state: State, now: _Look, budget_s: float) -> int:
        """As many as fit a chunk beside which this decode step costs little, or a pass if that is longer: see
        `_pass_tokens`."""
        seconds, units = state.estimates.seconds, state.table.units
        beside_s = seconds(Phase.FUSED, units, now.work + TYPICAL_PASS)
        # More than prefill alone, but once that was found slower, and fused passes not yet, only their own times tell.
        decode_s = beside_s - min(seconds(phase, units, TYPICAL_PASS) for phase in (Phase.PREFILL, Phase.FUSED))
        ttft_s = state.objective.slo.ttft_s

        def most(limit_s: float, tokens: int) -> int:
            return largest_chunk(state, now.work, min(budget_s, limit_s), tokens)

        usual = most(max(PASS_PART_OF_TTFT * ttft_s, decode_s / DECODE_PART_OF_CHUNK), LARGEST_PASS)
        return usual if usual >= SMALLEST_PASS else max(usual, most(LARGEST_PART_OF_TTFT * ttft_s, SMALLEST_PASS))

    def _fused(self, state: State, now: _Look, chunk: _Chunk, now_s: float) -> Plan:
        found = self._jobs(state, now_s, self._chunk_pace(state, chunk))
        filling = Filling()
        if found is not None:
            room = TimeLeft(state, now.work, chunk.seconds)
            filling = fill(state, now.growth, found[1], chunk.tokens, max_running=self._max_running, room=room)
        growth = replace(now.growth, decode=now.stepping)
        if not filling.spans:
            return fused_plan(state, growth, filling, "no one may join: decode on the whole device", now.budget_s)
        plan = fused_plan(state, growth, filling, "a fused chunk prefills faster than the best split", now.budget_s)
        assert plan.why is not None
        why = replace(plan.why, lanes_tokens_s=chunk.lanes_tokens_s, fused_tokens_s=chunk.tokens_s)
        return replace(plan, why=why)


class _Look(msgspec.Struct, frozen=True):
    """What one decision starts from. `stepping` is the batch of the next step, or of the one that runs."""

    growth: Growth
    stepping: tuple[Decoding, ...]
    work: PassWork
    cell: Cell  # of the batch and of what prefills beside it, or would
    budget_s: float | None
    row: Partition
    tight: bool  # no lane keeps the budget, and steps on the whole device would catch up
    running: int
    waiting: int

    def step_s(self, state: State, units: int) -> float:
        return _step_s(state, units, self.work, self.cell)

    def decision(self, reason: str, step_s: float | None = None, slice_s: float | None = None) -> Decision:
        return Decision(reason, self.running, self.waiting, self.budget_s, step_s, slice_s)


def _step_s(state: State, units: int, work: PassWork, cell: Cell) -> float:
    """The predicted step: guarded on a lane, as it is on the whole device."""
    return state.estimates.guarded_decode_s(units, work, None if units == state.table.units else cell)


def _alone_s(state: State, units: int, stepping: tuple[Decoding, ...]) -> float:
    return state.estimates.seconds(Phase.DECODE, units, batch_work(stepping))


def _without_flex(stepping: tuple[Decoding, ...]) -> tuple[Decoding, ...]:
    """`flex` sequences sit out the steps that they would make too long for the others."""
    return tuple(s for s in stepping if s.priority[0] < FLEX_RANK)


def _whole_catches_up(state: State, work: PassWork) -> bool:
    step_s = state.estimates.seconds(Phase.DECODE, state.table.units, work)
    return step_s <= CATCHING_UP_PART_OF_TPOT * state.objective.slo.tpot_s


def _waits(state: State) -> bool:
    """Whether there is anything to prefill that is not in flight."""
    return state.paused is not None or bool(state.queued) or bool(state.prefilling)


def _beside(state: State) -> PassWork:
    """The pass that prefill is in, or one of the usual kind."""
    at_hand = state.flight.prefill or state.paused
    return TYPICAL_PASS if at_hand is None else prefill_work((span.start, span.stop) for span in at_hand.spans)


def _splits_within_bounds(state: State) -> tuple[Partition, ...]:
    """By rising decode share; all of them if none is within the objective's bounds."""
    table, objective = state.table, state.objective
    if objective.min_decode_share <= 0 and objective.max_decode_share >= 1:
        return table.splits
    within = tuple(
        row
        for row in table.splits
        if objective.min_decode_share <= row.decode_units / table.units <= objective.max_decode_share
    )
    return within or table.splits
