"""What a device did over a whole replay, in few numbers however long it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MOST_BUCKETS = 120


@dataclass(frozen=True, slots=True)
class Share:
    """Parts of the device's units, 0 to 1, that worked on what from `begin_s` to `end_s`; the rest was idle.

    `fused` is decode and prefill in one batch.
    """

    begin_s: float
    end_s: float
    decode: float
    prefill: float
    fused: float


class LaneShares:
    """Unit-seconds in at most `MOST_BUCKETS` buckets of equal length, which doubles whenever they do not suffice."""

    def __init__(self, units: int, bucket_s: float) -> None:
        self._units = units
        self._bucket_s = bucket_s
        self._buckets: list[list[float]] = []  # [decode, prefill, fused] unit-seconds

    def add(self, begin_s: float, end_s: float, decode: int, prefill: int, fused: int) -> None:
        """So many units were at work on each from `begin_s` to `end_s`."""
        while begin_s < end_s:
            at = int(begin_s / self._bucket_s)
            if at >= MOST_BUCKETS:
                self._merge()
                continue
            while len(self._buckets) <= at:
                self._buckets.append([0.0, 0.0, 0.0])
            # Never before `begin_s`: a quotient rounded down may name the bucket that ends there.
            stop_s = min(end_s, (at + 1) * self._bucket_s)
            if stop_s <= begin_s:
                stop_s = end_s
            bucket = self._buckets[at]
            passed_s = stop_s - begin_s
            bucket[0] += decode * passed_s
            bucket[1] += prefill * passed_s
            bucket[2] += fused * passed_s
            begin_s = stop_s

    def shares(self) -> tuple[Share, ...]:
        return tuple(self._shares())

    def _shares(self) -> Iterator[Share]:
        whole = self._units * self._bucket_s
        for at, (decode, prefill, fused) in enumerate(self._buckets):
            begin_s = at * self._bucket_s
            yield Share(begin_s, begin_s + self._bucket_s, decode / whole, prefill / whole, fused / whole)

    def _merge(self) -> None:
        pairs = zip(self._buckets[::2], [*self._buckets[1::2], [0.0, 0.0, 0.0]], strict=False)
        self._buckets = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
        self._bucket_s *= 2
