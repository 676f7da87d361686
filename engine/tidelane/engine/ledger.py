"""The books of the loop: which sequences there are, what each holds, what is in flight, and what to tell the front.

Single-threaded; the only code that changes a Sequence or the BlockPool.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType

from tidelane.engine.channel import Accepted, RefusalReason, Refused, ToFront, Tokens
from tidelane.engine.estimation.estimates import Estimates, Phase
from tidelane.engine.estimation.passes import NO_WORK, PassWork, decode_work
from tidelane.engine.execution.executor import Completion, Event, PrefillBack, PrefillLost, Sampled
from tidelane.engine.kv.cache import Holding, KVCache
from tidelane.engine.kv.moves import Fetch, Move
from tidelane.engine.kv.retention import UNKNOWN, Retention
from tidelane.engine.kv.stream_run import StreamRun
from tidelane.engine.lanes.partition import PartitionTable
from tidelane.engine.learning import Learner
from tidelane.engine.prefetch import LookAhead, NoLookAhead
from tidelane.engine.request import FLEX_RANK, FinishReason, NewToken, Request
from tidelane.engine.scheduling.plan import (
    Decoding,
    Flight,
    Late,
    Objective,
    Plan,
    PoolState,
    Prefilling,
    PrefillSlice,
    State,
)
from tidelane.engine.scheduling.refusal import LONGEST_RETRY_S
from tidelane.engine.scheduling.streams import pass_s
from tidelane.engine.sequence import Sequence
from tidelane.engine.slo import Slo, Timeline
from tidelane.engine.streams import MOST_FAILURES, StreamLine
from tidelane.engine.waiting import BlockNames, WaitingLine

_PRIORITY = attrgetter("priority")
# A prompt during which the process that prefills ended so often may well be what ends it.
MOST_PREFILLS_LOST = 3


def _at_once(_: int) -> float:
    """For those who know nothing of how long tiers take."""
    return 0.0


class Ledger:
    """`ended` hears of each request that ran to its end: its timeline (None: without a token) and its targets.

    `estimates` are where predictions start; what launches take corrects them. `fetch_s` predicts the fetch of so many
    blocks from the disk; `retention` makes what decides in a tier of the cache which blocks go, and `look_ahead` what
    brings KV up before it is asked for. Without `names` no two sequences share a block. What never fits the device
    streams through `stream_run` from host memory, and `read_s` predicts the reading of so many blocks there; without a
    run it is refused.
    """

    def __init__(
        self,
        *,
        table: PartitionTable,
        layers: int,
        block_tokens: int,
        blocks: int,
        queue_limit: int,
        objective: Objective,
        estimates: Estimates,
        ended: Callable[[Timeline | None, Slo], None],
        retention: Callable[[], Retention],
        names: BlockNames | None = None,
        host_slots: int = 0,
        disk_slots: int = 0,
        fetch_s: Callable[[int], float] = _at_once,
        look_ahead: Callable[[KVCache], LookAhead] = NoLookAhead,
        stream_run: StreamRun | None = None,
        read_s: Callable[[int], float] = _at_once,
    ) -> None:
        self.objective = objective
        self.draining = False
        self.preemptions = 0
        self.refusals: Counter[RefusalReason] = Counter()
        self._progress_s = 0.0  # when a launch last started or ended
        self.steps = 0  # launches that ended: decode steps and prefill slices
        self.flight = Flight()
        self.pool = KVCache(blocks, host_slots, disk_slots, retention)
        self._table = table
        self._layers = layers
        self._block_tokens = block_tokens
        self._queue_limit = queue_limit
        self._ended = ended
        self._sequences: dict[str, Sequence] = {}
        self._newcomers: dict[str, Sequence] = {}  # neither accepted nor refused yet
        self._running: list[Sequence] = []  # by priority
        self._aborted: set[str] = set()  # still in flight or in a paused pass
        self._paused: PrefillSlice | None = None
        self._no_prefill_since_s: float | None = None
        self._next_job = 1
        self._learner = Learner(estimates, layers)
        self.streams = StreamLine(self.pool, stream_run, block_tokens, read_s)
        self._names = names
        self._ahead = look_ahead(self.pool)
        self._waiting = WaitingLine(self.pool, names, block_tokens, self._prefill_s, fetch_s, self._ahead)
        # What `state` shows of the running sequences, until one of them changes. (The blocks that a step's sequences
        # get do not count: nobody asks while it runs.)
        self._view: tuple[tuple[Prefilling, ...], tuple[Decoding, ...]] | None = None
        self._outbox: list[ToFront] = []

    # ---- what others see --------------------------------------------------------------------------------------

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        return MappingProxyType(self._sequences)

    @property
    def running(self) -> int:
        return len(self._running) + self.streams.running

    @property
    def waiting(self) -> int:
        return len(self._waiting) + self.streams.waiting

    @property
    def estimates(self) -> Estimates:
        return self._learner.estimates

    @property
    def lacks_room(self) -> bool:
        """Whether the first in the queue waits for blocks, or would."""
        return self._missing_blocks() > 0

    @property
    def empty(self) -> bool:
        return not self._sequences

    def still_for_s(self, now_s: float) -> float:
        """How long what is in flight has neither been joined by a launch nor ended, or no prefill could be launched,
        whichever is longer; 0 when neither is so."""
        still_s = 0.0 if self.flight.idle else now_s - self._progress_s
        return still_s if self._no_prefill_since_s is None else max(still_s, now_s - self._no_prefill_since_s)

    def take_moves(self) -> list[Move]:
        """To be started before the launches of the plan just applied: those may read what the moves bring."""
        return self.pool.take_moves()

    def moved(self, move: Move, *, well: bool) -> None:
        self.pool.moved(move, well=well)
        if isinstance(move, Fetch):
            self._waiting.fetched(move.key)
            self._ahead.fetched(move.key)

    def lose_patience(self, now_s: float) -> None:
        """Wait no longer for a disk that does not answer."""
        self._waiting.lose_patience(now_s)

    def make_way(self, now_s: float) -> None:
        """Keep what is free for the context that is to stream next: those who plan hear of it once it has all."""
        self.streams.collect(now_s)

    def look_ahead(self, now_s: float) -> None:
        """Bring KV up for prompts that should come, where it is in nobody's way who is here."""
        room_is_short = self.draining or self.lacks_room
        if room_is_short or not self._waiting.fetching:
            self._ahead.act(now_s, room_is_short=room_is_short)

    @property
    def next_look_ahead_s(self) -> float | None:
        """When to do so, if nothing else happens before; None: nothing is due."""
        return self._ahead.next_s

    @property
    def brings_up(self) -> bool:
        """Whether KV is on its way for prompts that should come."""
        return self._ahead.busy

    def take_outbox(self) -> list[ToFront]:
        messages, self._outbox = self._outbox, []
        return messages

    def state(self) -> State:
        if self._view is None:
            self._view = self._look()
        prefilling, decoding = self._view
        return State(
            table=self._table,
            layers=self._layers,
            pool=self._pool_state(len(decoding)),
            objective=self.objective,
            estimates=self.estimates,
            flight=self.flight,
            paused=self._paused,
            next_job=self._next_job,
            can_prefill=self._no_prefill_since_s is None,
            queued=self._waiting.by_priority(),
            queued_by_due=self._waiting.by_due(),
            newcomers=self._waiting.jobs(each for each in self._newcomers.values() if each.stream is None),
            prefilling=prefilling,
            decoding=decoding,
            stream=self.streams.view(),
        )

    # ---- what happens -----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Refuse `request`, or queue it until the next plan says whether it is accepted."""
        # One token of room even if none is wanted, as admission asks for.
        most_tokens = len(request.prompt) + max(1, request.max_new_tokens)
        streams = self._blocks_for(most_tokens) > self.streams.resident_blocks
        if self.draining:
            self._refuse(request, RefusalReason.DRAINING, "the engine is shutting down", retry_after_s=5.0)
        elif streams and most_tokens > self.streams.most_tokens:
            self._refuse(request, RefusalReason.NEVER_FITS, self._never_fits(request))
        elif self.waiting >= self._queue_limit:
            message = f"{self.waiting} requests are waiting already"
            self._refuse(request, RefusalReason.QUEUE_FULL, message, retry_after_s=self._queue_drain_s())
        else:
            sequence = Sequence(request, self.objective.slo.for_request(request.ttft_s, request.tpot_s))
            self._sequences[request.id] = sequence
            self._newcomers[request.id] = sequence
            if streams:
                self.streams.add(sequence)
            else:
                self._waiting.add(sequence)

    def abort(self, request_id: str, *, satisfied: bool) -> None:
        """Stop the sequence and free its KV, now or when what is in flight for it has ended.

        `satisfied`: the front has all it wants (a stop string came up), so the request counts as finished.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or request_id in self._aborted:
            return
        if satisfied:
            self._ended(sequence.timeline(), sequence.slo)
        self._drop(sequence)

    def fail_all(self, error: str, now_s: float) -> None:
        """End every sequence with an error: nothing more will be computed."""
        self._accept_newcomers()
        for sequence in [s for s in self._sequences.values() if s.id not in self._aborted]:
            self._finish(sequence, (), FinishReason.ERROR, now_s, error)

    def apply(self, plan: Plan, now_s: float) -> None:
        """Answer newcomers, move blocks as `plan` says and note its launches as in flight."""
        for late in plan.refuse:
            self._refuse_late(late)
        self._accept_newcomers()
        if plan.launches:
            self._progress_s = now_s
        for sequence_id in plan.preempt:
            self._preempt(self._sequences[sequence_id])
        self._admit([self._sequences[sequence_id] for sequence_id in plan.admit])
        if plan.decode is not None:
            for sequence_id in plan.decode.ids:
                self._grow(self._sequences[sequence_id])
            flight = self.flight
            self.flight = Flight(plan.decode, plan.partition.decode_units, flight.prefill, flight.prefill_units)
        if plan.prefill is not None:
            for span in plan.prefill.spans:
                sequence = self._sequences[span.id]
                if sequence.prefill_start_s is None:
                    sequence.prefill_start_s = now_s
            streams = self.streams.owns(plan.prefill)
            if streams:
                self.streams.launched(self._slice_s(plan))
            else:
                self._paused = None
            self._next_job = max(self._next_job, plan.prefill.job + 1)
            flight = self.flight
            self.flight = Flight(flight.decode, flight.decode_units, plan.prefill, plan.partition.prefill_units)
        self._learner.launched(plan, self.flight, awaits_kv=self._awaits_kv(plan.prefill))

    def hear(self, event: Event, now_s: float) -> None:
        match event:
            case Completion():
                self.commit(event, now_s)
            case PrefillLost():
                self._no_prefill_since_s = now_s
                self._lose_prefill(event.prefill, now_s)
            case PrefillBack():
                self._no_prefill_since_s = None

    def commit(self, completion: Completion, now_s: float) -> None:
        """Take what a launch produced: computed tokens, new tokens, finished requests, freed blocks."""
        self._learner.ended(completion, self._decoded(completion), self.flight.prefill)
        self.steps += 1
        self._progress_s = now_s
        if self.streams.owns(completion.prefill):
            self._commit_stream(completion, now_s)
            return
        self.streams.others_ended()
        touched: list[tuple[str, int]] = []
        if completion.decode is not None:
            self.flight = Flight(prefill=self.flight.prefill, prefill_units=self.flight.prefill_units)
            touched += [(i, self._sequences[i].computed + 1) for i in completion.decode.ids]
        if completion.prefill is not None:
            self.flight = Flight(self.flight.decode, self.flight.decode_units)
            if completion.failure is None and completion.prefill.last_layer < self._layers:
                self._paused = completion.prefill
            else:
                touched += [(span.id, span.stop) for span in completion.prefill.spans]
        if completion.failure is not None:
            self._fail_launch([self._sequences[i] for i, _ in touched], completion.failure, now_s)
            return
        if touched:
            self._view = None
        filled: list[Sequence] = []
        for sequence_id, computed in touched:
            sequence = self._sequences[sequence_id]
            sequence.computed, sequence.seen = computed, None
            if computed // self._block_tokens > sequence.settled:
                filled.append(sequence)
        if filled and self._names is not None:
            self._publish(filled, self._names, {sampled.id for sampled in completion.sampled if sampled.failed})
        for sampled in completion.sampled:
            self._take_sample(self._sequences[sampled.id], sampled, now_s)

    def steps_in_a_row(self) -> int:
        """How often the decode step in flight can be taken again, by what is known, with nothing to decide between: all
        that there is decodes in it, and none will end or lack a block. 0 if `flex` takes part, which may sit out."""
        decode = self.flight.decode
        if decode is None or self.flight.prefill is not None or self.waiting or self._paused or self._aborted:
            return 0
        if self.streams.running:
            return 0
        if len(decode.ids) != len(self._running) or self._running[-1].priority[0] >= FLEX_RANK:
            return 0
        steps = min(s.request.max_new_tokens - s.output_tokens for s in self._running) - 1
        missing = sum(self._blocks_for(s.computed + steps + 1) - len(s.blocks) for s in self._running)
        return steps if missing <= self.pool.free else 0

    def run_on(self, steps: list[Completion]) -> None:
        """Take what the decode step in flight produced, and as many repetitions of it, up to `steps_in_a_row`, right
        one after the other: in each of them the token 0, which stops none, for each sequence. One more is in flight.
        Only virtual time knows of so many steps at once."""
        decode = self.flight.decode
        assert decode is not None
        batch, context = len(decode.ids), sum(s.computed for s in self._running)
        for number, step in enumerate(steps):
            self._learner.ended(step, decode_work(batch, context + batch * number), None)
        times_s = [step.ended_s for step in steps]
        for sequence in self._running:
            sequence.run_on(0, times_s)
            self._grow(sequence)
        self.steps += len(steps)
        self._progress_s = times_s[-1]
        self._view = None

    def abandoned_pass(self) -> int | None:
        """The job of a paused pass that no living sequence waits for, if there is one; its sequences are let go."""
        streamed = self.streams.paused
        if streamed is not None and streamed.spans[0].id in self._aborted:
            self._release(self._sequences[streamed.spans[0].id])
            return streamed.job
        if self._paused is None or not all(span.id in self._aborted for span in self._paused.spans):
            return None
        job, spans = self._paused.job, self._paused.spans
        self._paused = None
        for span in spans:
            self._release(self._sequences[span.id])
        return job

    # ---- how --------------------------------------------------------------------------------------------------

    def _pool_state(self, decoding: int) -> PoolState:
        free = self.pool.free
        if free >= decoding or (self._names is None and not self.streams.waiting):
            return PoolState(free, self._block_tokens)
        shared = {sequence.id: self.pool.shared(sequence.holding) for sequence in self._running}
        return PoolState(free, self._block_tokens, {name: blocks for name, blocks in shared.items() if blocks})

    def _look(self) -> tuple[tuple[Prefilling, ...], tuple[Decoding, ...]]:
        prefilling: list[Prefilling] = []
        decoding: list[Decoding] = []
        for sequence in self._running:
            if sequence.request.id in self._aborted:
                continue
            seen = sequence.seen
            if seen is None:
                seen = sequence.seen = sequence.view()
            if isinstance(seen, Decoding):
                decoding.append(seen)
            else:
                prefilling.append(seen)
        return tuple(prefilling), tuple(decoding)

    def _refuse(
        self, request: Request, reason: RefusalReason, message: str, retry_after_s: float | None = None
    ) -> None:
        self.refusals[reason] += 1
        self._outbox.append(Refused(request.id, reason, message, retry_after_s))
        if reason is not RefusalReason.NEVER_FITS:
            self._ended(None, self.objective.slo)

    def _accept_newcomers(self) -> None:
        self._outbox += [Accepted(newcomer) for newcomer in self._newcomers]
        self._newcomers.clear()

    def _never_fits(self, request: Request) -> str:
        what = f"{len(request.prompt)} prompt tokens and {request.max_new_tokens} new ones can never fit: the KV cache"
        here = self.streams.resident_blocks * self._block_tokens
        if self.streams.most_tokens:
            return (
                f"{what} holds {here} tokens on the device and {self.streams.most_tokens} in host memory: "
                "ask for fewer, or give it more host memory (kvCache.hostMemory, --kv-host-memory)"
            )
        return f"{what} holds {here} tokens"

    def _refuse_late(self, late: Late) -> None:
        request = self._sequences[late.id].request
        message = (
            f"The first token would come {late.ttft_s:.1f} s after the request, and its target is {late.target_s:.1f} s"
        )
        self._release(self._sequences[late.id])
        self._refuse(request, RefusalReason.WOULD_BE_LATE, message, retry_after_s=late.retry_after_s)

    def _prefill_s(self, work: PassWork) -> float:
        return self.estimates.seconds(Phase.PREFILL, self._table.units, work)

    def _queue_drain_s(self) -> float:
        """When a place should be free, as predicted: whichever takes longer, computing the prompts ahead on the whole
        device, or blocks for the first of them. One second at least."""
        return min(LONGEST_RETRY_S, max(1.0, self._waiting.work_s, self._blocks_wait_s()))

    def _blocks_wait_s(self) -> float:
        """When running sequences, each to the end of its budget, have given back what the first in the queue needs."""
        missing = self._missing_blocks()
        if missing <= 0:
            return 0.0
        running = [s for s in self._running if s.id not in self._aborted]
        batch = decode_work(len(running), sum(s.computed for s in running))
        step_s = self.estimates.seconds(Phase.DECODE, self._table.units, batch)
        wait_s = 0.0
        for tokens_left, blocks in sorted((s.request.max_new_tokens - s.output_tokens, len(s.blocks)) for s in running):
            if missing <= 0:
                break
            missing -= blocks + 1
            wait_s = tokens_left * step_s
        return wait_s

    def _missing_blocks(self) -> int:
        """For the first in the queue; admission keeps a block free for each that decodes. Not above 0: none."""
        first = self._waiting.first
        return 0 if first is None else self._blocks_for(first.tokens + 1) + len(self._running) - self.pool.free

    def _admit(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            job = self._waiting.remove(sequence)
            assert job is not None
            insort(self._running, sequence, key=_PRIORITY)
            self._view = None
            sequence.computed, sequence.seen, sequence.found = job.cached, None, job.cached
            sequence.settled = job.cached // self._block_tokens
            if sequence.found_at_first is None:
                sequence.found_at_first = job.cached
            sequence.holding = self.pool.hold(sequence.keys[: sequence.settled], sequence.asker or UNKNOWN)
        # Not before each has what was found of it: room is made of what nobody holds.
        for sequence in sequences:
            self.pool.extend(sequence.holding, self._blocks_for(len(sequence.tokens) + 1))

    def _preempt(self, sequence: Sequence) -> None:
        self._requeue(sequence)
        self.preemptions += 1

    def _requeue(self, sequence: Sequence) -> None:
        """Back to its own place in the queue; what it has generated is kept and computed again."""
        del self._running[bisect_left(self._running, sequence.priority, key=_PRIORITY)]
        self.pool.give_up(sequence.holding)
        sequence.holding, sequence.computed, sequence.settled, sequence.seen = Holding(), 0, 0, None
        sequence.decodes = False
        sequence.prompt_logprobs = []
        self._view = None
        self._waiting.add(sequence)

    def _lose_prefill(self, lost: PrefillSlice | None, now_s: float) -> None:
        """Every prompt that is not done is queued again; one that was being computed too many times is given up."""
        self.flight = Flight(self.flight.decode, self.flight.decode_units)
        self._paused = None
        hit = {span.id for span in lost.spans} if lost is not None else set()
        for sequence in [s for s in self._running if isinstance(s.view(), Prefilling)]:
            sequence.prefills_lost += sequence.id in hit
            if sequence.id in self._aborted:
                self._release(sequence)
            elif sequence.prefills_lost >= MOST_PREFILLS_LOST:
                error = f"the process that prefills ended {sequence.prefills_lost} times while it was at this prompt"
                self._finish(sequence, (), FinishReason.ERROR, now_s, error)
            else:
                self._requeue(sequence)

    def _grow(self, sequence: Sequence) -> None:
        if sequence.computed >= len(sequence.blocks) * self._block_tokens:
            self.pool.extend(sequence.holding, self._blocks_for(sequence.computed + 1))

    def _publish(self, filled: list[Sequence], names: BlockNames, failed: set[str]) -> None:
        """Let others use the blocks that are full by now."""
        for sequence in filled:
            if sequence.id in failed:
                continue
            full = sequence.computed // self._block_tokens
            names.extend(sequence.keys, sequence.request, sequence.tokens, full)
            for key in sequence.keys[sequence.settled : full]:
                self.pool.name(sequence.holding, key)
            sequence.settled = full

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _take_sample(self, sequence: Sequence, sampled: Sampled, now_s: float) -> None:
        if sequence.id in self._aborted:
            self._release(sequence)
            return
        if sampled.failed:
            self.pool.spoil(sequence.holding)
            self._finish(sequence, (), FinishReason.ERROR, now_s, "the model's output is not a number")
            return
        if sampled.prompt_logprobs is not None:
            sequence.prompt_logprobs += sampled.prompt_logprobs
        if sampled.token is not None:
            finish = sequence.append(sampled.token, now_s)
            if finish is None:
                self._tell(sequence, (sampled.token,), now_s)
            else:
                self._finish(sequence, (sampled.token,), finish, now_s)
        elif sequence.computed == len(sequence.tokens):  # only the prompt's log-probabilities were wanted
            self._finish(sequence, (), FinishReason.LENGTH, now_s)

    def _commit_stream(self, completion: Completion, now_s: float) -> None:
        """A slice of its pass: of that nothing counts before the end of its last one."""
        prefill = completion.prefill
        assert prefill is not None
        self.flight = Flight(self.flight.decode, self.flight.decode_units)
        (span,) = prefill.spans
        sequence = self._sequences[span.id]
        if completion.failure is not None:
            if self.streams.failed(completion) or sequence.id in self._aborted:
                self._fail(sequence, f"a pass failed {MOST_FAILURES} times, at last by {completion.failure}", now_s)
            return
        self.streams.ended(completion, self._layers)
        if prefill.last_layer == self._layers:
            sequence.computed = span.stop
            (sampled,) = completion.sampled
            self._take_sample(sequence, sampled, now_s)

    def _slice_s(self, plan: Plan) -> float:
        """What the plan's slice of what streams takes by prediction."""
        prefill = plan.prefill
        assert prefill is not None
        all_s = pass_s(self.state(), plan.partition.prefill_units, prefill)
        return all_s * (prefill.last_layer - prefill.first_layer) / self._layers

    def _fail_launch(self, sequences: list[Sequence], failure: str, now_s: float) -> None:
        """Who waited for KV that did not come is queued again, and who was launched with them goes on from where he
        was. Of any other failure nobody knows whose it is."""
        lost = [sequence for sequence in sequences if self.pool.lose(sequence.holding)]
        for sequence in sequences:
            if not lost or sequence.id in self._aborted:
                self._fail(sequence, failure, now_s)
            elif sequence in lost:
                self._requeue(sequence)

    def _fail(self, sequence: Sequence, failure: str, now_s: float) -> None:
        if sequence.id in self._aborted:
            self._release(sequence)
        else:
            self._finish(sequence, (), FinishReason.ERROR, now_s, failure)

    def _finish(
        self,
        sequence: Sequence,
        new: tuple[NewToken, ...],
        reason: FinishReason,
        now_s: float,
        error: str | None = None,
    ) -> None:
        timeline = sequence.timeline() if error is None else None
        self._tell(sequence, new, now_s, reason, timeline, error)
        self._ended(timeline, sequence.slo)
        self._drop(sequence)

    def _tell(
        self,
        sequence: Sequence,
        new: tuple[NewToken, ...],
        now_s: float,
        finish: FinishReason | None = None,
        timeline: Timeline | None = None,
        error: str | None = None,
    ) -> None:
        first = sequence.output_tokens <= 1
        report = None
        if sequence.prompt_logprobs and not sequence.prompt_logprobs_sent:
            report = tuple(sequence.prompt_logprobs)
            sequence.prompt_logprobs, sequence.prompt_logprobs_sent = [], True
        self._outbox.append(
            Tokens(
                sequence.id,
                new,
                now_s,
                cached_tokens=(sequence.found_at_first or 0) if first else 0,
                prompt_logprobs=report,
                prefill_start_s=sequence.prefill_start_s if first else None,
                finish=finish,
                timeline=timeline,
                error=error,
            )
        )

    def _drop(self, sequence: Sequence) -> None:
        """Free everything, at once unless a launch still reads or writes it."""
        paused = {span.id for each in (self._paused, self.streams.paused) if each is not None for span in each.spans}
        if sequence.id in self.flight.ids or sequence.id in paused:
            self._aborted.add(sequence.id)
            self._view = None
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._aborted.discard(sequence.id)
        self._newcomers.pop(sequence.id, None)
        self._view = None
        del self._sequences[sequence.id]
        if sequence.stream is not None:
            self.streams.remove(sequence)
            return
        if self._waiting.remove(sequence) is None:
            del self._running[bisect_left(self._running, sequence.priority, key=_PRIORITY)]
        self._ahead.ended(sequence.id, sequence.holding, sequence.asker or UNKNOWN)
        self.pool.give_up(sequence.holding)

    def _awaits_kv(self, prefill: PrefillSlice | None) -> bool:
        spans = () if prefill is None else prefill.spans
        if self.streams.owns(prefill):
            return True
        return any(self.pool.awaits(self._sequences[span.id].holding) for span in spans)

    def _decoded(self, completion: Completion) -> PassWork:
        if completion.decode is None:
            return NO_WORK
        ids, sequences = completion.decode.ids, self._sequences
        return decode_work(len(ids), sum([sequences[i].computed for i in ids]))
