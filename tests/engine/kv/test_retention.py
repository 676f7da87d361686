"""Orders of eviction against the same said slowly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.kv.keys import Key
from tidelane.engine.kv.retention import (
    MOST_TURNS,
    TURN_WEIGHT,
    Asker,
    ByServiceTier,
    LeastRecentlyUsed,
    LongerByTurn,
    Retention,
    Use,
    UseTimes,
)
from tidelane.engine.kv.turns import Turns
from tidelane.engine.sim.clock import VirtualClock


@dataclass
class Slow:
    """All that may go in one list. `pace`: how fast time passes for blocks of a turn; among those of one pace the first
    goes, and what was needed before that one comes first."""

    pace: Callable[[int], float]
    blocks: list[tuple[Key, Use]] = field(default_factory=list)

    def add(self, key: Key, use: Use) -> None:
        alike = [at for at, (_, other) in enumerate(self.blocks) if self.pace(other.by.turn) == self.pace(use.by.turn)]
        if alike and use.at < self.blocks[alike[0]][1].at:
            self.blocks.insert(alike[0], (key, use))
        else:
            self.blocks.append((key, use))

    def remove(self, key: Key) -> None:
        self.blocks = [each for each in self.blocks if each[0] != key]

    def victim(self, now: int) -> Key:
        firsts: dict[float, tuple[Key, Use]] = {}
        for key, use in self.blocks:
            firsts.setdefault(self.pace(use.by.turn), (key, use))
        # Of what has waited equally long the earlier turn goes.
        return max(((now + 1 - use.at) * pace, pace, key) for pace, (key, use) in firsts.items())[2]


SLOW: dict[type[Retention], Callable[[int], float]] = {
    LeastRecentlyUsed: lambda turn: 1.0,
    LongerByTurn: lambda turn: TURN_WEIGHT ** -(min(turn, MOST_TURNS) - 1),
}


@pytest.mark.parametrize("policy", SLOW)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "late", "remove", "evict", "evict"]),
            st.integers(0, 9),
            st.integers(1, MOST_TURNS + 2),
            st.integers(1, 8),
        ),
        max_size=60,
    )
)
def test_the_same_goes_first_as_by_looking_at_all(
    policy: Callable[[], Retention], steps: list[tuple[str, int, int, int]]
) -> None:
    fast, slow, now = policy(), Slow(SLOW[policy]), 0  # type: ignore[index]
    for action, which, turn, ago in steps:
        key = bytes([which])
        if action in ("add", "late") and key not in fast:
            now += 1
            use = Use(Asker(turn, 1), now if action == "add" else max(1, now - ago))
            fast.add(key, use)
            slow.add(key, use)
        elif action == "remove" and key in fast:
            fast.remove(key)
            slow.remove(key)
        elif action == "evict" and len(fast):
            victim = fast.victim(now)
            assert victim == slow.victim(now)
            fast.remove(victim)
            slow.remove(victim)
        assert {bytes([each]) for each in range(10) if bytes([each]) in fast} == {key for key, _ in slow.blocks}
        assert len(fast) == len(slow.blocks)


def test_a_later_turn_stays_longer_but_not_for_ever() -> None:
    blocks = LongerByTurn()
    blocks.add(b"second", Use(Asker(2, 1), 1))
    blocks.add(b"first", Use(Asker(1, 1), 2))
    assert blocks.victim(now=2) == b"second", "unused for two uses, at two thirds; the other for one"
    assert blocks.victim(now=4) == b"first", "for four at two thirds; the other for three"
    blocks.remove(b"first")
    blocks.add(b"first", Use(Asker(1, 1), 8))
    assert blocks.victim(now=10) == b"second"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "pass", "remove", "evict", "evict"]),
            st.integers(0, 9),
            st.builds(Asker, st.integers(1, 3), st.integers(0, 2)),
            st.integers(1, 200),
        ),
        max_size=60,
    )
)
def test_what_timed_out_goes_first_and_then_by_tier(steps: list[tuple[str, int, Asker, int]]) -> None:
    clock = VirtualClock()
    fast, slow, used_s, now = ByServiceTier(64.0, clock), list[tuple[Key, Use]](), [0.0], 0
    for action, which, by, while_s in steps:
        key = bytes([which])
        if action == "add" and key not in fast:
            now += 1
            fast.add(key, Use(by, now))
            slow.append((key, Use(by, now)))
            used_s.append(clock.now_s)
        elif action == "pass":
            clock.now_s += while_s / 4
        elif action == "remove" and key in fast:
            fast.remove(key)
            slow = [each for each in slow if each[0] != key]
        elif action == "evict" and slow:
            victim = fast.victim(now)
            [use] = [use for key, use in slow if key == victim]
            idle_s = clock.now_s - used_s[use.at]
            # The time is known to a 64th.
            surely = [each for _, each in slow if clock.now_s - used_s[each.at] >= 66.0]
            maybe = [each for _, each in slow if clock.now_s - used_s[each.at] >= 64.0]
            if surely:
                assert idle_s >= 64.0
                assert use.by.rank >= max(each.by.rank for each in surely)
            elif not maybe:
                assert use.by.rank == max(each.by.rank for _, each in slow)
                ours = LongerByTurn()
                for key, each in slow:
                    if each.by.rank == use.by.rank:
                        ours.add(key, each)
                assert victim == ours.victim(now)
            fast.remove(victim)
            slow = [each for each in slow if each[0] != victim]
        assert len(fast) == len(slow)


def test_a_time_out_only_changes_who_goes_first() -> None:
    clock = VirtualClock()
    blocks = ByServiceTier(100.0, clock)
    blocks.add(b"priority", Use(Asker(8, 0), 1))
    clock.now_s = 60.0
    blocks.add(b"flex", Use(Asker(1, 2), 2))
    blocks.add(b"default", Use(Asker(1, 1), 3))
    assert blocks.victim(3) == b"flex"
    clock.now_s = 130.0
    assert blocks.victim(3) == b"priority", (
        "of the longest conversation, and of those served first, but unused too long"
    )
    assert len(blocks) == 3
    clock.now_s = 170.0
    assert blocks.victim(3) == b"flex", "all have timed out"
    for _ in range(2):
        blocks.remove(blocks.victim(3))
    assert blocks.victim(3) == b"priority"


def test_what_may_go_again_may_have_timed_out_long_ago() -> None:
    clock = VirtualClock()
    blocks = ByServiceTier(100.0, clock)
    blocks.add(b"in use", Use(Asker(8, 0), 1))
    blocks.remove(b"in use")
    clock.now_s = 60.0
    blocks.add(b"flex", Use(Asker(1, 2), 2))
    clock.now_s = 130.0
    assert blocks.victim(2) == b"flex"
    blocks.add(b"in use", Use(Asker(8, 0), 1))
    assert blocks.victim(2) == b"in use"


def test_of_many_uses_few_times_are_kept() -> None:
    clock = VirtualClock()
    times = UseTimes(64.0, clock)
    for at in range(1, 2001):
        clock.now_s += 0.25
        times.note(at)
        # Four uses a second; of one part nothing is known yet.
        assert at - 66 * 4 <= times.timed_out() <= max(0, at - 64 * 4)
        assert len(times) <= 66


def test_a_turn_is_one_more_than_that_which_it_goes_on_from() -> None:
    turns = Turns(limit=3)
    asked: list[tuple[str, int]] = [
        ("a", 1),
        ("ab", 2),
        ("abcd", 3),
        ("abx", 3),  # goes on from the second, too
        ("abcd", 3),  # again, which is no turn
        ("b", 1),
        ("abcde", 4),
        ("abxy", 1),  # what it goes on from is forgotten
        ("", 1),
    ]
    assert [(path, turns.next(keys_of(path))) for path, _ in asked] == asked


@given(st.lists(st.text("a", max_size=6) | st.text("ab", max_size=4), max_size=30))
def test_turns_as_counted_one_by_one(paths: list[str]) -> None:
    turns, known = Turns(limit=100), dict[str, int]()
    for path in paths:
        before = [path[:length] for length in range(1, len(path)) if path[:length] in known]
        expected = known.get(path, known[before[-1]] + 1 if before else 1)
        assert turns.next(keys_of(path)) == expected
        if path:
            known[path] = expected


def keys_of(path: str) -> list[Key]:
    """Those of the blocks of a chain: each is named by the path to it."""
    return [path[: n + 1].encode() for n in range(len(path))]
