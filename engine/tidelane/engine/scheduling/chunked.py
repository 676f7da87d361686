"""Chunked prefill (Sarathi-Serve, OSDI 2024): decode first, and prompts cut to what is left of a budget of tokens.

The budget is a number of tokens, as other engines have it, or chosen anew for each pass: as many as the tightest TPOT
budget allows by prediction.
"""

from __future__ import annotations

from tidelane.engine.estimation.estimates import Phase
from tidelane.engine.estimation.passes import PassWork, prefill_work
from tidelane.engine.scheduling.budget import step_budget_s
from tidelane.engine.scheduling.capacity import fill, grow
from tidelane.engine.scheduling.fused import TimeLeft, batch_work, finish_pass, fused_plan, largest_chunk
from tidelane.engine.scheduling.order import Order
from tidelane.engine.scheduling.plan import Plan, State

# A chunk chosen by budget is never smaller, or prefill would all but stop, nor larger than one pass may be.
SMALLEST_CHUNK = 64
LARGEST_CHUNK = 8192


class ChunkedScheduler:
    """`chunk_tokens` counts decoding sequences too, one token each; None: chosen for each pass."""

    def __init__(self, order: Order, *, chunk_tokens: int | None = None, max_running: int = 256) -> None:
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ValueError("chunk_tokens must be at least 1")
        self._order = order
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running

    def plan(self, state: State, now_s: float) -> Plan:
        if not state.flight.idle:
            return Plan(state.table.whole)
        if state.paused is not None:
            return finish_pass(state)
        growth = grow(state)
        decode = batch_work(growth.decode)
        budget_s = step_budget_s(growth.decode, state.objective, now_s)
        chunk, reason = self._chunk(state, decode, budget_s)
        jobs = self._order.arrange(state, now_s, self._pace(state, decode, chunk)).jobs
        room = None
        if self._chunk_tokens is None and budget_s is not None and chunk > SMALLEST_CHUNK:
            room = TimeLeft(state, decode, budget_s)
        filling = fill(state, growth, jobs, chunk, max_running=self._max_running, room=room)
        return fused_plan(state, growth, filling, reason, budget_s)

    def pace(self, state: State, now_s: float) -> float:
        decoding = state.decoding
        decode = batch_work(decoding)
        chunk, _ = self._chunk(state, decode, step_budget_s(decoding, state.objective, now_s))
        return self._pace(state, decode, chunk)

    def _chunk(self, state: State, decode: PassWork, budget_s: float | None) -> tuple[int, str]:
        """Tokens of prompts in one pass, at most."""
        if self._chunk_tokens is not None:
            return max(1, self._chunk_tokens - decode.tokens), f"a budget of {self._chunk_tokens} tokens"
        if budget_s is None:
            return LARGEST_CHUNK, "nothing decodes: the largest chunk"
        chunk = largest_chunk(state, decode, budget_s, LARGEST_CHUNK)
        return max(SMALLEST_CHUNK, chunk), "the largest chunk within the TPOT budget"

    def _pace(self, state: State, decode: PassWork, tokens: int) -> float:
        """How much longer a prompt takes in such passes than alone on the whole device."""
        chunk = prefill_work(((0, tokens),))
        units = state.table.units
        alone_s = state.estimates.seconds(Phase.PREFILL, units, chunk)
        return state.estimates.seconds(Phase.FUSED, units, decode + chunk) / alone_s
