"""Which of the blocks that nobody holds goes first when room is needed."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from tidelane.engine.kv.keys import Key
from tidelane.engine.request import ServiceTier

# A block of turn n stays TURN_WEIGHT ** (n - 1) times as long as one of the first; later turns count as MOST_TURNS.
# Both from docs/measurements/kv-hit-rates.md.
TURN_WEIGHT = 1.5
MOST_TURNS = 8


class Asker(msgspec.Struct, frozen=True):
    """A prompt, as far as retention goes: which turn of its conversation it is, from 1 on, and its service tier's rank,
    of which 0 is served first."""

    turn: int
    rank: int

    def joined(self, other: Asker) -> Asker:
        """For what both need: the later turn, and the tier that is served before the other."""
        if self.turn >= other.turn and self.rank <= other.rank:
            return self
        return Asker(max(self.turn, other.turn), min(self.rank, other.rank))


# As Mooncake's soft pin. By its conversation trace nine of ten who come back do so within 9 minutes.
IDLE_TIMEOUT_S = 1800.0
# Whoever left something behind before this process was started.
UNKNOWN = Asker(1, ServiceTier.DEFAULT.rank)


class Use(msgspec.Struct, frozen=True):
    """All who have needed a block, and when it was needed last, counted in uses by whoever keeps the blocks."""

    by: Asker
    at: int

    def or_later(self, other: Use) -> Use:
        """Of what was needed in both."""
        return Use(self.by.joined(other.by), max(self.at, other.at))

    def long_before(self, at: int) -> Use:
        """As if nobody had needed it but then, before all uses, for a first turn."""
        return Use(Asker(1, self.by.rank), at)


class Unused(msgspec.Struct, frozen=True):
    """What goes next to make room: the turn of the latest prompt that needed it, and how many uses ago that was.
    `guessed`: it was brought here for a prompt that may still come."""

    turn: int
    uses: int
    guessed: bool


class Guesses(msgspec.Struct):
    """Blocks that were brought to a tier for prompts that might come, counted since the start; and of those what
    became of them: a prompt found them, or they left before one did, or were told to go first."""

    brought: int = 0
    useful: int = 0
    wasted: int = 0

    def judge(self, *, useful: bool) -> None:
        if useful:
            self.useful += 1
        else:
            self.wasted += 1


class Retention(Protocol):
    """The order in which blocks go that may go. No call's cost grows with their number.

    A block never goes before one that was added before it, and was needed neither later, nor at a later turn, nor by
    a tier that is served before its own. Whoever adds a chain from its end so keeps beginnings longest.
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
        _, uses = self._turns[min(use.by.turn, len(self._turns)) - 1]
        self._of[key] = uses
        _add(uses, key, use.at)

    def remove(self, key: Key) -> None:
        del self._of.pop(key)[key]

    def victim(self, now: int) -> Key:
        found = self.unused_since(now, now)
        assert found is not None
        return found

    def unused_since(self, at: int, now: int) -> Key | None:
        """The first to go of those not needed after use `at`, if there is one."""
        longest, found = 0.0, None
        for pace, uses in self._turns:
            if uses:
                key = next(iter(uses))
                needed_at = uses[key]
                # From 1 on, so that of what was needed in the same use the later turn still goes later.
                unused = (now + 1 - needed_at) * pace
                if unused > longest and needed_at <= at:
                    longest, found = unused, key
        return found


class ByServiceTier:
    """What was idle for `idle_timeout_s` goes before all else; of that, and then of the rest, that of tiers which are
    served last goes first; in each tier as `LongerByTurn` has it. Nothing goes but to make room."""

    def __init__(self, idle_timeout_s: float, clock: Callable[[], float]) -> None:
        self._ranks = [LongerByTurn() for _ in ServiceTier]
        self._of: dict[Key, LongerByTurn] = {}
        self._times = UseTimes(idle_timeout_s, clock)
        self._none_up_to = 0  # no block of these uses is left

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: Key) -> bool:
        return key in self._of

    def add(self, key: Key, use: Use) -> None:
        self._times.note(use.at)
        self._none_up_to = min(self._none_up_to, use.at - 1)
        self._of[key] = blocks = self._ranks[use.by.rank]
        blocks.add(key, use)

    def remove(self, key: Key) -> None:
        self._of.pop(key).remove(key)

    def victim(self, now: int) -> Key:
        timed_out = self._times.timed_out()
        if timed_out > self._none_up_to:
            for blocks in reversed(self._ranks):
                found = blocks.unused_since(timed_out, now)
                if found is not None:
                    return found
            self._none_up_to = timed_out
        return next(blocks for blocks in reversed(self._ranks) if blocks).victim(now)


class UseTimes:
    """Which uses were longer ago than `timeout_s`, to within one of `PARTS` of that: so that it remembers few times,
    however many uses there are."""

    PARTS = 64

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._last: deque[tuple[float, int]] = deque()  # when a part began, and the last use in it
        self._timed_out = 0

    def __len__(self) -> int:
        return len(self._last)

    def note(self, at: int) -> None:
        """A use, now, unless a later one is known."""
        if self._last and at <= self._last[-1][1]:
            return
        now_s = self._clock()
        if self._last and now_s < self._last[-1][0] + self._timeout_s / self.PARTS:
            self._last[-1] = (self._last[-1][0], at)
        else:
            self._last.append((now_s, at))
            self.timed_out()

    def timed_out(self) -> int:
        """All up to this use were longer ago."""
        before_s = self._clock() - self._timeout_s * (1 + 1 / self.PARTS)
        while self._last and self._last[0][0] <= before_s:
            _, self._timed_out = self._last.popleft()
        return self._timed_out


def _add(uses: OrderedDict[Key, int], key: Key, at: int) -> None:
    first = bool(uses) and at < uses[next(iter(uses))]
    uses[key] = at
    if first:
        uses.move_to_end(key, last=False)
