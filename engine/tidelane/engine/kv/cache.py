"""The KV cache: what each sequence holds, what is found for it in any tier, and what moves between them.

Single-threaded, and nothing but books: copies are the mover's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, takewhile

import msgspec

from tidelane.engine.kv.device_blocks import DeviceBlocks
from tidelane.engine.kv.frontier import Frontier
from tidelane.engine.kv.keys import Key
from tidelane.engine.kv.moves import Arrival, Fetch, Load, Move, Spill, Store
from tidelane.engine.kv.retention import UNKNOWN, Asker, Retention, Unused
from tidelane.engine.kv.slot_blocks import SlotBlocks, anything
from tidelane.engine.kv.turns import Turns

# For how many prompts it is remembered which turn they were of: an hour at four a second, in a few MB.
REMEMBERED_PROMPTS = 16_384


class Holding(msgspec.Struct):
    """The device blocks of one sequence, in the order of its tokens; the first of them have the names `keys`.

    `wanted` are names found below the device, whose blocks come next. `arrivals` are under way, or lost, for it or for
    others before. While it has `moves`, its blocks are copied from or to, and stay though it is `given_up`. `nameless`:
    one of its blocks got no name, so no later one gets any. `by` is the prompt that it is for.
    """

    blocks: list[int] = []
    keys: list[Key] = []
    wanted: tuple[Key, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    moves: int = 0
    given_up: bool = False
    nameless: bool = False
    by: Asker = UNKNOWN


def _unheard(_: Key) -> None:
    """Nobody follows what is on the disk."""


class KVCache:
    """`blocks` on the device, and slots for `host_slots` in host memory and for `disk_slots` on a disk.

    In each tier what is behind another in a chain is there only together with that. So what is found of a chain is a
    beginning of it, which `present` follows for waiting prompts; `held` follows how much of that takes no room on the
    device, since a sequence holds it. What is on the disk alone is not present: it has to be fetched to host memory
    first, where what came from the disk wrong, or not at all, is just not there.

    `retention` decides in each tier what goes when room is needed, by askers; `turns` tells which turn of its
    conversation a prompt is.
    """

    def __init__(
        self,
        blocks: int,
        host_slots: int,
        disk_slots: int,
        retention: Callable[[], Retention],
    ) -> None:
        self.device = DeviceBlocks(blocks, self._came_to_device, self._left_device, retention())
        self.host = SlotBlocks(host_slots, self._came_to_host, self._left_host, retention())
        self.disk = SlotBlocks(disk_slots, _unheard, _unheard, retention())
        self.turns = Turns(REMEMBERED_PROMPTS)
        self.present = Frontier(self._is_present)
        self.held = self.device.held
        self.loaded_blocks = 0
        self.stored_blocks = 0
        self.fetched_blocks = 0
        self.spilled_blocks = 0
        self._arriving: dict[Key, Arrival] = {}
        self._owners: dict[int, Holding | None] = {}  # by their numbers: whose they are
        self._numbers = count()
        self._moves: list[Move] = []

    @property
    def total(self) -> int:
        return self.device.total

    @property
    def free(self) -> int:
        """Device blocks that can be had."""
        return self.device.free

    @property
    def still(self) -> bool:
        """Nothing is on its way."""
        return not self._owners

    def hold(self, keys: Sequence[Key], by: Asker) -> Holding:
        """What is there of the chain `keys`, all of which `present` has found, for such a prompt. What is below
        the device comes with the blocks that `extend` finds room for."""
        here = next((at for at, key in enumerate(keys) if key not in self.device), len(keys))
        wanted = tuple(keys[here:])
        self.host.read(wanted)
        arrivals = self._under_way(keys[:here])
        return Holding(self.device.take(keys[:here], by), list(keys), wanted, arrivals, by=by)

    def extend(self, holding: Holding, blocks: int) -> None:
        """More device blocks, up to so many. Raises OutOfBlocks."""
        if holding.wanted:
            self._fetch(holding)
        missing = blocks - len(holding.blocks)
        if missing > 0:
            last = holding.blocks[-1] if holding.blocks else None
            holding.blocks += self.device.allocate(missing, after=last)

    def name(self, holding: Holding, key: Key) -> None:
        """The first block of `holding` that has no name is full, and gets this one; unless those before have lost
        theirs."""
        if holding.nameless:
            return
        at = len(holding.keys)
        block = self.device.publish(key, holding.blocks[at], holding.blocks[at - 1] if at else None, holding.by)
        if block is None:
            holding.nameless = True
            return
        if block != holding.blocks[at]:
            # Another list: executors take it that what they have copied of one does not change.
            holding.blocks = [*holding.blocks[:at], block, *holding.blocks[at + 1 :]]
        parent = holding.keys[-1] if holding.keys else b""
        holding.keys.append(key)
        if self.host.total:
            slot = self.host.reserve(parent, key, holding.by)
            if slot is not None:
                self._start(Store(next(self._numbers), key, block, slot), holding)

    def give_up(self, holding: Holding) -> None:
        self.host.used(holding.keys, holding.by)
        self.disk.used(holding.keys, holding.by)
        if holding.wanted:
            self.host.was_read(holding.wanted)
            holding.wanted = ()
        self.let_go(holding)

    def let_go(self, holding: Holding) -> None:
        """Of its blocks, though no prompt had use for them."""
        holding.given_up = True
        if not holding.moves:
            self.device.release(holding.blocks)

    def spoil(self, holding: Holding) -> None:
        """What it holds must not be used again, nor what was computed from it."""
        self.device.forget(holding.blocks)
        self.host.forget(holding.keys)
        self.disk.forget(holding.keys)

    def lose(self, holding: Holding) -> bool:
        """Whether it waited for what has not come; if so nobody finds that again, in any tier."""
        lost = [arrival for arrival in holding.arrivals if arrival.lost]
        if lost:
            named = zip(holding.keys, holding.blocks, strict=False)
            missing = [(key, block) for key, block in named if self._arriving.get(key) in lost]
            self._miss([key for key, _ in missing], [block for _, block in missing])
        return bool(lost)

    def awaits(self, holding: Holding) -> bool:
        """Whether some of its blocks may not be there yet."""
        return bool(holding.arrivals) and any(each in holding.arrivals for each in self._arriving.values())

    def shared(self, holding: Holding) -> int:
        """How many of its blocks would not get free with it."""
        return len(holding.blocks) if holding.moves else self.device.shared(holding.blocks)

    def fetchable(self, keys: Sequence[Key]) -> int:
        """How many blocks of the chain `keys`, behind what is present of it, are on the disk."""
        here = next((at for at, key in enumerate(keys) if not self._is_present(key)), len(keys))
        return sum(1 for _ in takewhile(self.disk.__contains__, keys[here:]))

    def asked_for(self, keys: Sequence[Key], by: Asker) -> None:
        """Such a prompt waits, which begins with this chain: what nobody waits for makes room before it."""
        self.host.used(keys, by)
        self.disk.used(keys, by)

    def want(self, keys: Sequence[Key], by: Asker) -> set[Key]:
        """Fetch for such a prompt what of the chain `keys` is on the disk alone, as far as host memory takes
        it. What is to come."""
        coming: set[Key] = set()
        here = next((at for at, key in enumerate(keys) if not self._is_present(key)), len(keys))
        if here == len(keys) or keys[here] not in self.disk:
            return coming
        parent = b""
        for key in keys:  # from the first: what is behind another comes to host memory only together with that
            if not self.host.knows(key) and not (key in self.disk and self._bring_to_host(parent, key, by)):
                break
            if self.host.expects(key) and key not in self.device:
                coming.add(key)
            parent = key
        return coming

    def chain(self, last: Key) -> list[Key]:
        """The names of the blocks up to this one, as far as it is known below the device."""
        return (self.disk if last in self.disk else self.host).chain(last)

    def found_ahead(self, keys: Sequence[Key]) -> None:
        """A prompt has come that begins with these: what of them was brought up for it was of use."""
        self.device.found(keys)
        self.host.found(keys)

    def wrong(self, keys: Sequence[Key]) -> None:
        """No prompt has come that begins with the chain `keys`: what of it was brought up for one goes first."""
        self.device.wrong(keys)
        self.host.wrong(keys)

    def fetch_ahead(
        self, keys: Sequence[Key], by: Asker, most: int, may_go: Callable[[Unused], bool]
    ) -> tuple[Key, ...]:
        """Fetch up to `most` of the chain `keys` that are on the disk alone, for such a prompt, which may come: to
        slots that are free, or whose blocks `may_go`. Those that are to come now."""
        coming: list[Key] = []
        parent = b""
        for key in keys:
            if not self.host.knows(key):
                if len(coming) == most or key not in self.disk:
                    break
                if not self._bring_to_host(parent, key, by, may_go):
                    break
                self.host.guessed(key)
                coming.append(key)
            parent = key
        return tuple(coming)

    def load_ahead(self, holding: Holding, keys: Sequence[Key], most: int, may_go: Callable[[Unused], bool]) -> bool:
        """Load up to `most` more of the chain `keys`, of which `holding` has a beginning, for a prompt that may come:
        to blocks that are free, or that `may_go`. Whether any is to come; if not, `let_go` of it."""
        here = next((n for n in range(len(holding.keys), len(keys)) if keys[n] not in self.device), len(keys))
        there = keys[len(holding.keys) : here]
        holding.blocks += self.device.take(there, holding.by)
        holding.keys += there
        behind = tuple(takewhile(self.host.__contains__, keys[here : here + most]))
        wanted = behind[: self.device.make_room(len(behind), may_go)]
        if not wanted:
            return False
        self.host.read(wanted)
        holding.wanted = wanted
        holding.keys += wanted
        self._fetch(holding)
        self.device.guessed(wanted)
        return True

    def take_moves(self) -> list[Move]:
        """To be started, in this order."""
        moves, self._moves = self._moves, []
        return moves

    def moved(self, move: Move, *, well: bool) -> None:
        """It has ended."""
        owner = self._owners.pop(move.number)
        match move:
            case Store():
                self.host.written(move.key, well=well)
                self.stored_blocks += well
                if well:
                    self._spill(move.key)
            case Spill():
                self.host.was_read((move.key,))
                self.disk.written(move.key, well=well)
                self.spilled_blocks += well
            case Fetch():
                self.disk.was_read((move.key,))
                self.host.written(move.key, well=well)
                self.fetched_blocks += well
                if not well:
                    self.disk.forget((move.key,))
            case Load():
                self.host.was_read(move.keys)
                self.loaded_blocks += len(move.keys) if well else 0
                for key in move.keys:
                    if self._arriving.get(key) is move.arrival:
                        del self._arriving[key]
                if not well:
                    self._miss(move.keys, move.blocks)
        if owner is not None:
            self._one_less(owner, move, well=well)

    def _bring_to_host(self, parent: Key, key: Key, by: Asker, may_go: Callable[[Unused], bool] = anything) -> bool:
        """From the disk, where it is. Whether there is a slot for it."""
        slot = self.host.reserve(parent, key, by, may_go)
        if slot is None:
            return False
        self.disk.read((key,))
        (source,) = self.disk.slots((key,))
        self._start(Fetch(next(self._numbers), key, parent, source, slot), None)
        return True

    def _fetch(self, holding: Holding) -> None:
        """Device blocks for what was found below; those that others have fetched meanwhile are shared."""
        wanted, holding.wanted = holding.wanted, ()
        here = next((at for at, key in enumerate(wanted) if key not in self.device), len(wanted))
        holding.blocks += self.device.take(wanted[:here], holding.by)
        holding.arrivals += self._under_way(wanted[:here])
        self.host.was_read(wanted[:here])
        missing = wanted[here:]
        if not missing:
            return
        arrival = Arrival()
        last = holding.blocks[-1] if holding.blocks else None
        blocks = self.device.allocate(len(missing), after=last)
        for before, key, block in zip((last, *blocks), missing, blocks, strict=False):
            self.device.publish(key, block, before, holding.by)
            self._arriving[key] = arrival
        holding.blocks += blocks
        holding.arrivals += (arrival,)
        slots = self.host.slots(missing)
        self._start(Load(next(self._numbers), missing, slots, tuple(blocks), arrival), holding)

    def _spill(self, key: Key) -> None:
        """To the disk, too, if it is still wanted in host memory."""
        if not self.disk.total or key not in self.host:
            return
        parent = self.host.before(key)
        slot = self.disk.reserve(parent, key, self.host.asked_by(key))
        if slot is not None:
            self.host.read((key,))
            (source,) = self.host.slots((key,))
            self._start(Spill(next(self._numbers), key, parent, source, slot), None)

    def _miss(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:
        """What could not be loaded once is computed from now on: else it might be tried for ever."""
        self.device.forget(blocks)
        self.host.forget(keys)
        self.disk.forget(keys)

    def _start(self, move: Move, owner: Holding | None) -> None:
        if owner is not None:
            owner.moves += 1
        self._owners[move.number] = owner
        self._moves.append(move)

    def _one_less(self, owner: Holding, move: Move, *, well: bool) -> None:
        owner.moves -= 1
        if isinstance(move, Load) and well:  # one that is lost stays: who has not begun to compute must hear of it
            owner.arrivals = tuple(each for each in owner.arrivals if each is not move.arrival)
        if owner.given_up and not owner.moves:
            self.device.release(owner.blocks)

    def _under_way(self, keys: Sequence[Key]) -> tuple[Arrival, ...]:
        if not self._arriving:
            return ()
        return tuple({id(a): a for key in keys if (a := self._arriving.get(key)) is not None}.values())

    def _is_present(self, key: Key) -> bool:
        return key in self.device or key in self.host

    def _came_to_device(self, key: Key) -> None:
        if key not in self.host:
            self.present.rose(key)

    def _left_device(self, key: Key) -> None:
        if key not in self.host:
            self.present.fell(key)

    def _came_to_host(self, key: Key) -> None:
        if key not in self.device:
            self.present.rose(key)

    def _left_host(self, key: Key) -> None:
        if key not in self.device:
            self.present.fell(key)
