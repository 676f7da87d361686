"""A node without devices, disk or engines: the agent's own node and replicas, over engines that are but said to run."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Final

from typing_extensions import override

from tidelane.agent.control import EngineControl
from tidelane.agent.devices import Device, DeviceKind, FixedInventory
from tidelane.agent.engine_process import EngineProcess, ProcessIdentity
from tidelane.agent.node import Node, NodeSettings
from tidelane.agent.replica import Replica, Surroundings
from tidelane.agent.running import RunningEngine
from tidelane.agent.state import Launched, Record, StateFolder
from tidelane.rpc.serving_pb2 import EngineStatus
from tidelane.rpc.wire import ModelSpec, Objective, ReplicaRef

_GIB: Final = 1 << 30
_STATUS_EVERY_S: Final = 1.0


def gpu(index: int) -> Device:
    return Device(f"GPU-{index}", DeviceKind.GPU, "a simulated GPU", 80 * _GIB, 132)


class UnknownWeights:
    """No model is on this node."""

    def parameters(self, model: ModelSpec) -> int | None:
        return None


class ForgetfulState(StateFolder):
    """Saves nothing: hundreds of nodes would measure the disk that they share here."""

    @override
    def save(self, records: Iterable[Record]) -> None:
        pass


class SimulatedProcess(EngineProcess):
    """Ends when it is told to."""

    def __init__(self, folder: Path) -> None:
        own = ProcessIdentity.of(os.getpid())
        assert own is not None
        super().__init__(own, folder)
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @override
    async def ended(self) -> int | None:
        return await asyncio.shield(self._end)

    @override
    def terminate(self) -> None:
        if not self._end.done():
            self._end.set_result(0)

    @override
    def kill(self) -> None:
        self.terminate()

    @override
    def let_go(self) -> None:
        pass


class SimulatedControl(EngineControl):
    """An idle engine: it loads, is ready, says so every second, takes any objective, and drains at once."""

    def __init__(self, process: SimulatedProcess, name: str, objective: Objective, load_s: float) -> None:
        self._process = process
        self._load_s = load_s
        self._status = EngineStatus(
            state=EngineStatus.LOADING, model_name=name, objective_revision=objective.revision, pid=os.getpid()
        )
        self._changed = asyncio.Event()

    @override
    async def close(self) -> None:
        pass

    @override
    async def statuses(self, period_s: float) -> AsyncIterator[EngineStatus]:
        yield self._told()
        await asyncio.sleep(self._load_s)
        self._status.state = EngineStatus.READY
        while True:
            yield self._told()
            self._changed.clear()
            try:
                async with asyncio.timeout(_STATUS_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    @override
    async def set_objective(self, objective: Objective) -> None:
        self._status.objective_revision = objective.revision
        self._changed.set()

    @override
    async def drain(self, deadline_s: float) -> None:
        self._process.terminate()

    def _told(self) -> EngineStatus:
        copy = EngineStatus()
        copy.CopyFrom(self._status)
        return copy


class SimulatedReplica(Replica):
    """The agent's replica, but for the process that it starts, finds again and clears up after."""

    def __init__(self, record: Record, node: SimulatedNode, around: Surroundings) -> None:
        super().__init__(node._wanted(record), node._state.folder(record.spec.ref), around)
        self._node = node

    @override
    async def _find_engine(self) -> None:
        pass

    @override
    def _launch(self) -> None:
        spec = self.wanted.spec
        self._node.launches[spec.ref] += 1
        self.port = 20000 + sum(self._node.launches.values())
        process = SimulatedProcess(self.folder.path)
        control = SimulatedControl(process, spec.model.served_name, self._objective, self._node.load_s)
        launched = Launched(spec, self.wanted.claim, self.port, process.identity)
        self._engine = RunningEngine.attend(
            process, launched, self._objective, control, _STATUS_EVERY_S, heard=self._heard, ended=self._wake.set
        )
        self._around.changed()

    @override
    def _remember(self, launched: Launched) -> None:
        pass

    @override
    async def _after_end(self, engine: RunningEngine, code: int | None) -> None:
        self._engine = None
        self._around.changed()
        await engine.close()


class SimulatedNode(Node):
    """`launches` counts the engines started for each replica; each is ready after `load_s`."""

    def __init__(self, name: str, address: str, devices: int, load_s: float, folder: Path) -> None:
        inventory = FixedInventory([gpu(index) for index in range(devices)])
        state = ForgetfulState(folder / name)
        super().__init__(NodeSettings(name, address), state, inventory, UnknownWeights(), time.monotonic, time.time)
        self.name = name
        self.load_s = load_s
        self.launches: Counter[ReplicaRef] = Counter()

    @property
    def present(self) -> Iterable[ReplicaRef]:
        """The replicas that it has, in whatever state."""
        return self._replicas.keys()

    @override
    def _replica(self, record: Record, around: Surroundings) -> Replica:
        return SimulatedReplica(record, self, around)
