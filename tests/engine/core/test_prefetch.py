"""What is brought up before its conversation goes on, and in whose place."""

from __future__ import annotations

import pytest

from tidelane.engine.kv.keys import TokenNames, namespace
from tidelane.engine.kv.retention import Guesses
from tidelane.engine.request import Request

from .virtual import World, request

NAMES = TokenNames(namespace("test"), 4)
EVERY_S = 10.0
TURNS = 40


def sent(world: World, name: str, tokens: int, first: int = 0, new: int = 1) -> Request:
    told = request(name, tokens, new, first=first, arrival_s=world.clock.now_s)
    world.submit(told)
    return told


def regular(*, prefetch: bool = True) -> World:
    """A prompt of six whole blocks that has come every ten seconds."""
    world = World(names=NAMES, prefetch=prefetch, blocks=10, host_slots=8, disk_slots=40)
    for turn in range(TURNS):
        world.clock.now_s = EVERY_S * turn
        sent(world, f"a{turn}", 25)
        world.run()
    return world


def crowded_out(world: World, at_s: float = 6.0) -> World:
    """Of device and host memory, by another prompt of eight blocks that has come so long after the last."""
    world.clock.now_s = EVERY_S * (TURNS - 1) + at_s
    sent(world, "other", 33, first=500)
    world.run()
    assert len(on(world, "device", 0)) < 6
    assert not on(world, "host", 0)
    return world


def on(world: World, tier: str, first: int) -> list[int]:
    """Which blocks of the prompt that begins with this token are there."""
    keys: list[bytes] = []
    told = request("asked", 33, 1, first=first)
    NAMES.extend(keys, told, list(told.prompt), 8)
    cache = world.ledger.pool
    return [at for at, key in enumerate(keys) if (key in cache.device if tier == "device" else key in cache.host)]


def wait(world: World, until_s: float) -> None:
    """As the loop does with nothing to compute: it turns with each heartbeat."""
    while world.clock.now_s < until_s:
        world.clock.now_s += 0.25
        world.turn()


def guesses(world: World) -> tuple[Guesses, Guesses]:
    return world.ledger.pool.host.guesses, world.ledger.pool.device.guesses


def test_a_prompt_that_comes_when_it_should_finds_its_kv_on_the_device() -> None:
    world = crowded_out(regular())
    begin_s = world.ledger.next_look_ahead_s
    assert begin_s is not None
    wait(world, begin_s - 0.5)
    assert guesses(world) == (Guesses(), Guesses())
    wait(world, EVERY_S * TURNS)
    # One fetch of these has found nothing: so did what stands behind it.
    assert on(world, "host", 0) == on(world, "device", 0) == [0, 1, 2, 3]
    loaded = world.ledger.pool.loaded_blocks
    sent(world, "again", 25)
    world.run()
    assert world.ledger.pool.loaded_blocks == loaded
    assert guesses(world)[0] == Guesses(brought=6, useful=4, wasted=2)
    assert guesses(world)[1].wasted == 0
    assert guesses(world)[1].brought == guesses(world)[1].useful > 1


def test_without_it_the_same_prompt_waits_for_the_disk() -> None:
    world = crowded_out(regular(prefetch=False))
    wait(world, EVERY_S * TURNS)
    assert not on(world, "host", 0)
    fetched = world.ledger.pool.fetched_blocks
    sent(world, "again", 25)
    world.run()
    assert world.ledger.pool.fetched_blocks == fetched + 5  # and one came to nothing


def test_a_guess_that_was_wrong_goes_first_and_is_counted() -> None:
    world = crowded_out(regular())
    wait(world, EVERY_S * TURNS + 3)
    host, device = guesses(world)
    assert host == Guesses(brought=6, wasted=6)
    assert device.brought == device.wasted > 1
    other = on(world, "device", 500)
    sent(world, "third", 4 * device.brought - 1, first=800)
    world.run()
    assert on(world, "device", 500) == other
    assert len(on(world, "device", 0)) <= 4 - device.brought + 1


def test_what_is_as_likely_to_come_is_not_displaced() -> None:
    world = World(names=NAMES, prefetch=True, blocks=14, host_slots=14, disk_slots=60)
    for turn in range(TURNS):
        world.clock.now_s = EVERY_S * turn
        sent(world, f"a{turn}", 25)
        world.run()
        world.clock.now_s += 0.5
        sent(world, f"b{turn}", 49, first=500)
        world.run()
    assert len(on(world, "host", 0)) < 6
    before = [on(world, tier, 500) for tier in ("host", "device")]
    here = len(on(world, "host", 0))
    wait(world, EVERY_S * TURNS - 0.25)
    assert [on(world, tier, 500) for tier in ("host", "device")] == before
    assert len(on(world, "host", 0)) == here


def test_nothing_is_brought_up_beside_those_who_lack_room() -> None:
    world = crowded_out(regular())
    sent(world, "long", 20, first=900, new=20)
    sent(world, "waits", 20, first=1000, new=2)
    world.turn()
    assert world.ledger.lacks_room
    world.clock.now_s = EVERY_S * TURNS - 1
    for _ in range(5):
        world.turn()
    assert world.ledger.lacks_room
    assert guesses(world) == (Guesses(), Guesses())


@pytest.mark.parametrize("policy", ["Lanes", "MixedBatch", "ChunkedPrefill"])
def test_every_request_ends_whatever_is_brought_up(policy: str) -> None:
    world = World(names=NAMES, prefetch=True, policy=policy, blocks=24, host_slots=30, disk_slots=60)
    names = []
    for turn in range(60):
        world.clock.now_s = max(world.clock.now_s, 3.0 * turn)
        for first, every in ((0, 1), (300, 2), (600, 3), (900, 5)):
            if turn % every == 0:
                names.append(f"{first} {turn}")
                sent(world, names[-1], 13 + 4 * (turn % 7), first=first, new=1 + turn % 4)
        for _ in range(turn % 9):
            world.advance()
    world.run()
    wait(world, world.clock.now_s + 60)
    assert sorted(world.finished()) == sorted(names)
    assert world.ledger.pool.free == world.ledger.pool.total
    host, device = guesses(world)
    assert host.brought + device.brought > 0
    assert host.useful + host.wasted <= host.brought
