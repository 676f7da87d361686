"""The time of one pass through a model's layers, whatever mix of prefill and decode is in it.

One form serves decode steps, prefill and fused chunks, so that policies compare like with like:

    T = linear(tokens) + pair_s * pairs + context_s * context + sequence_s * sequences

`linear` is a piecewise straight line over the tokens that go through the linear layers: flat while reading the weights
takes longer than the arithmetic, straight once arithmetic takes longer, and whatever a machine does between. The other
terms are those of MuxWise's fits (arXiv 2504.14489: sums of n^2, n*r and n for prefill; of r and the batch for decode).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec


class PassWork(msgspec.Struct, frozen=True):
    """What one pass computes.

    `tokens` go through the linear layers: new prompt tokens and one for each decoding sequence. `pairs` of a query and
    a key that it sees are computed by prefill. `context` tokens of KV are read by decoding sequences. `sequences` have
    tokens in the pass.
    """

    tokens: int
    pairs: int = 0
    context: int = 0
    sequences: int = 1

    def __add__(self, other: PassWork) -> PassWork:
        return PassWork(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            self.context + other.context,
            self.sequences + other.sequences,
        )


NO_WORK = PassWork(0, 0, 0, 0)


def prefill_work(spans: Iterable[tuple[int, int]]) -> PassWork:
    """Of spans [start, stop) of prompts: `start` tokens of each are in the KV cache already."""
    tokens = pairs = sequences = 0
    for start, stop in spans:
        new = stop - start
        tokens += new
        pairs += new * start + new * (new + 1) // 2
        sequences += 1
    return PassWork(tokens, pairs, 0, sequences)


def decode_work(batch: int, context: int) -> PassWork:
    """One step of `batch` sequences whose KV caches hold `context` tokens together."""
    return PassWork(batch, 0, context, batch)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of a pass through all layers, on one number of units.

    `knots` (ascending numbers of tokens) and `linear_s` (not falling) draw the line: flat before the first, continued
    beyond the last with the slope of the last piece. `linear_s` holds all that is paid however little there is to do.
    """

    knots: tuple[int, ...]
    linear_s: tuple[float, ...]
    pair_s: float = 0.0
    context_s: float = 0.0
    sequence_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.knots or len(self.knots) != len(self.linear_s):
            raise ValueError("knots and linear_s must be of one length, at least 1")
        if any(later <= earlier for earlier, later in zip(self.knots, self.knots[1:], strict=False)):
            raise ValueError("knots must ascend")
        if any(later < earlier for earlier, later in zip(self.linear_s, self.linear_s[1:], strict=False)):
            raise ValueError("linear_s must not fall")

    def seconds(self, work: PassWork) -> float:
        return (
            self.line(work.tokens)
            + self.pair_s * work.pairs
            + self.context_s * work.context
            + self.sequence_s * work.sequences
        )

    def line(self, tokens: int) -> float:
        knots, line = self.knots, self.linear_s
        at = bisect_right(knots, tokens)
        if at == 0 or len(knots) == 1:
            return line[0]
        if at == len(knots):
            at -= 1
        low, high = knots[at - 1], knots[at]
        return line[at - 1] + (line[at] - line[at - 1]) * (tokens - low) / (high - low)

    def most_tokens(self, beside: PassWork, start: int, limit_s: float, most: int) -> int:
        """The most tokens of one more prompt, up to `most`, for which a pass with `beside` takes `limit_s`; 0 if none.

        `start` of the prompt's tokens are in the KV cache already. With n tokens the time rises with n, and is
        a n^2 + b n + c on each piece of the line.
        """
        knots, line = self.knots, self.linear_s
        have, last = beside.tokens, len(self.knots) - 1
        a = self.pair_s / 2
        pairs_b = self.pair_s * (start + 0.5)
        fixed_s = (
            self.pair_s * beside.pairs + self.context_s * beside.context + self.sequence_s * (beside.sequences + 1)
        )
        # The first knot that cannot be reached in time: the answer lies before it, on the piece that ends there.
        low, high = bisect_right(knots, have), last + 1
        first = low
        while low < high:
            middle = (low + high) // 2
            n = knots[middle] - have
            if line[middle] + fixed_s + (a * n + pairs_b) * n <= limit_s:
                low = middle + 1
            else:
                high = middle
        done = knots[low - 1] - have if low > first else 0
        if low == 0 or last == 0:
            slope, base_s = 0.0, line[0]
        else:
            piece = min(low, last)
            slope = (line[piece] - line[piece - 1]) / (knots[piece] - knots[piece - 1])
            base_s = line[piece - 1] + slope * (have - knots[piece - 1])
        return min(most, max(done, _largest_root(a, slope + pairs_b, base_s + fixed_s - limit_s, most)))

    def scaled(self, factor: float) -> PassTimes:
        return PassTimes(
            self.knots,
            tuple(each * factor for each in self.linear_s),
            self.pair_s * factor,
            self.context_s * factor,
            self.sequence_s * factor,
        )


def _largest_root(a: float, b: float, c: float, most: int) -> int:
    """The largest whole n from 0 to `most` with a n^2 + b n + c <= 0, for a and b at least 0; 0 if there is none."""
    if c > 0:
        return 0
    # In the form that loses no digits where a is small.
    divisor = b + math.sqrt(b * b - 4 * a * c)
    return int(min(most, -2 * c / divisor)) if divisor else most


class RelativeError(NamedTuple):
    """How far predictions were from what was measured, |predicted - measured| / measured: 0.05 is 5 %."""

    median: float
    p90: float
