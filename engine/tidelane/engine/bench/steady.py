"""The time of a decode step, from the times of the tokens that many streams got."""

from __future__ import annotations

from collections.abc import Sequence


def steady_step_s(token_times_s: Sequence[Sequence[float]]) -> float:
    """Mean step while all streams decode: after the last one's first token, before the first one's last.

    Each step gives each stream one token, so a stream's mean gap is the mean step; a late reader shifts single times,
    but over many steps not their mean. Raises ValueError when the streams hardly overlap.
    """
    begin_s = max(times[0] for times in token_times_s)
    end_s = min(times[-1] for times in token_times_s)
    steps = 0
    seconds = 0.0
    for times in token_times_s:
        inside = [time_s for time_s in times if begin_s <= time_s <= end_s]
        if len(inside) < 3:
            raise ValueError("the streams overlap for fewer than three tokens")
        steps += len(inside) - 1
        seconds += inside[-1] - inside[0]
    return seconds / steps
