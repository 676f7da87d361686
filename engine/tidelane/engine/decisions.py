"""The last decisions that a loop carried out, to be read when somebody asks why."""

from __future__ import annotations

from collections import deque
from itertools import islice

from tidelane.engine.channel import LoggedDecision, LoggedRefusal
from tidelane.engine.scheduling.plan import Plan

# At a decode step of 25 ms, with a slice beside each, about the last minute.
KEPT_DECISIONS = 4096


class DecisionLog:
    """A ring: what is older than the last `kept` is forgotten. Written at each decision, so sizes are kept, not ids."""

    def __init__(self, kept: int = KEPT_DECISIONS) -> None:
        self._entries: deque[LoggedDecision] = deque(maxlen=kept)

    def add(self, plan: Plan, now_s: float) -> None:
        """Plans without a reason decide nothing: the loop looked, and both lanes were at work or nothing waited."""
        if plan.why is None:
            return
        prefill = plan.prefill
        self._entries.append(
            LoggedDecision(
                now_s,
                plan.why,
                plan.partition,
                plan.fused,
                0 if plan.decode is None else len(plan.decode.ids),
                0 if prefill is None else prefill.tokens,
                None if prefill is None else (prefill.first_layer, prefill.last_layer),
                len(plan.admit),
                len(plan.preempt),
                tuple(
                    LoggedRefusal(late.tokens, late.ttft_s, late.target_s, late.retry_after_s) for late in plan.refuse
                ),
            )
        )

    def last(self, count: int) -> tuple[LoggedDecision, ...]:
        """At most `count`, the newest last."""
        return tuple(islice(self._entries, max(0, len(self._entries) - count), None))
