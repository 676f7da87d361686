"""The agent's end of an engine's control socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType

import grpc
import grpc.aio

from tidelane.rpc import serving_pb2
from tidelane.rpc.serving_pb2_grpc import EngineStub
from tidelane.rpc.wire import Objective, objective_to_wire

# A Unix socket either answers at once or is not there yet: gRPC's own waits, made for networks, are too long.
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
_CALL_LIMIT_S = 5.0
_AGAIN_AFTER_S = 0.2


class ObjectiveRefused(Exception):
    """This engine cannot take the objective while it runs."""


class Unreachable(Exception):
    """The engine did not answer; it may do so later."""


class EngineControl:
    """One engine process, reached through `socket`. Made once per process, since gRPC remembers a dead peer."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.aio.insecure_channel(f"unix://{socket}", options=_OPTIONS)
        self._engine = EngineStub(self._channel)

    async def __aenter__(self) -> EngineControl:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def statuses(self, period_s: float) -> AsyncIterator[serving_pb2.EngineStatus]:
        """Every status from now on, over as many connections as it takes; ends only when cancelled."""
        while True:
            try:
                call = self._engine.WatchStatus(serving_pb2.WatchStatusRequest(period_s=period_s), wait_for_ready=True)
                async for status in call:
                    yield status
            except grpc.aio.AioRpcError:
                pass
            await asyncio.sleep(_AGAIN_AFTER_S)

    async def set_objective(self, objective: Objective) -> None:
        try:
            await self._engine.SetObjective(objective_to_wire(objective), timeout=_CALL_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.FAILED_PRECONDITION,
                grpc.StatusCode.UNIMPLEMENTED,
            ):
                raise ObjectiveRefused(error.details()) from error
            raise Unreachable(error.details()) from error

    async def drain(self, deadline_s: float) -> None:
        try:
            await self._engine.Drain(serving_pb2.DrainRequest(deadline_s=deadline_s), timeout=_CALL_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            raise Unreachable(error.details()) from error
