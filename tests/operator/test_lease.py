"""Of several operators with one Lease at most one acts, whatever is slow, lost or paused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.lease_contract import LeasesContract
from tidelane.operator.errors import Conflict, Deposed, Refused, Retry
from tidelane.operator.lease import Candidate, LeaseTiming, Record, may_take
from tidelane.operator.probe import Probe
from tidelane.operator.standby import act_in_turn

TIMING = LeaseTiming()


class World:
    """One Lease and one clock, which each operator reads for itself. Answers may be lost, before or after what was
    asked for is done, or take `slow_s`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.record: Record | None = None
        self.slow_s = 0.0
        self.meanwhile: Candidate | None = None  # tries while another one does, between its read and its write
        self.lost: str | None = None  # "before" or "after"
        self.writes = 0
        self.refused = ""

    def candidate(self, name: str) -> Candidate:
        return Candidate(self, name, lambda: self.now_s, TIMING)

    async def read(self) -> Record | None:
        self._answer("before")
        found = self.record
        self._answer("after")
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile.attempt()
        return found

    async def create(self, holder: str, duration_s: float) -> Record:
        self._answer("before")
        if self.record is not None:
            raise Conflict("there is one")
        return self._write(Record(holder, "", duration_s))

    async def replace(self, record: Record, holder: str, duration_s: float, transitions: int) -> Record:
        self._answer("before")
        if self.record is None or self.record.version != record.version:
            raise Conflict("another version")
        return self._write(Record(holder, "", duration_s, transitions))

    def _write(self, record: Record) -> Record:
        self.writes += 1
        self.record = written = replace(record, version=str(self.writes))
        self._answer("after")
        return written

    def _answer(self, when: str) -> None:
        self.now_s += self.slow_s / 2
        if self.refused:
            raise Refused(self.refused)
        if self.lost == when:
            raise Retry("lost")


@pytest.fixture
def leases() -> World:
    return World()


class TestWorld(LeasesContract):
    pass


def test_of_two_that_find_it_free_at_once_one_takes_it() -> None:
    world = World()
    one, two = world.candidate("one"), world.candidate("two")
    attempt(one)
    world.now_s = TIMING.duration_s
    three = world.candidate("three")
    attempt(two)
    attempt(three)
    world.now_s = 2 * TIMING.duration_s
    world.meanwhile = three
    attempt(two)
    assert (two.acts, three.acts) == (False, True)


def attempt(candidate: Candidate) -> bool:
    asyncio.run(candidate.attempt())
    return candidate.acts


@pytest.mark.parametrize(
    ("holder", "unchanged_s", "free"),
    [("", 0, True), ("me", 0, True), ("other", 14.9, False), ("other", 15, True)],
)
def test_a_lease_is_free_if_given_back_or_mine_or_silent_for_its_own_duration(
    holder: str, unchanged_s: float, free: bool
) -> None:
    assert may_take(Record(holder, "1", 15), "me", unchanged_s) is free


def test_the_first_acts_and_the_next_takes_over_once_it_is_silent() -> None:
    world = World()
    one, two = world.candidate("one"), world.candidate("two")
    assert attempt(one)
    assert not attempt(two)
    acts = []
    for world.now_s in (TIMING.act_s - 0.1, TIMING.act_s):
        acts.append(one.acts)
    assert acts == [True, False]
    world.now_s = TIMING.duration_s - 0.1
    assert not attempt(two)
    world.now_s = TIMING.duration_s
    assert attempt(two)
    assert not attempt(one)
    assert world.record is not None
    assert (world.record.holder, world.record.transitions) == ("two", 1)


def test_who_has_just_come_waits_for_the_whole_duration_whatever_was_before() -> None:
    world = World()
    attempt(world.candidate("one"))
    world.now_s = 1000.0
    two = world.candidate("two")
    assert not attempt(two)
    world.now_s += TIMING.duration_s
    assert attempt(two)


def test_what_is_given_back_is_taken_at_once() -> None:
    world = World()
    one, two = world.candidate("one"), world.candidate("two")
    attempt(one)
    asyncio.run(one.give_back())
    assert not one.acts
    assert attempt(two)


def test_a_renewal_counts_from_when_it_was_begun() -> None:
    world = World()
    one = world.candidate("one")
    world.slow_s = TIMING.act_s / 2
    assert not attempt(one)  # a read and a write, each of them that slow
    world.slow_s = 0.0
    assert attempt(one)


async def test_a_fault_while_renewing_ends_the_turn_and_a_clean_end_gives_back() -> None:
    world = World()
    candidate = Candidate(world, "one", lambda: world.now_s, replace(TIMING, every_s=0.0))

    async def broken() -> Record | None:
        raise ZeroDivisionError

    async def act(deposed: asyncio.Event) -> None:
        world.read = broken  # type: ignore[method-assign]
        async with asyncio.timeout(30):
            await deposed.wait()

    async def end(_: asyncio.Event) -> None:
        """At once."""

    await act_in_turn(candidate, Probe(), end)
    assert world.record is not None
    assert world.record.holder == ""
    with pytest.raises(Deposed) as deposed:
        await act_in_turn(candidate, Probe(), act)
    assert isinstance(deposed.value.__cause__, ZeroDivisionError)


STEP = st.tuples(
    st.integers(0, 2),
    st.floats(0, 20),  # how long everyone rests before
    st.sampled_from([0.0, 0.0, 0.1, 3.0, 12.0]),
    st.sampled_from([None, None, None, "before", "after"]),
    st.sampled_from(["attempt"] * 6 + ["give back", "restart"]),
    st.sampled_from([None, None, 0, 1, 2]),  # who else tries meanwhile
)


@given(st.lists(STEP, max_size=60))
def test_never_two_act(steps: list[tuple[int, float, float, str | None, str, int | None]]) -> None:
    world = World()
    candidates = [world.candidate(name) for name in "abc"]
    for number, (at, rest_s, slow_s, lost, what, other) in enumerate(steps):
        world.now_s += rest_s
        world.slow_s, world.lost = slow_s, lost
        world.meanwhile = None if other in (None, at) else candidates[other]
        if what == "restart":
            candidates[at] = world.candidate(f"{at} at {number}")
        elif what == "give back":
            asyncio.run(candidates[at].give_back())
        else:
            attempt(candidates[at])
        assert sum(each.acts for each in candidates) <= 1


@given(st.integers(0, 2))
def test_as_long_as_one_tries_one_acts_in_the_end(who: int) -> None:
    world = World()
    candidates = [world.candidate(name) for name in "abc"]
    for each in candidates:
        attempt(each)
    for _ in range(10):
        world.now_s += TIMING.every_s
        attempt(candidates[who])
    assert candidates[who].acts


def test_what_is_refused_for_as_long_as_a_lease_lasts_is_a_fault_until_it_is_not() -> None:
    world = World()
    one = world.candidate("one")
    world.refused = "no right"
    said = []
    for world.now_s in (0.0, TIMING.duration_s - 0.1, TIMING.duration_s):
        attempt(one)
        said.append(one.faults)
    assert said == [[], [], ["no right"]]
    # An answer that is lost tells nothing of rights.
    world.refused, world.lost = "", "before"
    attempt(one)
    assert one.faults == ["no right"]
    world.lost = None
    assert attempt(one)
    assert one.faults == []


def test_a_cluster_out_of_reach_is_no_fault_of_who_stands_by() -> None:
    world = World()
    one = world.candidate("one")
    world.lost = "before"
    for world.now_s in (0.0, 1000.0):
        attempt(one)
    assert one.faults == []


def test_a_refusal_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    one = world.candidate("one")
    world.refused = "no right"
    for _ in range(3):
        attempt(one)
    assert [each.getMessage() for each in caplog.records] == ["the Lease cannot be read or renewed: no right"]
