"""The reconciler on a local cluster, with agents that answer at once."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from typing_extensions import override

from control_plane.wrong_manifests import RIGHT
from tidelane.operator import crd
from tidelane.operator.errors import CannotRun, NoRoom, OperatorError, Retry
from tidelane.operator.local_cluster import LocalCluster
from tidelane.operator.observation import Device, Node, Phase, Replica, Timing
from tidelane.operator.reconcile import Reconciler
from tidelane.operator.resources import ObjectRef, RawObject
from tidelane.operator.validation import Schema
from tidelane.rpc.wire import ReplicaRef, ReplicaSpec

CHAT, OTHER = ObjectRef("default", "chat"), ObjectRef("default", "other")


class InstantAgents:
    """One device on each node. `refuse` answers the next calls for a node."""

    watching_for_s = 100.0
    unreached: Mapping[str, str] = {}

    def __init__(self, *names: str) -> None:
        self.running: dict[str, dict[ReplicaRef, Replica]] = {name: {} for name in names}
        self.refuse: dict[str, OperatorError] = {}
        self.calls: list[tuple[str, str, int]] = []

    def nodes(self) -> Mapping[str, Node]:
        return {
            name: Node(name, (Device("cpu", held=len(replicas)),), dict(replicas))
            for name, replicas in self.running.items()
        }

    async def apply(self, node_name: str, spec: ReplicaSpec) -> None:
        self.calls.append(("apply", node_name, spec.generation))
        if node_name in self.refuse:
            raise self.refuse[node_name]
        self.running[node_name][spec.ref] = Replica(
            spec.ref,
            spec.generation,
            spec.generation,
            Phase.READY,
            host="10.0.0.1",
            port=8000,
            model_loaded=True,
            objective=spec.objective,
        )

    async def remove(self, node_name: str, ref: ReplicaRef, drain_deadline_s: float) -> None:
        self.calls.append(("remove", node_name, 0))
        self.running[node_name].pop(ref, None)


class Rig:
    def __init__(self, *names: str) -> None:
        self.dirty: set[ObjectRef] = set()
        self.now_s = 0.0
        self.reads = 0
        self.schema = Schema(crd.load(), crd.VERSION)
        self.cluster = CountingCluster(
            lambda: datetime(2030, 1, 1, tzinfo=UTC), self._changed, lambda *_: None, lambda: None
        )
        self.agents = InstantAgents(*names)
        self.reconciler = self.another()

    def another(self) -> Reconciler:
        """As after a restart of the operator."""
        return Reconciler(
            self.cluster, self.agents, lambda: datetime(2030, 1, 1, tzinfo=UTC), lambda: self.now_s, Timing()
        )

    def _changed(self, ref: ObjectRef) -> None:
        self.dirty.add(ref)
        self.reconciler.changed(ref)

    def put(self, ref: ObjectRef = CHAT, **spec: Any) -> None:
        manifest: dict[str, Any] = copy.deepcopy(dict(RIGHT))
        manifest["metadata"]["name"] = ref.name
        manifest["spec"] |= spec
        self.cluster.put(self.schema.with_defaults(manifest))

    async def settle(self) -> None:
        """Looks at what changed until nothing does."""
        for _ in range(30):
            if not self.dirty:
                return
            ref = self.dirty.pop()
            if await self.reconciler.reconcile(ref) == 0.0:
                self.dirty.add(ref)
        raise AssertionError(f"never settles: {self.dirty}")

    async def again(self, *refs: ObjectRef) -> None:
        self.dirty |= set(refs or (CHAT,))
        await self.settle()

    async def condition(self, ref: ObjectRef, name: str) -> tuple[str, str]:
        raw = await self.cluster.service(ref)
        assert raw
        [found] = [each for each in raw["status"]["conditions"] if each["type"] == name]
        return found["status"], found["reason"]


class CountingCluster(LocalCluster):
    reads = 0

    @override
    async def service(self, ref: ObjectRef) -> RawObject | None:
        self.reads += 1
        return await super().service(ref)


@pytest.fixture
def rig() -> Rig:
    return Rig("a", "b")


async def test_up_and_down(rig: Rig) -> None:
    rig.put()
    await rig.settle()
    await rig.again()
    assert await rig.condition(CHAT, "Ready") == ("True", "Serving")
    assert [child["kind"] for child in await rig.cluster.children(CHAT)] == ["Service", "EndpointSlice"]
    rig.cluster.delete(CHAT)
    await rig.settle()
    await rig.again()
    assert await rig.cluster.service(CHAT) is None
    assert list(await rig.cluster.children(CHAT)) == []
    assert rig.agents.running == {"a": {}, "b": {}}


async def test_looking_again_does_nothing_and_reads_nothing(rig: Rig) -> None:
    rig.put()
    await rig.settle()
    await rig.again()
    calls, reads = list(rig.agents.calls), rig.cluster.reads
    for _ in range(5):
        await rig.reconciler.reconcile(CHAT)
    assert rig.agents.calls == calls
    assert rig.cluster.reads == reads


async def test_two_services_do_not_get_one_device(rig: Rig) -> None:
    rig.put(CHAT)
    rig.put(OTHER)
    # Both are planned before either agent has said a word.
    slow = rig.agents.apply

    async def unheard(node_name: str, spec: ReplicaSpec) -> None:
        rig.agents.calls.append(("apply", node_name, spec.generation))

    rig.agents.apply = unheard  # type: ignore[method-assign]
    await rig.reconciler.reconcile(CHAT)
    await rig.reconciler.reconcile(OTHER)
    assert [node for _, node, _ in rig.agents.calls] == ["a", "b"]
    rig.agents.apply = slow  # type: ignore[method-assign]


async def test_an_agent_that_refuses_is_left_for_another(rig: Rig) -> None:
    rig.agents.refuse["a"] = NoRoom("7 MiB of 9 MiB needed")
    rig.put()
    await rig.settle()
    await rig.again()
    assert [call[:2] for call in rig.agents.calls] == [("apply", "a"), ("apply", "b")]
    assert await rig.condition(CHAT, "Ready") == ("True", "Serving")


async def test_a_refusal_is_forgotten_after_a_while(rig: Rig) -> None:
    rig.agents.refuse = {"a": NoRoom("full"), "b": NoRoom("full")}
    rig.put()
    await rig.settle()
    assert await rig.condition(CHAT, "Scheduled") == ("False", "NoRoom")
    assert CHAT in rig.reconciler.waiting()
    rig.agents.refuse.clear()
    rig.now_s += Timing().refusal_s
    await rig.again()
    await rig.again()
    assert await rig.condition(CHAT, "Ready") == ("True", "Serving")
    assert CHAT not in rig.reconciler.waiting()


async def test_what_can_never_run_is_not_asked_again_until_it_changes(rig: Rig) -> None:
    rig.agents.refuse["a"] = CannotRun("spec.model.source: no such file")
    rig.put()
    await rig.settle()
    assert await rig.condition(CHAT, "Stalled") == ("True", "Refused")
    rig.now_s += 10_000
    await rig.again()
    assert len(rig.agents.calls) == 1
    rig.agents.refuse.clear()
    rig.put(model={"source": "file:///there"})
    await rig.settle()
    await rig.again()
    assert await rig.condition(CHAT, "Ready") == ("True", "Serving")


async def test_after_a_restart_nothing_moves(rig: Rig) -> None:
    rig.put(CHAT)
    rig.put(OTHER)
    await rig.settle()
    await rig.again(CHAT, OTHER)
    calls = list(rig.agents.calls)
    rig.reconciler = rig.another()
    assert set(await rig.reconciler.start()) == {CHAT, OTHER}
    await rig.again(CHAT, OTHER)
    assert rig.agents.calls == calls
    assert rig.reconciler.on_node("a") | rig.reconciler.on_node("b") == {CHAT, OTHER}


async def test_deleted_while_the_operator_was_away(rig: Rig) -> None:
    rig.put()
    await rig.settle()
    await rig.again()
    rig.cluster.delete(CHAT)
    rig.reconciler = rig.another()
    await rig.reconciler.start()
    await rig.again()
    await rig.again()
    assert await rig.cluster.service(CHAT) is None
    assert rig.agents.running == {"a": {}, "b": {}}


async def test_a_replica_nobody_knows_is_stopped(rig: Rig) -> None:
    stray = ReplicaRef("default", "chat", "uid-of-old", 0)
    rig.agents.running["a"][stray] = Replica(stray, 1, 1, Phase.READY)
    await rig.again()
    assert rig.agents.running["a"] == {}


async def test_a_status_that_cannot_be_written_keeps_the_agent_unasked(rig: Rig) -> None:
    rig.put()

    async def unreachable(*_: object) -> None:
        raise Retry("no API server")

    write = rig.cluster.write_status
    rig.cluster.write_status = unreachable  # type: ignore[method-assign,assignment]
    with pytest.raises(Retry):
        await rig.reconciler.reconcile(CHAT)
    assert rig.agents.calls == []
    rig.cluster.write_status = write  # type: ignore[method-assign]
    await rig.again()
    assert len(rig.agents.calls) == 1


async def test_room_of_a_deleted_service_goes_to_the_one_that_waits() -> None:
    rig = Rig("a")
    rig.put(CHAT)
    await rig.settle()
    rig.put(OTHER)
    await rig.settle()
    assert rig.reconciler.waiting() == {OTHER}
    rig.cluster.delete(CHAT)
    await rig.reconciler.reconcile(CHAT)
    # Its agent has let go of it, and the object is still there.
    assert await rig.cluster.service(CHAT)
    await rig.again(OTHER)
    await rig.again(OTHER)
    assert await rig.condition(OTHER, "Ready") == ("True", "Serving")
