"""The real engine without its front: loop, ledger, scheduler and executor in this process, on an in-memory desk.

What measures or checks the engine itself uses it: no HTTP, no second process, and every message can be looked at.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch

from tidelane.engine.bench.sent import answers, token_times
from tidelane.engine.channel import Abort, AboutRequest, Refused, Submit, ToFront, Tokens
from tidelane.engine.execution.calibration import calibrate
from tidelane.engine.execution.cpu import CpuExecutor
from tidelane.engine.execution.executor import Executor
from tidelane.engine.execution.watched import WatchedExecutor, WatchedMover
from tidelane.engine.handover.opening import Cores, Sides, open_sides
from tidelane.engine.kv.canary import Canary
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.host_copier import HostCopier
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.mover import CopyingMover
from tidelane.engine.kv.moves import Mover
from tidelane.engine.kv.retention import IDLE_TIMEOUT_S, ByServiceTier
from tidelane.engine.kv.traffic import Traffic
from tidelane.engine.lanes.cores import CpuLanes, leave_compute_to_lanes
from tidelane.engine.lanes.partition import PartitionTable, partition_table
from tidelane.engine.ledger import Ledger
from tidelane.engine.loop import Loop
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.loading import LoadedModel
from tidelane.engine.request import FinishReason, Request
from tidelane.engine.scheduling.plan import Objective, Scheduler
from tidelane.engine.scheduling.policies import apart_policies, live_policies
from tidelane.engine.slo import Slo, Timeline
from tidelane.engine.tiers import Below
from tidelane.engine.usage import Usage
from tidelane.engine.waiting import BlockNames
from tidelane.engine.wakeup import Wakeup
from tidelane.rpc.wire import ExecutionMode

# Targets that nothing is held to unless the caller says so.
LOOSE_SLO = Slo(ttft_s=2.0, tpot_s=0.2, ttft_per_1k_input_tokens_s=2.0, percentile=90)
_HEARTBEAT_S = 1.0

# Given the pool, and what to call when a move has ended.
OpenTiers = Callable[[DevicePool, Callable[[], None]], Below]


class MemoryDesk:
    """Both ends of the channel in one process. `submit` and `abort` may come from any thread.

    `heard` sees each message as the loop sends it, on the loop's thread, and may submit and abort.
    """

    def __init__(self, wakeup: Wakeup, mode: ExecutionMode) -> None:
        self.mode = mode
        self.heard: Callable[[ToFront], None] | None = None
        self.sent: list[ToFront] = []
        self._wakeup = wakeup
        self._incoming: deque[AboutRequest] = deque()
        self._poll = select.poll()
        self._poll.register(wakeup.fileno(), select.POLLIN)

    def put(self, message: AboutRequest) -> None:
        self._incoming.append(message)
        self._wakeup.notify()

    def wait(self) -> None:
        self._poll.poll(_HEARTBEAT_S * 1000)
        self._wakeup.clear()

    def messages(self) -> list[AboutRequest]:
        return [self._incoming.popleft() for _ in range(len(self._incoming))]

    def send(self, messages: list[ToFront]) -> None:
        self.sent += messages
        if self.heard is not None:
            for message in messages:
                self.heard(message)

    def policy(self) -> str:
        return self.mode

    @property
    def unread(self) -> bool:
        return bool(self._incoming)


class InProcessEngine:
    """A loop over `loaded` on `cores` (a core may be named twice, so that few cores can run the splits of many).

    With `mode` Disaggregated half of the cores are a prefill side's, a process of its own that loads the model from its
    folder; `table`, `model` and `clock` are then of no use, and the mode stays what it is.
    `table` defaults to all the splits of `cores`. `schedulers` are the policies by mode; `desk.mode` picks one, and may
    be set at any moment. `model` is for a view of `loaded` that measures itself. Without `names` no prompt finds what
    another has computed. With `watched` the canary looks at all KV before it is read. What `host_slots` blocks of host
    memory hold outlasts its room on the device; `open_tiers` is for any other tiers in their stead. The calling thread
    computes with one thread from then on.

    Public parts: `ledger`, `desk`, `executor`, `usage`, `loop`, `lanes`, `pool`, `prefill_side` if there is one, and
    `ended`, what the ledger said of each request that ran to its end.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        cores: Sequence[int],
        table: PartitionTable | None = None,
        mode: ExecutionMode = ExecutionMode.LANES,
        kv_blocks: int = 1024,
        queue_limit: int = 256,
        objective: Objective | None = None,
        schedulers: Mapping[str, Scheduler] | None = None,
        clock: Callable[[], float] = time.monotonic,
        model: SlicedModel | None = None,
        names: BlockNames | None = None,
        watched: bool = False,
        host_slots: int = 0,
        open_tiers: OpenTiers | None = None,
    ) -> None:
        leave_compute_to_lanes()
        layout = loaded.facts.kv_layout
        self._wakeup = Wakeup()
        sides: Sides | None = None
        if mode is ExecutionMode.DISAGGREGATED:
            apart = Cores.split(tuple(cores))
            sides = open_sides(loaded, apart, kv_blocks, self._wakeup.notify, max_context_tokens=None)
            model, self.lanes, self.pool, estimates = sides.model, sides.lanes, sides.pool, sides.estimates
            table, policies = apart.table, apart_policies(apart.partition)
        else:
            model = model or SlicedModel(loaded.module)
            table = table or partition_table(len(cores))
            self.lanes = CpuLanes(cores, table)
            self.pool = DevicePool.allocate(layout, kv_blocks, loaded.facts.dtype, torch.device("cpu"))
            estimates = calibrate(model, self.pool, self.lanes)
            policies = live_policies(table)
        below = (open_tiers or _host_alone(host_slots))(self.pool, self._wakeup.notify)
        self.mover: Mover = below.mover
        self.schedulers: Mapping[str, Scheduler] = schedulers or policies
        self.prefill_side = sides.side if sides is not None else None
        self.ended: list[tuple[Timeline | None, Slo]] = []
        self.desk = MemoryDesk(self._wakeup, mode)
        self.ledger = Ledger(
            table=table,
            layers=model.layers,
            block_tokens=layout.block_tokens,
            blocks=kv_blocks,
            queue_limit=queue_limit,
            objective=objective or Objective(LOOSE_SLO),
            estimates=estimates,
            ended=self._note_end,
            retention=lambda: ByServiceTier(IDLE_TIMEOUT_S, clock),
            names=names,
            host_slots=below.host_slots,
            disk_slots=below.disk_slots,
            fetch_s=below.fetch_times().seconds,
        )
        self.ledger.pool.disk.restore(below.left)
        executor: Executor = (
            sides.executor(self.ledger.sequences, self._wakeup.notify)
            if sides is not None
            else CpuExecutor(model, self.pool, self.lanes, self.ledger.sequences, self._wakeup.notify, clock)
        )
        if watched:
            canary = Canary(kv_blocks, layout.block_tokens, self.pool.prints)
            executor = WatchedExecutor(executor, canary, self.ledger.sequences, model.layers)
            self.mover = WatchedMover(self.mover, canary)
        self.executor = executor
        self.usage = Usage(table.units, clock())
        self.loop = Loop(
            ledger=self.ledger,
            policies=self.schedulers,
            executor=self.executor,
            mover=self.mover,
            desk=self.desk,
            usage=self.usage,
            clock=clock,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: Request) -> None:
        self.desk.put(Submit(request))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORTED) -> None:
        self.desk.put(Abort(request_id, reason))

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Turn the loop until `until()`, by default until nothing is left to do and every block is free again."""
        self._wakeup.notify()  # the first turn must not wait for something to happen
        self.loop.run(until or self._idle)

    def answers(self) -> dict[str, list[int]]:
        return answers(self.desk.sent)

    def token_times(self) -> dict[str, list[float]]:
        return token_times(self.desk.sent)

    def endings(self) -> dict[str, Tokens | Refused]:
        """The last message of each request that has one."""
        return {
            message.request_id: message
            for message in self.desk.sent
            if isinstance(message, Refused) or (isinstance(message, Tokens) and message.finish is not None)
        }

    def close(self) -> None:
        self.executor.close()
        self.mover.close()
        self._wakeup.close()

    def _idle(self) -> bool:
        still = self.ledger.flight.idle and self.ledger.pool.still
        return self.ledger.empty and not self.desk.unread and still

    def _note_end(self, timeline: Timeline | None, slo: Slo) -> None:
        self.ended.append((timeline, slo))


def _host_alone(slots: int) -> OpenTiers:
    def opened(pool: DevicePool, notify: Callable[[], None]) -> Below:
        if not slots:
            return Below()
        host, traffic = HostMemory.allocate(pool.layout, slots), Traffic()
        mover = CopyingMover([HostCopier(pool, host)], notify, traffic)
        return Below(mover, traffic, slots, record_bytes=host.record_bytes)

    return opened
