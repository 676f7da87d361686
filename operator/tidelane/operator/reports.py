"""Which changes of a service are worth an Event: what a person asks about afterwards. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidelane.operator.placement import Move
from tidelane.operator.resources import Condition, Service, Status


@dataclass(frozen=True, slots=True)
class Report:
    """One Event to be. `reason` is one word for programs."""

    reason: str
    message: str
    warning: bool = False


def reports(service: Service, status: Status, moves: Sequence[Move], warnings: Sequence[Report]) -> Sequence[Report]:
    """For a status about to be written. `warnings` are told when the service becomes ready, not time and again."""
    return tuple(_reports(service, status, moves, warnings))


def _reports(service: Service, status: Status, moves: Sequence[Move], warnings: Sequence[Report]) -> Iterator[Report]:
    before = {each["type"]: each for each in service.status.get("conditions", ())}
    after = {each["type"]: each for each in status.get("conditions", ())}
    for move in moves:
        yield Report("Moved", f"replica {move.index} from {move.source} to {move.target}: {move.why}", warning=True)
    if scheduled := _news(before.get("Scheduled"), after.get("Scheduled")):
        yield Report(scheduled["reason"], scheduled["message"], warning=scheduled["status"] != "True")
    if stalled := _news(before.get("Stalled"), after.get("Stalled")):
        yield Report(stalled["reason"], stalled["message"], warning=True)
    was_ready, ready = _status(before.get("Ready")), _status(after.get("Ready"))
    if ready == "True" and was_ready != "True":
        yield Report("Ready", f"serving at {status['endpoint']}" if "endpoint" in status else "no replicas wanted")
        yield from warnings
    elif ready == "False" and was_ready == "True" and not stalled:
        yield Report(after["Ready"]["reason"], after["Ready"]["message"], warning=True)
    slo_before, slo = _status(before.get("SLOMet")), _status(after.get("SLOMet"))
    if slo == "False" and slo_before != "False":
        yield Report("SLOMissed", after["SLOMet"]["message"], warning=True)
    elif slo == "True" and slo_before == "False":
        yield Report("SLOMet", after["SLOMet"]["message"])
    feasible_before, feasible = _status(before.get("SLOFeasible")), _status(after.get("SLOFeasible"))
    if feasible == "False" and feasible_before != "False":
        yield Report("SLOOutOfReach", after["SLOFeasible"]["message"], warning=True)
    if pressure := _news(before.get("KVPressure"), after.get("KVPressure")):
        if pressure["status"] == "True":
            yield Report("KVPressure", pressure["message"], warning=True)
        elif _status(before.get("KVPressure")) == "True":
            yield Report("KVPressureOver", "there is room in the KV cache again")


def _status(condition: Condition | None) -> str | None:
    return condition["status"] if condition else None


def _news(before: Condition | None, after: Condition | None) -> Condition | None:
    """The condition, if it says another thing than before."""
    if after is None or (before and (before["status"], before["reason"]) == (after["status"], after["reason"])):
        return None
    return after
