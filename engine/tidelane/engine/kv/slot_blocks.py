"""Which block of which name is in which slot of a tier below the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tidelane.engine.kv.keys import Key
from tidelane.engine.kv.retention import UNKNOWN, Asker, Guesses, Retention, Unused, Use


class _Slot(msgspec.Struct):
    """`behind` counts the slots whose blocks stand right behind this one's; `readers` the loads that read it.
    `use` is the last of its own, and of those that stood behind it and have gone. `guessed`: it was brought here for a
    prompt that may come, and none has found it since."""

    key: Key
    parent: Key
    number: int
    use: Use
    behind: int = 0
    readers: int = 0
    ready: bool = False  # it has been written
    there: bool = False  # and so has all that it stands behind
    spoilt: bool = False
    guessed: bool = False


def anything(_: Unused) -> bool:
    """May go."""
    return True


class SlotBlocks:
    """A slot is free; or being written, when nobody finds it; or ready, and then it is not written to any more.

    What is behind another in a chain is only here together with that: room is made of ends of chains, in the order of
    `retention`. `came` and `went` hear of each name that can be found from now on, or no more.
    """

    def __init__(
        self, slots: int, came: Callable[[Key], None], went: Callable[[Key], None], retention: Retention
    ) -> None:
        self.total = slots
        self.evictions = 0
        self.guesses = Guesses()
        self._came = came
        self._went = went
        self._free = list(range(slots - 1, -1, -1))
        self.pinned = 0
        self._slots: dict[Key, _Slot] = {}
        self._ends = retention  # of what may go
        self._uses = 0
        self._long_ago = 0  # before all uses
        self._guessed = 0  # of those that are here
        self._spoilt: list[_Slot] = []  # in use all the same
        self._early: defaultdict[Key, list[_Slot]] = defaultdict(list)  # by the name that they wait for

    @property
    def free(self) -> int:
        return len(self._free)

    def __contains__(self, key: Key) -> bool:
        """Whether it can be loaded."""
        slot = self._slots.get(key)
        return slot is not None and slot.there and not slot.spoilt

    def restore(self, found: Mapping[int, tuple[Key, Key]]) -> None:
        """What an earlier process has left, from the one written longest ago on, which goes first: by slot the name and
        that before it, empty for the first of a chain. What stands behind something that is gone is gone, too."""
        written = {number: at for at, number in enumerate(found, 1)}
        self._uses = len(found)
        behind: defaultdict[Key, list[tuple[int, Key]]] = defaultdict(list)
        for number, (key, parent) in found.items():
            behind[parent].append((number, key))
        taken = set()
        chains = [(b"", *first) for first in behind[b""]]
        for parent, number, key in chains:
            if key in self._slots:
                continue
            taken.add(number)
            self._slots[key] = slot = _Slot(key, parent, number, Use(UNKNOWN, written[number]), ready=True, there=True)
            before = self._slots.get(parent)
            if before is not None:
                before.behind += 1
                self._keep(parent)
            self._settle(slot)
            self._came(key)
            chains += [(key, *follower) for follower in behind[key]]
        self._free = [number for number in self._free if number not in taken]

    def reserve(self, parent: Key, key: Key, by: Asker, may_go: Callable[[Unused], bool] = anything) -> int | None:
        """A slot to write the block to, for such a prompt. None if it is here or on its way, or if there is no place
        for it: what it stands behind is not here (`parent`, empty for the first of a chain), or all slots are in use,
        or what would have to make room may not go."""
        before = self._slots.get(parent)
        if key in self._slots or (parent and (before is None or before.spoilt)):
            return None
        if before is not None:
            before.behind += 1  # so that it does not go to make room
            self._keep(parent)
        if not self._free and not self._evict(may_go):
            self._leave(before, None)
            return None
        number = self._free.pop()
        self._slots[key] = _Slot(key, parent, number, Use(by, self._uses))
        return number

    def pin(self, most: int) -> list[int]:
        """Up to so many slots, as many as can be had now: what is in them makes room. They are the caller's, and have
        no names, until they are given to `unpin`."""
        while len(self._free) < most and self._evict(anything):
            pass
        pinned = [self._free.pop() for _ in range(min(most, len(self._free)))]
        self.pinned += len(pinned)
        return pinned

    def unpin(self, slots: Sequence[int]) -> None:
        self._free += slots
        self.pinned -= len(slots)

    def written(self, key: Key, *, well: bool) -> None:
        """The writing of its slot has ended. If not `well`, nobody will find it, nor what stands behind it; if well,
        it is found once all is that it stands behind, whichever was written first."""
        slot = self._slots[key]
        slot.ready = True
        before = self._slots.get(slot.parent)
        if not slot.spoilt and (not well or (before is not None and before.spoilt)):
            self._spoil(slot)
        elif not slot.spoilt and before is not None and not before.there:
            self._early[slot.parent].append(slot)
            return
        settled = [slot]
        for each in settled:
            followers = [early for early in self._early.pop(each.key, ()) if not early.spoilt]
            for follower in followers if each.spoilt else ():
                self._spoil(follower)
            if not each.spoilt:
                each.there = True
                self._came(each.key)
                self._settle(each)
            settled += followers
        self._clear()

    def chain(self, last: Key) -> list[Key]:
        """All that this one stands behind, from the first on, and itself; nothing, if it is not here."""
        keys: list[Key] = []
        slot = self._slots.get(last)
        while slot is not None:
            keys.append(slot.key)
            slot = self._slots.get(slot.parent)
        return keys[::-1]

    def read(self, keys: Sequence[Key]) -> None:
        """Someone will load these, which are here; they stay until `was_read`."""
        for key in keys:
            self._slots[key].readers += 1
            self._keep(key)

    def before(self, key: Key) -> Key:
        """The name before this one, which is here."""
        return self._slots[key].parent

    def asked_by(self, key: Key) -> Asker:
        """Who is known to have needed this one, which is here."""
        return self._slots[key].use.by

    def knows(self, key: Key) -> bool:
        """Whether it is here, or will be once what is being written has been."""
        slot = self._slots.get(key)
        return slot is not None and not slot.spoilt

    def expects(self, key: Key) -> bool:
        """Whether it is being written here."""
        return self.knows(key) and not self._slots[key].ready

    def slots(self, keys: Sequence[Key]) -> tuple[int, ...]:
        return tuple(self._slots[key].number for key in keys)

    def was_read(self, keys: Sequence[Key]) -> None:
        for key in keys:
            slot = self._slots[key]
            slot.readers -= 1
            self._settle(slot)
        self._clear()

    def used(self, keys: Sequence[Key], by: Asker) -> None:
        """Such a prompt had use for this chain."""
        self._uses += 1
        last = next((key for key in reversed(keys) if key in self._slots), None)
        if last is not None:
            slot = self._slots[last]
            slot.use = slot.use.or_later(Use(by, self._uses))
            if last in self._ends:
                self._ends.remove(last)
                self._ends.add(last, slot.use)

    def guessed(self, key: Key) -> None:
        """A slot has just been reserved for it, for a prompt that may come."""
        self._slots[key].guessed = True
        self._guessed += 1
        self.guesses.brought += 1

    def found(self, keys: Sequence[Key]) -> None:
        """By a prompt, here or on the device."""
        if self._guessed:
            for slot in self._guesses(keys):
                self._judge(slot, useful=True)

    def wrong(self, keys: Sequence[Key]) -> None:
        """Of these, in the order of a chain, what was a guess has come to nothing, and goes before all else."""
        for slot in self._guesses(keys):
            self._judge(slot, useful=False)
            self._long_ago -= 1
            slot.use = slot.use.long_before(self._long_ago)
            if slot.key in self._ends:
                self._ends.remove(slot.key)
                self._ends.add(slot.key, slot.use)

    def forget(self, keys: Sequence[Key]) -> None:
        """What is in these must not be used again, nor what stands behind them."""
        behind: defaultdict[Key, list[_Slot]] = defaultdict(list)
        for slot in self._slots.values():
            behind[slot.parent].append(slot)
        spoilt = [self._slots[key] for key in keys if key in self._slots][:1]
        for slot in spoilt:
            spoilt += behind[slot.key]
        for slot in reversed(spoilt):
            if not slot.spoilt:
                if slot.there:
                    self._went(slot.key)
                self._spoil(slot)
        self._clear()

    def _evict(self, may_go: Callable[[Unused], bool]) -> bool:
        if not self._ends:
            return False
        key = self._ends.victim(self._uses)
        slot = self._slots[key]
        if not may_go(Unused(slot.use.by.turn, self._uses - slot.use.at, slot.guessed)):
            return False
        self._ends.remove(key)
        self._went(key)
        self._drop(self._slots[key])
        self.evictions += 1
        return True

    def _guesses(self, keys: Sequence[Key]) -> list[_Slot]:
        return [slot for key in keys if (slot := self._slots.get(key)) is not None and slot.guessed]

    def _judge(self, slot: _Slot, *, useful: bool) -> None:
        slot.guessed = False
        self._guessed -= 1
        self.guesses.judge(useful=useful)

    def _drop(self, slot: _Slot) -> None:
        del self._slots[slot.key]
        self._free.append(slot.number)
        self._leave(self._slots.get(slot.parent), None if slot.guessed else slot)
        if slot.guessed:
            self._judge(slot, useful=False)

    def _leave(self, before: _Slot | None, gone: _Slot | None) -> None:
        """One less stands behind it: `gone`, or one that never came. If none does, it goes when that would have: it was
        of use to nobody but those behind it, unless it was used by itself since."""
        if before is not None:
            before.behind -= 1
            if gone is not None:
                before.use = before.use.or_later(gone.use)
            self._settle(before)

    def _settle(self, slot: _Slot) -> None:
        if slot.there and not (slot.spoilt or slot.readers or slot.behind) and slot.key not in self._ends:
            self._ends.add(slot.key, slot.use)

    def _keep(self, key: Key) -> None:
        """It does not go to make room."""
        if key in self._ends:
            self._ends.remove(key)

    def _spoil(self, slot: _Slot) -> None:
        slot.spoilt = True
        self._spoilt.append(slot)
        self._keep(slot.key)

    def _clear(self) -> None:
        """Take back the slots that were spoilt and are not in use any more, ends first."""
        while True:
            done = [slot for slot in self._spoilt if slot.ready and not (slot.readers or slot.behind)]
            if not done:
                return
            self._spoilt = [slot for slot in self._spoilt if slot not in done]
            for slot in done:
                self._drop(slot)
