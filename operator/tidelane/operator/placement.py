"""Which node owns which replica. Pure, and sticky: an owner changes only for a reason that can be named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tidelane.operator.observation import Node, Observed, RefusalKind, Timing
from tidelane.operator.resources import Service, ServiceSpec
from tidelane.rpc.wire import ReplicaRef

_HOLDERS_TOLD: Final = 5


@dataclass(frozen=True, slots=True)
class Move:
    """A replica that gets another owner, and why."""

    index: int
    source: str
    target: str
    why: str


@dataclass(frozen=True, slots=True)
class Placements:
    """The owner of each replica, why some must wait, and who moves."""

    owners: Mapping[int, str] = field(default_factory=dict)
    waiting: Mapping[int, str] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()


def place(
    service: Service, spec: ServiceSpec, observed: Observed, timing: Timing, surge: int | None = None
) -> Placements:
    """An owner for each replica that has none or must leave it, where there is room.

    `surge` is the index of one more, beyond the number wanted.
    """
    indexes = [*range(spec.replicas or 0), *(() if surge is None else (surge,))]
    recorded = {index: node for index, node in service.placements.items() if index in indexes}
    owners: dict[int, str] = {}
    waiting: dict[int, str] = {}
    moves: list[Move] = []
    for index in indexes:
        ref = service.replica_ref(index)
        owner = recorded.get(index) or _reporting(ref, observed)
        why = "" if owner is None else _reason_to_leave(owner, ref, service.generation, observed, timing)
        if owner is not None and not why:
            owners[index] = owner
            continue
        # Its own replicas that are placed and not reported yet take room as much as those of others.
        others = {**recorded, **owners}
        others.pop(index, None)
        target = _best(service, spec, others, observed, ref, avoid=owner)
        if target is not None:
            owners[index] = target
            if owner is not None:
                moves.append(Move(index, owner, target, why))
        else:
            waiting[index] = why or _no_room(service, spec, others, observed, ref)
            if owner is not None:
                owners[index] = owner
    return Placements(owners, waiting, tuple(moves))


def _reporting(ref: ReplicaRef, observed: Observed) -> str | None:
    """A node that runs a replica of which no record exists, as after a restore from a backup without status."""
    return min((node.name for node in observed.nodes.values() if node.connected and ref in node.replicas), default=None)


def _reason_to_leave(owner: str, ref: ReplicaRef, generation: int, observed: Observed, timing: Timing) -> str:
    if observed.lost_for_s(owner) >= timing.move_s:
        return f"node {owner} has been out of reach for over {timing.move_s:.0f} s"
    refusal = observed.refusals.get((owner, ref))
    if refusal and refusal.kind is RefusalKind.NO_ROOM and refusal.generation == generation:
        return f"node {owner} has no room: {refusal.message}"
    node = observed.connected(owner)
    if node and ref not in node.replicas and not node.accepts_replicas:
        return f"node {owner} accepts no replicas"
    return ""


def _best(
    service: Service,
    spec: ServiceSpec,
    others: Mapping[int, str],
    observed: Observed,
    ref: ReplicaRef,
    avoid: str | None,
) -> str | None:
    """The node with the fewest replicas of this service, then the most free devices, then the first by name."""
    ranked = []
    for node in observed.nodes.values():
        refusal = observed.refusals.get((node.name, ref))
        if not node.connected or not node.accepts_replicas or node.name == avoid:
            continue
        if refusal and refusal.generation == service.generation:
            continue
        free = _free(node, _promises(service, spec, node, others, observed))
        if free >= spec.devices:
            ranked.append((list(others.values()).count(node.name), -free, node.name))
    return min(ranked)[2] if ranked else None


def _promises(
    service: Service, spec: ServiceSpec, node: Node, others: Mapping[int, str], observed: Observed
) -> Sequence[int]:
    own = [
        spec.devices
        for index, owner in others.items()
        if owner == node.name and service.replica_ref(index) not in node.replicas
    ]
    return [*observed.promised.get(node.name, ()), *own]


def _free(node: Node, promises: Sequence[int]) -> int:
    """How many of its devices have a free slot once every promise has been kept."""
    free = [device.free for device in node.devices]
    for devices in promises:
        free.sort(reverse=True)
        free = [slots - 1 if place < devices else slots for place, slots in enumerate(free)]
    return sum(slots > 0 for slots in free)


def _no_room(
    service: Service, spec: ServiceSpec, others: Mapping[int, str], observed: Observed, ref: ReplicaRef
) -> str:
    nodes = [node for node in observed.nodes.values() if node.connected]
    if not nodes:
        return _no_agent(observed)
    refusals = [refusal.message for (_, refused), refusal in sorted(observed.refusals.items()) if refused == ref]
    if refusals:
        return f"no node has room: {refusals[0]}"
    largest = max(sum(device.healthy for device in node.devices) for node in nodes)
    if spec.devices > largest:
        return f"spec.resources.gpus: {spec.devices} wanted; no node has more than {largest}"
    free = {node.name: _free(node, _promises(service, spec, node, others, observed)) for node in nodes}
    freest = max(sorted(nodes, key=lambda node: node.name), key=lambda node: free[node.name])
    slots = sum(device.slots for device in freest.devices if device.healthy)
    return (
        f"spec.resources.gpus: {spec.devices} wanted; no node has as many free: "
        f"{freest.name} has {free[freest.name]} of {slots}{_holders(freest)}"
    )


def _no_agent(observed: Observed) -> str:
    if not observed.unreached:
        return "no agent is connected"
    # Of one: of hundreds that one fault cuts off, all would say the same.
    (address, why), rest = min(observed.unreached.items()), len(observed.unreached) - 1
    return f"no agent is connected: {address}: {why}{f' (and {rest} more)' if rest else ''}"


def _holders(node: Node) -> str:
    names = sorted({f"{ref.namespace}/{ref.service}" for ref in node.replicas})
    told = ", ".join(names[:_HOLDERS_TOLD]) + (", ..." if len(names) > _HOLDERS_TOLD else "")
    return f", the rest held by {told}" if names else ""
