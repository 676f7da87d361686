"""Which device blocks are free, which are held, and which hold what a later prompt may begin with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from tidelane.engine.kv.blocks import BlockPool, OutOfBlocks
from tidelane.engine.kv.frontier import Frontier
from tidelane.engine.kv.keys import Key
from tidelane.engine.kv.retention import Asker, Guesses, Retention, Unused, Use


class _Named(msgspec.Struct):
    """What is in a block, and how many sequences hold it; with none it is idle, since use `idle_since`. `asked_by` is
    all that have held it. `guessed`: it was brought here for a prompt that may come, and nobody has held it since."""

    key: Key
    parent: Key
    block: int
    holders: int
    asked_by: Asker
    idle_since: int = 0
    guessed: bool = False


class DeviceBlocks:
    """Each block is free; or held by one sequence that may write to it; or has a name, and then nobody writes to it any
    more: sequences share it, and while none holds it, it stays until its room is needed.

    Whoever holds a named block holds those before it in its chain, too: so the first blocks of a chain are in at least
    as many hands as those behind them, and an idle block has only idle ones behind it.

    `came` and `went` hear of each name that can be found from now on, or no more. `held` follows how many of the first
    blocks of waiting prompts some sequence holds, so that they take no room.
    """

    def __init__(
        self, total: int, came: Callable[[Key], None], went: Callable[[Key], None], retention: Retention
    ) -> None:
        self._pool = BlockPool(total)
        self._by_key: dict[Key, _Named] = {}
        self._by_block: dict[int, _Named] = {}
        self._idle = retention
        self._uses = 0
        self._long_ago = 0  # before all uses
        self._guessed = 0  # of those that are here
        self._came = came
        self._went = went
        self.held = Frontier(self._is_held)
        self.evictions = 0
        self.guesses = Guesses()

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    @property
    def total(self) -> int:
        return self._pool.total

    @property
    def free(self) -> int:
        """Blocks that can be allocated."""
        return self._pool.free + len(self._idle)

    @property
    def idle(self) -> int:
        """Those of them that hold something."""
        return len(self._idle)

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """`count` blocks, whose contents are the caller's affair; first those adjacent to block `after`."""
        if count > self.free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.free} of {self.total} free")
        while self._pool.free < count:
            self._evict()
        return self._pool.allocate(count, after=after)

    @property
    def kept(self) -> int:
        """Blocks behind the fence that nobody holds any more."""
        return self._pool.kept

    def fence(self, first: int) -> None:
        """Blocks `first` and on go to nobody any more, and what is in them gets no name: so each is kept back once
        whoever holds it has let go."""
        self._unname_all([named for named in self._by_key.values() if named.block >= first])
        self._pool.fence(first)

    def unfence(self) -> None:
        self._pool.unfence()

    def make_room(self, count: int, may_go: Callable[[Unused], bool]) -> int:
        """For up to `count` blocks, of what is idle and `may_go`. How many are free then, but no more than that."""
        while self._pool.free < count and self._idle:
            named = self._by_key[self._idle.victim(self._uses)]
            if not may_go(Unused(named.asked_by.turn, self._uses - named.idle_since, named.guessed)):
                break
            self._evict()
        return min(count, self._pool.free)

    def guessed(self, keys: Sequence[Key]) -> None:
        """These have just been published, for a prompt that may come."""
        for named in [self._by_key[key] for key in keys if key in self._by_key]:
            named.guessed = True
            self._guessed += 1
            self.guesses.brought += 1

    def found(self, keys: Sequence[Key]) -> None:
        """By a prompt."""
        if self._guessed:
            for key in keys:
                named = self._by_key.get(key)
                if named is not None and named.guessed:
                    self._judge(named, useful=True)

    def wrong(self, keys: Sequence[Key]) -> None:
        """Of these, in the order of a chain, what was a guess has come to nothing, and goes before all else."""
        for key in keys:
            named = self._by_key.get(key)
            if named is not None and named.guessed and not named.holders:
                self._judge(named, useful=False)
                self._long_ago -= 1
                named.idle_since = self._long_ago
                self._idle.remove(key)
                self._idle.add(key, Use(named.asked_by, 0).long_before(self._long_ago))

    def take(self, keys: Sequence[Key], by: Asker) -> list[int]:
        """Hold the blocks of these names, the first of a chain, which are all here, for such a prompt."""
        blocks = []
        for key in keys:
            named = self._by_key[key]
            named.holders += 1
            named.asked_by = named.asked_by.joined(by)
            blocks.append(named.block)
            if named.holders == 1:
                self._idle.remove(key)
                self.held.rose(key)
            if named.guessed:  # what is made from here on stands behind it, so that it cannot go first any more
                self._judge(named, useful=True)
        return blocks

    def publish(self, key: Key, block: int, before: int | None, by: Asker) -> int | None:
        """`block`, which one sequence holds behind block `before`, is written and gets a name. The block to hold from
        now on: another, if it is here under this name already. None, and nothing happens, if `before` has lost its
        name, since this one was computed from what must not be used again, or if the block is behind the fence."""
        parent = b""
        if before is not None:
            stands = self._by_block.get(before)
            if stands is None or self._by_key.get(stands.key) is not stands:
                return None
            parent = stands.key
        named = self._by_key.get(key)
        if named is not None:
            self._pool.release((block,))
            return self.take((key,), by)[0]
        if block >= self._pool.fenced_from:
            return None
        self._by_key[key] = self._by_block[block] = _Named(key, parent, block, 1, by)
        self._came(key)
        self.held.rose(key)
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up what one sequence holds, all of it, in the order of its tokens."""
        self._uses += 1
        for block in reversed(blocks):  # what stands last in a chain is of no use without the others, and goes first
            named = self._by_block.get(block)
            if named is None:
                self._pool.release((block,))
                continue
            if named.holders < 1:
                raise ValueError(f"block {block} is not held")
            named.holders -= 1
            if named.holders:
                continue
            if self._by_key.get(named.key) is named:
                self.held.fell(named.key)
                named.idle_since = self._uses
                self._idle.add(named.key, Use(named.asked_by, self._uses))
            else:
                self._free(named)

    def shared(self, blocks: Sequence[int]) -> int:
        """How many of the blocks that one sequence holds would not get free with it: others hold them as well, or they
        are behind the fence."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            named = self._by_block.get(blocks[middle])
            if named is not None and named.holders > 1:
                low = middle + 1
            else:
                high = middle
        fenced_from = self._pool.fenced_from
        return low if fenced_from == self.total else low + sum(block >= fenced_from for block in blocks[low:])

    def forget(self, blocks: Sequence[int]) -> None:
        """What is in these must not be used again, nor what was computed from it: they all lose their names."""
        named = (self._by_block[block] for block in blocks if block in self._by_block)
        first = next((each for each in named if self._by_key.get(each.key) is each), None)
        self._unname_all([] if first is None else [first])

    def _unname_all(self, spoilt: list[_Named]) -> None:
        """And all that stands behind them."""
        behind: defaultdict[Key, list[_Named]] = defaultdict(list)
        for each in self._by_key.values():
            behind[each.parent].append(each)
        all_of, found = {each.key: each for each in spoilt}, list(spoilt)
        for each in found:
            more = [one for one in behind[each.key] if one.key not in all_of]
            all_of.update({one.key: one for one in more})
            found += more
        chains = [each for each in found if each.parent not in all_of]
        for each in chains:
            chains += behind[each.key]
        for each in reversed(chains):
            self._unname(each)

    def _judge(self, named: _Named, *, useful: bool) -> None:
        named.guessed = False
        self._guessed -= 1
        self.guesses.judge(useful=useful)

    def _evict(self) -> None:
        self._unname(self._by_key[self._idle.victim(self._uses)])
        self.evictions += 1

    def _unname(self, named: _Named) -> None:
        """Only of what nothing stands behind."""
        if named.guessed:
            self._judge(named, useful=False)
        del self._by_key[named.key]
        self._went(named.key)
        if named.holders:
            self.held.fell(named.key)
        else:
            self._idle.remove(named.key)
            self._free(named)

    def _free(self, named: _Named) -> None:
        del self._by_block[named.block]
        self._pool.release((named.block,))

    def _is_held(self, key: Key) -> bool:
        named = self._by_key.get(key)
        return named is not None and named.holders > 0
