from __future__ import annotations

import math
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidelane.engine.estimation.estimates import LARGEST_CORRECTION, Contention, Estimates, Phase
from tidelane.engine.estimation.guard import cell_of
from tidelane.engine.estimation.passes import PassTimes, PassWork, decode_work, prefill_work

DECODE = {8: PassTimes((1, 64), (0.02, 0.03), 0.0, 4e-7, 1e-5), 32: PassTimes((1, 64), (0.01, 0.015), 0.0, 1e-7, 1e-5)}
PREFILL = {32: PassTimes((1, 128, 1024), (0.01, 0.01, 0.08), 2e-9, 0.0, 3e-5)}
ESTIMATES = Estimates({Phase.DECODE: DECODE, Phase.PREFILL: PREFILL}, Contention(guard=1.3))
STEP = decode_work(16, 20_000)
CHUNK = prefill_work([(512, 1024)])


def test_units_that_were_measured_are_taken_as_they_are() -> None:
    assert ESTIMATES.seconds(Phase.DECODE, 8, STEP) == DECODE[8].seconds(STEP)


def test_half_way_between_in_logarithms_is_the_geometric_mean_term_by_term() -> None:
    times = PassTimes((1, 64), (math.sqrt(0.02 * 0.01), math.sqrt(0.03 * 0.015)), 0.0, 2e-7, 1e-5)
    assert ESTIMATES.seconds(Phase.DECODE, 16, STEP) == pytest.approx(times.seconds(STEP))


def test_beyond_the_ends_time_goes_by_the_square_root_of_units() -> None:
    assert ESTIMATES.seconds(Phase.DECODE, 2, STEP) == pytest.approx(2 * DECODE[8].seconds(STEP))
    assert ESTIMATES.seconds(Phase.DECODE, 128, STEP) == pytest.approx(DECODE[32].seconds(STEP) / 2)


def test_lines_with_different_knots_meet_on_all_of_them() -> None:
    bent = PassTimes((16, 64), (0.02, 0.03))
    times = {8: bent, 32: PassTimes((8, 32), (0.02, 0.03))}
    estimates = Estimates({Phase.DECODE: times, Phase.PREFILL: PREFILL})
    for tokens in (4, 8, 16, 32, 64, 256):
        work = PassWork(tokens)
        expected = math.sqrt(times[8].seconds(work) * times[32].seconds(work))
        # Beyond the last knot each line goes on with its slope, and so does their mean with its own.
        assert estimates.seconds(Phase.DECODE, 16, work) == pytest.approx(expected, rel=0.01 if tokens <= 64 else 0.1)


@st.composite
def faster_with_units(draw: st.DrawFn) -> dict[int, PassTimes]:
    """Times on rising units; each term falls, or stays, from one number of units to the next."""
    units = sorted(draw(st.sets(st.integers(1, 200), min_size=1, max_size=5)))
    knots = tuple(sorted(draw(st.sets(st.sampled_from([1, 8, 64, 512, 4096]), min_size=1))))
    rises = st.lists(st.floats(0, 0.1), min_size=len(knots), max_size=len(knots))
    line = [0.001 + each for each in draw(rises)]
    for at in range(1, len(line)):
        line[at] += line[at - 1]
    terms = draw(st.tuples(st.floats(0, 1e-8), st.floats(0, 1e-6), st.floats(0, 1e-4)))
    found, factor = {}, 1.0
    for each in units:
        found[each] = PassTimes(knots, tuple(line), *terms).scaled(factor)
        factor *= draw(st.floats(0.3, 1))
    return found


works = st.builds(
    PassWork, st.integers(0, 20_000), st.integers(0, 10**8), st.integers(0, 10**6), sequences=st.integers(0, 256)
)


@given(faster_with_units(), works)
def test_more_units_never_take_longer_where_they_did_not_in_what_was_measured(
    times: dict[int, PassTimes], work: PassWork
) -> None:
    estimates = Estimates({Phase.DECODE: times, Phase.PREFILL: times})
    predicted = [estimates.seconds(Phase.DECODE, units, work) for units in range(1, 250)]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(predicted))


@given(faster_with_units(), works, st.integers(1, 250))
def test_more_tokens_never_take_less(times: dict[int, PassTimes], work: PassWork, units: int) -> None:
    estimates = Estimates({Phase.DECODE: times, Phase.PREFILL: times})
    more = work + PassWork(100, 0, 0, 0)
    before, after = (estimates.seconds(Phase.PREFILL, units, each) for each in (work, more))
    assert after >= before * (1 - 1e-9)


def test_a_fused_pass_that_nobody_measured_is_a_prefill_that_also_reads_context() -> None:
    fused = ESTIMATES.seconds(Phase.FUSED, 32, CHUNK + STEP)
    prefill = PREFILL[32]
    expected = prefill.line(512 + 16) + prefill.pair_s * CHUNK.pairs + 1e-7 * 20_000 + 3e-5 * 17
    assert fused == pytest.approx(expected)


@pytest.mark.parametrize("missing", [Phase.DECODE, Phase.PREFILL])
def test_decode_and_prefill_must_be_known(missing: Phase) -> None:
    times = {phase: DECODE for phase in (Phase.DECODE, Phase.PREFILL) if phase is not missing}
    with pytest.raises(ValueError, match=missing.value):
        Estimates(times)


@pytest.mark.parametrize("factor", [0.6, 1.4, 1.9])
def test_a_wrong_model_is_put_right_in_some_twenty_steps(factor: float) -> None:
    estimates = ESTIMATES
    measured_s = factor * ESTIMATES.seconds(Phase.DECODE, 8, STEP)
    for _ in range(25):
        estimates = estimates.learned(Phase.DECODE, 8, STEP, 1.0, measured_s)
    assert estimates.seconds(Phase.DECODE, 8, STEP) == pytest.approx(measured_s, rel=0.1)


def test_what_is_off_by_next_to_nothing_teaches_nothing() -> None:
    seconds = ESTIMATES.seconds(Phase.DECODE, 8, STEP)
    assert ESTIMATES.learned(Phase.DECODE, 8, STEP, 1.0, 1.001 * seconds) is ESTIMATES
    assert ESTIMATES.learned(Phase.DECODE, 8, STEP, 1.0, 1.01 * seconds).seconds(Phase.DECODE, 8, STEP) > seconds


def test_some_layers_teach_as_a_whole_pass_does() -> None:
    whole = ESTIMATES.learned(Phase.PREFILL, 32, CHUNK, 1.0, 0.05)
    part = ESTIMATES.learned(Phase.PREFILL, 32, CHUNK, 0.25, 0.05 / 4)
    assert part.corrections == pytest.approx(whole.corrections)


def test_one_stalled_step_moves_little() -> None:
    stalled = ESTIMATES.learned(Phase.DECODE, 8, STEP, 1.0, 60.0)
    ratio = stalled.seconds(Phase.DECODE, 8, STEP) / ESTIMATES.seconds(Phase.DECODE, 8, STEP)
    assert 1 < ratio < 1.05


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60))
def test_corrections_stay_within_a_factor_of_two_whatever_is_measured(measured_s: list[float]) -> None:
    estimates = ESTIMATES
    for seconds in measured_s:
        estimates = estimates.learned(Phase.DECODE, 8, STEP, 1.0, seconds)
    assert all(abs(correction) <= LARGEST_CORRECTION for correction in estimates.corrections.values())


def test_what_is_learned_holds_for_units_that_taught_nothing_and_for_no_other_phase() -> None:
    learned = ESTIMATES.learned(Phase.DECODE, 8, STEP, 1.0, 1.0)
    factor = learned.seconds(Phase.DECODE, 8, STEP) / ESTIMATES.seconds(Phase.DECODE, 8, STEP)
    assert learned.seconds(Phase.DECODE, 32, STEP) == pytest.approx(factor * ESTIMATES.seconds(Phase.DECODE, 32, STEP))
    assert learned.seconds(Phase.PREFILL, 32, CHUNK) == ESTIMATES.seconds(Phase.PREFILL, 32, CHUNK)


def test_learning_leaves_the_estimates_it_came_from_as_they_were() -> None:
    before = ESTIMATES.seconds(Phase.DECODE, 8, STEP)
    ESTIMATES.learned(Phase.DECODE, 8, STEP, 1.0, 1.0).learned_beside(8, STEP, CHUNK, 2.0)
    assert ESTIMATES.seconds(Phase.DECODE, 8, STEP) == before
    assert ESTIMATES.corrections == {}


def test_the_guard_counts_only_beside_prefill_and_learns() -> None:
    alone_s = ESTIMATES.seconds(Phase.DECODE, 8, STEP)
    assert ESTIMATES.guarded_decode_s(8, STEP, None) == alone_s
    assert ESTIMATES.guarded_decode_s(8, STEP, cell_of(STEP, CHUNK)) == pytest.approx(1.3 * alone_s)
    learned = ESTIMATES.learned_beside(8, STEP, CHUNK, 1.5 * alone_s)
    assert learned.guarded_decode_s(8, STEP, cell_of(STEP, CHUNK)) == pytest.approx(1.5 * alone_s)


@given(
    steps=st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1e-2)), min_size=1, max_size=6),
    pair_s=st.sampled_from([0.0, 1e-9, 1e-7]),
    have=st.integers(0, 700),
    start=st.integers(0, 2000),
    limit_s=st.floats(0, 0.1),
    most=st.integers(1, 3000),
)
@example(steps=[(1, 0.0), (4, 2.2e-309)], pair_s=0.0, have=0, start=0, limit_s=0.0625, most=1)  # a slope of almost 0
def test_the_most_tokens_in_time_are_the_most(
    steps: list[tuple[int, float]], pair_s: float, have: int, start: int, limit_s: float, most: int
) -> None:
    knots = tuple(accumulate(step for step, _ in steps))
    times = PassTimes(knots, tuple(accumulate(rise for _, rise in steps)), pair_s, 1e-8, 1e-5)
    beside = decode_work(have, 10 * have)

    def seconds(tokens: int) -> float:
        return times.seconds(beside + prefill_work(((start, start + tokens),)))

    found = times.most_tokens(beside, start, limit_s, most)
    assert 0 <= found <= most
    if found:
        assert seconds(found) <= limit_s * (1 + 1e-9)
    if found < most:
        assert seconds(found + 1) >= limit_s * (1 - 1e-9)
