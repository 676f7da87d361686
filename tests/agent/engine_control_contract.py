"""What every engine's control service must do, whatever runs behind it.

Subclass `EngineControlContract` and give it a `start_engine` fixture; its tests then run against that engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tidelane.rpc import serving_pb2
from tidelane.rpc.serving_pb2 import EngineStatus
from tidelane.rpc.serving_pb2_grpc import EngineStub

LIMIT_S = 120.0


@dataclass
class RunningEngine:
    """One engine process under test. `process` is a child of the test."""

    process: asyncio.subprocess.Process
    control_socket: Path
    host: str
    port: int
    initial_revision: int
    channel: grpc.aio.Channel = field(init=False)

    def __post_init__(self) -> None:
        self.channel = grpc.aio.insecure_channel(
            f"unix://{self.control_socket}",
            options=(
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.max_reconnect_backoff_ms", 200),
                ("grpc.use_local_subchannel_pool", 1),
            ),
        )
        self.stub = EngineStub(self.channel)

    def watch(self, period_s: float = 1.0) -> grpc.aio.UnaryStreamCall[serving_pb2.WatchStatusRequest, EngineStatus]:
        return self.stub.WatchStatus(serving_pb2.WatchStatusRequest(period_s=period_s), wait_for_ready=True)

    async def until(self, wanted: Callable[[EngineStatus], bool]) -> EngineStatus:
        """The first status that is as `wanted`; fails after LIMIT_S."""
        async with asyncio.timeout(LIMIT_S):
            call = self.watch()
            try:
                async for status in call:
                    if wanted(status):
                        return status
            finally:
                call.cancel()
        raise AssertionError("the stream ended first")

    async def ready(self) -> EngineStatus:
        return await self.until(lambda status: status.state == EngineStatus.READY)

    async def exit_code(self) -> int:
        async with asyncio.timeout(LIMIT_S):
            return await self.process.wait()


# (extra command-line flags) -> a started engine, stopped and awaited at the test's end.
StartEngine = Callable[[Sequence[str]], Awaitable[RunningEngine]]


def objective(revision: int, tpot_s: float = 0.05) -> serving_pb2.Objective:
    slo = serving_pb2.Slo(ttft_s=0.5, tpot_s=tpot_s, percentile=99)
    return serving_pb2.Objective(slo=slo, mode=serving_pb2.LANES, revision=revision)


class EngineControlContract:
    @pytest.fixture
    async def engine(self, start_engine: StartEngine) -> AsyncIterator[RunningEngine]:
        engine = await start_engine([])
        yield engine
        await engine.channel.close()

    async def test_it_says_what_it_is_once_ready(self, engine: RunningEngine) -> None:
        status = await engine.ready()
        assert status.pid == engine.process.pid
        assert status.listen == f"{engine.host}:{engine.port}"
        assert status.objective_revision == engine.initial_revision
        assert status.resident_memory_bytes > 0

    async def test_the_listener_answers_once_ready(self, engine: RunningEngine) -> None:
        await engine.ready()
        assert (await http_status(engine)) == 200

    async def test_a_status_comes_at_once_and_then_every_period(self, engine: RunningEngine) -> None:
        await engine.ready()
        call = engine.watch(period_s=0.05)
        seen = []
        async with asyncio.timeout(LIMIT_S):
            async for status in call:
                seen.append(status.state)
                if len(seen) == 5:
                    break
        call.cancel()
        assert seen == [EngineStatus.READY] * 5

    async def test_an_objective_is_echoed_without_waiting_for_the_period(self, engine: RunningEngine) -> None:
        await engine.ready()
        call = engine.watch(period_s=3600)
        await call.initial_metadata()
        await engine.stub.SetObjective(objective(revision=7))
        async with asyncio.timeout(LIMIT_S):
            async for status in call:
                if status.objective_revision == 7:
                    break
        call.cancel()

    async def test_an_objective_sent_before_it_is_ready_is_in_force_when_it_is(self, engine: RunningEngine) -> None:
        await engine.until(lambda _: True)
        await engine.stub.SetObjective(objective(revision=5))
        assert (await engine.ready()).objective_revision == 5

    async def test_a_bad_objective_is_refused_and_changes_nothing(self, engine: RunningEngine) -> None:
        await engine.ready()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await engine.stub.SetObjective(objective(revision=9, tpot_s=-1))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        status = await engine.ready()
        assert status.objective_revision == engine.initial_revision

    async def test_many_watch_and_one_that_never_reads_holds_up_nobody(self, engine: RunningEngine) -> None:
        await engine.ready()
        idle = [engine.watch(period_s=0.01) for _ in range(4)]
        await engine.stub.SetObjective(objective(revision=11))
        status = await engine.until(lambda status: status.objective_revision == 11)
        assert status.state == EngineStatus.READY
        for call in idle:
            call.cancel()

    async def test_drained_while_idle_it_exits_0_and_frees_its_port(self, engine: RunningEngine) -> None:
        await engine.ready()
        await engine.stub.Drain(serving_pb2.DrainRequest(deadline_s=30))
        assert await engine.exit_code() == 0
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(engine.host, engine.port)

    async def test_asked_twice_to_drain_it_still_exits_0(self, engine: RunningEngine) -> None:
        await engine.ready()
        first = engine.stub.Drain(serving_pb2.DrainRequest(deadline_s=30))
        second = engine.stub.Drain(serving_pb2.DrainRequest(deadline_s=0))
        await asyncio.gather(first, second, return_exceptions=True)
        assert await engine.exit_code() == 0

    async def test_sigterm_ends_it_with_0(self, engine: RunningEngine) -> None:
        await engine.ready()
        engine.process.terminate()
        assert await engine.exit_code() == 0

    async def test_a_model_that_does_not_exist_exits_78(self, start_engine: StartEngine) -> None:
        engine = await start_engine(["--model", "builtin://no-such-model"])
        assert await engine.exit_code() == 78
        await engine.channel.close()


async def http_status(engine: RunningEngine) -> int:
    reader, writer = await asyncio.open_connection(engine.host, engine.port)
    writer.write(f"GET /health HTTP/1.1\r\nhost: {engine.host}\r\nconnection: close\r\n\r\n".encode())
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return int(line.split()[1])
