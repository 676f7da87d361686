"""The waits between tokens of a whole replay: millions of them, as a histogram."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

# Finer than any measurement of a token gap.
RESOLUTION_S = 1e-5


class GapHistogram:
    """Gaps rounded to `RESOLUTION_S`."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, gap_s: float, count: int = 1) -> None:
        self._counts[round(gap_s / RESOLUTION_S)] += count

    def merge(self, other: GapHistogram) -> None:
        self._counts.update(other._counts)

    @property
    def count(self) -> int:
        return self._counts.total()

    def percentiles(self, *percents: float) -> tuple[float, ...] | None:
        """By nearest rank, ascending `percents`; None of no gaps."""
        total = self.count
        if not total:
            return None
        return tuple(self._at_ranks([max(1, math.ceil(percent / 100 * total)) for percent in percents]))

    def _at_ranks(self, ranks: list[int]) -> Iterator[float]:
        seen, at = 0, 0
        for value, count in sorted(self._counts.items()):
            seen += count
            while at < len(ranks) and ranks[at] <= seen:
                yield value * RESOLUTION_S
                at += 1
