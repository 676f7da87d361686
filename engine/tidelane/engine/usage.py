"""How the device was really used: the split that policies ask for holds only while both lanes have work."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tidelane.engine.scheduling.plan import Flight

# How finely the window slides.
MARK_EVERY_S = 1.0


class Use(StrEnum):
    SPLIT = "split"  # both lanes at work, each on its own part
    DECODE_ALONE = "decode_alone"
    PREFILL_ALONE = "prefill_alone"
    MIXED = "mixed"  # both in one fused batch
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Realised:
    """How the device was used over some time: share of it by kind of use, all 0 where there was no time.

    `decode_unit_share` is the mean part of the device that decode had while it ran; None if it did not run.
    """

    shares: Mapping[Use, float]
    decode_unit_share: float | None


@dataclass(frozen=True, slots=True)
class _Mark:
    """The sums as they stood at `time_s`."""

    time_s: float
    seconds: Mapping[Use, float]
    decode_s: float
    decode_unit_s: float


class Usage:
    """Seconds by kind of use, decode's unit-seconds, and how often the border moved; fed at every launch and end."""

    def __init__(self, units: int, now_s: float, window_s: float = 60.0) -> None:
        self.units = units
        self.seconds = dict.fromkeys(Use, 0.0)
        self._window_s = window_s
        self._since_s = now_s
        self._use = Use.IDLE
        self._decode_units = 0
        self._decode_s = 0.0
        self._decode_unit_s = 0.0
        self._marks = deque([self._mark()])
        self.border_moves = 0
        # How often the border moved to where: "1+3" (units of decode and prefill), or "whole".
        self.moves_to: Counter[str] = Counter()
        # Units of the (decode, prefill) lanes as last split; (0, 0) before the first split.
        self.nominal = (0, 0)
        self._border: tuple[int, int] | None = None

    def note(self, flight: Flight, now_s: float) -> None:
        """The device is used as `flight` says from `now_s` on."""
        passed_s = now_s - self._since_s
        self.seconds[self._use] += passed_s
        if self._decode_units:
            self._decode_s += passed_s
            self._decode_unit_s += passed_s * self._decode_units
        self._since_s = now_s
        self._slide()
        self._use = _use(flight, self.units)
        self._decode_units = flight.decode_units if flight.decode is not None else 0

    def launched(self, border: tuple[int, int]) -> None:
        """Units of (decode, prefill) that this launch is for; the border moves when they differ from the last."""
        if self._border is not None and border != self._border:
            self.border_moves += 1
            self.moves_to["whole" if sum(border) > self.units else "{}+{}".format(*border)] += 1
        self._border = border
        if sum(border) <= self.units:
            self.nominal = border

    def realised(self) -> Realised:
        """Over the window that ended with the last `note`; to within a second or one launch, whichever is longer."""
        begin = self._marks[0]
        passed_s = self._since_s - begin.time_s
        decode_s = self._decode_s - begin.decode_s
        return Realised(
            {use: (self.seconds[use] - begin.seconds[use]) / passed_s if passed_s else 0.0 for use in Use},
            (self._decode_unit_s - begin.decode_unit_s) / decode_s / self.units if decode_s else None,
        )

    def _slide(self) -> None:
        if self._since_s - self._marks[-1].time_s >= MARK_EVERY_S:
            self._marks.append(self._mark())
        while len(self._marks) > 1 and self._marks[1].time_s <= self._since_s - self._window_s:
            self._marks.popleft()

    def _mark(self) -> _Mark:
        return _Mark(self._since_s, dict(self.seconds), self._decode_s, self._decode_unit_s)


def _use(flight: Flight, units: int) -> Use:
    if flight.decode is not None and flight.prefill is not None:
        return Use.MIXED if flight.decode_units == flight.prefill_units == units else Use.SPLIT
    if flight.decode is not None:
        return Use.DECODE_ALONE
    return Use.PREFILL_ALONE if flight.prefill is not None else Use.IDLE
