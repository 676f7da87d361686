"""Executor and mover under watch: before each launch the canary looks at all KV that the launch will read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidelane.engine.execution.executor import Completion, Event, Executor
from tidelane.engine.kv.canary import Canary
from tidelane.engine.kv.moves import Fetch, Load, Move, Mover, Spill, Store
from tidelane.engine.scheduling.plan import Plan, Span
from tidelane.engine.sequence import Sequence as Running


class WatchedExecutor:
    """`executor` is this one's to close. `layers` are those that make a pass complete."""

    def __init__(self, executor: Executor, canary: Canary, sequences: Mapping[str, Running], layers: int) -> None:
        self._executor = executor
        self._canary = canary
        self._sequences = sequences
        self._layers = layers

    def launch(self, plan: Plan) -> None:
        """Raises WrongKV."""
        steps = plan.decode.ids if plan.decode is not None else ()
        starting = [self._step(name) for name in steps]
        if plan.prefill is not None:
            starting += plan.prefill.spans
        for span in starting:
            sequence = self._sequences[span.id]
            if sequence.stream is not None:  # nobody else may read what comes to these, and goes again
                run = sequence.stream.run
                blocks = range(run.first, run.first + run.count)
                self._canary.opens(blocks, 0, run.count * self._canary.block_tokens)
                continue
            for arrival in sequence.holding.arrivals:  # the launch would wait for it layer by layer
                arrival.wait(self._layers - 1)
            self._canary.check(span.id, sequence.blocks, sequence.tokens, span.start)
            self._canary.opens(sequence.blocks, span.start, span.stop)
        self._executor.launch(plan)

    def poll(self) -> Sequence[Event]:
        events = self._executor.poll()
        for event in events:
            if isinstance(event, Completion) and event.failure is None:
                self._note(event)
        return events

    def forget(self, job: int) -> None:
        self._executor.forget(job)

    def close(self) -> None:
        self._executor.close()

    def _note(self, ended: Completion) -> None:
        spans = [self._step(name) for name in (ended.decode.ids if ended.decode is not None else ())]
        if ended.prefill is not None and ended.prefill.last_layer == self._layers:
            spans += ended.prefill.spans
        for span in spans:
            sequence = self._sequences[span.id]
            if sequence.stream is not None:
                continue
            self._canary.wrote(sequence.blocks, sequence.tokens, span.start, span.stop)

    def _step(self, name: str) -> Span:
        computed = self._sequences[name].computed
        return Span(name, computed, computed + 1)


class WatchedMover:
    """`mover` is this one's to close."""

    def __init__(self, mover: Mover, canary: Canary) -> None:
        self._mover = mover
        self._canary = canary

    def start(self, moves: Sequence[Move]) -> None:
        for move in moves:
            if isinstance(move, Load):
                for slot, block in zip(move.slots, move.blocks, strict=True):
                    self._canary.loading(slot, block)
        self._mover.start(moves)

    def poll(self) -> Sequence[tuple[Move, bool]]:
        ended = self._mover.poll()
        for move, well in ended:
            match move:
                case Store() if well:
                    self._canary.stored(move.block, move.slot)
                case Spill() if well:
                    self._canary.spilled(move.host_slot, move.disk_slot)
                case Fetch() if well:
                    self._canary.fetched(move.disk_slot, move.host_slot)
        return ended

    def close(self) -> None:
        self._mover.close()
