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
        _add(self._uses, key, use.at)

    def remove(self, key: Key) -> None:
        del self._uses[key]

    def victim(self, now: int) -> Key:
        return next(iter(self._uses))


class LongerByTurn:
    """The longest unused, where the time of blocks of later turns passes more slowly: a conversation that has gone on
    is the likelier to go on."""

    def __init__(self, weight: float = TURN_WEIGHT, most_turns: int = MOST_TURNS) -> None:
        # By turn how fast its time passes, and when what may go was needed.
        self._turns: list[tuple[float, OrderedDict[Key, int]]] = [
            (weight**-turn, OrderedDict()) for turn in range(most_turns)
        ]
        self._of: dict[Key, OrderedDict[Key, int]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: Key) -> bool:
        return key in self._of

    def add(self, key: Key, use: Use) -> None:
        _, uses = self._turns[min(use.turn, len(self._turns)) - 1]
        self._of[key] = uses
        _add(uses, key, use.at)

    def remove(self, key: Key) -> None:
        del self._of.pop(key)[key]

    def victim(self, now: int) -> Key:
        longest, found = 0.0, None
        for pace, uses in self._turns:
            if uses:
                key = next(iter(uses))
                # From 1 on, so that of what was needed in the same use the later turn still goes later.
                unused = (now + 1 - uses[key]) * pace
                if unused > longest:
                    longest, found = unused, key
        assert found is not None
        return found


def _add(uses: OrderedDict[Key, int], key: Key, at: int) -> None:
    first = bool(uses) and at < uses[next(iter(uses))]
    uses[key] = at
    if first:
        uses.move_to_end(key, last=False)
