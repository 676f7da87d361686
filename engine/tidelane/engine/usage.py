"""How the device was really used: the split that policies ask for holds only while both lanes have work."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from tidelane.engine.scheduling.plan import Flight


class Use(StrEnum):
    SPLIT = "split"  # both lanes at work, each on its own part
    DECODE_ALONE = "decode_alone"
    PREFILL_ALONE = "prefill_alone"
    MIXED = "mixed"  # both in one fused batch
    IDLE = "idle"


class Usage:
    """Seconds by kind of use, decode's unit-seconds, and how often the border moved; fed at every launch and end."""

    def __init__(self, units: int, now_s: float) -> None:
        self.units = units
        self._since_s = now_s
        self._use = Use.IDLE
        self._decode_units = 0
        self.seconds = dict.fromkeys(Use, 0.0)
        self.decode_seconds = 0.0
        self.decode_unit_seconds = 0.0
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
            self.decode_seconds += passed_s
            self.decode_unit_seconds += passed_s * self._decode_units
        self._since_s = now_s
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

    @property
    def decode_unit_share(self) -> float | None:
        """Mean part of the device that decode had while it ran, 0 to 1; None before the first step."""
        return self.decode_unit_seconds / self.decode_seconds / self.units if self.decode_seconds else None


def _use(flight: Flight, units: int) -> Use:
    if flight.decode is not None and flight.prefill is not None:
        return Use.MIXED if flight.decode_units == flight.prefill_units == units else Use.SPLIT
    if flight.decode is not None:
        return Use.DECODE_ALONE
    return Use.PREFILL_ALONE if flight.prefill is not None else Use.IDLE
