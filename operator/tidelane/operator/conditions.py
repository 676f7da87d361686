"""What the conditions of a service say. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from tidelane.operator.observation import Observed, Phase, RefusalKind, Replica, Timing
from tidelane.operator.placement import Placements
from tidelane.operator.resources import Condition, Service, ServiceSpec, Status

_LISTED: Final = 8
_MESSAGE_LIMIT: Final = 1000


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a condition says, before it is compared with what it said."""

    status: bool | None
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """One wanted replica: its owner, what the owner reports, and what it should report."""

    index: int
    node: str | None
    replica: Replica | None
    lost: bool
    refused: str
    waiting: str

    def serves(self, generation: int) -> bool:
        replica = self.replica
        return replica is not None and not self.lost and replica.serves and replica.serving_generation == generation


def placed_replica(
    service: Service, index: int, placements: Placements, observed: Observed, timing: Timing
) -> PlacedReplica:
    ref, node = service.replica_ref(index), placements.owners.get(index)
    refusal = observed.refusals.get((node, ref)) if node else None
    refused = refusal.message if refusal and refusal.generation == service.generation else ""
    return PlacedReplica(
        index=index,
        node=node,
        replica=observed.replica(node, ref) if node else None,
        lost=node is not None and observed.lost_for_s(node) >= timing.unreachable_s,
        refused=refused if refusal and refusal.kind is RefusalKind.CANNOT_RUN else "",
        waiting=placements.waiting.get(index, ""),
    )


def verdicts_of(
    service: Service, placed: Sequence[PlacedReplica], one_more: PlacedReplica | None, spec: ServiceSpec
) -> dict[str, Verdict]:
    """Every condition but those that traffic decides. The last three are there only while true.

    `one_more` is the replica that comes up before others are replaced.
    """
    troubles = [trouble for each in placed if (trouble := _trouble(each, service.generation))]
    rolling = _rolling(one_more, service.generation)
    first = troubles[0] if troubles else None
    # Those that its load has brought beyond the fewest are no promise: Ready does not blink while they come up.
    promised = spec.scaling.min if spec.scaling else len(placed)
    serving = len(placed) - len(troubles)
    if first is None:
        ready = Verdict(True, "Serving" if placed else "ScaledToZero")
    elif serving >= promised:
        ready = Verdict(True, "Serving", f"{serving} of {len(placed)} replicas; {first.verdict.message}")
    else:
        ready = first.verdict
    verdicts = {
        "Scheduled": _scheduled(placed),
        "ModelLoaded": _model_loaded(placed),
        "Ready": ready,
    }
    for trouble in [*troubles, *rolling]:
        if trouble.final:
            verdicts["Stalled"] = Verdict(True, trouble.verdict.reason, trouble.verdict.message)
            break
    else:
        if pending := [*rolling, *troubles]:
            told = pending[0].verdict
            verdicts["Reconciling"] = Verdict(True, told.reason, told.message)
    if spec.ignored:
        verdicts["FieldsIgnored"] = Verdict(
            True, "NotSupportedYet", f"no effect in this version: {', '.join(spec.ignored)}"
        )
    return verdicts


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Why a replica is not ready. `final`: it will not change without another spec."""

    verdict: Verdict
    final: bool = False


def _trouble(placed: PlacedReplica, generation: int) -> _Trouble | None:
    if placed.serves(generation):
        return None
    if placed.node is None:
        return _Trouble(Verdict(False, "NotScheduled", f"replica {placed.index}: {placed.waiting}"))
    reason, message, final = _why_not_serving(placed, generation)
    return _Trouble(Verdict(False, reason, f"replica {placed.index} on {placed.node}: {message}"), final)


def _rolling(one_more: PlacedReplica | None, generation: int) -> list[_Trouble]:
    """What there is to say of the one more replica."""
    if one_more is None:
        return []
    if one_more.waiting:
        message = f"no room for one more replica, so they are replaced one by one: {one_more.waiting}"
        return [_Trouble(Verdict(False, "RollingOut", message))]
    trouble = _trouble(one_more, generation)
    if trouble is None:
        return [_Trouble(Verdict(False, "RollingOut", "one more replica serves while others are replaced"))]
    message = f"before others are replaced, one more comes up: {trouble.verdict.message}"
    if trouble.final:
        message = f"the others are not replaced: {trouble.verdict.message}"
        return [_Trouble(Verdict(False, trouble.verdict.reason, message), final=True)]
    return [_Trouble(Verdict(False, "RollingOut", message))]


def _why_not_serving(placed: PlacedReplica, generation: int) -> tuple[str, str, bool]:
    """Reason, message and whether only another spec can help."""
    if placed.lost:
        return "NodeLost", placed.waiting or "its agent cannot be reached", False
    if placed.refused:
        return "Refused", placed.refused, True
    if placed.waiting:
        return "NotScheduled", placed.waiting, False
    if placed.replica is None:
        return "Starting", "asked of its agent", False
    return _why_not_ready(placed.replica, generation)


def _why_not_ready(replica: Replica, generation: int) -> tuple[str, str, bool]:
    match replica.phase:
        case Phase.FAILED if replica.generation == generation:
            return "EngineFailed", replica.message or "the engine cannot run as asked", True
        case Phase.FAILED | Phase.STARTING:
            return "WarmingUp" if replica.model_loaded else "LoadingModel", replica.message or "engine started", False
        case Phase.BACKING_OFF:
            return "EngineRestarting", replica.message or "the engine ended unexpectedly", False
        case Phase.DRAINING:
            return "Draining", replica.message or "it finishes its requests", False
        case Phase.READY:
            return "Updating", f"serves generation {replica.serving_generation or 0}, not {generation} yet", False


def _scheduled(placed: Sequence[PlacedReplica]) -> Verdict:
    waiting = [each for each in placed if each.waiting]
    if waiting:
        unplaced = [each for each in waiting if each.node is None] or waiting
        reason = "NoAgents" if unplaced[0].waiting.startswith("no agent") else "NoRoom"
        return Verdict(False, reason, f"replica {unplaced[0].index}: {unplaced[0].waiting}")
    return Verdict(True, "Placed", ", ".join(f"replica {each.index} on {each.node}" for each in placed[:_LISTED]))


def _model_loaded(placed: Sequence[PlacedReplica]) -> Verdict:
    loaded = sum(each.replica is not None and each.replica.model_loaded for each in placed)
    if loaded == len(placed):
        return Verdict(True, "Loaded")
    return Verdict(False, "NotLoaded", f"{loaded} of {len(placed)} replicas have it loaded")


def conditions(
    written: Sequence[Condition], generation: int, verdicts: Mapping[str, Verdict], now: datetime
) -> list[Condition]:
    before = {each["type"]: each for each in written}
    conditions = []
    for name, verdict in sorted(verdicts.items()):
        status = {True: "True", False: "False", None: "Unknown"}[verdict.status]
        old = before.get(name)
        since = old["lastTransitionTime"] if old and old["status"] == status else timestamp(now)
        conditions.append(
            Condition(
                type=name,
                status=status,
                reason=verdict.reason,
                message=verdict.message[:_MESSAGE_LIMIT],
                observedGeneration=generation,
                lastTransitionTime=since,
            )
        )
    return conditions


def written_verdict(status: Status, name: str) -> Verdict | None:
    for each in status.get("conditions", ()):
        if each["type"] == name:
            return Verdict({"True": True, "False": False}.get(each["status"]), each["reason"], each["message"])
    return None


def timestamp(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
