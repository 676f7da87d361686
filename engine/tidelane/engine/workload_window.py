"""The sketch of the last minutes, slid on slice by slice: memory and time do not grow with the rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tidelane.engine.workload import Sketch, Tally

WINDOW_S: Final = 300.0
_SLICES: Final = 10


@dataclass(slots=True)
class _Slice:
    begin_s: float
    tally: Tally = field(default_factory=Tally)


class WorkloadWindow:
    """Over the last `window_s` seconds, a tenth more or less."""

    def __init__(self, clock: Callable[[], float], window_s: float = WINDOW_S) -> None:
        self._clock = clock
        self._window_s = window_s
        self._slice_s = window_s / _SLICES
        self._slices = deque([_Slice(clock())])
        self._last_arrival_s: float | None = None

    def arrived(self, arrival_s: float, prompt_tokens: int, *, flex: bool) -> None:
        """`arrival_s` is by the same clock."""
        # A pause before the window is no longer than the window, or one night would make all traffic look bursty.
        last_s = self._last_arrival_s
        gap_s = None if last_s is None else min(max(0.0, arrival_s - last_s), self._window_s)
        self._last_arrival_s = arrival_s if last_s is None else max(last_s, arrival_s)
        self._now().arrived(gap_s, prompt_tokens, flex=flex)

    def began(self, reused_tokens: int) -> None:
        self._now().began(reused_tokens)

    def ended(self, output_tokens: int) -> None:
        self._now().ended(output_tokens)

    def sketch(self) -> Sketch | None:
        """None: nothing arrived."""
        self._now()
        if not any(each.tally.requests for each in self._slices):
            return None
        now_s, ends_s = self._clock(), [each.begin_s for each in self._slices][1:]
        return sum(
            (
                each.tally.sketch(end_s - each.begin_s)
                for each, end_s in zip(self._slices, [*ends_s, now_s], strict=True)
            ),
            Sketch(),
        )

    def _now(self) -> Tally:
        """That of this moment, after what is too old has gone."""
        now_s, last = self._clock(), self._slices[-1]
        if now_s >= last.begin_s + self._slice_s:
            # Idle slices in between are part of what was observed.
            begun = int((now_s - last.begin_s) / self._slice_s)
            first = max(1, begun - _SLICES)
            self._slices.extend(_Slice(last.begin_s + at * self._slice_s) for at in range(first, begun + 1))
            while self._slices[0].begin_s <= now_s - self._window_s - self._slice_s:
                self._slices.popleft()
        return self._slices[-1].tally
