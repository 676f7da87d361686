"""What GitOps tools make of each state that the operator writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from control_plane.cluster_contract import NEVER_SEEN
from control_plane.gitops_health import Health, health_of
from tidelane.operator.observation import Measured, Phase
from tidelane.operator.policies import Policy
from tidelane.operator.policy_status import policy_status

from .policy_objects import policies, policy_object
from .world import FakeNode, World, service_object

pytestmark = pytest.mark.cluster

PROGRESSING = ("Progressing", "InProgress")


def serving() -> World:
    world = World(service_object(), FakeNode("a"))
    world.settle()
    world.serve()
    world.settle()
    return world


def new(world: World) -> None:
    assert world.raw
    world.raw["status"] = dict(NEVER_SEEN)


def loading(world: World) -> None:
    """As when it was made."""
    assert world.raw
    del world.raw["status"]
    world.nodes["a"] = FakeNode("a")
    world.settle()


def no_room(world: World) -> None:
    world.edit(resources={"gpus": 8})
    world.settle()


def targets_missed(world: World) -> None:
    slow = Measured(requests=40, ttft_s=0.5, tpot_s=0.2, attainment=0.5, goodput_rps=1.0)
    world.now_s += 60.0  # figures are written at intervals
    each(world, measured=slow)


def stalled(world: World) -> None:
    world.edit(model={"source": "builtin://another"})
    world.settle()
    each(world, generation=2, phase=Phase.FAILED, message="there is no such model")


def restarting(world: World) -> None:
    each(world, phase=Phase.BACKING_OFF, message="killed for memory")


def deleting(world: World) -> None:
    world.delete()
    world.settle()


def updating(world: World) -> None:
    """The operator goes on to speak of the old generation, which serves, until its engine has the new targets."""
    world.edit(slo={"ttft": "100ms", "tpot": "40ms", "percentile": 90})
    world.settle()


def replaced(world: World) -> None:
    world.edit(model={"source": "builtin://another"})
    world.settle()


def edited(world: World) -> None:
    """The operator is yet to see it."""
    world.edit(replicas=2)


def each(world: World, **changes: Any) -> None:
    node = world.nodes["a"]
    for ref, replica in node.replicas.items():
        node.replicas[ref] = replace(replica, **changes)
    world.settle()


STATES: tuple[tuple[Callable[[World], None], tuple[str, str], str], ...] = (
    (new, PROGRESSING, "the operator has not seen it yet"),
    (loading, PROGRESSING, "LoadingModel: replica 0 on a: engine started"),
    (no_room, PROGRESSING, "NotScheduled: replica 0 on a: node a has no room: 8 devices wanted, 1 free"),
    (restarting, PROGRESSING, "EngineRestarting: replica 0 on a: killed for memory"),
    (lambda _: None, ("Healthy", "Current"), "Serving"),
    (targets_missed, ("Healthy", "Current"), "SLOMet is False, "),
    (stalled, ("Degraded", "Failed"), "EngineFailed: replica 0 on a: there is no such model"),
    (deleting, ("Progressing", "Terminating"), "it is being deleted"),
    (updating, PROGRESSING, "its status still speaks of generation 1"),
    (replaced, PROGRESSING, "LoadingModel: replica 0 on a: engine started"),
    (edited, PROGRESSING, "its status still speaks of generation 1"),
)


def test_services_are_judged_as_they_are() -> None:
    objects = []
    for change, _, _ in STATES:
        world = serving()
        change(world)
        assert world.raw is not None
        objects.append(copy.deepcopy(world.raw))
    told = health_of(objects)
    assert [(health.argo, health.kstatus) for health in told] == [wanted for _, wanted, _ in STATES]
    for health, (_, _, message) in zip(told, STATES, strict=True):
        assert health.message.startswith(message)


def test_policies_are_judged_as_they_are() -> None:
    good, bad = policy_object("good", overrides={"slo": {"tpot": "40ms"}}), policy_object("bad", mode="Never")
    objects = [{**good, "status": dict(NEVER_SEEN)}]
    for raw in (good, bad):
        policy = Policy.parse(raw)
        status = policy_status(policy, policies(policy), [], datetime(2030, 1, 1, tzinfo=UTC))
        objects.append({**raw, "status": dict(status)})
    told = [Health(each.argo, each.kstatus) for each in health_of(objects)]
    assert told == [Health(*PROGRESSING), Health("Healthy", "Current"), Health("Degraded", "Failed")]
