"""The node: which replicas it has, what they hold, and what is remembered of them."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tidelane.agent.backoff import RestartPolicy
from tidelane.agent.claims import Claim, Slot, choose
from tidelane.agent.command import ENGINE_COMMAND
from tidelane.agent.devices import Device, DeviceInventory, DeviceKind
from tidelane.agent.engine_process import clear_up
from tidelane.agent.errors import Outdated, TryLater
from tidelane.agent.footprint import Weights, footprint
from tidelane.agent.lifecycle import Ending, Limits, Wanted
from tidelane.agent.replica import Replica, Surroundings
from tidelane.agent.state import Record, StateFolder
from tidelane.rpc import node_agent_pb2
from tidelane.rpc.wire import ReplicaRef, ReplicaSpec, ref_to_wire

log = logging.getLogger(__name__)

_DEVICES_EVERY_S = 10.0
# Between two statuses to one watcher: many changes at once are told together.
_TELL_AT_MOST_EVERY_S = 0.05
_SAVE_AGAIN_AFTER_S = 1.0
_KINDS = {DeviceKind.CPU: node_agent_pb2.Device.CPU, DeviceKind.GPU: node_agent_pb2.Device.GPU}


@dataclass(frozen=True, slots=True)
class NodeSettings:
    name: str
    address: str = "127.0.0.1"
    version: str = ""
    model_store: Path | None = None
    engine_command: tuple[str, ...] = ENGINE_COMMAND
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    limits: Limits = field(default_factory=Limits)


class Node:
    """Everything runs in one event loop; changes are made one after another, and saved before they are acted on."""

    def __init__(
        self,
        settings: NodeSettings,
        state: StateFolder,
        inventory: DeviceInventory,
        weights: Weights,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._state = state
        self._inventory = inventory
        self._weights = weights
        self._clock = clock
        self._wall_clock = wall_clock
        self._instance = uuid.uuid4().hex
        self._devices: dict[str, Device] = {}
        self._replicas: dict[ReplicaRef, Replica] = {}
        self._records: dict[ReplicaRef, Record] = {}
        self._tasks: dict[ReplicaRef, asyncio.Task[None]] = {}
        self._changing = asyncio.Lock()
        self._watchers: set[asyncio.Event] = set()
        self._accepts = False
        self._device_task: asyncio.Task[None] | None = None
        # Resolved with the error if one of our own tasks breaks: the process must then end, not go on half alive.
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        await self._read_devices()
        self._records = {record.spec.ref: record for record in self._state.load(self._wall_clock())}
        known = {self._state.folder(ref).path for ref in self._records}
        for folder in self._state.folders():
            if folder.path not in known:
                # A removal was saved and then cut short; nobody wants what may still run there.
                await clear_up(folder.path, grace_s=0.0)
                folder.remove()
        for ref, record in self._records.items():
            self._begin(ref, record)
        self._device_task = self._own(self._watch_devices())
        self._accepts = True

    async def stop(self, drain_s: float | None) -> None:
        """Leaves the engines running, or with `drain_s` drains and stops them; what is wanted stays saved."""
        async with self._changing:
            self._accepts = False
            self._changed()
            if drain_s is not None:
                for replica in self._replicas.values():
                    forget = replica.wanted.ending is not None
                    replica.want(replace(replica.wanted, ending=Ending(self._clock() + drain_s, forget)))
        tasks = list(self._tasks.values())
        if drain_s is not None and tasks:
            await asyncio.wait(tasks)
        if self._device_task:
            tasks.append(self._device_task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._state.close()

    # ---- changes -----------------------------------------------------------------------------------------------------

    async def apply(self, spec: ReplicaSpec) -> node_agent_pb2.ReplicaStatus:
        """Raises Outdated, NoRoom or TryLater; then nothing has changed.

        Of the generation that is in force, only another objective is taken.
        """
        async with self._changing:
            self._check_open()
            current = self._records.get(spec.ref)
            if current and spec.generation < current.spec.generation:
                raise Outdated(f"generation {spec.generation} asked for, {current.spec.generation} is in force")
            if current and spec.generation == current.spec.generation and current.remove_by_unix_s is None:
                if spec.objective == current.spec.objective:
                    return self._replicas[spec.ref].status()
                record = replace(current, spec=replace(current.spec, objective=spec.objective))
            else:
                record = Record(spec, self._choose(spec, current))
            await self._save({**self._records, spec.ref: record})
            if spec.ref in self._replicas:
                self._replicas[spec.ref].want(self._wanted(record))
            else:
                self._begin(spec.ref, record)
            log.info("replica applied replica=%s generation=%d", spec.ref, spec.generation)
            self._changed()
            return self._replicas[spec.ref].status()

    async def remove(self, ref: ReplicaRef, drain_s: float) -> None:
        """Begins the removal; an unknown replica is removed already. Raises TryLater."""
        async with self._changing:
            self._check_open()
            record = self._records.get(ref)
            if record is None:
                return
            by_unix_s = self._wall_clock() + drain_s
            if record.remove_by_unix_s is not None:
                by_unix_s = min(by_unix_s, record.remove_by_unix_s)
            record = replace(record, remove_by_unix_s=by_unix_s)
            await self._save({**self._records, ref: record})
            self._replicas[ref].want(self._wanted(record))
            log.info("replica to be removed replica=%s drain_s=%.1f", ref, drain_s)
            self._changed()

    def _check_open(self) -> None:
        if not self._accepts:
            raise TryLater("the agent is shutting down")

    def _choose(self, spec: ReplicaSpec, current: Record | None) -> Claim:
        held: set[Slot] = set()
        for ref, replica in self._replicas.items():
            if ref != spec.ref:
                held |= replica.held_slots()
        keep = current.claim.slots if current else ()
        return choose(spec.devices, footprint(spec, self._weights), list(self._devices.values()), held, keep)

    async def _save(self, records: Mapping[ReplicaRef, Record]) -> None:
        try:
            await asyncio.to_thread(self._state.save, list(records.values()))
        except OSError as error:
            raise TryLater(f"state could not be saved: {error}") from error
        self._records = dict(records)

    # ---- replicas ----------------------------------------------------------------------------------------------------

    def _wanted(self, record: Record) -> Wanted:
        ending = None
        if record.remove_by_unix_s is not None:
            ending = Ending(self._clock() + record.remove_by_unix_s - self._wall_clock(), forget=True)
        return Wanted(record.spec, record.claim, ending)

    def _begin(self, ref: ReplicaRef, record: Record) -> None:
        surroundings = Surroundings(
            engine_command=self._settings.engine_command,
            address=self._settings.address,
            model_store=self._settings.model_store,
            restart=self._settings.restart,
            limits=self._settings.limits,
            clock=self._clock,
            wall_clock=self._wall_clock,
            devices=lambda: self._devices,
            taken_ports=self._taken_ports,
            changed=self._changed,
        )
        replica = self._replica(record, surroundings)
        self._replicas[ref] = replica
        self._tasks[ref] = self._own(self._run(replica))

    def _replica(self, record: Record, around: Surroundings) -> Replica:
        return Replica(self._wanted(record), self._state.folder(record.spec.ref), around)

    async def _run(self, replica: Replica) -> None:
        ref = replica.ref
        while True:
            await replica.run()
            async with self._changing:
                ending = replica.wanted.ending
                if ending is None:
                    continue  # It was applied again just as its removal ended.
                if not ending.forget:
                    return
                try:
                    await self._save({other: record for other, record in self._records.items() if other != ref})
                except TryLater as error:
                    log.error("removal not saved replica=%s why=%s", ref, error)
                else:
                    del self._replicas[ref], self._tasks[ref]
                    replica.folder.remove()
                    log.info("replica removed replica=%s", ref)
                    self._changed()
                    return
            await asyncio.sleep(_SAVE_AGAIN_AFTER_S)

    def _taken_ports(self, ref: ReplicaRef) -> Collection[int]:
        others = (replica for other, replica in self._replicas.items() if other != ref)
        asked = (replica.wanted.spec.port for replica in self._replicas.values() if replica.ref != ref)
        return {port for port in (*(other.port for other in others), *asked) if port is not None}

    # ---- devices -----------------------------------------------------------------------------------------------------

    async def _watch_devices(self) -> None:
        while True:
            await asyncio.sleep(_DEVICES_EVERY_S)
            await self._read_devices()

    async def _read_devices(self) -> None:
        found = {device.id: device for device in await asyncio.to_thread(self._inventory.devices)}
        if found != self._devices:
            log.info("devices of this node devices=%s", sorted(found))
            self._devices = found
            self._changed()

    # ---- telling -----------------------------------------------------------------------------------------------------

    def status(self) -> node_agent_pb2.NodeStatus:
        return node_agent_pb2.NodeStatus(
            node_name=self._settings.name,
            agent_instance=self._instance,
            agent_version=self._settings.version,
            address=self._settings.address,
            devices=[self._device_status(device) for device in self._devices.values()],
            replicas=[replica.status() for _, replica in sorted(self._replicas.items())],
            accepts_replicas=self._accepts,
        )

    def _device_status(self, device: Device) -> node_agent_pb2.Device:
        holders = [
            r for _, r in sorted(self._replicas.items()) if any(s.device_id == device.id for s in r.held_slots())
        ]
        return node_agent_pb2.Device(
            id=device.id,
            kind=_KINDS[device.kind],
            name=device.name,
            memory_bytes=device.memory_bytes,
            compute_units=device.compute_units,
            healthy=device.healthy,
            held_by=[ref_to_wire(replica.ref) for replica in holders],
            slots=device.slots,
            claimed_memory_bytes=sum(
                replica.wanted.claim.bytes_per_slot * replica.wanted.claim.device_ids.count(device.id)
                for replica in holders
            ),
        )

    async def watch(self, period_s: float) -> AsyncIterator[node_agent_pb2.NodeStatus]:
        """The status now, on every change, and every `period_s`. A slow reader skips statuses; it holds up nobody."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                yield self.status()
                await asyncio.sleep(_TELL_AT_MOST_EVERY_S)
                try:
                    async with asyncio.timeout(period_s):
                        await changed.wait()
                except TimeoutError:
                    pass
        finally:
            self._watchers.discard(changed)

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def _changed(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error and not self.broken.done():
            log.critical("the agent is broken", exc_info=error)
            self.broken.set_exception(error)
