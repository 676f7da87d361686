"""Time that passes only when told to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class VirtualClock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s
