"""Pass times from measurements: least squares of relative errors, no term negative, a few outliers forgiven.

The only file here that needs numpy: import it where you fit, not where you predict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import numpy as np
from numpy.typing import NDArray

from tidelane.engine.estimation.passes import PassTimes, PassWork, RelativeError
from tidelane.engine.slo import percentile

Sample = tuple[PassWork, float]  # a pass, and the seconds it took
Matrix = NDArray[np.float64]  # [samples, terms]
Vector = NDArray[np.float64]  # [samples] or [terms]

ROUNDS = 4
# Huber's constant: residuals above this many standard deviations lose weight. 95 % as good as plain least squares where
# there are no outliers (P. J. Huber, Robust Statistics, 1981).
HUBER = 1.345
# The standard deviation of normal residuals is this many times the median of their magnitudes.
DEVIATIONS_PER_MEDIAN = 1.4826
# Residuals below this are never outliers: a model of what was computed from a formula fits exactly.
SMALLEST_DEVIATION = 1e-6


def split(samples: Sequence[Sample], every: int = 5) -> tuple[list[Sample], list[Sample]]:
    """(those to fit, those held out): the last of each `every` samples is held out."""
    held_out = [sample for at, sample in enumerate(samples) if at % every == every - 1]
    return [sample for at, sample in enumerate(samples) if at % every != every - 1], held_out


def held_out_error(times: PassTimes, samples: Sequence[Sample]) -> RelativeError:
    """Raises ValueError on no samples."""
    if not samples:
        raise ValueError("no samples to compare with")
    errors = [abs(times.seconds(work) - seconds) / seconds for work, seconds in samples]
    return RelativeError(median(errors), percentile(errors, 90))


def fit(samples: Sequence[Sample]) -> PassTimes:
    """The pass times of one phase on one number of units.

    Raises ValueError on no samples, on a pass without tokens, or one that took no time. What the samples do not tell
    apart stays in the line: with one sequence in each pass, sequences cost nothing of their own; and the cost of pairs
    is only told from that of tokens by prefills that start at different places.
    """
    if not samples:
        raise ValueError("no samples to fit")
    if any(work.tokens < 1 or not (seconds > 0 and math.isfinite(seconds)) for work, seconds in samples):
        raise ValueError("each sample needs at least one token and a time above 0")
    knots = knots_of([work.tokens for work, _ in samples])
    terms = _terms(knots, samples)
    seconds = np.array([seconds for _, seconds in samples])
    costs = _robust_costs(terms / seconds[:, np.newaxis])
    rises, (pair_s, context_s, sequence_s) = costs[: len(knots)], costs[len(knots) :].tolist()
    return PassTimes(knots, tuple(np.cumsum(rises).tolist()), pair_s, context_s, sequence_s)


def knots_of(tokens: Sequence[int]) -> tuple[int, ...]:
    """Powers of 2 that are the nearest of some sample, and the one below all: more knots than data bend at will."""
    return tuple(sorted({2 ** round(math.log2(each)) for each in tokens} | {2 ** int(math.log2(min(tokens)))}))


def _terms(knots: tuple[int, ...], samples: Sequence[Sample]) -> Matrix:
    """What each cost is multiplied by: the line's value at its first knot, its rise to each next one, and the rest.

    Rises instead of values, since all costs are at least 0: so the line never falls.
    """
    tokens = np.array([work.tokens for work, _ in samples], dtype=np.float64)
    columns = [np.ones_like(tokens)]
    for at, (low, high) in enumerate(pairwise(knots)):
        is_last = at == len(knots) - 2
        columns.append(np.clip((tokens - low) / (high - low), 0, None if is_last else 1))
    columns.append(np.array([work.pairs for work, _ in samples], dtype=np.float64))
    columns.append(np.array([work.context for work, _ in samples], dtype=np.float64))
    columns.append(_sequences_apart(samples))
    return np.stack(columns, axis=1)


def _sequences_apart(samples: Sequence[Sample]) -> Vector:
    """Sequences of each sample; all 0 where the line says the same already: one token each, or always as many."""
    sequences = np.array([work.sequences for work, _ in samples], dtype=np.float64)
    one_token_each = all(work.sequences == work.tokens for work, _ in samples)
    return np.zeros_like(sequences) if one_token_each or np.ptp(sequences) == 0 else sequences


def _robust_costs(terms: Matrix) -> Vector:
    """Costs >= 0 for which terms @ costs is 1, nearly: iteratively reweighted least squares with Huber's weights.

    `terms` are divided by the measured seconds, so residuals are relative errors.
    """
    # Terms differ by ten orders of magnitude; of one length, they are told from rounding by one tolerance.
    lengths = np.linalg.norm(terms, axis=0)
    lengths[lengths == 0] = 1.0
    scaled = terms / lengths
    weights = np.ones(len(terms))
    costs = np.zeros(terms.shape[1])
    for _ in range(ROUNDS):
        roots = np.sqrt(weights)
        costs = nonnegative_least_squares(scaled * roots[:, np.newaxis], roots)
        residuals = np.abs(scaled @ costs - 1)
        limit = HUBER * max(DEVIATIONS_PER_MEDIAN * float(np.median(residuals)), SMALLEST_DEVIATION)
        weights = np.minimum(1.0, limit / np.maximum(residuals, limit))
    return np.asarray(costs / lengths, dtype=np.float64)


def nonnegative_least_squares(matrix: Matrix, target: Vector) -> Vector:
    """The x >= 0 that brings matrix @ x nearest to target.

    The active-set method of C. L. Lawson and R. J. Hanson, Solving Least Squares Problems (1974), algorithm NNLS,
    chapter 23: free one variable after another while that helps; where one would turn negative, stop and hold it at 0.
    """
    count = matrix.shape[1]
    x = np.zeros(count)
    free = np.zeros(count, dtype=bool)
    tolerance = 1e-11 * float(np.abs(matrix.T @ target).max(initial=0.0))
    for _ in range(3 * count):  # more than it takes, unless rounding makes it go in circles
        gradient = matrix.T @ (target - matrix @ x)
        gradient[free] = -np.inf
        entering = int(np.argmax(gradient))
        if gradient[entering] <= tolerance:
            break
        free[entering] = True
        while free.any():
            wanted = np.zeros(count)
            wanted[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            negative = free & (wanted <= 0)
            if not negative.any():
                x = wanted
                break
            step = float(np.min(x[negative] / np.maximum(x[negative] - wanted[negative], 1e-300)))
            x += step * (wanted - x)
            free &= x > 1e-14
            x[~free] = 0.0
    return x
