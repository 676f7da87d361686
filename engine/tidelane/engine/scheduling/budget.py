"""How long the next decode step may take."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tidelane.engine.request import FLEX_RANK
from tidelane.engine.scheduling.plan import Decoding, Objective

# Predictions err, and launching takes a moment too: steps are planned to take no more than this part of the target.
SAFE_PART = 0.95
# A request that fell behind is given faster steps to catch up, but no faster than this part of its TPOT: whoever is
# further behind than that cannot be helped, and all others would pay for the attempt.
FASTEST_PART = 0.75
# Nor is prefill held back for one that is behind by more tokens than this.
MOST_BEHIND = 2.0


def step_budget_s(decoding: Iterable[Decoding], objective: Objective, now_s: float) -> float | None:
    """The time in which every decoding sequence still keeps its TPOT; None if nothing decodes that has one.

    Time saved up is not spent: long gaps later keep sequences, and their memory, here for longer than they need
    (measured in simulation: it lost goodput beyond saturation). `flex` work has no TPOT of its own.
    """
    budget_s = math.inf
    gap_s = objective.slo.max_token_gap_s or math.inf
    for sequence in decoding:
        if sequence.priority[0] >= FLEX_RANK:
            continue
        tpot_s = min(gap_s, sequence.tpot_s)
        left_s = sequence.next_due_s - now_s
        if left_s < FASTEST_PART * tpot_s:
            left_s = FASTEST_PART * tpot_s
        elif left_s > SAFE_PART * tpot_s:
            left_s = SAFE_PART * tpot_s
        if left_s < budget_s:
            budget_s = left_s
    return budget_s if budget_s < math.inf else None


def slack_s(decoding: Iterable[Decoding], now_s: float) -> float:
    """The time in which the next token of every decoding sequence keeps its mean gap within TPOT, saved time included.

    Negative if one is behind. Who is behind by more than `MOST_BEHIND` tokens does not count: where steps take longer
    than predicted, prefill would wait for ever for what cannot be. Infinite if nobody that has a TPOT counts.
    """
    counting = (
        each.next_due_s - now_s
        for each in decoding
        if each.priority[0] < FLEX_RANK and now_s - each.next_due_s <= MOST_BEHIND * each.tpot_s
    )
    return min(counting, default=math.inf)
