"""Caches of a few blocks, where all that can happen can be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.kv_hit_rates import LRU, OURS, Device, GoingOn, Prompts, Slots, going_on, measured, measures, table, through
from tools.kv_policies import Arc, Cache, Frequency, S3Fifo, found, optimum

from tidelane.cli.targets import BadOption
from tidelane.engine.bench.traffic import Arrival
from tidelane.engine.kv.retention import LeastRecentlyUsed, LongerByTurn

# Chains in a tree: a block is named by the path to it, as a number.
PROMPTS = st.lists(st.text("12", min_size=1, max_size=4).map(lambda path: chain(path)), min_size=1, max_size=30)
ROOM = 4


def chain(path: str) -> tuple[int, ...]:
    return tuple(int(path[: length + 1]) for length in range(len(path)))


def prompts_of(*chains: Sequence[int]) -> Prompts:
    return Prompts(tuple(map(tuple, chains)), sum(map(len, chains)) * 512)


def best(prompts: Sequence[Sequence[int]], room: int) -> int:
    """By trying everything that could be kept after each prompt."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for prompt in prompts:
        after: dict[frozenset[int], int] = {}
        for kept, total in states.items():
            now = total + sum(1 for _ in takewhile(kept.__contains__, prompt))
            could = kept | set(prompt)
            for choice in combinations(sorted(could), min(room, len(could))):
                after[frozenset(choice)] = max(after.get(frozenset(choice), 0), now)
        states = after
    return max(states.values())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("12", min_size=1, max_size=3).map(chain), min_size=1, max_size=7), st.integers(1, 3))
def test_nothing_finds_more_than_the_optimum(prompts: list[tuple[int, ...]], room: int) -> None:
    assert optimum(prompts, room) == best(prompts, room)


@given(PROMPTS)
def test_the_books_with_lru_find_what_a_list_would(chains: list[tuple[int, ...]]) -> None:
    used: list[int] = []
    expected = 0
    for blocks in chains:
        expected += sum(1 for _ in takewhile(used.__contains__, blocks))
        used = [*(each for each in used if each not in blocks), *reversed(blocks)][-ROOM:]
    assert through(Device(ROOM, LeastRecentlyUsed()), prompts_of(*chains), 100) == expected


@given(PROMPTS)
def test_every_policy_finds_all_where_there_is_room_and_no_more_than_the_optimum(chains: list[tuple[int, ...]]) -> None:
    prompts = prompts_of(*chains)
    every = len({block for blocks in chains for block in blocks})
    most = optimum(chains, 1000)
    for name, find in measures(prompts).items():
        # S3-FIFO and ARC divide their room.
        assert find(20 * every) == most, name
        assert find(ROOM) <= optimum(chains, ROOM), name


@pytest.mark.parametrize("kind", [S3Fifo, Arc, Frequency])
@given(st.lists(st.integers(0, 12), max_size=80), st.integers(1, 6))
def test_caches_hold_what_they_were_made_for_and_what_came_last(kind: type, used: list[int], room: int) -> None:
    cache: Cache = kind(room)
    for block in used:
        cache.use(block)
        assert block in cache
        assert sum(each in cache for each in range(13)) <= room


@pytest.mark.parametrize("kind", [S3Fifo, Arc, Frequency])
def test_what_was_used_again_outlasts_what_comes_once(kind: type) -> None:
    cache: Cache = kind(10)
    for block in (1, 2, 1, 2, 1, 2):
        cache.use(block)
    for block in range(100, 130 if kind is not Frequency else 110):
        cache.use(block)
    assert (1 in cache, 2 in cache) == (True, True)


def test_of_a_prompt_the_beginning_without_a_gap_is_found() -> None:
    cache = Frequency(5)
    for block in (1, 3):
        cache.use(block)
    assert found(cache, (1, 2, 3)) == 1
    assert found(cache, (1, 2, 3)) == 3


def test_a_conversation_outlasts_what_is_asked_once_in_both_books() -> None:
    turns = [chain("1" * turn) for turn in (1, 2, 3, 4)]
    prompts = prompts_of(*turns, chain("2"), chain("3"), chain("4"), chain("11111"))
    for tier in (Slots, Device):
        lru, ours = (through(tier(5, retention()), prompts, 100) for retention in (LeastRecentlyUsed, LongerByTurn))
        assert (lru, ours) == (6 + 2, 6 + 4), "of the last prompt two blocks, or four"


def test_figures_are_shares_of_all_tokens() -> None:
    arrivals = [
        Arrival(0.0, 1100, 1, hash_ids=(1, 2, 3)),
        Arrival(1.0, 1024, 1, hash_ids=(1, 2)),  # its last token is computed, and so is the block that holds it
        Arrival(2.0, 1076, 1, hash_ids=(1, 2, 4)),
    ]
    prompts = Prompts.of(arrivals)
    assert prompts.blocks == ((1, 2), (1,), (1, 2))
    figures = measured(prompts, (2, 3), (LRU, OURS))
    assert figures.hit_rates == {LRU: {2: 0.48, 3: 0.48}, OURS: {2: 0.48, 3: 0.48}}
    assert figures.without_limit == 0.48
    assert list(table("all", figures))[1:] == [
        "| tokens found, % | 2 blocks | 3 blocks | no limit |",
        "|---|---|---|---|",
        "| least recently used | 48.00 | 48.00 | 48.00 |",
        "| longer by turn | 48.00 | 48.00 | 48.00 |",
    ]
    with pytest.raises(BadOption, match="a prompt of the trace has 2"):
        measured(prompts, (1,))


def test_prompts_go_on_where_a_later_one_begins_with_all_of_them() -> None:
    arrivals = [
        Arrival(at_s, 512 * len(path) + 1, 1, hash_ids=chain(path))
        for at_s, path in (
            (0.0, "11"),
            (1.0, "12"),
            (4.0, "111"),
            (5.0, "1"),
            (10.0, "1111"),
            (70.0, "11111"),
            (80.0, "2"),
        )
    ]
    assert going_on(arrivals) == {
        1: GoingOn(2, 0.5, 4.0),
        2: GoingOn(1, 1.0, 6.0),
        3: GoingOn(1, 1.0, 60.0),
    }
