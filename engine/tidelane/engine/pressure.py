"""What lack of room for KV has come to lately."""

from __future__ import annotations

from enum import Enum

# A condition that came and went with every request would say nothing.
WINDOW_S = 30.0


class Pressure(Enum):
    """The mildest first. What is idle makes room for others all the time: that is no pressure."""

    NONE = "none"
    WAITING = "waiting"  # the first in the queue lacks blocks
    PREEMPTING = "preempting"  # running requests lose their place
    REFUSING = "refusing"  # the queue is full, and lacks blocks


class PressureWindow:
    """The worst of the last WINDOW_S. It sees what is there when it looks, and counts what happened in between."""

    def __init__(self) -> None:
        self._preemptions = 0
        self._turned_away = 0
        self._last_s: dict[Pressure, float] = {}

    def look(self, now_s: float, *, lacks_room: bool, preemptions: int, turned_away: int) -> Pressure:
        """`preemptions`, and how many were `turned_away` by a full queue, are counted since the start."""
        if lacks_room:
            self._last_s[Pressure.WAITING] = now_s
        if preemptions > self._preemptions:
            self._last_s[Pressure.PREEMPTING] = now_s
        if turned_away > self._turned_away and self._within(Pressure.WAITING, now_s):
            self._last_s[Pressure.REFUSING] = now_s
        self._preemptions, self._turned_away = preemptions, turned_away
        return next((each for each in reversed(Pressure) if self._within(each, now_s)), Pressure.NONE)

    def _within(self, pressure: Pressure, now_s: float) -> bool:
        last_s = self._last_s.get(pressure)
        return last_s is not None and now_s - last_s <= WINDOW_S
