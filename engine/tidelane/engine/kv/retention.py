"""Which of the blocks that nobody holds goes first when room is needed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import msgspec

from tidelane.engine.kv.keys import Key

# A block of turn n stays TURN_WEIGHT ** (n - 1) times as long as one of the first; later turns count as MOST_TURNS.
# Both from docs/measurements/kv-hit-rates.md.
TURN_WEIGHT = 1.5
MOST_TURNS = 8


class Use(msgspec.Struct, frozen=True):
    """The last need for a block: by a prompt of this turn of its conversation, from 1 on; and when, counted in uses by
    whoever keeps the blocks."""

    turn: int
    at: int

    def or_later(self, other: Use) -> Use:
        """Of what was needed in both. One that was needed at a later turn once counts as that."""
        return Use(max(self.turn, other.turn), max(self.at, other.at))


class Retention(Protocol):
    """The order in which blocks go that may go. No call's cost grows with their number.

    If of two blocks neither was needed earlier nor at an earlier turn than the other, the one that was added first goes
    first. Whoever adds a chain from its end so keeps beginnings longest.
    """

    def __len__(self) -> int: ...

    def __contains__(self, key: Key) -> bool: ...

    def add(self, key: Key, use: Use) -> None:
        """It may go from now on. If it was needed before all others that may go, it comes before them, else behind."""
        ...

    def remove(self, key: Key) -> None:
        """It may not go any more, or has gone."""
        ...

    def victim(self, now: int) -> Key:
        """The one to go, of one or more. `now` is the number of the last use."""
        ...


class LeastRecentlyUsed:
    def __init__(self) -> None:
        self._uses: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, key: Key) -> bool:
        return key in self._uses

    def add(self, key: Key, use: Use) -> None:
        first = bool(self._uses) and use.at < self.oldest
        self._uses[key] = use.at
        if first:
            self._uses.move_to_end(key, last=False)

    def remove(self, key: Key) -> None:
        del self._uses[key]

    def victim(self, now: int) -> Key:
        return next(iter(self._uses))

    @property
    def oldest(self) -> int:
        """When the next victim was needed; there is one."""
        return next(iter(self._uses.values()))


class LongerByTurn:
    """The longest unused, where the time of blocks of later turns passes more slowly: a conversation that has gone on
    is the likelier to go on."""

    def __init__(self) -> None:
        self._turns = [(TURN_WEIGHT**turn, LeastRecentlyUsed()) for turn in range(MOST_TURNS)]
        self._of: dict[Key, LeastRecentlyUsed] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: Key) -> bool:
        return key in self._of

    def add(self, key: Key, use: Use) -> None:
        _, blocks = self._turns[min(use.turn, MOST_TURNS) - 1]
        self._of[key] = blocks
        blocks.add(key, use)

    def remove(self, key: Key) -> None:
        self._of.pop(key).remove(key)

    def victim(self, now: int) -> Key:
        longest, found = 0.0, None
        for weight, blocks in self._turns:
            if blocks:
                # From 1 on, so that of what was needed in the same use the later turn still goes later.
                unused = (now + 1 - blocks.oldest) / weight
                if unused > longest:
                    longest, found = unused, blocks
        assert found is not None
        return found.victim(now)
