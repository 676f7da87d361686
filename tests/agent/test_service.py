"""The gRPC face: idempotence, refusals, the status stream, health, reflection, who may connect."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from agent.rig import GIB, cpu, gpu, rig, spec
from tidelane.agent.devices import FixedInventory
from tidelane.agent.errors import CannotStart
from tidelane.agent.node import NodeSettings
from tidelane.agent.server import SERVICE, Agent, AgentSettings, TlsPaths, is_loopback
from tidelane.rpc import node_agent_pb2
from tidelane.rpc.node_agent_pb2 import NodeStatus, ReplicaStatus
from tidelane.rpc.wire import KvCacheSpec, ReplicaRef, ref_to_wire, spec_to_wire

pytestmark = pytest.mark.slow  # real processes, dozens of them


async def test_the_same_generation_again_changes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec())
        before = await r.serving()
        again = await r.apply(spec(tpot_s=0.01))
        assert again.serving_generation == 1
        assert again.phase == ReplicaStatus.READY
        assert again.engine.pid == before.engine.pid
        assert r.files.journal("objective") == []
        assert len(r.files.journal("started")) == 1


async def test_an_older_generation_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.apply(spec(generation=5))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await r.apply(spec(generation=4))
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert refused.value.details() == "generation 4 asked for, 5 is in force"


async def test_no_room_is_refused_with_the_numbers_and_leaves_no_trace(tmp_path: Path) -> None:
    async with rig(tmp_path, gpu(0)) as r:
        await r.apply(spec("one"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await r.apply(spec("two"))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.value.details() == "1 devices wanted, 0 free: 1 of 1 slots are held"
        node = await r.until(lambda _: True)
        assert [replica.id.service for replica in node.replicas] == ["one"]


async def test_too_little_memory_is_refused_with_the_numbers(tmp_path: Path) -> None:
    async with rig(tmp_path, cpu(memory_bytes=2 * GIB)) as r:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await r.apply(spec(kv_cache=KvCacheSpec(host_memory_bytes=4 * GIB)))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        expected = "1 devices wanted, 0 free: 0 of 1 slots are held; cpu offers 2048 MiB of 4608 MiB needed"
        assert refused.value.details() == expected


async def test_room_is_free_again_only_when_the_engine_is_gone(tmp_path: Path) -> None:
    async with rig(tmp_path, gpu(0)) as r:
        r.files.switch(drain_takes_s=0.5)
        await r.apply(spec("one"))
        await r.serving(name="one")
        await r.remove(spec("one").ref)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await r.apply(spec("two"))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await r.gone("one")
        await r.apply(spec("two"))
        await r.serving(name="two")


async def test_while_an_engine_is_replaced_by_one_with_fewer_devices_both_are_held(tmp_path: Path) -> None:
    async with rig(tmp_path, gpu(0), gpu(1)) as r:
        r.files.switch(drain_takes_s=0.5)
        await r.apply(spec("one", devices=2))
        await r.serving(name="one")
        await r.apply(spec("one", generation=2, devices=1))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await r.apply(spec("two"))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await r.serving(generation=2, name="one")
        await r.apply(spec("two"))
        await r.serving(name="two")


async def test_applied_again_while_it_drains_it_comes_back(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.files.switch(drain_takes_s=0.5)
        await r.apply(spec())
        before = await r.serving()
        await r.remove(spec().ref)
        await r.in_phase(ReplicaStatus.DRAINING)
        await r.apply(spec())
        after = await r.replica(lambda s: s.phase == ReplicaStatus.READY and s.engine.pid != before.engine.pid)
        assert after.serving_generation == 1


async def test_a_service_made_again_under_its_name_is_another(tmp_path: Path) -> None:
    async with rig(tmp_path, gpu(0), gpu(1)) as r:
        await r.apply(spec(generation=9))
        reborn = ReplicaRef("default", "chat", "another-uid", 0)
        await r.apply(spec(generation=1, ref=reborn))
        node = await r.until(lambda n: len(n.replicas) == 2)
        assert {(x.id.service_uid, x.generation) for x in node.replicas} == {("uid-of-chat", 9), ("another-uid", 1)}


async def test_removing_what_is_not_there_is_fine(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.remove(spec().ref)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"id": {"service": ""}}, "spec.id: namespace, service and service_uid must not be empty"),
        ({"generation": 0}, "spec: generation must be at least 1"),
        ({"model": {"source": "ftp://x"}}, "spec.model: source: 'ftp://x' must start with"),
        ({"model": {"dtype": "int3"}}, "spec.model: dtype: 'int3' must be"),
        ({"objective": {"mode": 0}}, "spec.objective.mode: 0 is no known mode"),
        ({"objective": {"late_requests": 9}}, "spec.objective.late_requests: 9 is neither SERVE nor REFUSE"),
        ({"objective": {"slo": {"tpot_s": math.nan}}}, "spec.objective.slo.tpot_s: nan must be a finite number"),
        ({"objective": {"slo": {"ttft_s": 0.0}}}, "spec.objective.slo: ttft_s and tpot_s must be above 0"),
        ({"objective": {"min_decode_share": 0.7, "max_decode_share": 0.2}}, "spec.objective: decode shares must"),
        ({"port": 70000}, "spec: port: 70000 must lie between 1 and 65535"),
    ],
)
async def test_what_can_never_run_is_rejected_with_the_field(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    message = spec_to_wire(spec())
    _set(message, change)
    async with rig(tmp_path) as r:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await r.stub.ApplyReplica(node_agent_pb2.ApplyReplicaRequest(spec=message))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (refused.value.details() or "").startswith(told)


def _set(message: object, change: dict[str, Any]) -> None:
    for field, value in change.items():
        if isinstance(value, dict):
            _set(getattr(message, field), value)
        else:
            setattr(message, field, value)


@pytest.mark.parametrize("drain_s", [-1.0, math.nan, math.inf])
async def test_a_senseless_drain_deadline_is_rejected(tmp_path: Path, drain_s: float) -> None:
    async with rig(tmp_path) as r:
        request = node_agent_pb2.RemoveReplicaRequest(id=ref_to_wire(spec().ref), drain_deadline_s=drain_s)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await r.stub.RemoveReplica(request)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_state_that_cannot_be_saved_refuses_the_change(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        # A folder where the file's temporary goes: root, too, fails to write it.
        (tmp_path / "state" / "state.json.new").mkdir()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await r.apply(spec())
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert not (await r.until(lambda _: True)).replicas
        (tmp_path / "state" / "state.json.new").rmdir()
        await r.apply(spec())
        await r.serving()


async def read(call: Any) -> NodeStatus:
    status = await asyncio.wait_for(call.read(), 10)
    assert isinstance(status, NodeStatus)
    return status


async def test_the_node_is_told_at_once_then_on_changes_and_by_period(tmp_path: Path) -> None:
    async with rig(tmp_path, gpu(0), gpu(1)) as r:
        quiet = r.stub.WatchNode(node_agent_pb2.WatchNodeRequest(period_s=60))
        first = await read(quiet)
        assert first.node_name == "node-1"
        assert first.accepts_replicas
        assert [(d.id, d.kind, d.slots) for d in first.devices] == [
            ("GPU-0", node_agent_pb2.Device.GPU, 1),
            ("GPU-1", node_agent_pb2.Device.GPU, 1),
        ]
        await r.apply(spec())
        changed = await read(quiet)
        assert [replica.id.service for replica in changed.replicas] == ["chat"]
        assert [h.service for h in changed.devices[0].held_by] == ["chat"]
        quiet.cancel()
        periodic = r.stub.WatchNode(node_agent_pb2.WatchNodeRequest(period_s=0.1))
        for _ in range(3):
            assert (await read(periodic)).node_name == "node-1"
        periodic.cancel()


async def test_a_reader_that_never_reads_holds_up_nobody_and_skips(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        slow = r.stub.WatchNode(node_agent_pb2.WatchNodeRequest(period_s=0.1))
        await slow.initial_metadata()
        await r.apply(spec())
        await r.serving()
        for generation in range(2, 30):
            await r.apply(spec(generation=generation))
        await r.serving(generation=29)
        async with asyncio.timeout(10):
            async for status in slow:
                if status.replicas and status.replicas[0].serving_generation == 29:
                    break
        slow.cancel()
        await r.until(lambda _: r.agent.node.watchers == 1)  # only the watch of `until` itself


async def test_too_many_watchers_are_refused(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        calls = [r.stub.WatchNode(node_agent_pb2.WatchNodeRequest(period_s=60)) for _ in range(64)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await r.stub.WatchNode(node_agent_pb2.WatchNodeRequest()).read()
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()


async def test_health_and_reflection_answer(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        health = health_pb2_grpc.HealthStub(r.channel)
        for name in ("", SERVICE):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(r.channel)
        call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert SERVICE == "tidelane.rpc.v1alpha1.NodeAgent"
        assert {SERVICE, "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(
    ("listen", "loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/x", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("192.0.2.1:1", False),
        ("example.org:1", False),
        (":1", False),
    ],
)
def test_loopback_is_told_from_the_rest(listen: str, loopback: bool) -> None:
    assert is_loopback(listen) is loopback


def _settings(tmp_path: Path, listen: str, tls: TlsPaths | None = None, insecure: bool = False) -> AgentSettings:
    return AgentSettings(NodeSettings("node-1"), tmp_path / "state", listen, tls, insecure)


async def test_beyond_loopback_it_wants_tls(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="without TLS"):
        await Agent(_settings(tmp_path, "0.0.0.0:0"), FixedInventory([cpu()])).start()
    assert not (tmp_path / "state").exists()
    async with Agent(_settings(tmp_path, "0.0.0.0:0", insecure=True), FixedInventory([cpu()])) as agent:
        assert agent.port > 0


async def test_a_taken_address_is_refused_and_the_folder_untouched(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        taken = _settings(tmp_path / "other", f"127.0.0.1:{r.agent.port}")
        with pytest.raises(CannotStart, match="cannot listen on"):
            await Agent(taken, FixedInventory([cpu()])).start()
        assert not (tmp_path / "other").exists()
