"""What an engine says of the device that it runs on, so that others can simulate it. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

PHASES: Final = ("decode", "prefill", "fused")
# One model on a device cut in seven, at the most: a report is sent each second.
MOST_TIMES: Final = 64
_MOST_KNOTS: Final = 64


@dataclass(frozen=True, slots=True)
class ReportedTimes:
    """What passes of one phase take on so many units; the terms are those of `estimation.passes`."""

    phase: str
    units: int
    knots: tuple[int, ...]
    linear_s: tuple[float, ...]
    pair_s: float = 0.0
    context_s: float = 0.0
    sequence_s: float = 0.0

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"phase: {self.phase!r} is none of {', '.join(PHASES)}")
        if self.units < 1:
            raise ValueError("units must be at least 1")
        if not 1 <= len(self.knots) <= _MOST_KNOTS or len(self.knots) != len(self.linear_s):
            raise ValueError(f"knots: 1 to {_MOST_KNOTS} of them, and as many of linear_s")
        if self.knots[0] < 1 or any(after <= before for before, after in pairwise(self.knots)):
            raise ValueError("knots must be at least 1 and rise")
        if not all(math.isfinite(each) and each >= 0 for each in self.linear_s):
            raise ValueError("linear_s must be finite, and not negative")
        if any(after < before for before, after in pairwise(self.linear_s)):
            raise ValueError("linear_s must not fall")


@dataclass(frozen=True, slots=True)
class MachineReport:
    """`device` is named as in profiles; `decode_units` are those of each split, ascending, and prefill has the rest of
    `units`. `kv_tokens` have room on the device, in blocks of `block_tokens`. Times include what the engine learned.
    """

    device: str
    units: int
    dtype: str
    layers: int
    block_tokens: int
    kv_tokens: int
    decode_units: tuple[int, ...]
    times: tuple[ReportedTimes, ...]
    decode_slowdown: float
    prefill_slowdown: float
    guard: float

    def __post_init__(self) -> None:
        if min(self.units, self.layers, self.block_tokens) < 1:
            raise ValueError("units, layers and block_tokens must be at least 1")
        if self.kv_tokens < self.block_tokens:
            raise ValueError(f"kv_tokens: {self.kv_tokens} have no room for a block of {self.block_tokens}")
        if any(not 0 < each < self.units for each in self.decode_units):
            raise ValueError(f"decode_units must lie between 1 and {self.units - 1}")
        if len(self.times) > MOST_TIMES or not {"decode", "prefill"} <= {each.phase for each in self.times}:
            raise ValueError(f"times: at most {MOST_TIMES}, of decode and of prefill at the least")
        if min(self.decode_slowdown, self.prefill_slowdown, self.guard) < 1:
            raise ValueError("slowdowns and guard must be at least 1")
