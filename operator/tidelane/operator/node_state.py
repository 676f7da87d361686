"""An agent's NodeStatus as an observation, and what is new in it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from tidelane.operator.observation import Device, KVPressure, Lanes, Measured, Node, Phase, Reach, Replica, TtftParts
from tidelane.operator.resources import ObjectRef
from tidelane.rpc import node_agent_pb2 as pb
from tidelane.rpc.serving_pb2 import Latency, Load
from tidelane.rpc.wire import ReplicaRef, objective_from_wire, ref_from_wire, spec_from_wire

_PHASES: Final[Mapping[int, Phase]] = {
    pb.ReplicaStatus.STARTING: Phase.STARTING,
    pb.ReplicaStatus.READY: Phase.READY,
    pb.ReplicaStatus.DRAINING: Phase.DRAINING,
    pb.ReplicaStatus.BACKING_OFF: Phase.BACKING_OFF,
    pb.ReplicaStatus.FAILED: Phase.FAILED,
}


# An agent older than this operator says nothing of it.
_PRESSURES: Final[Mapping[int, KVPressure]] = {
    Load.NONE: KVPressure.NONE,
    Load.WAITING: KVPressure.WAITING,
    Load.PREEMPTING: KVPressure.PREEMPTING,
    Load.REFUSING: KVPressure.REFUSING,
}


@dataclass(frozen=True, slots=True)
class Change:
    """What is new on a node: services whose replicas changed, services with new figures only, and room for others."""

    services: frozenset[ObjectRef] = frozenset()
    measured: frozenset[ObjectRef] = frozenset()
    room: bool = False

    @classmethod
    def everything(cls, node: Node) -> Self:
        return cls(services=frozenset(_service(ref) for ref in node.replicas), room=True)

    def __bool__(self) -> bool:
        return bool(self.services or self.measured or self.room)


def compare(before: Node | None, after: Node) -> Change:
    if before is None or before.connected != after.connected:
        return Change.everything(after)
    changed, measured = set(), set()
    for ref in before.replicas.keys() | after.replicas.keys():
        old, new = before.replicas.get(ref), after.replicas.get(ref)
        if old == new:
            continue
        if old and new and _without_figures(old) == _without_figures(new):
            measured.add(_service(ref))
        else:
            changed.add(_service(ref))
    room = (before.devices, before.accepts_replicas) != (after.devices, after.accepts_replicas)
    return Change(frozenset(changed), frozenset(measured - changed), room)


def node_of(status: pb.NodeStatus) -> Node:
    """Raises ValueError for a message that names no node or no service."""
    if not status.node_name:
        raise ValueError("node_name is empty")
    replicas = [_replica(each, status.address) for each in status.replicas]
    claims = Counter(device for each in status.replicas for device in each.device_ids)
    devices = tuple(
        Device(each.id, each.healthy, max(1, each.slots), held=max(len(each.held_by), claims[each.id]))
        for each in status.devices
    )
    return Node(status.node_name, devices, {each.ref: each for each in replicas}, status.accepts_replicas)


def with_replica(status: pb.NodeStatus, replica: pb.ReplicaStatus) -> pb.NodeStatus:
    """The status as the agent will give it next, from its answer about one replica."""
    others = [each for each in status.replicas if each.id != replica.id]
    merged = pb.NodeStatus()
    merged.CopyFrom(status)
    del merged.replicas[:]
    merged.replicas.extend([*others, replica])
    return merged


def _replica(status: pb.ReplicaStatus, address: str) -> Replica:
    latency, lanes, reach = status.engine.latency, status.engine.lanes, status.engine.reach
    return Replica(
        ref=ref_from_wire(status.id),
        generation=status.generation,
        serving_generation=status.serving_generation or None,
        # An agent newer than this operator may say what it does not know: surely not ready.
        phase=_PHASES.get(status.phase, Phase.STARTING),
        message=status.message,
        host=status.host or address,
        port=status.port,
        model_loaded=status.model_loaded,
        measured=_measured(latency) if status.engine.HasField("latency") else None,
        lanes=Lanes(lanes.decode_compute_units, lanes.prefill_compute_units) if lanes.decode_compute_units else None,
        kv_pressure=_PRESSURES.get(status.engine.load.kv_pressure),
        idle=status.engine.HasField("load") and not status.engine.load.running and not status.engine.load.waiting,
        reach=Reach(reach.input_tokens, reach.ttft_s, reach.tpot_s) if status.engine.HasField("reach") else None,
        objective=objective_from_wire(status.objective) if status.HasField("objective") else None,
        running=spec_from_wire(status.running, "running") if status.HasField("running") else None,
        serves_objective=status.serves_objective or not status.HasField("objective"),
        workload=status.engine.workload.SerializeToString(),
    )


def _measured(latency: Latency) -> Measured:
    return Measured(
        latency.requests,
        latency.ttft_at_percentile_s,
        latency.tpot_at_percentile_s,
        latency.attainment,
        latency.goodput_rps,
        latency.ttft_p50_s,
        latency.tpot_p50_s,
        latency.window_s,
        TtftParts(
            latency.queue_at_percentile_s,
            latency.prefill_at_percentile_s,
            latency.queue_p90_s,
            latency.prefill_p50_s,
        )
        if latency.prefill_p50_s > 0
        else None,
    )


def _without_figures(replica: Replica) -> Replica:
    return replace(replica, measured=None, lanes=None, kv_pressure=None, reach=None, idle=False, workload=b"")


def _service(ref: ReplicaRef) -> ObjectRef:
    return ObjectRef(ref.namespace, ref.service)
