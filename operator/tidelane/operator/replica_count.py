"""How many replicas a service has and should have: the number it states, or the one that its load asks for. Pure."""

from __future__ import annotations

from datetime import datetime

from tidelane.operator.conditions import timestamp, written_verdict
from tidelane.operator.feasibility import feasible
from tidelane.operator.observation import Observed, Phase, Replica, Timing
from tidelane.operator.resources import ScalingStatus, Service, ServiceSpec
from tidelane.operator.scaling import Decision, Wanted, decide


def replica_count(service: Service, spec: ServiceSpec, observed: Observed, timing: Timing, now: datetime) -> Decision:
    """The number from now on. What was decided before is in the service's status, so that a restart changes nothing."""
    if spec.scaling is None:
        return Decision(spec.replicas or 0)
    present = _present(service, observed)
    if present is None:
        return Decision(spec.scaling.min)
    owners = service.placements
    # Beyond the last that has a node there was no room.
    placed = [_serving(service, spec, index, observed) for index in range(max(owners, default=-1) + 1)][:present]
    serving = [replica for replica in placed if replica is not None]
    reach = feasible(serving, spec.slo, written_verdict(service.status, "SLOFeasible"))
    wanted = Wanted(spec.scaling, spec.slo, reachable=reach is None or reach.status is not False)
    return decide(wanted, present, placed, observed.calm_since, now, timing.stabilisation_s)


def scaling_status(service: Service, spec: ServiceSpec, decision: Decision, now: datetime) -> ScalingStatus | None:
    """What `status.scaling` says, as it was if the number is; None: the number is not by load."""
    if spec.scaling is None:
        return None
    before = service.status.get("scaling")
    if before is not None and before["replicas"] == decision.replicas:
        return before
    return {"replicas": decision.replicas, "reason": decision.reason or "at first", "changedAt": timestamp(now)}


def _present(service: Service, observed: Observed) -> int | None:
    """As decided before, else as many as run by the records or by what agents say; None: none do."""
    if decided := service.status.get("scaling"):
        return decided["replicas"]
    running = {
        ref.index
        for node in observed.nodes.values()
        for ref, replica in node.replicas.items()
        if ref.service_uid == service.uid and replica.phase is not Phase.DRAINING
    }
    one_more = {service.status.get("surge")}
    return max({*service.placements, *running} - one_more, default=-1) + 1 or None


def _serving(service: Service, spec: ServiceSpec, index: int, observed: Observed) -> Replica | None:
    """That replica, if it serves just what is wanted and its agent can be reached."""
    node = service.placements.get(index)
    if node is None or observed.connected(node) is None:
        return None
    replica = observed.replica(node, service.replica_ref(index))
    if replica is None or not replica.serves or replica.serving_generation != service.generation:
        return None
    return replica if replica.serves_objective and not replica.lacks(spec.objective) else None
