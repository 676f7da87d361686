"""One service with `spec.scaling`, planned for as its load rises and falls; time is ours."""

from __future__ import annotations

from typing import Any

import pytest

from tidelane.operator.observation import Measured, Phase, Reach, TtftParts
from tidelane.operator.plan import StartReplica, StopReplica
from tidelane.rpc.wire import ReplicaRef

from .world import TIMING, FakeNode, World, service_object

WINDOW_S = 60.0


def scaled(fewest: int = 1, most: int = 4, **spec: Any) -> World:
    bounds = {"min": fewest, "max": most}
    nodes = (FakeNode(name) for name in "abcdef")
    world = World(service_object(replicas=None, scaling=bounds, **spec), *nodes)
    return serving(world)


def serving(world: World) -> World:
    world.settle()
    world.serve()
    world.settle()
    return world


def measure(world: World, *, idle: bool = False, age_s: float = WINDOW_S, **changes: Any) -> None:
    """What every engine that serves measured, as if each had the same load. 200 ms and 50 ms at p90 are wanted."""
    values: dict[str, Any] = {
        "requests": 0 if idle else 50,
        "ttft_s": 0.1,
        "tpot_s": 0.02,
        "attainment": 1.0,
        "goodput_rps": 1.0,
        "tpot_median_s": 0.02,
        "window_s": age_s,
        "parts": TtftParts(0.0, 0.02, 0.0, 0.02),
        **changes,
    }
    reach = Reach(100, 0.02, 0.018)
    for node in world.nodes.values():
        for ref, replica in list(node.replicas.items()):
            if replica.phase is Phase.READY:
                world.update(node.name, ref, measured=Measured(**values), idle=idle, reach=reach)


def late(world: World) -> None:
    measure(world, attainment=0.8)


def number(world: World) -> int:
    replicas: int = world.status["scaling"]["replicas"]
    return replicas


def told(world: World, *reasons: str) -> list[str]:
    return [report.message for report in world.reports if report.reason in reasons]


def test_it_begins_with_the_fewest() -> None:
    world = scaled(fewest=2)
    assert number(world) == 2
    assert world.status["readyReplicas"] == 2
    assert world.condition("Ready") == ("True", "Serving")


def test_load_rises_to_the_most_and_falls_to_the_fewest() -> None:
    world, numbers = scaled(), [1]
    for _ in range(5):
        world.now_s += WINDOW_S
        late(world)
        serving(world)
        numbers.append(number(world))
    assert numbers == [1, 2, 3, 4, 4, 4]
    assert told(world, "ScaledUp")[0] == (
        "1 to 2 replicas: replica 0 kept 80 % of requests within their targets, 90 % wanted"
    )
    measure(world, idle=True)
    waits = []
    for _ in range(4):
        waits.append(world.plan().again_in_s)
        world.now_s += TIMING.stabilisation_s
        serving(world)
        numbers.append(number(world))
    assert numbers[6:] == [3, 2, 1, 1]
    assert waits == [TIMING.stabilisation_s] * 3 + [None]
    assert told(world, "ScaledDown")[0] == "4 to 3 replicas: one fewer would have met every target for 5m"
    assert sum(len(node.replicas) for node in world.nodes.values()) == 1
    assert not [name for kind, name in world.children if kind == "EndpointSlice" and name != "chat-0"]


def test_a_queue_is_reason_enough_and_doubles_at_most() -> None:
    world = scaled(fewest=2, most=10)
    # Everything is still in time, but a second of waiting beside 20 ms of prefill is no small excess.
    measure(world, parts=TtftParts(0.15, 0.02, 1.0, 0.02))
    world.settle()
    assert number(world) == 4
    assert told(world, "ScaledUp") == [
        "2 to 4 replicas: prompts wait 1s at P90 on replica 1, more than half of the TTFT target of 200ms"
    ]


def test_ready_stays_while_more_come_up() -> None:
    world = scaled()
    late(world)
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")
    [ready] = [each for each in world.status["conditions"] if each["type"] == "Ready"]
    assert ready["message"].startswith("1 of 2 replicas; replica 1 on b: ")
    assert world.condition("Reconciling") == ("True", "LoadingModel")
    world.update("a", ref(world), phase=Phase.BACKING_OFF)
    world.settle()
    assert world.condition("Ready") == ("False", "EngineRestarting")


def ref(world: World, index: int = 0) -> ReplicaRef:
    service = world.service
    assert service
    return service.replica_ref(index)


def test_nothing_changes_while_one_starts_or_has_measured_too_little() -> None:
    world = scaled()
    late(world)
    world.settle()
    assert number(world) == 2
    for _ in range(3):
        world.now_s += TIMING.stabilisation_s
        late(world)
        world.settle()
    assert number(world) == 2
    world.serve()
    late(world)
    # The new engine's figures are of another number than those of the old one are still full of.
    world.update("b", ref(world, 1), measured=Measured(50, 0.1, 0.02, 0.8, 1.0, window_s=20.0, parts=None), idle=False)
    world.settle()
    assert number(world) == 2
    late(world)
    world.settle()
    assert number(world) == 3


def test_one_that_goes_drains_and_a_break_begins_the_window_again() -> None:
    world = scaled(fewest=1, most=2)
    late(world)
    serving(world)
    measure(world)
    world.settle()
    world.now_s += TIMING.stabilisation_s - 1
    measure(world, attainment=0.85, requests=10)  # too few misses to want more, and yet not calm
    world.settle()
    measure(world)
    world.settle()
    world.now_s += TIMING.stabilisation_s - 1
    world.settle()
    assert number(world) == 2
    world.now_s += 1
    [stop] = [action for action in world.settle() if isinstance(action, StopReplica)]
    assert (stop.ref.index, stop.drain_deadline_s) == (1, TIMING.drain_s)
    assert world.nodes["b"].replicas[stop.ref].phase is Phase.DRAINING


def test_an_operator_that_restarts_goes_on_from_the_number() -> None:
    world = scaled()
    for _ in range(2):
        late(world)
        serving(world)
    measure(world)
    world.settle()
    world.now_s += TIMING.stabilisation_s - 1
    world.calm_since = None
    nodes, world.nodes, world.now_s = world.nodes, {}, 2.0
    assert world.plan().actions == ()
    world.nodes, world.now_s = nodes, 5000.0
    assert not [action for action in world.settle() if isinstance(action, StartReplica | StopReplica)]
    assert number(world) == 3
    # But it does not know how long it has been calm.
    world.now_s += TIMING.stabilisation_s - 1
    world.settle()
    assert number(world) == 3
    world.now_s += 1
    world.settle()
    assert number(world) == 2


@pytest.mark.parametrize("seen", ["placements", "agents"])
def test_without_a_record_it_goes_on_from_what_runs(seen: str) -> None:
    world = serving(World(service_object(replicas=3), *(FakeNode(name) for name in "abc")))
    assert world.raw
    if seen == "agents":
        del world.raw["status"]
    world.edit(replicas=None, scaling={"min": 1, "max": 5})
    serving(world)
    assert number(world) == 3
    assert sum(len(node.replicas) for node in world.nodes.values()) == 3


def test_bounds_that_change_hold_at_once() -> None:
    world = scaled()
    world.edit(scaling={"min": 3, "max": 5})
    serving(world)
    assert number(world) == 3
    world.edit(scaling={"min": 1, "max": 2})
    serving(world)
    assert number(world) == 2
    assert told(world, "ScaledUp", "ScaledDown") == [
        "1 to 3 replicas: spec.scaling.min is 3",
        "3 to 2 replicas: spec.scaling.max is 2",
    ]
    world.edit(scaling=None, replicas=1)
    serving(world)
    assert "scaling" not in world.status


def test_targets_out_of_reach_ask_for_no_replicas() -> None:
    world = scaled()
    measure(world, attainment=0.0, tpot_s=0.2, tpot_median_s=0.2)
    world.update("a", ref(world), reach=Reach(100, 0.02, 0.19))
    world.settle()
    assert number(world) == 1
    world.update("a", ref(world), reach=Reach(100, 0.02, 0.04))
    world.settle()
    assert number(world) == 2


def test_without_room_the_number_waits_and_falls_with_the_load() -> None:
    world = World(service_object(replicas=None, scaling={"min": 1, "max": 4}), FakeNode("a"))
    serving(world)
    for _ in range(3):
        late(world)
        world.settle()
        world.refusals.clear()
    assert number(world) == 2
    assert world.condition("Scheduled") == ("False", "NoRoom")
    assert world.condition("Ready") == ("True", "Serving")
    measure(world)
    world.settle()
    world.now_s += TIMING.stabilisation_s
    world.settle()
    assert number(world) == 1
    assert world.condition("Scheduled") == ("True", "Placed")


def test_a_steady_service_writes_nothing() -> None:
    world = scaled(fewest=2)
    world.now_s += TIMING.figures_s
    measure(world)
    world.settle()
    for _ in range(20):
        world.now_s += TIMING.stabilisation_s
        made = world.plan()
        assert (made.actions, made.again_in_s) == ((), None)


def test_a_new_replica_is_on_record_before_its_agent_hears_of_it() -> None:
    world = scaled()
    late(world)
    kinds = [type(action).__name__ for action in world.plan().actions]
    assert kinds.index("WriteStatus") < kinds.index("StartReplica")
    [start] = [action for action in world.settle() if isinstance(action, StartReplica)]
    assert start.spec.ref.index == 1
