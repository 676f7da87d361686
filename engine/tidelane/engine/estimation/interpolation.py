"""Pass times on numbers of units that nobody measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate

from tidelane.engine.estimation.passes import PassTimes


def at_units(by_units: Mapping[int, PassTimes], units: int) -> PassTimes:
    """Straight between the logarithms of time and units; beyond the ends, the nearest by the square root of the ratio.

    A power law lies between each two neighbours, as speed by SMs roughly follows one (on an H800, 8 to 64 of 132 SMs).
    The square root is half way between "more units do not help" and "time goes as 1 / units".
    """
    known = sorted(by_units)
    if units in by_units:
        return by_units[units]
    if not known[0] < units < known[-1]:
        nearest = known[0] if units < known[0] else known[-1]
        return by_units[nearest].scaled(math.sqrt(nearest / units))
    at = bisect_left(known, units)
    low, high = known[at - 1], known[at]
    return blend(by_units[low], by_units[high], math.log(units / low) / math.log(high / low))


def blend(one: PassTimes, other: PassTimes, weight: float) -> PassTimes:
    """The geometric mean, term by term, in which `other` has `weight`: 0 gives `one`, 1 gives `other`."""

    def mean(a: float, b: float) -> float:
        return float(a ** (1 - weight) * b**weight)

    knots = tuple(sorted({*one.knots, *other.knots}))
    # The running maximum only undoes rounding: neither line falls, so their mean does not.
    line = tuple(accumulate((mean(one.line(knot), other.line(knot)) for knot in knots), max))
    return PassTimes(
        knots,
        line,
        mean(one.pair_s, other.pair_s),
        mean(one.context_s, other.context_s),
        mean(one.sequence_s, other.sequence_s),
    )
