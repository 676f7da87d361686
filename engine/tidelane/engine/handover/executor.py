"""The executor of an engine whose prefill is a process of its own: decode here, slices there."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from tidelane.engine.execution.executor import Event, Executor, PrefillBack, PrefillLost
from tidelane.engine.handover.messages import Compute, Forget, Prompt
from tidelane.engine.handover.prefill_side import Did, Down, PrefillSide, Up
from tidelane.engine.scheduling.plan import Plan, PrefillSlice
from tidelane.engine.sequence import Sequence


class ApartExecutor:
    """`decode` runs the decode steps; both are this executor's to close. Plans are never fused."""

    def __init__(self, decode: Executor, side: PrefillSide, sequences: Mapping[str, Sequence]) -> None:
        self._decode = decode
        self._side = side
        self._sequences = sequences
        self._epoch = 0  # of the process that is up, or was last
        self._at: PrefillSlice | None = None

    def launch(self, plan: Plan) -> None:
        assert not plan.fused
        if plan.prefill is not None:
            prompts = tuple(Prompt.of(self._sequences[span.id]) for span in plan.prefill.spans)
            self._side.order(self._epoch, Compute(plan.prefill, plan.partition.prefill_units, prompts))
            self._at = plan.prefill
        if plan.decode is not None:
            self._decode.launch(replace(plan, prefill=None))

    def poll(self) -> list[Event]:
        events: list[Event] = [*self._decode.poll()]
        for news in self._side.news():
            match news:
                case Up(epoch=epoch):
                    self._epoch = epoch
                    events.append(PrefillBack())
                case Did(completion=completion):
                    self._at = None
                    events.append(completion)
                case Down():
                    events.append(PrefillLost(self._at))
                    self._at = None
        return events

    def forget(self, job: int) -> None:
        self._side.order(self._epoch, Forget(job))

    def close(self) -> None:
        self._side.close()
        self._decode.close()
