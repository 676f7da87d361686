"""What a router is told of a loop's state, worked out by hand."""

from __future__ import annotations

import pytest

from tidelane.engine.estimation.estimates import Estimates, Phase
from tidelane.engine.estimation.passes import decode_work, prefill_work
from tidelane.engine.lanes.partition import partition_table
from tidelane.engine.outlook import RATED_TOKENS, outlook
from tidelane.engine.scheduling.plan import Decoding, Objective, PoolState, Prefilling, Queued, State
from tidelane.engine.slo import Slo

from .virtual import true_estimates

ESTIMATES = true_estimates(units=2, layers=4)

QUEUED = (
    Queued("p", (0, 0.0, "p"), tokens=100, ttft_due_s=1.0, cached=64),
    Queued("q", (1, 0.0, "q"), tokens=30, ttft_due_s=1.0),
    Queued("f", (2, 0.0, "f"), tokens=500, ttft_due_s=1.0),
)
PREFILLING = (Prefilling("r", (1, 0.0, "r"), tokens=80, computed=32, ttft_due_s=1.0),)
DECODING = (Decoding("d", (1, 0.0, "d"), 40, 3, 0.05, 1.0), Decoding("e", (2, 0.0, "e"), 8, 1, 0.05, 1.0))


def state(**fields: object) -> State:
    return State(
        table=partition_table(2),
        layers=4,
        pool=PoolState(10, 16),
        objective=Objective(Slo(0.2, 0.05)),
        estimates=ESTIMATES,
        **fields,  # type: ignore[arg-type]
    )


def seconds(estimates: Estimates, phase: Phase, units: int, tokens: int) -> float:
    return estimates.seconds(phase, units, prefill_work([(0, tokens)]))


def test_an_idle_engine_has_nothing_queued_and_all_its_units() -> None:
    told = outlook(state(), 2, (1, 1))
    assert told.queued_tokens == {"priority": 0, "default": 0, "flex": 0}
    assert told.requests == {"priority": 0, "default": 0, "flex": 0}
    assert told.prefill_tokens_per_s == pytest.approx(RATED_TOKENS / seconds(ESTIMATES, Phase.PREFILL, 2, RATED_TOKENS))
    assert told.step_s == ESTIMATES.seconds(Phase.DECODE, 2, decode_work(1, 0))


def test_what_is_to_be_computed_counts_by_tier_and_without_what_is_cached() -> None:
    told = outlook(state(queued=QUEUED, prefilling=PREFILLING, decoding=DECODING), 2, (0, 0))
    assert told.queued_tokens == {"priority": 36, "default": 30 + 48, "flex": 500}
    assert told.requests == {"priority": 1, "default": 3, "flex": 2}


def test_with_both_phases_at_work_each_has_its_side_of_the_split() -> None:
    told = outlook(state(queued=QUEUED, prefilling=PREFILLING, decoding=DECODING), 2, (1, 1))
    assert told.prefill_tokens_per_s == pytest.approx(RATED_TOKENS / seconds(ESTIMATES, Phase.PREFILL, 1, RATED_TOKENS))
    context = 40 + 8 + 100 + 30 + 500 + 80
    step_s, wider_s = (ESTIMATES.seconds(Phase.DECODE, 1, decode_work(batch, context)) for batch in (7, 8))
    assert told.step_s == step_s
    assert told.step_more_s == pytest.approx(wider_s - step_s)
