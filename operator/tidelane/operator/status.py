"""`status` of a service, from its placements and what agents report. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, cast

from tidelane.operator import figures
from tidelane.operator.conditions import Verdict, conditions, placed_replica, timestamp, verdicts_of
from tidelane.operator.figures import Figures
from tidelane.operator.observation import Observed, Replica, Timing
from tidelane.operator.placement import Placements
from tidelane.operator.resources import ScalingStatus, Service, ServiceSpec, Status, effective_status

_LISTED: Final = 8


def service_status(
    service: Service,
    spec: ServiceSpec,
    scaling: ScalingStatus | None,
    surge: int | None,
    placements: Placements,
    observed: Observed,
    timing: Timing,
    now: datetime,
) -> tuple[Status, float | None]:
    """What `status` should say, and in how many seconds figures held back may be written; None: none are.

    The status equals what it was when nothing that shows has changed.
    """
    placed = [placed_replica(service, index, placements, observed, timing) for index in range(spec.replicas or 0)]
    one_more = None if surge is None else placed_replica(service, surge, placements, observed, timing)
    running = [*placed, *([one_more] if one_more else [])]
    serving = [each.replica for each in running if each.replica and not each.lost and each.replica.serves]
    verdicts = verdicts_of(service, placed, one_more, spec)
    rest: dict[str, Any] = {
        "observedGeneration": service.generation,
        "placements": [{"replica": index, "node": node} for index, node in sorted(placements.owners.items())],
        # What autoscalers read: the one more of a roll-out is not theirs to count.
        "replicas": len(placements.owners.keys() - {surge}),
        "readyReplicas": sum(each.serves(service.generation) for each in placed),
        **effective_status(spec.effective),
        **({"scaling": scaling} if scaling else {}),
        **({} if surge is None else {"surge": surge}),
    }
    if serving:
        rest["endpoint"] = endpoint(serving[0])
    old, new = Figures.written(service.status), Figures.measured(service.status, serving, spec)
    unchanged = _assembled(service, rest, verdicts, old, now)
    if new == old:
        return unchanged, None
    wait_s = figures.due_in_s(service.status, timing, now)
    if unchanged == service.status and wait_s > 0:
        return unchanged, wait_s
    # They are due, or come along with a write that is needed anyway.
    return _assembled(service, rest | {"measuredAt": timestamp(now)}, verdicts, new, now), None


def refused_status(service: Service, verdict: Verdict, observed: Observed, timing: Timing, now: datetime) -> Status:
    """For a spec that this version cannot follow. What runs under an earlier one stays as it is."""
    placements = Placements(owners=service.placements)
    placed = [placed_replica(service, index, placements, observed, timing) for index in sorted(placements.owners)]
    serving = [each.replica for each in placed if each.replica and not each.lost and each.replica.serves]
    message = verdict.message + ("; an earlier spec still serves" if serving else "")
    verdicts = {
        "Ready": Verdict(False, verdict.reason, message),
        "Stalled": Verdict(True, verdict.reason, message),
    }
    rest: dict[str, Any] = {
        "observedGeneration": service.generation,
        "placements": service.status.get("placements", []),
        "replicas": len(placements.owners),
        "readyReplicas": 0,
    }
    if serving:
        rest["endpoint"] = endpoint(serving[0])
    return _assembled(service, rest, verdicts, Figures.written(service.status), now)


def deleting_status(service: Service, waiting_for: Sequence[str], now: datetime) -> Status:
    """While replicas drain."""
    message = f"waiting for {', '.join(waiting_for[:_LISTED])} to let go of its replicas"
    rest = {
        "observedGeneration": service.generation,
        "placements": service.status.get("placements", []),
        "replicas": service.status.get("replicas", 0),
        "readyReplicas": 0,
    }
    verdicts = {"Ready": Verdict(False, "Deleting", message)}
    return _assembled(service, rest, verdicts, Figures(fields={}), now)


def endpoint(replica: Replica) -> str:
    """The base address that OpenAI clients take."""
    host = f"[{replica.host}]" if ":" in replica.host else replica.host
    return f"http://{host}:{replica.port}/v1"


def _assembled(
    service: Service, rest: Mapping[str, Any], verdicts: Mapping[str, Verdict], shown: Figures, now: datetime
) -> Status:
    all_verdicts = dict(verdicts)
    if shown.slo_met:
        all_verdicts["SLOMet"] = shown.slo_met
    if shown.kv_pressure:
        all_verdicts["KVPressure"] = shown.kv_pressure
    if shown.slo_feasible:
        all_verdicts["SLOFeasible"] = shown.slo_feasible
    written = {"measuredAt": service.status["measuredAt"]} if "measuredAt" in service.status else {}
    shown_conditions = conditions(service.status.get("conditions", ()), service.generation, all_verdicts, now)
    return cast("Status", {**written, **rest, **shown.fields, "conditions": shown_conditions})
