"""One request alone: nothing is faster, and the engine says it of the median prompt."""

from __future__ import annotations

import pytest

from tidelane.engine.estimation.estimates import Estimates, Phase
from tidelane.engine.estimation.passes import PassTimes, decode_work
from tidelane.engine.estimation.reach import reach

# 10 ms and 1 us for each token of context; 20 ms up to 100 tokens, then 0.2 ms a token.
ESTIMATES = Estimates(
    {
        Phase.DECODE: {4: PassTimes((1,), (0.01,), 0.0, 1e-6, 0.0), 2: PassTimes((1,), (0.02,), 0.0, 1e-6, 0.0)},
        Phase.PREFILL: {4: PassTimes((100, 200), (0.02, 0.04), 0.0, 0.0, 0.0)},
    }
)


def test_it_is_one_decode_step_and_one_prefill() -> None:
    short, long = reach(ESTIMATES, 2, 4, 50), reach(ESTIMATES, 4, 4, 1000)
    assert (short.input_tokens, short.ttft_s) == (50, 0.02)
    assert short.tpot_s == pytest.approx(0.02005)
    assert long.ttft_s == pytest.approx(0.2)
    assert long.tpot_s == pytest.approx(0.011)


def test_company_is_never_faster() -> None:
    alone = reach(ESTIMATES, 4, 4, 500).tpot_s
    assert all(ESTIMATES.seconds(Phase.DECODE, 4, decode_work(batch, 500 * batch)) >= alone for batch in range(1, 9))
