"""The pool of agents against a real gRPC server in this process, whose agent does what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from typing_extensions import override

from tidelane.engine.slo import Slo
from tidelane.operator.agents import AgentPool, plain_channel
from tidelane.operator.errors import CannotRun, Deposed, NoRoom, Retry
from tidelane.operator.node_state import Change
from tidelane.operator.observation import Phase, TtftParts
from tidelane.operator.resources import ObjectRef
from tidelane.rpc import node_agent_pb2 as pb
from tidelane.rpc.node_agent_pb2_grpc import NodeAgentServicer, add_NodeAgentServicer_to_server
from tidelane.rpc.wire import ExecutionMode, ModelSpec, Objective, ReplicaRef, ReplicaSpec, ref_to_wire

REF = ReplicaRef("default", "chat", "uid-1", 0)
SPEC = ReplicaSpec(REF, 1, ModelSpec("builtin://x", "chat"), Objective(Slo(0.2, 0.05), ExecutionMode.LANES))


class ScriptedAgent(NodeAgentServicer):
    """Sends what is put in `statuses`; `refusal` is how it answers calls."""

    def __init__(self) -> None:
        self.statuses: asyncio.Queue[pb.NodeStatus] = asyncio.Queue()
        # One entry for each watch begun.
        self.watches: asyncio.Queue[None] = asyncio.Queue()
        self.refusal: grpc.StatusCode | None = None
        self.removed: list[pb.RemoveReplicaRequest] = []

    @override
    async def WatchNode(self, request: Any, context: Any) -> AsyncIterator[pb.NodeStatus]:
        self.watches.put_nowait(None)
        while True:
            yield await self.statuses.get()

    @override
    async def ApplyReplica(self, request: pb.ApplyReplicaRequest, context: Any) -> pb.ReplicaStatus:
        if self.refusal:
            await context.abort(self.refusal, "said the agent")
        return pb.ReplicaStatus(id=request.spec.id, generation=1, phase=pb.ReplicaStatus.STARTING, device_ids=["cpu"])

    @override
    async def RemoveReplica(self, request: pb.RemoveReplicaRequest, context: Any) -> pb.RemoveReplicaResponse:
        self.removed.append(request)
        return pb.RemoveReplicaResponse()


class Rig:
    """`changes` is what the pool told, newest last."""

    def __init__(self) -> None:
        self.agent = ScriptedAgent()
        self.changes: list[tuple[str, Change]] = []
        self.now_s = 0.0
        self._told = asyncio.Event()
        self.may_act = True
        self.pool = AgentPool(plain_channel, lambda: self.now_s, self._changed, lambda: self.may_act)
        self._server: grpc.aio.Server | None = None
        self.port = 0

    def _changed(self, name: str, change: Change) -> None:
        self.changes.append((name, change))
        self._told.set()

    async def start(self) -> None:
        # Two servers must not share the port while one goes and the next comes.
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_NodeAgentServicer_to_server(self.agent, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server:
            await self._server.stop(None)

    async def until(self, wanted: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not wanted():
                self._told.clear()
                await self._told.wait()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    await made.start()
    made.pool.follow([f"127.0.0.1:{made.port}"])
    yield made
    await made.pool.close()
    await made.stop()


def node_status(name: str = "a", *replicas: pb.ReplicaStatus) -> pb.NodeStatus:
    cpu = pb.Device(id="cpu", kind=pb.Device.CPU, healthy=True)
    return pb.NodeStatus(node_name=name, address="10.0.0.1", accepts_replicas=True, devices=[cpu], replicas=replicas)


def replica_status(**changes: Any) -> pb.ReplicaStatus:
    status = pb.ReplicaStatus(
        id=ref_to_wire(REF), generation=1, serving_generation=1, phase=pb.ReplicaStatus.READY, port=8000
    )
    status.device_ids.append("cpu")
    status.MergeFrom(pb.ReplicaStatus(**changes))
    return status


async def test_a_node_is_known_once_heard(rig: Rig) -> None:
    assert rig.pool.nodes() == {}
    await rig.agent.statuses.put(node_status("a", replica_status()))
    await rig.until(lambda: "a" in rig.pool.nodes())
    node = rig.pool.nodes()["a"]
    assert node.connected
    assert node.accepts_replicas
    assert [device.free for device in node.devices] == [0]
    replica = node.replicas[REF]
    assert (replica.phase, replica.host, replica.port) == (Phase.READY, "10.0.0.1", 8000)
    assert replica.measured is None
    assert rig.changes == [("a", Change(services=frozenset({ObjectRef("default", "chat")}), room=True))]


async def test_who_may_not_act_tells_no_agent_anything_and_still_hears_them(rig: Rig) -> None:
    rig.may_act = False
    await rig.agent.statuses.put(node_status("a", replica_status()))
    await rig.until(lambda: "a" in rig.pool.nodes())
    with pytest.raises(Deposed):
        await rig.pool.apply("a", SPEC)
    with pytest.raises(Deposed):
        await rig.pool.remove("a", REF, 30.0)
    assert rig.agent.removed == []
    rig.may_act = True
    await rig.pool.remove("a", REF, 30.0)
    assert len(rig.agent.removed) == 1


async def test_what_is_told_apart(rig: Rig) -> None:
    service = frozenset({ObjectRef("default", "chat")})
    await rig.agent.statuses.put(node_status("a", replica_status()))
    await rig.agent.statuses.put(node_status("a", replica_status()))
    measured = replica_status(engine={"latency": {"requests": 3, "ttft_at_percentile_s": 0.1}})
    await rig.agent.statuses.put(node_status("a", measured))
    await rig.agent.statuses.put(node_status("a", replica_status(phase=pb.ReplicaStatus.BACKING_OFF)))
    await rig.agent.statuses.put(node_status("a"))
    await rig.until(lambda: len(rig.changes) == 4)
    told = [change for _, change in rig.changes[1:]]
    assert told == [Change(measured=service), Change(services=service), Change(services=service, room=True)]


async def test_measured_figures_are_read(rig: Rig) -> None:
    latency = {
        "window_s": 60.0,
        "requests": 3,
        "queue_at_percentile_s": 0.4,
        "prefill_at_percentile_s": 0.3,
        "queue_p90_s": 0.2,
        "prefill_p50_s": 0.1,
    }
    for engine in ({"latency": latency, "load": {"waiting": 1}}, {"latency": {"requests": 3}, "load": {}}):
        await rig.agent.statuses.put(node_status("a", replica_status(engine=engine)))
    await rig.until(lambda: len(rig.changes) == 2)
    assert rig.changes[1][1].measured
    [older] = rig.pool.nodes()["a"].replicas.values()
    assert older.measured
    assert (older.measured.parts, older.idle) == (None, True)
    await rig.agent.statuses.put(node_status("a", replica_status(engine={"latency": latency, "load": {"waiting": 1}})))
    await rig.until(lambda: len(rig.changes) == 3)
    [found] = rig.pool.nodes()["a"].replicas.values()
    assert found.measured
    assert (found.measured.window_s, found.measured.parts) == (60.0, TtftParts(0.4, 0.3, 0.2, 0.1))
    assert not found.idle


async def test_a_lost_agent_keeps_its_last_state_and_is_found_again(rig: Rig) -> None:
    await rig.agent.statuses.put(node_status("a", replica_status()))
    await rig.until(lambda: "a" in rig.pool.nodes())
    await rig.stop()
    await rig.until(lambda: not rig.pool.nodes()["a"].connected)
    rig.now_s += 7
    assert rig.pool.nodes()["a"].lost_for_s == 7
    assert REF in rig.pool.nodes()["a"].replicas
    with pytest.raises(Retry, match="not connected"):
        await rig.pool.apply("a", SPEC)
    await rig.agent.statuses.put(node_status("a"))
    await rig.start()
    await rig.until(lambda: rig.pool.nodes()["a"].connected)
    assert rig.pool.nodes()["a"].replicas == {}


async def test_an_applied_replica_is_known_and_holds_its_device_at_once(rig: Rig) -> None:
    await rig.agent.statuses.put(node_status())
    await rig.until(lambda: "a" in rig.pool.nodes())
    await rig.pool.apply("a", SPEC)
    node = rig.pool.nodes()["a"]
    assert node.replicas[REF].phase is Phase.STARTING
    assert [device.free for device in node.devices] == [0]


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, NoRoom),
        (grpc.StatusCode.INVALID_ARGUMENT, CannotRun),
        (grpc.StatusCode.FAILED_PRECONDITION, Retry),
        (grpc.StatusCode.UNAVAILABLE, Retry),
    ],
)
async def test_refusals_mean_what_to_do(rig: Rig, code: grpc.StatusCode, meaning: type[Exception]) -> None:
    await rig.agent.statuses.put(node_status())
    await rig.until(lambda: "a" in rig.pool.nodes())
    rig.agent.refusal = code
    with pytest.raises(meaning, match="said the agent"):
        await rig.pool.apply("a", SPEC)


async def test_removing(rig: Rig) -> None:
    await rig.agent.statuses.put(node_status())
    await rig.until(lambda: "a" in rig.pool.nodes())
    await rig.pool.remove("a", REF, 12.0)
    assert [(each.id, each.drain_deadline_s) for each in rig.agent.removed] == [(ref_to_wire(REF), 12.0)]


async def test_a_second_agent_of_the_same_name_is_not_believed(rig: Rig) -> None:
    await rig.agent.statuses.put(node_status("a", replica_status()))
    await rig.until(lambda: "a" in rig.pool.nodes())
    impostor = Rig()
    await impostor.start()
    try:
        rig.pool.follow([f"127.0.0.1:{rig.port}", f"127.0.0.1:{impostor.port}"])
        await impostor.agent.watches.get()
        await impostor.agent.statuses.put(node_status("a"))
        # It is left at once, and tried again later.
        await impostor.agent.watches.get()
        assert REF in rig.pool.nodes()["a"].replicas
    finally:
        await impostor.stop()


async def test_one_no_longer_followed_is_lost(rig: Rig) -> None:
    await rig.agent.statuses.put(node_status())
    await rig.until(lambda: "a" in rig.pool.nodes())
    rig.pool.follow([])
    await rig.until(lambda: not rig.pool.nodes()["a"].connected)
    assert rig.pool.dead_followers == []


async def test_silence_counts_only_once_every_agent_has_been_tried(rig: Rig) -> None:
    rig.now_s = 50.0
    assert rig.pool.watching_for_s == 0.0
    await rig.agent.statuses.put(node_status())
    await rig.until(lambda: "a" in rig.pool.nodes())
    rig.now_s = 53.0
    assert rig.pool.watching_for_s == 3.0
