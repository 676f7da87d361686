"""A spec that running engines cannot take: one more replica first, then one after another; and what stops it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.operator.observation import Phase, Refusal, RefusalKind
from tidelane.operator.rollout import Standing, next_to_replace, wants_surge

from .world import TIMING, FakeNode, World, service_object

OUTDATED, SERVING, DOWN = Standing.OUTDATED, Standing.SERVING, Standing.DOWN
OTHER = {"source": "file:///models/other"}


def up(replicas: int, *nodes: str) -> World:
    world = World(service_object(replicas=replicas), *(FakeNode(name) for name in nodes))
    return step(world)


def step(world: World) -> World:
    """What was begun comes to its end."""
    world.settle()
    world.serve()
    world.settle()
    return world


def serving(world: World) -> list[tuple[str, int]]:
    """Node and generation of the replicas that serve."""
    return sorted(
        (node.name, replica.serving_generation or 0)
        for node in world.nodes.values()
        for replica in node.replicas.values()
        if replica.serves
    )


def message(world: World, name: str) -> str:
    [found] = [each["message"] for each in world.status["conditions"] if each["type"] == name]
    return str(found)


def test_one_more_comes_first_and_goes_last() -> None:
    world, seen = up(2, "a", "b", "c"), []
    world.edit(model=OTHER)
    for _ in range(4):
        world.settle()
        seen.append(serving(world))
        world.serve()
    world.settle()
    assert seen == [
        [("a", 1), ("b", 1)],
        [("b", 1), ("c", 2)],
        [("a", 2), ("c", 2)],
        [("a", 2), ("b", 2)],
    ]
    assert "surge" not in world.status
    assert [each["node"] for each in world.status["placements"]] == ["a", "b"]
    assert world.condition("Ready") == ("True", "Serving")
    assert not world.has_condition("Reconciling")


def test_it_is_told_while_it_goes_on() -> None:
    world = up(1, "a", "b")
    world.edit(model=OTHER)
    world.settle()
    assert (world.status["surge"], world.status["replicas"], world.status["observedGeneration"]) == (1, 1, 2)
    assert world.condition("Reconciling") == ("True", "RollingOut")
    assert message(world, "Reconciling").startswith("before others are replaced, one more comes up: replica 1 on b: ")
    assert world.condition("Ready") == ("False", "Updating")
    world.serve()
    world.settle()
    assert message(world, "Reconciling") == "one more replica serves while others are replaced"
    assert world.status["endpoint"]
    assert ("EndpointSlice", "chat-1") in world.children


def test_without_room_they_are_replaced_one_by_one_and_it_is_said() -> None:
    world, seen = up(2, "a", "b"), []
    world.edit(model=OTHER)
    for _ in range(3):
        world.settle()
        seen.append(serving(world))
        if len(seen) == 1:
            told = message(world, "Reconciling")
        world.serve()
    assert told.startswith("no room for one more replica, so they are replaced one by one: ")
    assert seen == [[("b", 1)], [("a", 2)], [("a", 2), ("b", 2)]]
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("fault", ["fails", "is refused", "cannot come up"])
def test_a_new_one_that_does_not_come_up_stops_it(fault: str) -> None:
    world = up(2, "a", "b", "c")
    world.edit(model=OTHER)
    service = world.service
    assert service
    surge = service.replica_ref(2)
    world.settle()
    if fault == "is refused":
        world.refusals["c", surge] = Refusal(RefusalKind.CANNOT_RUN, 2, "no such file")
        del world.nodes["c"].replicas[surge], world.nodes["c"].claims[surge]
    else:
        phase = Phase.FAILED if fault == "fails" else Phase.BACKING_OFF
        world.update("c", surge, phase=phase, message="no such file")
    for _ in range(3):
        world.settle()
        world.now_s += TIMING.forget_s
    assert serving(world) == [("a", 1), ("b", 1)]
    if fault != "cannot come up":
        assert world.condition("Stalled") == ("True", "EngineFailed" if fault == "fails" else "Refused")
        assert message(world, "Stalled") == "the others are not replaced: replica 2 on c: no such file"
    else:
        assert world.condition("Reconciling") == ("True", "RollingOut")
    # Taken back, nothing restarts, and the one more goes.
    world.edit(model=service_object()["spec"]["model"])
    world.refusals.clear()
    world.settle()
    assert serving(world) == [("a", 1), ("b", 1)]
    step(world)
    assert serving(world) == [("a", 3), ("b", 3)]
    step(world)
    assert not world.nodes["c"].replicas
    assert not world.has_condition("Stalled")


def test_an_operator_that_restarts_goes_on_in_the_middle() -> None:
    world = up(2, "a", "b", "c")
    world.edit(model=OTHER)
    step(world)
    assert serving(world) == [("b", 1), ("c", 2)]
    world.calm_since = None
    nodes, world.nodes, world.now_s = world.nodes, {}, 2.0
    assert world.plan().actions == ()
    world.nodes, world.now_s = nodes, 5000.0
    assert world.settle() == []
    for _ in range(3):
        step(world)
    assert serving(world) == [("a", 2), ("b", 2)]


def test_what_engines_take_while_they_run_reaches_all_at_once() -> None:
    world = up(3, "a", "b", "c", "d")
    world.edit(slo={"ttft": "300ms", "tpot": "50ms", "percentile": 90})
    world.settle()
    assert {each.generation for node in world.nodes.values() for each in node.replicas.values()} == {2}
    assert serving(world) == [("a", 1), ("b", 1), ("c", 1)]
    assert "surge" not in world.status
    assert world.condition("Ready") == ("True", "Serving")


def test_to_and_from_disaggregated_engines_are_replaced() -> None:
    world = up(1, "a", "b")
    world.edit(execution={"mode": "Disaggregated"})
    world.settle()
    assert world.status["surge"] == 1
    assert serving(world) == [("a", 1)]


def test_a_replica_that_was_down_anyway_gets_the_new_spec_at_once() -> None:
    world = up(2, "a", "b", "c")
    service = world.service
    assert service
    world.update("a", service.replica_ref(0), phase=Phase.BACKING_OFF)
    world.edit(model=OTHER)
    world.settle()
    assert {name: each.generation for name in "ab" for each in world.nodes[name].replicas.values()} == {"a": 2, "b": 1}


standings = st.dictionaries(st.integers(0, 63), st.sampled_from(Standing), max_size=8)


@given(standings, st.sampled_from([None, *Standing]))
def test_only_an_outdated_one_and_only_once_all_others_serve(
    found: dict[int, Standing], surge: Standing | None
) -> None:
    turn = next_to_replace(found, surge)
    if turn is not None:
        assert found[turn] is OUTDATED
        assert DOWN not in found.values()
        assert surge in (None, SERVING)


@given(
    count=st.integers(1, 6),
    room=st.booleans(),
    broken=st.booleans(),
    moves=st.lists(st.sampled_from(["decide", "come up"]), max_size=60),
)
def test_never_fewer_than_before_and_never_more_than_one_more(
    count: int, room: bool, broken: bool, moves: list[str]
) -> None:
    """`moves` is in which order the operator looks and engines come up; at the end both go on until nothing changes."""
    found, surge = dict.fromkeys(range(count), OUTDATED), None
    for move in [*moves, *["decide", "come up"] * (2 * count + 3)]:
        if move == "come up":
            found = {each: SERVING if it is DOWN and not broken else it for each, it in found.items()}
            surge = SERVING if surge is DOWN and not broken else surge
        else:
            wanted = wants_surge(found, had_surge=surge is not None)
            surge = (surge or DOWN) if wanted and room else None
            turn = next_to_replace(found, surge)
            if turn is not None:
                found[turn] = DOWN
        ready = sum(it is not DOWN for it in found.values()) + (surge is SERVING)
        assert ready >= (count if room else count - 1)
    if broken:
        assert list(found.values()).count(OUTDATED) == (count if room else count - 1)
    else:
        assert (set(found.values()), surge) == ({SERVING}, None)
