"""The books of the loop: which sequences there are, what each holds, what is in flight, and what to tell the front.

Single-threaded; the only code that changes a Sequence or the BlockPool.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from tidelane.engine.channel import Accepted, RefusalReason, Refused, ToFront, Tokens
from tidelane.engine.execution.executor import Completion, Sampled
from tidelane.engine.kv.blocks import BlockPool
from tidelane.engine.lanes.partition import PartitionTable
from tidelane.engine.request import FinishReason, NewToken, Request
from tidelane.engine.scheduling.plan import (
    Decoding,
    Flight,
    Measured,
    Objective,
    Plan,
    PoolState,
    Prefilling,
    PrefillSlice,
    Priority,
    Queued,
    State,
)
from tidelane.engine.sequence import Sequence
from tidelane.engine.slo import Slo, Timeline

# Schedulers look at no more of the queue than this: enough to fill any pass, and planning stays cheap with thousands.
QUEUE_HEAD = 64
# Weight of the newest measurement in the running means.
LEARNING_RATE = 0.2


class Ledger:
    """`ended` hears of each request that ran to its end: its timeline (None: without a token) and its targets."""

    def __init__(
        self,
        *,
        table: PartitionTable,
        layers: int,
        block_tokens: int,
        blocks: int,
        queue_limit: int,
        objective: Objective,
        ended: Callable[[Timeline | None, Slo], None],
    ) -> None:
        self.objective = objective
        self.draining = False
        self.preemptions = 0
        self.refusals = 0
        self._progress_s = 0.0  # when a launch last started or ended
        self.steps = 0  # launches that ended: decode steps and prefill slices
        self.flight = Flight()
        self.pool = BlockPool(blocks)
        self._table = table
        self._layers = layers
        self._block_tokens = block_tokens
        self._queue_limit = queue_limit
        self._ended = ended
        self._sequences: dict[str, Sequence] = {}
        self._queued: list[Priority] = []  # sorted; a priority ends with the sequence's id
        self._running: list[Priority] = []
        self._aborted: set[str] = set()  # still in flight or in a paused pass
        self._paused: PrefillSlice | None = None
        self._next_job = 1
        self._measured = Measured()
        self._outbox: list[ToFront] = []

    # ---- what others see --------------------------------------------------------------------------------------

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        return MappingProxyType(self._sequences)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queued)

    @property
    def empty(self) -> bool:
        return not self._sequences

    def still_for_s(self, now_s: float) -> float:
        """How long what is in flight has neither been joined by a launch nor ended; 0 when nothing is."""
        return 0.0 if self.flight.idle else now_s - self._progress_s

    def take_outbox(self) -> list[ToFront]:
        messages, self._outbox = self._outbox, []
        return messages

    def state(self) -> State:
        prefilling: list[Prefilling] = []
        decoding: list[Decoding] = []
        for sequence in self._live(self._running):
            if sequence.decoding:
                decoding.append(
                    Decoding(
                        sequence.id, sequence.priority, sequence.computed, len(sequence.blocks), sequence.slo.tpot_s
                    )
                )
            else:
                prefilling.append(
                    Prefilling(
                        sequence.id, sequence.priority, len(sequence.tokens), sequence.computed, sequence.ttft_due_s
                    )
                )
        queued = tuple(
            Queued(s.id, s.priority, len(s.tokens), s.ttft_due_s) for s in self._live(self._queued[:QUEUE_HEAD])
        )
        return State(
            table=self._table,
            layers=self._layers,
            pool=PoolState(self.pool.free, self._block_tokens),
            objective=self.objective,
            flight=self.flight,
            paused=self._paused,
            next_job=self._next_job,
            queued=queued,
            prefilling=tuple(prefilling),
            decoding=tuple(decoding),
            measured=Measured(dict(self._measured.decode_step_s), dict(self._measured.prefill_token_layer_s)),
        )

    # ---- what happens -----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue `request`, or refuse it; the outbox says which."""
        # One token of room even if none is wanted, as admission asks for.
        most_tokens = len(request.prompt) + max(1, request.max_new_tokens)
        blocks = PoolState(self.pool.free, self._block_tokens).blocks_for(most_tokens)
        if self.draining:
            self._refuse(request, RefusalReason.DRAINING, "the engine is shutting down", retry_after_s=5.0)
        elif blocks > self.pool.total:
            room = self.pool.total * self._block_tokens
            message = (
                f"{len(request.prompt)} prompt tokens and {request.max_new_tokens} new ones can never fit: "
                f"the KV cache holds {room} tokens"
            )
            self._refuse(request, RefusalReason.NEVER_FITS, message)
        elif len(self._queued) >= self._queue_limit:
            message = f"{len(self._queued)} requests are waiting already"
            self._refuse(request, RefusalReason.QUEUE_FULL, message, retry_after_s=self._queue_drain_s())
        else:
            sequence = Sequence(request, self.objective.slo.for_request(request.ttft_s, request.tpot_s))
            self._sequences[request.id] = sequence
            insort(self._queued, sequence.priority)
            self._outbox.append(Accepted(request.id))

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
        for sequence in [s for s in self._sequences.values() if s.id not in self._aborted]:
            self._finish(sequence, (), FinishReason.ERROR, now_s, error)

    def apply(self, plan: Plan, now_s: float) -> None:
        """Move blocks as `plan` says and note its launches as in flight."""
        if plan.launches:
            self._progress_s = now_s
        for sequence_id in plan.preempt:
            self._preempt(self._sequences[sequence_id])
        for sequence_id in plan.admit:
            self._admit(self._sequences[sequence_id])
        if plan.decode is not None:
            for sequence_id in plan.decode.ids:
                self._grow(self._sequences[sequence_id])
            self.flight = replace(self.flight, decode=plan.decode, decode_units=plan.partition.decode_units)
        if plan.prefill is not None:
            for span in plan.prefill.spans:
                sequence = self._sequences[span.id]
                if sequence.prefill_start_s is None:
                    sequence.prefill_start_s = now_s
            self._paused = None
            self._next_job = max(self._next_job, plan.prefill.job + 1)
            self.flight = replace(self.flight, prefill=plan.prefill, prefill_units=plan.partition.prefill_units)

    def commit(self, completion: Completion, now_s: float) -> None:
        """Take what a launch produced: computed tokens, new tokens, finished requests, freed blocks."""
        self._learn(completion)
        self.steps += 1
        self._progress_s = now_s
        touched: list[tuple[str, int]] = []
        if completion.decode is not None:
            self.flight = replace(self.flight, decode=None, decode_units=0)
            touched += [(i, self._sequences[i].computed + 1) for i in completion.decode.ids]
        if completion.prefill is not None:
            self.flight = replace(self.flight, prefill=None, prefill_units=0)
            if completion.failure is None and completion.prefill.last_layer < self._layers:
                self._paused = completion.prefill
            else:
                touched += [(span.id, span.stop) for span in completion.prefill.spans]
        if completion.failure is not None:
            for sequence in [self._sequences[i] for i, _ in touched]:
                self._fail(sequence, completion.failure, now_s)
            return
        for sequence_id, computed in touched:
            self._sequences[sequence_id].computed = computed
        for sampled in completion.sampled:
            self._take_sample(self._sequences[sampled.id], sampled, now_s)

    def abandoned_pass(self) -> int | None:
        """The job of a paused pass that no living sequence waits for, if there is one; its sequences are let go."""
        if self._paused is None or not all(span.id in self._aborted for span in self._paused.spans):
            return None
        job, spans = self._paused.job, self._paused.spans
        self._paused = None
        for span in spans:
            self._release(self._sequences[span.id])
        return job

    # ---- how --------------------------------------------------------------------------------------------------

    def _live(self, priorities: list[Priority]) -> Iterator[Sequence]:
        return (self._sequences[p[-1]] for p in priorities if p[-1] not in self._aborted)

    def _refuse(
        self, request: Request, reason: RefusalReason, message: str, retry_after_s: float | None = None
    ) -> None:
        self.refusals += 1
        self._outbox.append(Refused(request.id, reason, message, retry_after_s))
        if reason is not RefusalReason.NEVER_FITS:
            self._ended(None, self.objective.slo)

    def _queue_drain_s(self) -> float:
        """When a place should be free: whichever takes longer, computing the prompts ahead at the measured speed, or
        blocks for the first of them. One second at least."""
        known = self._measured.prefill_token_layer_s
        token_s = known[max(known)] * self._layers if known else 0.0
        ahead = sum(len(self._sequences[p[-1]].tokens) for p in self._queued[:QUEUE_HEAD])
        return min(60.0, max(1.0, ahead * token_s, self._blocks_wait_s()))

    def _blocks_wait_s(self) -> float:
        """When running sequences, each to the end of its budget, have given back what the first in the queue needs."""
        head = next(self._live(self._queued), None)
        if head is None:
            return 0.0
        step_s = max(self._measured.decode_step_s.values(), default=0.0)
        # Admission keeps a block free for each that decodes.
        missing = self._blocks_for(len(head.tokens) + 1) + len(self._running) - self.pool.free
        wait_s = 0.0
        for tokens_left, blocks in sorted(
            (s.request.max_new_tokens - s.output_tokens, len(s.blocks)) for s in self._live(self._running)
        ):
            if missing <= 0:
                break
            missing -= blocks + 1
            wait_s = tokens_left * step_s
        return wait_s

    def _admit(self, sequence: Sequence) -> None:
        del self._queued[bisect_left(self._queued, sequence.priority)]
        insort(self._running, sequence.priority)
        sequence.blocks = self.pool.allocate(self._blocks_for(len(sequence.tokens) + 1))

    def _preempt(self, sequence: Sequence) -> None:
        """Back to its own place in the queue; what it has generated is kept and computed again."""
        del self._running[bisect_left(self._running, sequence.priority)]
        insort(self._queued, sequence.priority)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0
        self.preemptions += 1

    def _grow(self, sequence: Sequence) -> None:
        missing = self._blocks_for(sequence.computed + 1) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing, after=sequence.blocks[-1])

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _take_sample(self, sequence: Sequence, sampled: Sampled, now_s: float) -> None:
        if sequence.id in self._aborted:
            self._release(sequence)
            return
        if sampled.failed:
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
                prompt_logprobs=report,
                prefill_start_s=sequence.prefill_start_s if first else None,
                finish=finish,
                timeline=timeline,
                error=error,
            )
        )

    def _drop(self, sequence: Sequence) -> None:
        """Free everything, at once unless a launch still reads or writes it."""
        paused = {span.id for span in self._paused.spans} if self._paused is not None else set()
        if sequence.id in self.flight.ids or sequence.id in paused:
            self._aborted.add(sequence.id)
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._aborted.discard(sequence.id)
        del self._sequences[sequence.id]
        for line in (self._queued, self._running):
            at = bisect_left(line, sequence.priority)
            if at < len(line) and line[at] == sequence.priority:
                del line[at]
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def _learn(self, completion: Completion) -> None:
        if completion.failure is not None:
            return
        seconds = completion.ended_s - completion.started_s
        if completion.prefill is None:
            _update(self._measured.decode_step_s, completion.units, seconds)
        elif completion.decode is None:
            work = completion.prefill.tokens * (completion.prefill.last_layer - completion.prefill.first_layer)
            _update(self._measured.prefill_token_layer_s, completion.units, seconds / work)


def _update(means: dict[int, float], units: int, value: float) -> None:
    means[units] = means.get(units, value) + LEARNING_RATE * (value - means.get(units, value))
