"""The engine's gRPC side: the agent watches its status, sets its objective and drains it.

gRPC threads and the loop's thread meet in `ControlRoom` and nowhere else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from typing_extensions import override

from tidelane.rpc import serving_pb2, serving_pb2_grpc
from tidelane.rpc.wire import ExecutionMode, Objective, objective_from_wire

# How many processes an engine is, is settled at its start: it changes between modes of its own kind only.
_TWO_PROCESSES = frozenset({ExecutionMode.DISAGGREGATED})
_ONE_PROCESS = frozenset(ExecutionMode) - _TWO_PROCESSES


class ControlRoom:
    """What the agent asked for and what it may know. `notify` wakes the loop.

    `modes` are those that it may ask for while the engine runs.
    """

    def __init__(self, objective: Objective, notify: Callable[[], None]) -> None:
        self._changed = threading.Condition()
        self._notify = notify
        self._status = serving_pb2.EngineStatus(state=serving_pb2.EngineStatus.LOADING)
        self._version = 0
        self._objective = objective
        self.modes = _TWO_PROCESSES if objective.mode in _TWO_PROCESSES else _ONE_PROCESS
        self._drain_by_s: float | None = None
        self._closed = False

    @property
    def objective(self) -> Objective:
        return self._objective

    @property
    def drain_by_s(self) -> float | None:
        """Monotonic time by which all requests must have ended; None: not draining."""
        return self._drain_by_s

    def publish(self, status: serving_pb2.EngineStatus) -> None:
        with self._changed:
            if status.state != self._status.state or status.objective_revision != self._status.objective_revision:
                self._version += 1
                self._changed.notify_all()
            self._status = status

    def set_objective(self, objective: Objective) -> None:
        self._objective = objective
        self._notify()

    def drain(self, deadline_s: float) -> None:
        """Starts or shortens the drain; a later deadline than the one in force changes nothing."""
        by_s = time.monotonic() + max(0.0, deadline_s)
        self._drain_by_s = by_s if self._drain_by_s is None else min(by_s, self._drain_by_s)
        self._notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def statuses(self, period_s: float, active: Callable[[], bool]) -> Iterator[serving_pb2.EngineStatus]:
        """The status now, then every `period_s`, and at once when its state changed."""
        seen = -1
        while active() and not self._closed:
            with self._changed:
                if self._version == seen:
                    self._changed.wait(timeout=period_s)
                seen, status = self._version, self._status
            yield status


class EngineService(serving_pb2_grpc.EngineServicer):
    def __init__(self, room: ControlRoom) -> None:
        self._room = room

    @override
    def WatchStatus(
        self, request: serving_pb2.WatchStatusRequest, context: grpc.ServicerContext
    ) -> Iterator[serving_pb2.EngineStatus]:
        period_s = request.period_s if request.period_s > 0 else 1.0
        return self._room.statuses(min(period_s, 60.0), context.is_active)

    @override
    def SetObjective(
        self, request: serving_pb2.Objective, context: grpc.ServicerContext
    ) -> serving_pb2.SetObjectiveResponse:
        try:
            objective = objective_from_wire(request)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if objective.mode not in self._room.modes:
            message = (
                f"execution mode {objective.mode} needs another start: this engine can change between "
                f"{', '.join(sorted(self._room.modes))}"
            )
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        self._room.set_objective(objective)
        return serving_pb2.SetObjectiveResponse()

    @override
    def Drain(self, request: serving_pb2.DrainRequest, context: grpc.ServicerContext) -> serving_pb2.DrainResponse:
        self._room.drain(request.deadline_s)
        return serving_pb2.DrainResponse()


def start_control_server(room: ControlRoom, socket_path: str) -> grpc.Server:
    """Serve the Engine service on the Unix socket at `socket_path`."""
    server = grpc.server(ThreadPoolExecutor(max_workers=16, thread_name_prefix="control"))
    serving_pb2_grpc.add_EngineServicer_to_server(EngineService(room), server)
    server.add_insecure_port(f"unix:{socket_path}")
    server.start()
    return server
