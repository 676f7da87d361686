"""When an engine that ended on its own is started again. Pure; times are seconds of one monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays double from `first_delay_s` to `longest_delay_s`; `stable_after_s` of being ready forgets all failures."""

    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    stable_after_s: float = 30.0

    def delay_s(self, failures: int) -> float:
        """Wait before the start that follows the `failures`th failure in a row; the first is 1."""
        if failures < 1:
            return 0.0
        # The exponent is bounded: 2.0 ** 1024 overflows.
        return float(min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(failures - 1, 60)))


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures in a row so far, and when the next start is due."""

    in_a_row: int = 0
    restart_at_s: float = 0.0

    def another(self, now_s: float, ready_for_s: float, policy: RestartPolicy) -> Failures:
        in_a_row = 1 if ready_for_s >= policy.stable_after_s else self.in_a_row + 1
        return Failures(in_a_row, now_s + policy.delay_s(in_a_row))
