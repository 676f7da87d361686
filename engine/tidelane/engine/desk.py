"""The loop's desk: the channel to the front, heartbeats, and the objective in force."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from tidelane.engine.channel import (
    Endpoint,
    ForLoop,
    FrontFailed,
    FrontReady,
    Heartbeat,
    RefusalReason,
    Submit,
    ToFront,
    Tokens,
    ToLoop,
)
from tidelane.engine.control import ControlRoom
from tidelane.engine.errors import CannotServe
from tidelane.engine.kv.traffic import Traffic
from tidelane.engine.ledger import Ledger
from tidelane.engine.pressure import PressureWindow
from tidelane.engine.reports import engine_status, heartbeat, scheduling_objective
from tidelane.engine.request import ServiceTier
from tidelane.engine.usage import Usage
from tidelane.engine.wakeup import Wakeup
from tidelane.engine.window import LatencyWindow
from tidelane.engine.workload_report import WorkloadReport
from tidelane.rpc import serving_pb2
from tidelane.rpc.wire import Objective

HEARTBEAT_S = 0.25
STATUS_S = 1.0


class ChannelDesk:
    """`identity` holds the fields of EngineStatus that do not change."""

    def __init__(
        self,
        endpoint: Endpoint[ToFront, ToLoop],
        wakeup: Wakeup,
        room: ControlRoom,
        ledger: Ledger,
        usage: Usage,
        traffic: Traffic,
        window: LatencyWindow,
        identity: serving_pb2.EngineStatus,
        workload: WorkloadReport,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = endpoint
        self._wakeup = wakeup
        self._room = room
        self._ledger = ledger
        self._usage = usage
        self._traffic = traffic
        self._window = window
        self._identity = identity
        self._workload = workload
        self._clock = clock
        self._pressure = PressureWindow()
        self._objective: Objective | None = None
        self._front_ready = False
        self._next_heartbeat_s = 0.0
        self._next_status_s = 0.0
        self._poller = zmq.Poller()
        self._poller.register(endpoint.incoming, zmq.POLLIN)
        self._poller.register(wakeup.fileno(), zmq.POLLIN)

    def wait(self) -> None:
        left_s = self._next_heartbeat_s - self._clock()
        self._poller.poll(max(0, int(left_s * 1000)))
        self._wakeup.clear()
        self._follow_orders()
        if self._clock() >= self._next_heartbeat_s:
            self._beat()

    def messages(self) -> list[ForLoop]:
        """Raises CannotServe when the front has given up."""
        taken: list[ForLoop] = []
        while (message := self._endpoint.receive(0)) is not None:
            if isinstance(message, FrontReady):
                self._front_ready = True
                self._beat(with_status=True)
            elif isinstance(message, FrontFailed):
                raise CannotServe(f"the HTTP front {message.reason}")
            else:
                if isinstance(message, Submit):
                    asked = message.request
                    self._workload.window.arrived(
                        asked.arrival_s, len(asked.prompt), flex=asked.tier is ServiceTier.FLEX
                    )
                taken.append(message)
        return taken

    def send(self, messages: list[ToFront]) -> None:
        window = self._workload.window
        for message in messages:
            if isinstance(message, Tokens):
                if message.prefill_start_s is not None:
                    window.began(message.cached_tokens)
                if message.timeline is not None:
                    window.ended(message.timeline.output_tokens)
            self._endpoint.send(message)

    def policy(self) -> str:
        return self._room.objective.mode

    def _follow_orders(self) -> None:
        if self._room.objective is not self._objective:
            self._objective = self._room.objective
            self._ledger.objective = scheduling_objective(self._objective)
            self._beat(with_status=True)
        if self._room.drain_by_s is not None and not self._ledger.draining:
            self._ledger.draining = True
            self._beat(with_status=True)

    def _beat(self, *, with_status: bool = False) -> None:
        now_s = self._clock()
        self._next_heartbeat_s = now_s + HEARTBEAT_S
        beat: Heartbeat = heartbeat(self._ledger, self._usage, self._traffic, self._room.objective, now_s)
        self._endpoint.send(beat)
        pressure = self._pressure.look(
            now_s,
            lacks_room=self._ledger.lacks_room,
            preemptions=self._ledger.preemptions,
            turned_away=self._ledger.refusals[RefusalReason.QUEUE_FULL],
        )
        if with_status or now_s >= self._next_status_s:
            self._next_status_s = now_s + STATUS_S
            status = engine_status(
                self._identity,
                self._state(),
                self._ledger,
                self._usage,
                self._window,
                self._room.objective,
                pressure,
            )
            workload = self._workload.message(self._ledger.estimates)
            if workload is not None:
                status.workload.CopyFrom(workload)
            self._room.publish(status)

    def _state(self) -> serving_pb2.EngineStatus.State:
        if self._ledger.draining:
            return serving_pb2.EngineStatus.DRAINING
        return serving_pb2.EngineStatus.READY if self._front_ready else serving_pb2.EngineStatus.WARMING
