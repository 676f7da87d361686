"""The contention guard: how much slower decode has been beside which prefill, cell by cell.

Lanes share memory bandwidth and caches, and nothing predicts what that costs. So it is looked up: the largest slowdown
seen in each cell of (prefill new tokens, prefill reused tokens, decode batch, decode context) and partition, as MuxWise
does (arXiv 2504.14489), whose grid of tokens this is: powers of 4 from 2K to 128K.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidelane.engine.estimation.passes import PassWork

TOKEN_STEPS = (2 * 1024, 8 * 1024, 32 * 1024, 128 * 1024)
LARGEST_BATCH = 1024
# Nothing that lanes do to each other was ever seen to double a step: MuxWise's largest is 1.3. More is a stall.
LARGEST_SLOWDOWN = 2.0
# A smaller slowdown pulls a cell's value down by this share of the difference: an outlier of 2 among 1.1s is below 1.2
# after some hundred steps.
DECAY = 0.02

# (prefill new tokens, prefill reused tokens, decode batch, decode context): the upper ends of a cell's intervals, of
# which the last has none. A plain tuple, since a decision looks up some fifty.
Cell = tuple[int, int, int, int]


def cell_of(decode: PassWork, prefill: PassWork) -> Cell:
    return (
        _token_step(prefill.tokens),
        _token_step(reused_tokens(prefill)),
        min(LARGEST_BATCH, 1 << max(0, decode.sequences - 1).bit_length()),
        _token_step(decode.context),
    )


def reused_tokens(prefill: PassWork) -> float:
    """Tokens that a prefill found in the KV cache, over all its sequences: exact where these are of one size.

    From pairs = tokens * (start + (new + 1) / 2) for sequences that each add `new` tokens after `start`.
    """
    if not prefill.tokens:
        return 0.0
    new = prefill.tokens / max(1, prefill.sequences)
    start = prefill.pairs / prefill.tokens - (new + 1) / 2
    return max(0.0, start) * prefill.sequences


def _token_step(tokens: float) -> int:
    return TOKEN_STEPS[bisect_left(TOKEN_STEPS, tokens, 0, len(TOKEN_STEPS) - 1)]


@dataclass(frozen=True, slots=True)
class GuardTable:
    """The slowdowns of decode seen, each between 1 and 2: `seen[units][cell]`; decode's units name the partition."""

    seen: Mapping[int, Mapping[Cell, float]] = field(default_factory=dict)

    def factor(self, units: int, cell: Cell, unseen: float) -> float:
        """Largest slowdown seen in `cell`; else in those one step away; else there in the nearest partition that knows.

        `unseen` where all of these are blank.
        """
        here = self.seen.get(units)
        if here:
            exact = here.get(cell)
            if exact is not None:
                return exact
            beside = [here[other] for other in _neighbours(cell) if other in here]
            if beside:
                return max(beside)
        # Of two equally near, the larger slowdown.
        elsewhere = [(abs(math.log(at / units)), -cells[cell]) for at, cells in self.seen.items() if cell in cells]
        return -min(elsewhere)[1] if elsewhere else unseen

    def observed(self, units: int, cell: Cell, slowdown: float, unseen: float) -> GuardTable:
        """After decode took `slowdown` times as long as alone. Counts as at least 1 and at most 2.

        A new cell starts from what was believed of it: one calm step says little about the largest slowdown.
        """
        bounded = min(max(slowdown, 1.0), LARGEST_SLOWDOWN)
        before = self.factor(units, cell, unseen)
        after = bounded if bounded > before else before + DECAY * (bounded - before)
        return GuardTable({**self.seen, units: {**self.seen.get(units, {}), cell: after}})


def _neighbours(cell: Cell) -> tuple[Cell, ...]:
    """Those one step away along one axis. Beyond the grid's ends nothing is ever seen, so they need no care."""
    new, reused, batch, context = cell
    return (
        (new * 4, reused, batch, context),
        (new // 4, reused, batch, context),
        (new, reused * 4, batch, context),
        (new, reused // 4, batch, context),
        (new, reused, batch * 2, context),
        (new, reused, batch // 2, context),
        (new, reused, batch, context * 4),
        (new, reused, batch, context // 4),
    )
