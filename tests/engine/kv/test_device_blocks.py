"""Blocks that sequences share, and blocks that stay for those to come."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelane.engine.kv.blocks import OutOfBlocks
from tidelane.engine.kv.device_blocks import DeviceBlocks
from tidelane.engine.kv.keys import Key
from tidelane.engine.kv.retention import (
    MOST_TURNS,
    UNKNOWN,
    Asker,
    ByServiceTier,
    LeastRecentlyUsed,
    LongerByTurn,
    Retention,
)


def keys_of(path: str) -> list[Key]:
    """Those of the blocks of a chain: each is named by the path to it."""
    return [path[: n + 1].encode() for n in range(len(path))]


def timed() -> ByServiceTier:
    """By a clock that ticks when it is looked at, and a time-out of some ticks."""
    return ByServiceTier(4.0, itertools.count(0.0).__next__)


class Books:
    """Sequences as the ledger would treat them; `named` counts those of a sequence's blocks that are published."""

    def __init__(self, total: int, retention: Callable[[], Retention] = LeastRecentlyUsed) -> None:
        self.here: set[Key] = set()
        self.pool = DeviceBlocks(total, self.here.add, self.here.remove, retention())
        self.blocks: dict[str, list[int]] = {}
        self.paths: dict[str, str] = {}
        self.named: dict[str, int] = {}
        self.askers: dict[str, Asker] = {}
        self.contents: dict[int, Key] = {}

    def found(self, path: str) -> int:
        keys = keys_of(path)
        return next((n for n, key in enumerate(keys) if key not in self.pool), len(keys))

    def start(self, name: str, path: str, by: Asker = UNKNOWN) -> None:
        found = self.found(path)
        self.blocks[name] = self.pool.take(keys_of(path)[:found], by)
        self.blocks[name] += self.pool.allocate(len(path) - found)
        self.paths[name], self.named[name], self.askers[name] = path, found, by

    def compute(self, name: str) -> None:
        """The next of its blocks is full."""
        at, keys = self.named[name], keys_of(self.paths[name])
        if at == len(keys):
            return
        block = self.blocks[name][at]
        self.contents[block] = keys[at]
        named = self.pool.publish(keys[at], block, self.blocks[name][at - 1] if at else None, self.askers[name])
        if named is not None:
            self.blocks[name][at] = named
            self.named[name] = at + 1

    def end(self, name: str) -> None:
        self.pool.release(self.blocks.pop(name))
        del self.paths[name], self.named[name], self.askers[name]


@settings(max_examples=300)
@given(
    st.integers(4, 14),
    st.sampled_from([LeastRecentlyUsed, LongerByTurn, timed]),
    st.lists(
        st.tuples(
            st.sampled_from(["start", "compute", "compute", "compute", "end", "spoil"]),
            st.integers(0, 3),
            st.text("ab", min_size=1, max_size=5),
            st.builds(Asker, st.integers(1, MOST_TURNS + 1), st.integers(0, 2)),
        ),
        max_size=60,
    ),
)
def test_nobody_reads_what_another_wrote(
    total: int, retention: Callable[[], Retention], steps: list[tuple[str, int, str, Asker]]
) -> None:
    books = Books(total, retention)
    pool = books.pool
    for action, which, path, by in steps:
        name = str(which)
        if action == "start" and name not in books.blocks:
            needed = len(path)  # at most: those found idle must be counted, those held need not
            if needed <= pool.free:
                books.start(name, path, by)
        elif action == "compute" and name in books.blocks:
            books.compute(name)
        elif action == "end" and name in books.blocks:
            books.end(name)
        elif action == "spoil" and name in books.blocks:
            pool.forget(books.blocks[name])
            books.end(name)
        holders: dict[int, int] = {}
        for held in books.blocks.values():
            assert len(set(held)) == len(held)
            for block in held:
                holders[block] = holders.get(block, 0) + 1
        assert pool.free == total - len(holders)
        assert 0 <= pool.idle <= pool.free
        assert all(key in pool for key in books.here)
        assert all(key[:-1] in books.here for key in books.here if len(key) > 1)
        for each, held in books.blocks.items():
            named = books.named[each]
            assert [books.contents[block] for block in held[:named]] == keys_of(books.paths[each])[:named]
            assert all(holders[block] == 1 for block in held[named:])
            shared = [holders[block] > 1 for block in held]
            assert all(before >= after for before, after in pairwise(shared))
            assert pool.shared(held) == sum(shared)
    for name in list(books.blocks):
        books.end(name)
    assert pool.free == total
    assert sorted(pool.allocate(total)) == list(range(total))


def test_an_ended_sequence_leaves_its_blocks_to_the_next() -> None:
    books = Books(8)
    books.start("first", "abc")
    for _ in range(3):
        books.compute("first")
    blocks = list(books.blocks["first"])
    books.end("first")
    assert (books.pool.free, books.pool.idle) == (8, 3)
    books.start("second", "abxy")
    assert books.blocks["second"][:2] == blocks[:2]
    assert (books.pool.free, books.pool.idle) == (4, 1)


def test_room_is_made_of_the_ends_of_the_oldest_first() -> None:
    books = Books(6)
    for name, path in (("old", "aaa"), ("new", "bbb")):
        books.start(name, path)
        for _ in path:
            books.compute(name)
        books.end(name)
    books.pool.allocate(2)
    assert (books.found("aaa"), books.found("bbb")) == (1, 3)
    books.pool.allocate(2)
    assert (books.found("aaa"), books.found("bbb")) == (0, 2)
    assert books.pool.evictions == 4


def test_conversations_that_have_gone_on_stay_longer() -> None:
    left = []
    for turn in (1, 2):
        books = Books(9, LongerByTurn)
        for name, path, its in (("on", "aaa", turn), ("one", "bbb", 1), ("two", "ccc", 1)):
            books.start(name, path, Asker(its, 1))
            for _ in path:
                books.compute(name)
            books.end(name)
        # Unused for three uses at weight 1.5, for two at weight 1, for one: the second goes first, its end before all.
        books.pool.allocate(2)
        left.append([books.found(path) for path in ("aaa", "bbb", "ccc")])
    assert left == [[1, 3, 3], [3, 1, 3]]


@pytest.mark.parametrize("later", [Asker(1, 1), Asker(2, 2), Asker(3, 2)])
def test_a_beginning_counts_for_all_that_have_asked_for_it(later: Asker) -> None:
    books = Books(2, lambda: ByServiceTier(1000.0, lambda: 0.0))
    for name, path, by in (("first", "ab", Asker(2, 1)), ("later", "a", later)):
        books.start(name, path, by)
        for _ in path:
            books.compute(name)
        books.end(name)
    books.pool.allocate(1)
    assert books.here == {b"a"}


def test_two_that_compute_the_same_end_up_with_one_block() -> None:
    books = Books(6)
    books.start("one", "ab")
    books.start("other", "ab")
    assert books.pool.free == 2
    books.compute("one")
    books.compute("other")
    assert books.blocks["one"][0] == books.blocks["other"][0]
    assert books.pool.free == 3


def test_what_was_spoilt_is_found_no_more_nor_what_came_of_it() -> None:
    books = Books(12)
    for name, path in (("gone", "abcd"), ("other", "x")):
        books.start(name, path)
        for _ in path:
            books.compute(name)
    books.end("gone")  # its blocks behind "ab" are idle
    books.start("spoilt", "abe")
    books.pool.forget(books.blocks["spoilt"])
    assert [books.found(path) for path in ("abcd", "abe", "x")] == [0, 0, 1]
    books.end("spoilt")
    assert books.pool.free == 11


def test_no_more_is_given_than_there_is() -> None:
    pool = Books(4).pool
    blocks = pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 4 free"):
        pool.allocate(2)
    pool.publish(b"a", blocks[0], None, UNKNOWN)
    pool.release(blocks)
    with pytest.raises(ValueError, match=f"block {blocks[0]} is not held"):
        pool.release(blocks[:1])


def test_what_is_computed_from_what_was_spoilt_gets_no_name() -> None:
    books = Books(12)
    books.start("spoilt", "ab")
    for _ in "ab":
        books.compute("spoilt")
    books.start("reader", "abc")
    books.pool.forget(books.blocks["spoilt"])
    # The same name again, of another block: what "reader" has is not that.
    books.start("fresh", "ab")
    for _ in "ab":
        books.compute("fresh")
    books.compute("reader")
    assert (books.found("abc"), books.named["reader"]) == (2, 2)
