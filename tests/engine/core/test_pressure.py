"""What lack of room for KV is called, and for how long."""

from __future__ import annotations

from dataclasses import replace

from tidelane.engine.channel import RefusalReason
from tidelane.engine.pressure import WINDOW_S, Pressure, PressureWindow

from .virtual import World, request


def test_the_worst_of_the_last_half_minute_counts() -> None:
    window = PressureWindow()

    def look(now_s: float, *, lacks_room: bool = False, preemptions: int = 0, turned_away: int = 0) -> Pressure:
        return window.look(now_s, lacks_room=lacks_room, preemptions=preemptions, turned_away=turned_away)

    assert look(0.0) is Pressure.NONE
    assert look(1.0, turned_away=3) is Pressure.NONE  # by a queue that waits for compute
    assert look(2.0, lacks_room=True, turned_away=3) is Pressure.WAITING
    assert look(5.0, preemptions=2, turned_away=3) is Pressure.PREEMPTING
    assert look(6.0, preemptions=2, turned_away=4) is Pressure.REFUSING
    assert look(6.0 + WINDOW_S, preemptions=2, turned_away=4) is Pressure.REFUSING
    assert look(6.1 + WINDOW_S, preemptions=2, turned_away=4) is Pressure.NONE
    assert look(7.0 + WINDOW_S, lacks_room=True, preemptions=2, turned_away=4) is Pressure.WAITING


def test_a_queue_lacks_room_while_its_first_would_not_fit() -> None:
    world = World(blocks=12, queue_limit=2)
    long = request("long", 30, 10)
    lacking = []
    for names in (("long",), ("second", "third", "fourth")):
        world.submit(*(replace(long, id=name) for name in names))
        world.turn()
        lacking.append(world.ledger.lacks_room)
    assert world.ledger.refusals == {RefusalReason.QUEUE_FULL: 1}
    world.run()
    assert [*lacking, world.ledger.lacks_room] == [False, True, False]
