"""Classic continuous batching (Orca, OSDI 2022): one batch at a time, new prompts whole beside the decoding ones.

Every sequence in the batch waits for the longest prompt in it: the baseline that lanes exist to beat.
"""

from __future__ import annotations

from tidelane.engine.scheduling.capacity import fill, grow
from tidelane.engine.scheduling.fused import finish_pass, fused_plan
from tidelane.engine.scheduling.order import Order
from tidelane.engine.scheduling.plan import Plan, State


class MixedScheduler:
    def __init__(self, order: Order, *, max_running: int = 256, max_pass_tokens: int = 8192) -> None:
        self._order = order
        self._max_running = max_running
        self._max_pass_tokens = max_pass_tokens

    def plan(self, state: State, now_s: float) -> Plan:
        if not state.flight.idle:
            return Plan(state.table.whole)
        if state.paused is not None:
            return finish_pass(state)
        growth = grow(state)
        filling = fill(
            state,
            growth,
            self._order.arrange(state, now_s, self.pace(state, now_s)).jobs,
            self._max_pass_tokens,
            max_running=self._max_running,
            cut=False,
        )
        return fused_plan(state, growth, filling, "all prompts that fit, with all that decode")

    def pace(self, _state: State, _now_s: float) -> float:
        return 1.0
