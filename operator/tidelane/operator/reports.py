"""Which changes of a service are worth an Event: what a person asks about afterwards. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    if scaled := _scaled(service.status, status):
        yield scaled
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
    yield from _of_targets(service.status, status, before, after)
    if pressure := _news(before.get("KVPressure"), after.get("KVPressure")):
        if pressure["status"] == "True":
            yield Report("KVPressure", pressure["message"], warning=True)
        elif _status(before.get("KVPressure")) == "True":
            yield Report("KVPressureOver", "there is room in the KV cache again")


def _scaled(written: Status, status: Status) -> Report | None:
    before, after = written.get("scaling"), status.get("scaling")
    if before is None or after is None or before["replicas"] == after["replicas"]:
        return None
    word = "ScaledUp" if after["replicas"] > before["replicas"] else "ScaledDown"
    return Report(word, f"{before['replicas']} to {after['replicas']} replicas: {after['reason']}")


def _of_targets(
    written: Status, status: Status, before: Mapping[str, Condition], after: Mapping[str, Condition]
) -> Iterator[Report]:
    if targets := _changed_targets(written, status):
        yield Report("TargetsChanged", targets)
    slo_before, slo = _status(before.get("SLOMet")), _status(after.get("SLOMet"))
    if slo == "False" and slo_before != "False":
        yield Report("SLOMissed", after["SLOMet"]["message"], warning=True)
    elif slo == "True" and slo_before == "False":
        yield Report("SLOMet", after["SLOMet"]["message"])
    feasible_before, feasible = _status(before.get("SLOFeasible")), _status(after.get("SLOFeasible"))
    if feasible == "False" and feasible_before != "False":
        yield Report("SLOOutOfReach", after["SLOFeasible"]["message"], warning=True)


def _changed_targets(before: Status, after: Status) -> str:
    """What is in force now and was not, with its source; empty for the first targets and for none."""
    old, new = _in_force(before), _in_force(after)
    if not (old and new):
        return ""
    sources = {each["field"]: each["source"] for each in after["effectiveSLO"].get("sources", ())}
    changed = [name for name in dict.fromkeys((*new, *old)) if old.get(name) != new.get(name)]
    texts = [f"{name} {old.get(name, 'none')} to {new.get(name, 'none')}" for name in changed]
    return "; ".join(
        f"{text} ({sources[name]})" if name in sources else text for name, text in zip(changed, texts, strict=True)
    )


def _in_force(status: Status) -> dict[str, Any]:
    slo = {name: value for name, value in status.get("effectiveSLO", {}).items() if name not in ("source", "sources")}
    return {**slo, **status.get("effectiveExecution", {})}


def _status(condition: Condition | None) -> str | None:
    return condition["status"] if condition else None


def _news(before: Condition | None, after: Condition | None) -> Condition | None:
    """The condition, if it says another thing than before."""
    if after is None or (before and (before["status"], before["reason"]) == (after["status"], after["reason"])):
        return None
    return after
