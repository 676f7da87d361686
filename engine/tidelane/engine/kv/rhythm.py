"""When a silent conversation should go on, by how long it and others have been silent before."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence

import msgspec

from tidelane.engine.kv.retention import MOST_TURNS

# Of one conversation: those of long ago say little of the next one.
MOST_PAUSES = 8
# From fewer of all conversations nothing is concluded.
FEW_PAUSES = 32
# A rhythm is kept to within a tenth: without that, equal pauses would leave no time for the next one.
SLACK = 0.1
# Pauses of which one is so many times another are no rhythm: such a window says less than what others do.
MOST_UNEVEN = 2.0


class Window(msgspec.Struct, frozen=True):
    """From when until when a conversation should go on, in seconds since it fell silent, and how likely it does so
    then."""

    from_s: float
    until_s: float
    likelihood: float

    @property
    def seconds(self) -> float:
        return self.until_s - self.from_s


def own_window(pauses_s: Sequence[float]) -> Window | None:
    """The next of these, if there is one, and if they are a rhythm: of n + 1 values in random order, the last lies
    between the others with a probability of (n - 1) / (n + 1), whatever they are distributed like."""
    number = len(pauses_s)
    if number < 2 or max(pauses_s) > MOST_UNEVEN * min(pauses_s):
        return None
    return Window(min(pauses_s) * (1 - SLACK), max(pauses_s) * (1 + SLACK), (number - 1) / (number + 1))


class Pauses:
    """The last `limit` pauses of all conversations, and how many of those that were at each turn have gone on."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._last: deque[float] = deque()
        self._ordered: list[float] = []
        self._ended = [0.0] * MOST_TURNS
        self._went_on = [0.0] * MOST_TURNS

    def ended(self, turn: int) -> None:
        """A conversation is silent from now on."""
        at = _place(turn)
        self._ended[at] += 1
        if self._ended[at] > 2 * self._limit:  # what was once counts less and less
            self._ended[at] /= 2
            self._went_on[at] /= 2

    def went_on(self, turn: int, pause_s: float) -> None:
        """It was silent for so long after that turn."""
        self._went_on[_place(turn)] += 1
        insort(self._ordered, pause_s)
        self._last.append(pause_s)
        if len(self._last) > self._limit:
            self._ordered.pop(bisect_right(self._ordered, self._last.popleft()) - 1)

    def likelihood(self, turn: int, silent_s: float, within_s: float) -> float:
        """That one which has been silent for so long goes on within so much time; 1 while little is known."""
        if len(self._ordered) < FEW_PAUSES:
            return 1.0
        share = self._share(turn)
        before, by_then = self._part_up_to(silent_s), self._part_up_to(silent_s + within_s)
        still_silent = 1 - share * before
        return share * (by_then - before) / still_silent if still_silent > 0 else 0.0

    def window(self, turn: int, own_s: Sequence[float]) -> Window | None:
        """When one goes on that paused so before: by its own rhythm, if it has one, or as that half of all do whose
        pauses are closest together. None while nothing is known."""
        share = self._share(turn)
        own = own_window(own_s)
        if own is not None:
            return Window(own.from_s, own.until_s, share * own.likelihood)
        known = len(self._ordered)
        if known < FEW_PAUSES:
            return None
        half = known // 2
        first = min(range(known - half), key=lambda at: self._ordered[at + half] - self._ordered[at])
        from_s, until_s = self._ordered[first] * (1 - SLACK), self._ordered[first + half] * (1 + SLACK)
        return Window(from_s, until_s, self.likelihood(turn, from_s, until_s - from_s))

    def _share(self, turn: int) -> float:
        """Of those at that turn, which went on; of few, more than were seen to."""
        at = _place(turn)
        return min(1.0, (self._went_on[at] + 1) / (self._ended[at] + 1))

    def _part_up_to(self, pause_s: float) -> float:
        return bisect_right(self._ordered, pause_s) / len(self._ordered)


def _place(turn: int) -> int:
    return min(turn, MOST_TURNS) - 1
