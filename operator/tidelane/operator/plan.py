"""What to do next about one service: the operator's one decision, a pure function of what is wanted and what is seen.

It is asked again after every change, and says nothing once nothing is left to do. Its actions are in the order in which
they must happen: the owner of a replica is recorded before its agent hears of it, so that no crash in between can lead
to a second owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from tidelane.operator import children
from tidelane.operator.conditions import Verdict
from tidelane.operator.observation import Observed, Phase, Replica, Timing
from tidelane.operator.placement import Placements, place
from tidelane.operator.replica_count import replica_count, scaling_status
from tidelane.operator.reports import Report, reports
from tidelane.operator.resources import FINALIZER, ObjectRef, RawObject, Service, ServiceSpec, Status
from tidelane.operator.rollout import held_back, rollout
from tidelane.operator.status import deleting_status, refused_status, service_status
from tidelane.rpc.wire import ReplicaRef, ReplicaSpec


@dataclass(frozen=True, slots=True)
class SetFinalizers:
    """Valid only for the version of the object that the plan was made from."""

    finalizers: tuple[str, ...]
    resource_version: str


@dataclass(frozen=True, slots=True)
class WriteStatus:
    status: Status


@dataclass(frozen=True, slots=True)
class StartReplica:
    """Also brings a running replica to another generation, or to another objective."""

    node: str
    spec: ReplicaSpec


@dataclass(frozen=True, slots=True)
class StopReplica:
    node: str
    ref: ReplicaRef
    drain_deadline_s: float


@dataclass(frozen=True, slots=True)
class ApplyChild:
    manifest: RawObject


@dataclass(frozen=True, slots=True)
class DeleteChild:
    kind: str
    ref: ObjectRef
    uid: str


Action = SetFinalizers | WriteStatus | StartReplica | StopReplica | ApplyChild | DeleteChild | Report


@dataclass(frozen=True, slots=True)
class Plan:
    """`again_in_s`: when to plan again though nothing has happened; None: not before something does.

    `calm_since` is to be observed by the next plan for this service.
    """

    actions: tuple[Action, ...] = ()
    again_in_s: float | None = None
    calm_since: datetime | None = None


def plan(ref: ObjectRef, service: Service | None, observed: Observed, now: datetime, timing: Timing) -> Plan:
    """What to do about the service of that name; None: there is none, or none any more."""
    if service is None:
        return Plan(tuple(_stops(ref, {}, observed, timing)))
    if service.deleting:
        return _delete(service, observed, now, timing)
    settling_s = _settling_s(service, observed, timing)
    if settling_s is not None:
        return Plan(again_in_s=settling_s)
    finalizers = _with_finalizer(service)
    spec = service.spec
    if isinstance(spec, str):
        return _refuse(service, finalizers, Verdict(False, "InvalidSpec", spec), observed, now, timing)
    return _serve(service, spec, finalizers, observed, now, timing)


def _serve(
    service: Service,
    spec: ServiceSpec,
    finalizers: Sequence[Action],
    observed: Observed,
    now: datetime,
    timing: Timing,
) -> Plan:
    count = replica_count(service, spec, observed, timing, now)
    spec = replace(spec, replicas=count.replicas)
    rolling = rollout(service, spec, observed)
    placements = place(service, spec, observed, timing, rolling.surge)
    held = held_back(service, spec, rolling, placements, observed)
    starts = [start for start in _starts(service, spec, placements, observed) if start.spec.ref.index not in held]
    wanted = {service.replica_ref(index): node for index, node in placements.owners.items()}
    stops = list(_stops(service.ref, wanted, observed, timing))
    scaling = scaling_status(service, spec, count, now)
    status, figures_in_s = service_status(service, spec, scaling, rolling.surge, placements, observed, timing, now)
    recorded = placements.owners.items() <= service.placements.items()
    if (
        recorded
        and rolling.surge is None
        and not rolling.outdated
        and _updating_in_place(service, spec, placements, observed)
    ):
        # Until the new generation serves, the status speaks of the old one, which does: Ready does not blink.
        writes: list[Action] = []
    else:
        writes = _writes(service, status, placements, observed)
    waits = [figures_in_s, count.again_in_s, *_deadlines(service, placements, observed, timing)]
    return Plan(
        (*finalizers, *writes, *stops, *starts, *_children(service, placements.owners, observed)),
        min((wait for wait in waits if wait is not None), default=None),
        count.calm_since,
    )


def _refuse(
    service: Service,
    finalizers: Sequence[Action],
    verdict: Verdict,
    observed: Observed,
    now: datetime,
    timing: Timing,
) -> Plan:
    status = refused_status(service, verdict, observed, timing, now)
    placements = Placements(owners=service.placements)
    # Only what no record speaks of is stopped.
    wanted = {service.replica_ref(index): node for index, node in placements.owners.items()}
    stops = _stops(service.ref, wanted, observed, timing)
    writes = _writes(service, status, placements, observed)
    return Plan((*finalizers, *writes, *stops, *_children(service, placements.owners, observed)))


def _delete(service: Service, observed: Observed, now: datetime, timing: Timing) -> Plan:
    if FINALIZER not in service.finalizers:
        return Plan(tuple(_stops(service.ref, {}, observed, timing)))
    stops = tuple(_stops(service.ref, {}, observed, timing))
    deletes = tuple(_child_deletes(service, (), observed))
    running = {
        node.name
        for node in observed.nodes.values()
        if node.connected and any(ref.service_uid == service.uid for ref in node.replicas)
    }
    unreachable = {
        node: timing.forget_s - observed.lost_for_s(node)
        for node in service.placements.values()
        if observed.connected(node) is None and observed.lost_for_s(node) < timing.forget_s
    }
    if service.force_delete or not (running or unreachable):
        rest = tuple(each for each in service.finalizers if each != FINALIZER)
        return Plan((*stops, *deletes, SetFinalizers(rest, service.resource_version)))
    status = deleting_status(service, sorted(running | unreachable.keys()), now)
    writes = (WriteStatus(status),) if status != service.status else ()
    return Plan((*writes, *stops, *deletes), min(unreachable.values(), default=None))


def _settling_s(service: Service, observed: Observed, timing: Timing) -> float | None:
    """How long to hold still after a start, while agents that matter have not been heard yet; None: not at all."""
    left_s = timing.unreachable_s - observed.watching_for_s
    unheard = not observed.nodes or any(node not in observed.nodes for node in service.placements.values())
    return left_s if left_s > 0 and unheard else None


def _with_finalizer(service: Service) -> Sequence[Action]:
    if FINALIZER in service.finalizers:
        return ()
    return (SetFinalizers((*service.finalizers, FINALIZER), service.resource_version),)


def _starts(service: Service, spec: ServiceSpec, placements: Placements, observed: Observed) -> Iterator[StartReplica]:
    for index, node_name in sorted(placements.owners.items()):
        ref = service.replica_ref(index)
        node, refusal = observed.connected(node_name), observed.refusals.get((node_name, ref))
        if node is None or (refusal and refusal.generation == service.generation):
            continue
        replica = node.replicas.get(ref)
        behind = replica is not None and (
            replica.generation < service.generation
            # A policy changes the objective without the service.
            or (replica.generation == service.generation and replica.lacks(spec.objective))
        )
        if replica is None or (behind and replica.phase is not Phase.DRAINING):
            yield StartReplica(node_name, spec.replica(ref, service.generation))


def _stops(
    ref: ObjectRef, wanted: Mapping[ReplicaRef, str], observed: Observed, timing: Timing
) -> Iterator[StopReplica]:
    """Replicas under this name on nodes that do not own them, of whichever uid."""
    for node in observed.nodes.values():
        for replica in node.replicas.values() if node.connected else ():
            named = (replica.ref.namespace, replica.ref.service) == (ref.namespace, ref.name)
            if named and wanted.get(replica.ref) != node.name and replica.phase is not Phase.DRAINING:
                yield StopReplica(node.name, replica.ref, timing.drain_s)


def _updating_in_place(service: Service, spec: ServiceSpec, placements: Placements, observed: Observed) -> bool:
    """Every replica serves, some of them an older generation or objective that agents can replace without a pause."""

    def state(index: int, node: str) -> tuple[Replica | None, bool]:
        ref = service.replica_ref(index)
        refusal = observed.refusals.get((node, ref))
        return observed.replica(node, ref), refusal is not None and refusal.generation == service.generation

    states = [state(index, node) for index, node in placements.owners.items()]
    serving = all(replica is not None and replica.serves and not refused for replica, refused in states)
    behind = any(
        replica
        and (
            replica.serving_generation != service.generation
            or replica.lacks(spec.objective)
            or not replica.serves_objective
        )
        for replica, _ in states
    )
    return serving and behind and not placements.waiting and "observedGeneration" in service.status


def _writes(service: Service, status: Status, placements: Placements, observed: Observed) -> list[Action]:
    if status == service.status:
        return []
    warnings = list(_warnings(service, placements.owners, observed))
    return [WriteStatus(status), *reports(service, status, placements.moves, warnings)]


def _warnings(service: Service, owners: Mapping[int, str], observed: Observed) -> Iterator[Report]:
    """Why the Service does not lead to all that serves."""
    if any(child["kind"] == "Service" and not children.is_ours(child) for child in observed.children):
        yield Report("ServiceNameTaken", f"a Service {service.ref.name} exists and is left alone", warning=True)
    for replica in _serving(service, owners, observed):
        if not children.publishable(replica.host):
            message = (
                f"the Service does not lead to replica {replica.ref.index}: Kubernetes takes no EndpointSlice with "
                f"{replica.host}; start its agent with --address"
            )
            yield Report("AddressNotPublished", message, warning=True)


def _serving(service: Service, owners: Mapping[int, str], observed: Observed) -> Iterator[Replica]:
    for index, node in sorted(owners.items()):
        replica = observed.replica(node, service.replica_ref(index))
        if replica and replica.serves:
            yield replica


def _children(service: Service, owners: Mapping[int, str], observed: Observed) -> Iterator[ApplyChild | DeleteChild]:
    slices = [
        children.endpoint_slice(service, replica.ref.index, replica.host, replica.port)
        for replica in _serving(service, owners, observed)
        if children.publishable(replica.host)
    ]
    wanted = [children.service_manifest(service), *slices]
    found = {_identity(child): child for child in observed.children}
    for manifest in wanted:
        child = found.get(_identity(manifest))
        if child is None or (children.is_owned(child, service.uid) and not children.matches(child, manifest)):
            yield ApplyChild(manifest)
    yield from _child_deletes(service, [_identity(manifest) for manifest in wanted], observed)


def _child_deletes(service: Service, wanted: Sequence[tuple[str, str]], observed: Observed) -> Iterator[DeleteChild]:
    """Those not wanted, and those of a former service of this name. Never what somebody else made."""
    for child in observed.children:
        stale = not children.is_owned(child, service.uid) or _identity(child) not in wanted
        if children.is_ours(child) and stale and "deletionTimestamp" not in child["metadata"]:
            yield DeleteChild(child["kind"], ObjectRef.of(child), child["metadata"]["uid"])


def _identity(child: RawObject) -> tuple[str, str]:
    return child["kind"], child["metadata"]["name"]


def _deadlines(service: Service, placements: Placements, observed: Observed, timing: Timing) -> Iterator[float]:
    """When time alone changes what is to be done."""
    if placements.waiting:
        yield timing.recheck_s
    for index, node in placements.owners.items():
        lost_s = observed.lost_for_s(node)
        if observed.connected(node) is None:
            yield from (limit - lost_s for limit in (timing.unreachable_s, timing.move_s) if limit > lost_s)
        yield from _expiries(service.replica_ref(index), observed)
    for index in placements.waiting.keys() - placements.owners.keys():
        yield from _expiries(service.replica_ref(index), observed)


def _expiries(ref: ReplicaRef, observed: Observed) -> Iterator[float]:
    for (_, refused), refusal in observed.refusals.items():
        if refused == ref and refusal.expires_in_s is not None:
            yield refusal.expires_in_s
