"""The engine's loop: poll, commit, plan, launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tidelane.engine.channel import Abort, Decisions, DecisionsWanted, ForLoop, Submit, ToFront
from tidelane.engine.decisions import DecisionLog
from tidelane.engine.execution.executor import Executor
from tidelane.engine.kv.moves import Mover
from tidelane.engine.ledger import Ledger
from tidelane.engine.request import FinishReason
from tidelane.engine.scheduling.plan import Scheduler
from tidelane.engine.usage import Usage


class Desk(Protocol):
    """The loop's side of everything outside: requests come in, tokens go out."""

    def wait(self) -> None:
        """Until a message or a completion is there, or it is time for the next heartbeat."""
        ...

    def messages(self) -> Sequence[ForLoop]: ...

    def send(self, messages: list[ToFront]) -> None: ...

    def policy(self) -> str:
        """The scheduling policy that the objective in force asks for."""
        ...


class Loop:
    """Owns the order of things; the ledger owns the state, the scheduler the decisions, the executor the work, and the
    mover what is on its way between tiers.

    `decisions` are the last ones carried out, whichever policy made them.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        policies: Mapping[str, Scheduler],
        executor: Executor,
        mover: Mover,
        desk: Desk,
        usage: Usage,
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._policies = policies
        self._executor = executor
        self._mover = mover
        self._desk = desk
        self._usage = usage
        self._clock = clock
        self.decisions = DecisionLog()

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self._desk.wait()
            self.turn()

    def turn(self) -> None:
        """Take in what happened, decide, launch. Never blocks."""
        now_s = self._clock()
        for event in self._executor.poll():
            self._ledger.hear(event, now_s)
        for move, well in self._mover.poll():
            self._ledger.moved(move, well=well)
        self._ledger.lose_patience(now_s)
        for message in self._desk.messages():
            self._take(message)
        abandoned = self._ledger.abandoned_pass()
        if abandoned is not None:
            self._executor.forget(abandoned)
        self._usage.note(self._ledger.flight, now_s)

        now_s = self._clock()  # again: a message may have arrived since
        self._ledger.make_way(now_s)
        plan = self._policies[self._desk.policy()].plan(self._ledger.state(), now_s)
        self._ledger.apply(plan, now_s)
        self._ledger.look_ahead(now_s)
        self._mover.start(self._ledger.take_moves())
        self.decisions.add(plan, now_s)
        if plan.launches:
            self._executor.launch(plan)
            self._usage.note(self._ledger.flight, now_s)
            self._usage.launched((plan.partition.decode_units, plan.partition.prefill_units))
        self._desk.send(self._ledger.take_outbox())

    def _take(self, message: ForLoop) -> None:
        match message:
            case Submit(request=request):
                self._ledger.submit(request)
            case Abort(request_id=request_id, reason=reason):
                self._ledger.abort(request_id, satisfied=reason is FinishReason.STOP)
            case DecisionsWanted(number=number, limit=limit):
                self._desk.send([Decisions(number, self.decisions.last(limit))])
