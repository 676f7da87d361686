"""The slow loop's only decision: measured percentiles -> the bounds an engine may move its border within.

The engine moves the border every step by prediction; this corrects what prediction gets wrong, at most once per
measuring window, so that the effect of one move is seen before the next. It moves the least share of decode and nothing
else: within its bounds the engine stays free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tidelane.engine.slo import Slo
from tidelane.rpc.wire import ExecutionMode, Objective, ShareBounds

# Both lanes must live: an engine with no SMs for one phase can meet only one of the two targets.
LOWEST_SHARE = 0.1
HIGHEST_SHARE = 0.9
_MOVE_UP = 0.1
_MOVE_DOWN = 0.05  # Slower than up: a decode stall is seen at every token, a late first token once.
_SLACK = 0.8  # TPOT under this part of its target may be traded for TTFT; between it and 1 nothing moves.
_FEWEST_REQUESTS = 5
_STEERED = frozenset({ExecutionMode.LANES, ExecutionMode.AUTO})


@dataclass(frozen=True, slots=True)
class Measured:
    """What the engine measured over its last window. The ratios are latency over target at the SLO's percentile."""

    requests: int
    tpot_ratio: float
    ttft_ratio: float
    window_s: float
    since_move_s: float


def next_objective(spec: Objective, measured: Measured | None, previous: Objective | None) -> Objective:
    """The objective to hold the engine to from now on: `previous` itself if nothing is to change, else one revision up.

    `spec` is what the service asks for; its revision is ignored. `previous` None: nothing was sent yet.
    """
    if previous is None:
        return replace(spec, revision=1)
    wanted = replace(spec, revision=previous.revision)
    if spec.mode in _STEERED and _same_but_bounds(spec, previous):
        wanted = replace(wanted, bounds=_bounds(spec, measured, previous))
    return previous if wanted == previous else replace(wanted, revision=previous.revision + 1)


def _bounds(spec: Objective, measured: Measured | None, previous: Objective) -> ShareBounds | None:
    # A bound that the service states is a promise to it, so feedback moves only inside.
    floor = max(LOWEST_SHARE, spec.bounds.min_decode_share if spec.bounds else 0.0)
    ceiling = min(HIGHEST_SHARE, spec.bounds.max_decode_share if spec.bounds else 1.0)
    if measured is None or floor >= ceiling or not _within(spec.bounds, previous.bounds):
        return previous.bounds if _within(spec.bounds, previous.bounds) else spec.bounds
    if measured.requests < _FEWEST_REQUESTS or measured.since_move_s < measured.window_s:
        return previous.bounds
    share = previous.bounds.min_decode_share if previous.bounds else floor
    if measured.tpot_ratio > 1:
        moved = share + _MOVE_UP
    elif measured.ttft_ratio > 1 and measured.tpot_ratio < _SLACK:
        moved = share - _MOVE_DOWN
    else:
        return previous.bounds
    # Rounded, so that a share reached by different ways is the same and no revision is spent on 1e-17.
    moved = min(ceiling, max(floor, round(moved, 6)))
    if moved == share:
        return previous.bounds
    return ShareBounds(moved, spec.bounds.max_decode_share if spec.bounds else 1.0)


def _within(asked: ShareBounds | None, now: ShareBounds | None) -> bool:
    """Whether the bounds in force can have come from those asked for; not so just after the service changed them."""
    if asked is None:
        return now is None or now.max_decode_share == 1.0
    return now is not None and (
        now.min_decode_share >= asked.min_decode_share and now.max_decode_share == asked.max_decode_share
    )


def _same_but_bounds(spec: Objective, previous: Objective) -> bool:
    return (spec.slo, spec.mode) == (previous.slo, previous.mode)


def ttft_ratio(measured_ratio: float, ttft_at_percentile_s: float, slo: Slo) -> float:
    """TTFT over target. Engines that do not report the ratio itself are judged without the length allowance."""
    return measured_ratio or ttft_at_percentile_s / slo.ttft_s
