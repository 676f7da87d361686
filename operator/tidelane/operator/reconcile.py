"""Observe, plan, act: the thin part around `plan`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from tidelane.operator.cluster import Cluster
from tidelane.operator.errors import CannotRun, NoRoom
from tidelane.operator.observation import Node, Observed, Refusal, RefusalKind, Timing
from tidelane.operator.plan import (
    Action,
    ApplyChild,
    DeleteChild,
    SetFinalizers,
    StartReplica,
    StopReplica,
    WriteStatus,
    plan,
)
from tidelane.operator.policies import Policies
from tidelane.operator.reports import Report
from tidelane.operator.resources import ObjectRef, RawObject, Service
from tidelane.rpc.wire import ReplicaRef, ReplicaSpec

log = logging.getLogger(__name__)


class Agents(Protocol):
    """The nodes, and what can be asked of their agents."""

    @property
    def watching_for_s(self) -> float: ...

    @property
    def unreached(self) -> Mapping[str, str]: ...

    def nodes(self) -> Mapping[str, Node]: ...

    async def apply(self, node_name: str, spec: ReplicaSpec) -> None:
        """Raises NoRoom, CannotRun or Retry."""

    async def remove(self, node_name: str, ref: ReplicaRef, drain_deadline_s: float) -> None:
        """Raises Retry."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A service and its children as last read."""

    service: RawObject | None
    children: tuple[RawObject, ...]


@dataclass(frozen=True, slots=True)
class _Claims:
    """The node that each replica of a service has been given, and the devices that each takes."""

    owners: Mapping[ReplicaRef, str]
    devices: int


class Reconciler:
    """Level-triggered: only the name matters, and looking once too often does nothing.

    For one name at a time; several names may be in progress together.
    """

    def __init__(
        self,
        cluster: Cluster,
        agents: Agents,
        now: Callable[[], datetime],
        clock: Callable[[], float],
        timing: Timing,
        policies: Callable[[], Policies] = Policies,
    ) -> None:
        self._cluster = cluster
        self._policies = policies
        self._agents = agents
        self._now = now
        self._clock = clock
        self._timing = timing
        # Kept until an event or a write of our own says that it is out of date: figures alone cost no reads.
        self._reads: dict[ObjectRef, _Read] = {}
        self._changes: Counter[ObjectRef] = Counter()
        self._claims: dict[ObjectRef, _Claims] = {}
        self._refusals: dict[tuple[str, ReplicaRef], tuple[Refusal, float]] = {}
        self._waiting: set[ObjectRef] = set()
        self._calm_since: dict[ObjectRef, datetime | None] = {}

    async def start(self) -> list[ObjectRef]:
        """Learns who owns what before anything is placed. Returns the names there are."""
        services = [Service.parse(raw) for raw in await self._cluster.services()]
        for service in services:
            self._claim(service, service.placements)
        return [service.ref for service in services]

    def changed(self, ref: ObjectRef) -> None:
        """Its object or a child has changed."""
        self._changes[ref] += 1
        self._reads.pop(ref, None)

    def on_node(self, node_name: str) -> set[ObjectRef]:
        """Services with a replica given to that node."""
        return {ref for ref, claims in self._claims.items() if node_name in claims.owners.values()}

    def waiting(self) -> set[ObjectRef]:
        """Services that are not placed, or not wholly."""
        return set(self._waiting)

    async def reconcile(self, ref: ObjectRef) -> float | None:
        """Brings the service a step nearer to what is wanted. Returns in how many seconds to come again."""
        read = self._reads.get(ref) or await self._read(ref)
        service = self._policies().applied(Service.parse(read.service)) if read.service else None
        observed = self._observe(ref, read)
        made = plan(ref, service, observed, self._now(), self._timing)
        self._calm_since[ref] = made.calm_since
        # Before anything is awaited: what is given to this service must not be given to another meanwhile.
        self._remember(ref, service, made.actions)
        refused = False
        for action in made.actions:
            refused |= await self._act(ref, service, action)
        return 0.0 if refused else made.again_in_s

    async def _read(self, ref: ObjectRef) -> _Read:
        changes = self._changes[ref]
        read = _Read(await self._cluster.service(ref), tuple(await self._cluster.children(ref)))
        if self._changes[ref] == changes:
            self._reads[ref] = read
        return read

    def _observe(self, ref: ObjectRef, read: _Read) -> Observed:
        nodes = self._agents.nodes()
        return Observed(
            nodes=nodes,
            children=read.children,
            promised=self._promised(ref, nodes),
            refusals=self._live_refusals(ref),
            watching_for_s=self._agents.watching_for_s,
            calm_since=self._calm_since.get(ref),
            unreached=self._agents.unreached,
        )

    def _promised(self, ref: ObjectRef, nodes: Mapping[str, Node]) -> Mapping[str, tuple[int, ...]]:
        promised: dict[str, tuple[int, ...]] = {}
        for other, claims in self._claims.items():
            for replica, node_name in claims.owners.items() if other != ref else ():
                node = nodes.get(node_name)
                if node is None or replica not in node.replicas:
                    promised[node_name] = (*promised.get(node_name, ()), claims.devices)
        return promised

    def _live_refusals(self, ref: ObjectRef) -> Mapping[tuple[str, ReplicaRef], Refusal]:
        now_s = self._clock()
        live = {}
        for key, (refusal, until_s) in list(self._refusals.items()):
            if until_s <= now_s:
                del self._refusals[key]
            elif (key[1].namespace, key[1].service) == (ref.namespace, ref.name):
                in_s = None if refusal.expires_in_s is None else until_s - now_s
                live[key] = Refusal(refusal.kind, refusal.generation, refusal.message, in_s)
        return live

    def _remember(self, ref: ObjectRef, service: Service | None, actions: tuple[Action, ...]) -> None:
        self._waiting.discard(ref)
        if service is None:
            self._claims.pop(ref, None)
            self._reads.pop(ref, None)
            self._calm_since.pop(ref, None)
            del self._changes[ref]
            return
        placements = service.placements
        conditions = service.status.get("conditions", ())
        for action in actions:
            if isinstance(action, WriteStatus):
                placements = {each["replica"]: each["node"] for each in action.status.get("placements", ())}
                conditions = action.status.get("conditions", ())
        if not any(each["type"] == "Scheduled" and each["status"] == "True" for each in conditions):
            self._waiting.add(ref)
        self._claim(service, placements)

    def _claim(self, service: Service, placements: Mapping[int, str]) -> None:
        owners = {service.replica_ref(index): node for index, node in placements.items()}
        devices = 1 if isinstance(service.spec, str) else service.spec.devices
        # What is being deleted starts nothing more: the room of its replicas is as free as their agents say.
        self._claims[service.ref] = _Claims(owners, 0 if service.deleting else devices)

    async def _act(self, ref: ObjectRef, service: Service | None, action: Action) -> bool:
        """Returns whether an agent refused, so that another plan is due."""
        log.debug("%s: %s", ref, action)
        match action:
            case StartReplica(node, spec):
                return await self._start_replica(node, spec)
            case StopReplica(node, replica, drain_deadline_s):
                await self._agents.remove(node, replica, drain_deadline_s)
                return False
        # All others write to the cluster.
        self.changed(ref)
        match action:
            case ApplyChild(manifest):
                await self._cluster.apply_child(manifest)
            case DeleteChild(kind, child, uid):
                await self._cluster.delete_child(kind, child, uid)
            case SetFinalizers(finalizers, resource_version):
                await self._cluster.set_finalizers(ref, finalizers, resource_version)
            case WriteStatus(status) if service:
                await self._cluster.write_status(ref, service.uid, status)
            case Report() if service:
                await self._cluster.report(ref, service.uid, action)
        return False

    async def _start_replica(self, node: str, spec: ReplicaSpec) -> bool:
        try:
            await self._agents.apply(node, spec)
        except NoRoom as error:
            refusal = Refusal(RefusalKind.NO_ROOM, spec.generation, str(error), self._timing.refusal_s)
            self._refusals[node, spec.ref] = refusal, self._clock() + self._timing.refusal_s
            return True
        except CannotRun as error:
            refusal = Refusal(RefusalKind.CANNOT_RUN, spec.generation, str(error))
            self._refusals[node, spec.ref] = refusal, float("inf")
            return True
        self._refusals.pop((node, spec.ref), None)
        return False
