"""A loop over any executor, on a desk in memory: for checks of an executor where there is no front."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Mapping

from tidelane.engine.bench.sent import answers, token_times
from tidelane.engine.channel import AboutRequest, Refused, Submit, ToFront, Tokens
from tidelane.engine.estimation.estimates import Estimates
from tidelane.engine.execution.executor import Executor
from tidelane.engine.kv.moves import NoMover
from tidelane.engine.kv.retention import LeastRecentlyUsed
from tidelane.engine.lanes.partition import PartitionTable
from tidelane.engine.ledger import Ledger
from tidelane.engine.loop import Loop
from tidelane.engine.request import Request
from tidelane.engine.scheduling.plan import Objective, Scheduler
from tidelane.engine.sequence import Sequence
from tidelane.engine.slo import Slo, Timeline
from tidelane.engine.usage import Usage
from tidelane.engine.wakeup import Wakeup

MakeExecutor = Callable[[Mapping[str, Sequence], Callable[[], None]], Executor]


class RigDesk:
    """`policy_name` may be set at any moment. `at_turn` is called once a turn, and may submit."""

    def __init__(self, policy_name: str, wakeup: Wakeup) -> None:
        self.policy_name = policy_name
        self.sent: list[ToFront] = []
        self.inbox: deque[AboutRequest] = deque()
        self.at_turn: Callable[[], None] = lambda: None
        self.longest_wait_s = 1.0
        self._wakeup = wakeup
        self._poll = select.poll()
        self._poll.register(wakeup.fileno(), select.POLLIN)

    def wait(self) -> None:
        self._poll.poll(max(0.0, self.longest_wait_s) * 1000)
        self._wakeup.clear()
        self.at_turn()

    def messages(self) -> list[AboutRequest]:
        return [self.inbox.popleft() for _ in range(len(self.inbox))]

    def send(self, messages: list[ToFront]) -> None:
        self.sent += messages

    def policy(self) -> str:
        return self.policy_name


class Rig:
    """`schedulers` are the policies by name. `ended` collects what the ledger says of each request that ran out."""

    def __init__(
        self,
        make_executor: MakeExecutor,
        *,
        table: PartitionTable,
        layers: int,
        blocks: int,
        block_tokens: int,
        estimates: Estimates,
        schedulers: Mapping[str, Scheduler],
        policy: str,
        objective: Objective,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wakeup = Wakeup()
        self.ended: list[tuple[Timeline | None, Slo]] = []
        self.desk = RigDesk(policy, self.wakeup)
        self.ledger = Ledger(
            table=table,
            layers=layers,
            block_tokens=block_tokens,
            blocks=blocks,
            queue_limit=100_000,
            objective=objective,
            estimates=estimates,
            ended=lambda timeline, slo: self.ended.append((timeline, slo)),
            retention=LeastRecentlyUsed,  # it has no names, so nothing is kept
        )
        self.executor = make_executor(self.ledger.sequences, self.wakeup.notify)
        self.usage = Usage(table.units, clock())
        self.loop = Loop(
            ledger=self.ledger,
            policies=schedulers,
            mover=NoMover(),
            executor=self.executor,
            desk=self.desk,
            usage=self.usage,
            clock=clock,
        )

    def submit(self, request: Request) -> None:
        self.desk.inbox.append(Submit(request))
        self.wakeup.notify()

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Turn the loop until `until()`, by default until nothing is left to do."""
        self.wakeup.notify()  # the first turn must not wait for something to happen
        self.loop.run(until or (lambda: self.ledger.empty and not self.desk.inbox and self.ledger.flight.idle))

    def answers(self) -> dict[str, list[int]]:
        return answers(self.desk.sent)

    def token_times(self) -> dict[str, list[float]]:
        return token_times(self.desk.sent)

    def errors(self) -> dict[str, str]:
        """What went wrong, by request."""
        wrong: dict[str, str] = {}
        for message in self.desk.sent:
            if isinstance(message, Refused):
                wrong[message.request_id] = message.message
            elif isinstance(message, Tokens) and message.error is not None:
                wrong[message.request_id] = message.error
        return wrong

    def close(self) -> None:
        self.executor.close()
        self.wakeup.close()
