from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelane.engine.estimation.fit import Sample, fit, held_out_error, knots_of, nonnegative_least_squares, split
from tidelane.engine.estimation.passes import PassTimes, PassWork, decode_work, prefill_work

# Llama-3.1-8B on a big GPU, roughly.
PREFILL = PassTimes((64, 256, 1024, 4096), (0.005, 0.007, 0.026, 0.104), 1.3e-9, 0.0, 2e-6)
DECODE = PassTimes((1, 64, 256), (0.0045, 0.0048, 0.0075), 0.0, 3.3e-8, 0.0)


def prefills(count: int = 200, seed: int = 0) -> list[PassWork]:
    rng = random.Random(seed)
    spans = []
    for _ in range(count):
        new = 2 ** rng.uniform(6, 13)
        parts = rng.randint(1, 4)
        spans.append([(start := rng.choice([0, 1000, 8000, 30_000]), start + round(new / parts) + 1)] * parts)
    return [prefill_work(each) for each in spans]


def decodes(count: int = 200, seed: int = 0) -> list[PassWork]:
    rng = random.Random(seed)
    batches = [round(2 ** rng.uniform(0, 8)) for _ in range(count)]
    return [decode_work(batch, batch * rng.randint(10, 8000)) for batch in batches]


def exact(times: PassTimes, works: list[PassWork]) -> list[Sample]:
    return [(work, times.seconds(work)) for work in works]


def noisy(times: PassTimes, works: list[PassWork], seed: int = 1, outliers: float = 0.05) -> list[Sample]:
    """2 % of noise; `outliers` of the passes took two to ten times as long."""
    rng = random.Random(seed)

    def disturbance() -> float:
        return rng.uniform(2, 10) if rng.random() < outliers else rng.gauss(1, 0.02)

    return [(work, times.seconds(work) * disturbance()) for work in works]


def test_known_costs_are_found_again() -> None:
    found = fit(exact(PREFILL, prefills()))
    assert found.pair_s == pytest.approx(PREFILL.pair_s, rel=1e-3)
    assert found.sequence_s == pytest.approx(PREFILL.sequence_s, rel=1e-2)
    for tokens in (64, 100, 256, 700, 1024, 3000, 4096, 8000):
        assert found.line(tokens) == pytest.approx(PREFILL.line(tokens), rel=1e-3)


def test_known_costs_of_decode_are_found_again_without_one_for_sequences() -> None:
    found = fit(exact(DECODE, decodes()))
    assert found.context_s == pytest.approx(DECODE.context_s, rel=1e-3)
    assert found.pair_s == found.sequence_s == 0
    for batch in (1, 8, 64, 100, 256):
        assert found.line(batch) == pytest.approx(DECODE.line(batch), rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("times", "works"), [(PREFILL, prefills), (DECODE, decodes)])
def test_noise_and_some_outliers_leave_less_than_two_per_cent(times: PassTimes, works: object, seed: int) -> None:
    assert callable(works)
    found = fit(noisy(times, works(seed=seed), seed + 10))
    error = held_out_error(found, exact(times, works(seed=seed + 20)))
    assert error.median < 0.01
    assert error.p90 < 0.02


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.integers(0, 9000), st.integers(1, 6), st.floats(1e-4, 10)),
        min_size=1,
        max_size=40,
    )
)
def test_whatever_was_measured_no_cost_is_negative_and_the_line_never_falls(
    rows: list[tuple[int, int, int, float]],
) -> None:
    found = fit([(prefill_work([(start, start + new)] * many), seconds) for new, start, many, seconds in rows])
    assert min(found.pair_s, found.context_s, found.sequence_s, found.linear_s[0]) >= 0
    assert all(later >= earlier for earlier, later in pairwise(found.linear_s))
    assert found.knots[0] <= min(new * many for new, _, many, _ in rows)


def test_one_size_with_one_sequence_is_all_in_the_line() -> None:
    found = fit([(PassWork(1024), 0.03)] * 5)
    assert found.seconds(PassWork(1024)) == pytest.approx(0.03)
    assert found.sequence_s == 0


def test_knots_are_where_samples_are() -> None:
    assert knots_of([100, 1000, 1100]) == (64, 128, 1024)
    assert knots_of([1]) == (1,)


@pytest.mark.parametrize("samples", [[], [(PassWork(0), 1.0)], [(PassWork(1), 0.0)], [(PassWork(1), float("nan"))]])
def test_samples_that_say_nothing_are_refused(samples: list[Sample]) -> None:
    with pytest.raises(ValueError, match="sample"):
        fit(samples)


def test_every_fifth_is_held_out() -> None:
    samples = [(PassWork(at), 1.0) for at in range(1, 12)]
    kept, held_out = split(samples)
    assert [work.tokens for work, _ in held_out] == [5, 10]
    assert sorted(kept + held_out, key=lambda sample: sample[0].tokens) == samples


def test_errors_are_relative_to_what_was_measured() -> None:
    flat = PassTimes((1,), (1.0,))
    samples = [(PassWork(1), seconds) for seconds in (1.0, 1.25, 2.0)]
    assert held_out_error(flat, samples) == pytest.approx((0.2, 0.5))
    with pytest.raises(ValueError, match="no samples"):
        held_out_error(flat, [])


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 20))
def test_no_nonnegative_costs_fit_better(seed: int, columns: int, rows: int) -> None:
    """The conditions of Karush, Kuhn and Tucker: where x is 0 going up does not help, elsewhere no change does."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    x = nonnegative_least_squares(matrix, target)
    gradient = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert (gradient <= 1e-8).all()
    assert np.abs(gradient[x > 0]).max(initial=0) < 1e-8
