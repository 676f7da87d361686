"""The highest rate at which a share of requests still meets its SLO, from few rates that were tried."""

from __future__ import annotations

from collections.abc import Mapping

# A bracket this narrow is not narrowed further.
PRECISE = 1.02
# A probe keeps this part of the bracket away from its ends, so that it always narrows it.
_MARGIN = 0.1
# Beyond the ends of what was tried. Down in large steps: first come may sustain a tenth of what other orders do.
_DESCENT, _ASCENT = 3.0, 2.0


def rate_at(tried: Mapping[float, float], level: float) -> float | None:
    """The highest rate whose attainment is `level`: between the highest rate that attains it and the next one, on a
    straight line. None if no rate attains it; the highest rate of all if that one does.
    """
    bracket = _bracket(tried, level)
    if bracket is None:
        return None
    low, high = bracket
    if high is None:
        return low
    return low + (high - low) * (tried[low] - level) / (tried[low] - tried[high])


def next_probe(tried: Mapping[float, float], level: float) -> float | None:
    """The rate to try next; None when the answer is known well enough."""
    bracket = _bracket(tried, level)
    if bracket is None:
        return min(tried) / _DESCENT
    low, high = bracket
    if high is None:
        return low * _ASCENT
    if high <= low * PRECISE:
        return None
    guess = rate_at(tried, level)
    assert guess is not None
    margin = _MARGIN * (high - low)
    return min(max(guess, low + margin), high - margin)


def _bracket(tried: Mapping[float, float], level: float) -> tuple[float, float | None] | None:
    """(the highest rate that attains `level`, the next one above)."""
    attaining = [rate for rate, attainment in tried.items() if attainment >= level]
    if not attaining:
        return None
    low = max(attaining)
    return low, min((rate for rate in tried if rate > low), default=None)
