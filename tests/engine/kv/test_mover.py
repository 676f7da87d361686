"""Threads that copy: every move ends, and what all of them come to is told."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence

import pytest

from tidelane.engine.kv.mover import CopyingMover, Way
from tidelane.engine.kv.moves import Arrival, Fetch, Load, LoadLost, Move, Spill, Store
from tidelane.engine.kv.traffic import Flow, RecentTimes, Traffic

PATIENCE_S = 30


class ByHand:
    """Stores are as `store` says. Loads come when `loading` is set; from an odd slot half does, and then it fails."""

    def __init__(self, store: Callable[[Sequence[Store]], int | None] = lambda stores: 10 * len(stores)) -> None:
        self.closed = threading.Event()
        self.loading = threading.Event()
        self.begun = threading.Semaphore(0)
        self._store = store

    def ways(self) -> tuple[Way[Store], Way[Load]]:
        return Way(Store, self._store), Way(Load, self._load)

    def close(self) -> None:
        self.closed.set()

    def _load(self, loads: Sequence[Load]) -> int:
        (load,) = loads
        self.begun.release()
        assert self.loading.wait(PATIENCE_S)
        load.arrival.reached(1)
        if load.slots[0] % 2:
            raise ZeroDivisionError("an odd slot")
        load.arrival.reached(2)
        return 7


class Rig:
    def __init__(self, copier: ByHand) -> None:
        self.traffic = Traffic()
        self._rang = threading.Semaphore(0)
        self.mover = CopyingMover([copier], self._rang.release, self.traffic)

    def ended(self, count: int) -> list[tuple[int, bool]]:
        """The next so many: their numbers, and whether well."""
        ended: list[tuple[Move, bool]] = []
        while len(ended) < count:
            assert self._rang.acquire(timeout=PATIENCE_S)
            ended += self.mover.poll()
        return [(move.number, well) for move, well in ended]


def load(number: int, slot: int = 0) -> Load:
    return Load(number, (b"a",), (slot,), (0,), Arrival())


def test_what_has_not_begun_when_it_closes_ends_and_nobody_waits_for_it() -> None:
    copier = ByHand()
    rig = Rig(copier)
    first, second, third = load(0), load(1), load(2)
    rig.mover.start([first, second, third])
    assert copier.begun.acquire(timeout=PATIENCE_S)
    closing = threading.Thread(target=rig.mover.close)
    closing.start()
    assert rig.ended(2) == [(1, False), (2, False)]
    for dropped in (second, third):
        with pytest.raises(LoadLost):
            dropped.arrival.wait(0)
    assert not copier.closed.is_set()
    copier.loading.set()
    closing.join(PATIENCE_S)
    assert rig.ended(1) == [(0, True)]
    first.arrival.wait(1)
    assert copier.closed.is_set()
    assert rig.traffic.of(Load).failed == 2


def test_a_load_that_fails_on_the_way_is_told_and_the_next_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    copier = ByHand()
    copier.loading.set()
    rig = Rig(copier)
    wrong, right = load(0, slot=3), load(1)
    try:
        with caplog.at_level(logging.ERROR):
            rig.mover.start([wrong, right])
            assert rig.ended(2) == [(0, False), (1, True)]
    finally:
        rig.mover.close()
    wrong.arrival.wait(0)
    with pytest.raises(LoadLost, match="layer 1 of KV"):
        wrong.arrival.wait(1)
    right.arrival.wait(1)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    flow = rig.traffic.of(Load)
    assert (flow.bytes, flow.failed) == (7, 1)


def test_loads_do_not_wait_for_stores_and_stores_started_at_once_are_one_copy() -> None:
    storing = threading.Event()
    copies: list[int] = []

    def store(stores: Sequence[Store]) -> int | None:
        copies.append(len(stores))
        assert storing.wait(PATIENCE_S)
        return 10 * len(stores) if stores[0].slot else None

    copier = ByHand(store)
    copier.loading.set()
    rig = Rig(copier)
    try:
        rig.mover.start([Store(0, b"a", 0, 1), Store(1, b"b", 1, 2), load(2)])
        rig.mover.start([Store(3, b"c", 2, 0)])
        assert rig.ended(1) == [(2, True)]
        storing.set()
        assert rig.ended(3) == [(0, True), (1, True), (3, False)]
    finally:
        rig.mover.close()
    assert copies == [2, 1]
    flow = rig.traffic.of(Store)
    assert (flow.bytes, flow.failed) == (20, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only there a thread has a scheduling class of its own")
def test_those_that_copy_give_way_to_lanes_and_nobody_else_does() -> None:
    before = os.sched_getscheduler(0)
    classes: list[int] = []

    def store(stores: Sequence[Store]) -> int:
        classes.append(os.sched_getscheduler(0))
        return len(stores)

    rig = Rig(ByHand(store))
    try:
        rig.mover.start([Store(0, b"a", 0, 1)])
        assert rig.ended(1) == [(0, True)]
    finally:
        rig.mover.close()
    assert classes == [os.SCHED_IDLE]
    assert os.sched_getscheduler(0) == before


def test_time_counts_once_however_many_copy_and_also_while_they_do() -> None:
    now_s = 100.0
    traffic = Traffic(lambda: now_s)
    with traffic.copying(Fetch):
        now_s = 101.0
        with traffic.copying(Fetch):
            now_s = 103.0
        assert traffic.of(Fetch).seconds == 3.0
        now_s = 104.0
    now_s = 110.0
    assert traffic.of(Fetch).seconds == 4.0
    with traffic.copying(Fetch):
        now_s = 110.5
    traffic.ended(Fetch, 1, 64)
    traffic.ended(Fetch, 1, None)
    assert traffic.of(Fetch) == Flow(64, 4.5, 1)
    assert traffic.of(Spill) == Flow(0, 0.0, 0)


def test_a_copy_that_raises_is_not_under_way_any_more() -> None:
    begun_s, ended_s, asked_s = 1.0, 3.0, 9.0
    traffic = Traffic(iter((begun_s, ended_s, asked_s)).__next__)

    def break_off() -> None:
        with traffic.copying(Store):
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        break_off()
    assert traffic.of(Store).seconds == 2.0


def test_times_are_those_of_the_last_moves() -> None:
    flow = Flow(0, 0.0, 0)
    times = RecentTimes(lambda: flow, record_bytes=1 << 20)
    assert times.seconds(3) == 0.0
    flow = Flow(8 << 20, 4.0, 0)
    assert times.seconds(3) == pytest.approx(1.5)
    flow = Flow(10 << 20, 100.0, 0)  # too little to say anything
    assert times.seconds(3) == pytest.approx(1.5)
    flow = Flow(24 << 20, 6.0, 1)
    assert times.seconds(3) == pytest.approx(0.375)
