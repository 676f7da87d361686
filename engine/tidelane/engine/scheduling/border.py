"""Where the border between the lanes stands: the first form, moved by what was measured.

Decode gets the smallest share whose step, as last measured at that share, times a guard, fits the TPOT target; prefill
gets the rest. The guard is feedback: it grows when requests miss TPOT and shrinks when they miss TTFT with TPOT to
spare. A share not measured yet is estimated from the nearest one that was, or from a prior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tidelane.engine.lanes.partition import Partition, PartitionTable
from tidelane.engine.scheduling.plan import Objective

# Decode is bound by memory bandwidth, which a few units nearly saturate: a step slows less than in proportion. Fits the
# published speeds of decode on 16 to 64 of 132 SMs (MuxWise, arXiv 2504.14489) within a fifth.
DECODE_SCALING = 0.5

GUARD_MIN, GUARD_START, GUARD_MAX = 1.0, 1.2, 2.0
# Only move to a narrower decode lane when its step fits with this much to spare, so that the border does not flutter.
NARROWING_MARGIN = 0.85


@dataclass(frozen=True, slots=True)
class Border:
    """`row` is the split in force; None before the first."""

    row: Partition | None = None
    guard: float = GUARD_START


def place_border(
    border: Border, table: PartitionTable, step_s: Mapping[int, float], tpot_s: float, objective: Objective
) -> Border:
    """The split for the next step. `tpot_s` is the tightest target among the decoding sequences.

    Needs a table with at least one split. When no share is enough, decode gets the widest that the bounds allow.
    """
    rows = [r for r in table.splits if _within(r, table.units, objective)] or list(table.splits)
    for row in rows:
        allowed_s = tpot_s
        if border.row is not None and row.decode_units < border.row.decode_units:
            allowed_s *= NARROWING_MARGIN
        if predicted_step_s(row.decode_units, step_s) * border.guard <= allowed_s:
            return replace(border, row=row)
    return replace(border, row=rows[-1])


def predicted_step_s(units: int, measured_s: Mapping[int, float]) -> float:
    """Decode step on `units`, from the measurement at the nearest number of units; 0 when nothing was measured."""
    if not measured_s:
        return 0.0
    nearest = min(measured_s, key=lambda known: (abs(known - units), known))
    return measured_s[nearest] * math.pow(nearest / units, DECODE_SCALING)


def learn(border: Border, *, missed_tpot: bool, missed_ttft: bool) -> Border:
    """Adjust the guard to one finished request."""
    if missed_tpot:
        return replace(border, guard=min(GUARD_MAX, border.guard * 1.05))
    if missed_ttft:
        return replace(border, guard=max(GUARD_MIN, border.guard * 0.98))
    return border


def _within(row: Partition, units: int, objective: Objective) -> bool:
    return objective.min_decode_share <= row.decode_units / units <= objective.max_decode_share
