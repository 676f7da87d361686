"""An agent in this process, with fake engines as real child processes, and a client that watches it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from agent.fake_engine import Switches
from tidelane.agent.backoff import RestartPolicy
from tidelane.agent.devices import Device, DeviceInventory, DeviceKind, FixedInventory
from tidelane.agent.engine_process import FOLDER_VARIABLE
from tidelane.agent.lifecycle import Limits
from tidelane.agent.node import NodeSettings
from tidelane.agent.server import Agent, AgentSettings
from tidelane.engine.slo import Slo
from tidelane.rpc import node_agent_pb2
from tidelane.rpc.node_agent_pb2 import NodeStatus, ReplicaStatus
from tidelane.rpc.node_agent_pb2_grpc import NodeAgentStub
from tidelane.rpc.wire import (
    ExecutionMode,
    ModelSpec,
    Objective,
    ReplicaRef,
    ReplicaSpec,
    ref_to_wire,
    spec_to_wire,
)

LIMIT_S = 60.0
GIB = 1 << 30
QUICK = RestartPolicy(first_delay_s=0.05, longest_delay_s=0.2, stable_after_s=3600)


def cpu(slots: int = 1, memory_bytes: int = 8 * GIB) -> Device:
    return Device("cpu", DeviceKind.CPU, "a CPU", memory_bytes, 4, slots=slots, cores=(0, 1, 2, 3))


def gpu(index: int, memory_bytes: int = 80 * GIB) -> Device:
    return Device(f"GPU-{index}", DeviceKind.GPU, "a GPU", memory_bytes, 132)


def spec(name: str = "chat", generation: int = 1, tpot_s: float = 0.05, **changes: Any) -> ReplicaSpec:
    made = ReplicaSpec(
        ref=ReplicaRef("default", name, f"uid-of-{name}", 0),
        generation=generation,
        model=ModelSpec("builtin://fake", served_name=name),
        objective=Objective(Slo(ttft_s=0.5, tpot_s=tpot_s), ExecutionMode.LANES),
    )
    return replace(made, **changes)


class EngineFiles:
    """The fake engine's switches and journal, shared by all engines of one rig."""

    def __init__(self, folder: Path) -> None:
        self.switches_file = folder / "switches"
        self.journal_file = folder / "journal"
        self.journal_file.touch()

    @property
    def command(self) -> tuple[str, ...]:
        fake = str(Path(__file__).with_name("fake_engine.py"))
        return (sys.executable, fake, "--switches", str(self.switches_file), "--journal", str(self.journal_file))

    def switch(self, **values: Any) -> None:
        Switches(**values).write(self.switches_file)

    def journal(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.journal_file.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]


@dataclass
class Rig:
    """A running agent and its client. `restart` makes a new agent on the same folder, as a new process would."""

    settings: AgentSettings
    inventory: DeviceInventory
    files: EngineFiles
    agent: Agent
    channel: grpc.aio.Channel
    stub: NodeAgentStub

    async def apply(self, wanted: ReplicaSpec) -> ReplicaStatus:
        return await self.stub.ApplyReplica(node_agent_pb2.ApplyReplicaRequest(spec=spec_to_wire(wanted)))

    async def remove(self, ref: ReplicaRef, drain_s: float = 10.0) -> None:
        request = node_agent_pb2.RemoveReplicaRequest(id=ref_to_wire(ref), drain_deadline_s=drain_s)
        await self.stub.RemoveReplica(request)

    async def until(self, wanted: Callable[[NodeStatus], bool]) -> NodeStatus:
        """The first status that is as `wanted`; fails, telling the last one, after LIMIT_S."""
        last: NodeStatus | None = None
        call = self.stub.WatchNode(node_agent_pb2.WatchNodeRequest(period_s=0.2))
        try:
            async with asyncio.timeout(LIMIT_S):
                async for last in call:
                    if wanted(last):
                        return last
        except TimeoutError:
            raise AssertionError(f"not so within {LIMIT_S} s; last: {last}") from None
        finally:
            call.cancel()
        raise AssertionError(f"the stream ended; last: {last}")

    async def replica(self, wanted: Callable[[ReplicaStatus], bool], name: str = "chat") -> ReplicaStatus:
        found: list[ReplicaStatus] = []

        def check(status: NodeStatus) -> bool:
            found[:] = [replica for replica in status.replicas if replica.id.service == name]
            return any(map(wanted, found))

        await self.until(check)
        return found[0]

    async def serving(self, generation: int = 1, name: str = "chat") -> ReplicaStatus:
        return await self.replica(lambda r: r.phase == ReplicaStatus.READY and r.serving_generation == generation, name)

    async def in_phase(self, phase: ReplicaStatus.Phase, name: str = "chat") -> ReplicaStatus:
        return await self.replica(lambda r: r.phase == phase, name)

    async def gone(self, name: str = "chat") -> NodeStatus:
        return await self.until(lambda status: all(r.id.service != name for r in status.replicas))

    async def close(self) -> None:
        """Ends the agent and leaves its engines."""
        await self.channel.close()
        await self.agent.stop()

    async def restart(self) -> None:
        await self.close()
        await self.open()

    async def open(self) -> None:
        self.agent = Agent(self.settings, self.inventory)
        await self.agent.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.agent.port}")
        self.stub = NodeAgentStub(self.channel)

    def folder(self, wanted: ReplicaSpec) -> Path:
        return self.agent.node._state.folder(wanted.ref).path


@contextlib.asynccontextmanager
async def rig(
    folder: Path,
    *devices: Device,
    limits: Limits | None = None,
    restart: RestartPolicy = QUICK,
    stop_engines_after_s: float | None = None,
) -> AsyncIterator[Rig]:
    files = EngineFiles(folder)
    node = NodeSettings("node-1", engine_command=files.command, restart=restart, limits=limits or Limits())
    settings = AgentSettings(node, folder / "state", "127.0.0.1:0", stop_engines_after_s=stop_engines_after_s)
    made = Rig.__new__(Rig)
    made.settings, made.inventory, made.files = settings, FixedInventory(devices or (cpu(),)), files
    await made.open()
    try:
        yield made
    finally:
        await made.close()
        end_engines(folder / "state")


def end_engines(state: Path) -> None:
    """Ends whatever still runs for a state folder, even one since removed, and waits until it is gone."""
    ended = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(FOLDER_VARIABLE, "").startswith(f"{state}/"):
                process.kill()
                ended.append(process)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, 0)
    # A front is no child of ours, and until it is gone it holds its port.
    psutil.wait_procs(ended, timeout=20)
