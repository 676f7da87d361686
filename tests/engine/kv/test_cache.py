"""The books of both tiers: whatever ends when, nobody reads what is not his."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from tidelane.engine.kv.cache import Holding, KVCache
from tidelane.engine.kv.keys import Key
from tidelane.engine.kv.moves import Move
from tidelane.engine.kv.retention import (
    UNKNOWN,
    Asker,
    ByServiceTier,
    LeastRecentlyUsed,
    LongerByTurn,
    Retention,
    Unused,
)

from .movers import HandMover


def keys_of(path: str) -> list[Key]:
    """Those of the blocks of a chain: each is named by the path to it."""
    return [path[: n + 1].encode() for n in range(len(path))]


def timed() -> ByServiceTier:
    """By a clock that ticks when it is looked at, and a time-out of some ticks."""
    return ByServiceTier(4.0, itertools.count(0.0).__next__)


class World:
    """Sequences as the ledger would treat them, and what is really in every block and slot."""

    def __init__(
        self, blocks: int, slots: int, disk_slots: int = 0, retention: Callable[[], Retention] = LongerByTurn
    ) -> None:
        self.cache = KVCache(blocks, slots, disk_slots, retention)
        self.mover = HandMover()
        self.holdings: dict[str, Holding] = {}
        self.paths: dict[str, str] = {}
        self.device: dict[int, Key] = {}
        self.host: dict[int, Key] = {}
        self.disk: dict[int, Key] = {}
        self.streams = False
        self.wrote = False  # the one that streams, to its blocks of the device
        self.pinned: list[int] = []

    def stream(self, slots: int) -> None:
        """One begins, which is given the last blocks of the device; or goes on, and gets more slots."""
        if not self.streams:
            self.cache.device.fence(self.run)
            self.streams = True
        pinned = self.cache.host.pin(slots)
        self.pinned += pinned
        self.host.update(dict.fromkeys(pinned, b"streamed"))
        # Once it has them all, it writes there.
        if self.cache.device.kept == self.cache.total - self.run:
            self.device.update(dict.fromkeys(range(self.run, self.cache.total), b"streamed"))
            self.wrote = True

    def end_stream(self) -> None:
        if self.streams:
            self.cache.device.unfence()
            self.cache.host.unpin(self.pinned)
            self.streams, self.wrote, self.pinned = False, False, []

    @property
    def run(self) -> int:
        return self.cache.total - 2

    def found(self, path: str) -> int:
        keys = keys_of(path)[: len(path) - 1]
        found = self.cache.present.follow("probe", keys)
        self.cache.present.leave("probe")
        return found

    def start(self, name: str, path: str, rank: int = 1) -> None:
        """One block more than the path is long, as a sequence has that goes on."""
        keys = keys_of(path)[: self.found(path)]
        held = self.cache.held.follow("probe", keys)
        self.cache.held.leave("probe")
        if len(path) + 1 - held > self.cache.free:
            return
        holding = self.holdings[name] = self.cache.hold(keys, Asker(self.cache.turns.next(keys_of(path)), rank))
        self.paths[name] = path
        self.cache.extend(holding, len(path) + 1)
        for block in holding.blocks[len(keys) :]:
            self.device[block] = b"of " + name.encode()  # it writes there from now on
        self.mover.start(self.cache.take_moves())

    def compute(self, name: str) -> None:
        """The next of its blocks is full. By then all that it began with has come."""
        holding = self.holdings[name]
        at = len(holding.keys)
        if at == len(self.paths[name]):
            return
        while self.mover.loads:
            self.end_load()
        self.device[holding.blocks[at]] = keys_of(self.paths[name])[at]
        self.cache.name(holding, keys_of(self.paths[name])[at])
        self.mover.start(self.cache.take_moves())

    def end(self, name: str) -> None:
        self.cache.give_up(self.holdings.pop(name))
        del self.paths[name]

    def want(self, path: str) -> set[Key]:
        coming = self.cache.want(keys_of(path), UNKNOWN)
        self.mover.start(self.cache.take_moves())
        return coming

    def fetch_ahead(self, path: str, most: int) -> tuple[Key, ...]:
        """Into the place of what was not used lately."""
        coming = self.cache.fetch_ahead(keys_of(path), UNKNOWN, most, self._unused)
        self.mover.start(self.cache.take_moves())
        return coming

    def load_ahead(self, path: str, most: int) -> bool:
        """And lets go of it at once, as who is in the way does."""
        holding = Holding(by=UNKNOWN)
        comes = self.cache.load_ahead(holding, keys_of(path), most, self._unused)
        assert comes is bool(holding.moves)
        self.cache.let_go(holding)
        self.mover.start(self.cache.take_moves())
        return comes

    def ask(self, action: str, path: str, most: int) -> None:
        match action:
            case "want":
                self.want(path)
            case "fetch-ahead":
                self.fetch_ahead(path, most)
            case "load-ahead":
                self.load_ahead(path, most)
            case "found":
                self.cache.found_ahead(keys_of(path))
            case "stream":
                self.stream(most)
            case "end-stream":
                self.end_stream()
            case _:
                self.cache.wrong(keys_of(path))

    @staticmethod
    def _unused(unused: Unused) -> bool:
        return unused.uses > 2 and not unused.guessed

    def end_store(self, *, well: bool = True) -> None:
        if self.mover.stores:
            store = self.mover.stores[0]
            assert self.device[store.block] == store.key
            self.host[store.slot] = store.key if well else b"torn"
            self.hear(store, well=well)

    def end_load(self) -> None:
        if self.mover.loads:
            load = self.mover.loads[0]
            assert [self.host[slot] for slot in load.slots] == list(load.keys)
            self.device.update(zip(load.blocks, load.keys, strict=True))
            self.hear(load)

    def end_spill(self, which: int = 0, *, well: bool = True) -> None:
        if self.mover.spills:
            spill = self.mover.spills[which % len(self.mover.spills)]
            assert self.host[spill.host_slot] == spill.key
            assert spill.parent == spill.key[:-1]
            self.disk[spill.disk_slot] = spill.key if well else b"torn"
            self.hear(spill, well=well)

    def end_fetch(self, which: int = 0, *, well: bool = True) -> None:
        if self.mover.fetches:
            fetch = self.mover.fetches[which % len(self.mover.fetches)]
            assert self.disk[fetch.disk_slot] == fetch.key
            self.host[fetch.host_slot] = fetch.key if well else b"rotten"
            self.hear(fetch, well=well)

    def hear(self, ended: Move, *, well: bool = True) -> None:
        self.mover.end(ended, well=well)
        for move, so in self.mover.poll():
            self.cache.moved(move, well=so)
        self.mover.start(self.cache.take_moves())

    def settle(self) -> None:
        """All that is under way ends."""
        while not self.mover.idle:
            self.end_store()
            self.end_load()
            self.end_spill()
            self.end_fetch()

    def check(self) -> None:
        cache = self.cache
        for name, holding in self.holdings.items():
            keys = keys_of(self.paths[name])
            assert holding.keys == keys[: len(holding.keys)]
            named = holding.blocks[: len(holding.keys)]
            assert holding.arrivals or [self.device[block] for block in named] == holding.keys
            for block in holding.blocks[len(holding.keys) :]:
                assert self.device[block] == b"of " + name.encode() or self.device[block] in keys
        assert all(self.host[slot] == b"streamed" for slot in self.pinned)
        assert len(set(self.pinned)) == len(self.pinned) == cache.host.pinned
        held = {block for holding in self.holdings.values() for block in holding.blocks}
        assert cache.device.kept <= (cache.total - self.run) * self.streams
        if cache.device.kept == cache.total - self.run:
            assert not held & set(range(self.run, cache.total))
        if self.wrote:
            assert {self.device[block] for block in range(self.run, cache.total)} == {b"streamed"}
        if not self.mover.stores and not self.mover.loads:
            assert cache.free + cache.device.kept == cache.total - len(held)
        for tier in (cache.device, cache.host):
            guesses = tier.guesses
            assert 0 <= guesses.brought - guesses.useful - guesses.wasted <= tier.total
        everything = {path.encode() for path in PATHS}
        for tier in (cache.device, cache.host, cache.disk):
            assert all(key[:-1] in tier for key in everything if key in tier and len(key) > 1)


PATHS = [a + b + c + d for a in "ab" for b in ("", "a", "b") for c in ("", "a", "b") for d in ("", "a", "b")]
STEPS = st.tuples(
    st.sampled_from(
        [
            *["start"] * 2,
            *["compute"] * 3,
            "end",
            "spoil",
            *["store"] * 3,
            "tear",
            "load",
            *["spill"] * 2,
            "tear-spill",
            "want",
            *["fetch-ahead"] * 2,
            *["load-ahead"] * 2,
            "found",
            "wrong",
            "fetch",
            "rot",
            *["stream"] * 2,
            "end-stream",
        ]
    ),
    st.integers(0, 3),
    st.sampled_from(sorted(set(PATHS))),
)


@settings(max_examples=400)
@given(
    st.integers(5, 14),
    st.integers(0, 8),
    st.integers(0, 12),
    st.sampled_from([LeastRecentlyUsed, LongerByTurn, timed]),
    st.lists(STEPS, max_size=100),
)
def test_nobody_reads_what_is_not_his(
    blocks: int, slots: int, disk_slots: int, retention: Callable[[], Retention], steps: list[tuple[str, int, str]]
) -> None:
    world = World(blocks, slots, disk_slots, retention)
    for action, which, path in steps:
        name = str(which)
        there = name in world.holdings
        match action:
            case "start" if not there:
                world.start(name, path, len(path) % 3)
            case "compute" if there:
                world.compute(name)
            case "end" if there:
                world.end(name)
            case "spoil" if there:
                world.cache.spoil(world.holdings[name])
                named = world.holdings[name].keys
                assert not any(key in world.cache.device or key in world.cache.host for key in named)
                world.end(name)
            case "store" | "tear":
                world.end_store(well=action == "store")
            case "load":
                world.end_load()
            case "spill" | "tear-spill":
                world.end_spill(which, well=action == "spill")
            case "want" | "fetch-ahead" | "load-ahead" | "found" | "wrong" | "stream" | "end-stream":
                world.ask(action, path, which + 1)
            case "fetch" | "rot":
                world.end_fetch(which, well=action == "fetch")
        world.check()
    for name in list(world.holdings):
        world.end(name)
    world.settle()
    assert world.cache.still
    assert world.cache.free + world.cache.device.kept == blocks
    assert world.cache.device.kept == 2 * world.streams
    world.end_stream()
    assert world.cache.free == blocks
    assert world.cache.host.pinned == 0
    world.check()


def run(world: World, name: str, path: str) -> None:
    """From beginning to end, with all that it stores."""
    world.start(name, path)
    for _ in path:
        world.compute(name)
    world.end(name)
    while world.mover.stores:
        world.end_store()


def test_a_block_behind_the_fence_gets_no_name_nor_does_any_after_it_though_the_fence_has_gone() -> None:
    world = World(blocks=6, slots=0)
    world.start("one", "aaaaa")
    for _ in range(4):
        world.compute("one")
    world.stream(0)
    assert world.found("aaaaax") == 4
    world.compute("one")
    world.end_stream()
    world.cache.name(world.holdings["one"], b"aaaaab")  # else it would be that of the fifth block
    assert world.holdings["one"].keys == keys_of("aaaa")
    world.end("one")
    assert world.found("aaaaax") == 4
    assert world.cache.free == 6


def test_what_left_the_device_is_found_in_host_memory() -> None:
    world = World(blocks=5, slots=8)
    run(world, "first", "abc")
    run(world, "other", "bbb")
    assert world.found("abcx") == 3
    assert world.cache.device.evictions > 0
    world.start("again", "abca")
    (load,) = world.mover.loads
    assert set(load.keys) < set(keys_of("abca"))
    arriving = [len(world.holdings["again"].arrivals)]
    world.end_load()
    arriving.append(len(world.holdings["again"].arrivals))
    assert arriving == [1, 0]
    world.check()


def test_who_has_not_begun_to_compute_hears_that_its_load_was_lost() -> None:
    world = World(blocks=5, slots=8)
    run(world, "first", "abc")
    run(world, "other", "bbb")
    world.start("again", "abca")
    (load,) = world.mover.loads
    assert world.cache.awaits(world.holdings["again"])
    world.hear(load, well=False)
    assert world.holdings["again"].arrivals == (load.arrival,)
    assert not world.cache.awaits(world.holdings["again"])
    world.end("again")
    assert world.cache.free == world.cache.total


def test_two_that_want_the_same_load_it_once() -> None:
    world = World(blocks=9, slots=12)
    run(world, "first", "aaa")
    run(world, "other", "bbbbbbbb")
    world.start("one", "aaax")
    world.start("two", "aaay")
    (load,) = world.mover.loads
    assert load.keys == tuple(keys_of("aaa"))
    assert world.holdings["two"].arrivals == world.holdings["one"].arrivals == (load.arrival,)
    world.end("one")
    assert world.cache.awaits(world.holdings["two"])
    world.end_load()
    assert not world.cache.awaits(world.holdings["two"])
    world.compute("two")
    world.check()


def test_blocks_that_are_copied_stay_until_that_has_ended() -> None:
    world = World(blocks=4, slots=4)
    world.start("first", "aaa")
    for _ in range(3):
        world.compute("first")
    assert world.cache.shared(world.holdings["first"]) == 4, "none of its blocks would get free"
    world.end("first")
    assert world.cache.free == 0
    for _ in range(3):
        world.end_store()
    assert world.cache.free == 4


def test_a_store_that_failed_leaves_nothing_to_find() -> None:
    world = World(blocks=4, slots=4)
    world.start("first", "aaa")
    for _ in range(3):
        world.compute("first")
    world.end("first")
    world.end_store()
    world.end_store(well=False)
    world.end_store()
    assert [key in world.cache.host for key in keys_of("aaa")] == [True, False, False]
    assert world.cache.host.free == 3


def test_room_in_host_memory_is_made_of_ends_unused_for_longest() -> None:
    world = World(blocks=8, slots=4)
    run(world, "old", "aa")
    run(world, "new", "bb")
    run(world, "use", "aax")
    assert [key in world.cache.host for key in keys_of("aax") + keys_of("bb")] == [True, True, True, True, False]
    assert world.cache.host.evictions == 1


def fill(world: World, *paths: str) -> None:
    """One after the other, each stored and spilled."""
    for number, path in enumerate(paths):
        world.start(f"fill {number}", path)
        for _ in path:
            world.compute(f"fill {number}")
        world.end(f"fill {number}")
        world.settle()


def test_what_is_on_the_disk_alone_is_found_once_it_was_fetched() -> None:
    world = World(blocks=5, slots=4, disk_slots=12)
    fill(world, "abb", "bbbb")
    assert world.found("abbx") == 0
    assert world.want("abb") == set(keys_of("abb"))
    for reached in (1, 2, 3):
        world.end_fetch()
        assert world.found("abbx") == reached
    assert world.want("abb") == set()


def test_what_is_on_the_disk_is_fetched_though_its_beginning_is_on_the_device_alone() -> None:
    world = World(blocks=6, slots=4, disk_slots=12)
    fill(world, "abb", "bbbb")
    assert [key in world.cache.device for key in keys_of("abb")] == [True, False, False]
    assert not any(key in world.cache.host for key in keys_of("abb"))
    assert world.want("abb") == {b"ab", b"abb"}
    world.settle()
    assert world.found("abbx") == 3
    world.check()


def test_who_wants_what_is_on_its_way_waits_for_the_same() -> None:
    world = World(blocks=4, slots=8, disk_slots=12)
    fill(world, "abb", "bbb", "bab", "baa")
    first = world.want("abb")
    under_way = len(world.mover.fetches)
    assert under_way == len(first) > 0
    assert world.want("abb") == first
    assert len(world.mover.fetches) == under_way


def test_what_the_disk_has_lost_is_not_asked_for_again() -> None:
    world = World(blocks=5, slots=4, disk_slots=12)
    fill(world, "abb", "bbbb")
    assert world.want("a") == {b"a"}
    world.end_fetch(well=False)
    assert world.found("abbx") == 0
    assert world.want("abb") == set()
    assert world.cache.still
    world.check()


def test_another_process_goes_on_with_the_disk() -> None:
    old = World(blocks=8, slots=8, disk_slots=8)
    fill(old, "abb", "ba")
    new = World(blocks=8, slots=8, disk_slots=8)
    new.disk = dict(old.disk)
    found = {slot: (key, key[:-1]) for slot, key in old.disk.items()}
    new.cache.disk.restore(found)
    assert new.cache.disk.free == 8 - 5
    new.want("abb")
    new.settle()
    assert new.found("abbx") == 3
    # Not what stands behind something that is gone.
    lame = World(blocks=8, slots=8, disk_slots=8)
    lame.cache.disk.restore({slot: names for slot, names in found.items() if names[0] != b"ab"})
    assert [key in lame.cache.disk for key in (*keys_of("abb"), *keys_of("ba"))] == [True, False, False, True, True]
    assert lame.cache.disk.free == 8 - 3
    lame.check()


def test_what_is_fetched_before_what_it_stands_behind_waits_for_that() -> None:
    for well in (True, False):
        world = World(blocks=5, slots=4, disk_slots=12)
        fill(world, "abb", "bbbb")
        world.want("abb")
        world.end_fetch(2)
        world.end_fetch(1)
        assert [key in world.cache.host for key in keys_of("abb")] == [False, False, False]
        assert world.want("abb") == {b"a"}
        world.end_fetch(well=well)
        assert world.found("abbx") == (3 if well else 0)
        world.check()
    assert world.cache.host.free == 3
    assert world.cache.still


def test_what_was_used_by_itself_since_outlasts_what_stood_behind_it() -> None:
    for again in (False, True):
        world = World(blocks=12, slots=4)
        run(world, "long", "aab")
        run(world, "other", "b")
        if again:
            run(world, "short", "aa")
        run(world, "new", "cd")
        assert [key in world.cache.host for key in (*keys_of("aab"), b"b")] == [True, again, False, not again]


def test_what_stood_before_something_goes_when_that_would_have() -> None:
    world = World(blocks=12, slots=3)
    for name, path in enumerate(("a", "ab", "c", "d", "e")):
        run(world, str(name), path)
    # "ab", of a second turn, made room for "d". At the turn and time of that, "a" now stays longer than "c".
    assert [path for path in ("a", "ab", "c", "d", "e") if path.encode() in world.cache.host] == ["a", "d", "e"]


def test_of_what_an_earlier_process_left_a_chain_goes_whole_before_the_next_loses_its_end() -> None:
    world = World(blocks=12, slots=0, disk_slots=4)
    disk = world.cache.disk
    disk.restore({0: (b"a", b""), 1: (b"ab", b"a"), 2: (b"b", b""), 3: (b"ba", b"b")})
    for key in (b"c", b"d"):
        assert disk.reserve(b"", key, UNKNOWN) is not None
    assert [key for key in (b"a", b"ab", b"b", b"ba") if key in disk] == [b"b", b"ba"]


def test_of_what_an_earlier_process_left_the_oldest_goes_first_however_long_its_chain_and_wherever_it_is() -> None:
    disk = World(blocks=12, slots=0, disk_slots=5).cache.disk
    disk.restore({4: (b"b", b""), 1: (b"ba", b"b"), 3: (b"bab", b"ba"), 2: (b"a", b""), 0: (b"ab", b"a")})
    for key in (b"c", b"d", b"e"):
        assert disk.reserve(b"", key, UNKNOWN) is not None
    assert [key for key in (b"a", b"ab", b"b", b"ba", b"bab") if key in disk] == [b"a", b"ab"]


def test_a_write_that_failed_does_not_make_what_it_stands_behind_go_first() -> None:
    world = World(blocks=12, slots=4)
    run(world, "old", "b")
    world.start("torn", "aa")
    for _ in "aa":
        world.compute("torn")
    world.end_store()
    world.end_store(well=False)
    run(world, "new", "abb")
    assert [key in world.cache.host for key in (b"b", b"a", b"ab", b"abb")] == [True] * 4
    run(world, "newer", "aba")
    assert [key in world.cache.host for key in (b"b", b"a", b"ab")] == [False, True, True]
