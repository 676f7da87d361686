"""When conversations should go on, against the same said slowly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.kv.rhythm import FEW_PAUSES, Pauses, own_window

SECONDS = st.integers(0, 1000).map(float)


def told(pauses_s: list[float], silent: int = 0, limit: int = 1000) -> Pauses:
    """All at turn 1, and so many that have not gone on."""
    pauses = Pauses(limit)
    for pause_s in pauses_s:
        pauses.ended(1)
        pauses.went_on(1, pause_s)
    for _ in range(silent):
        pauses.ended(1)
    return pauses


def test_of_one_pause_no_rhythm_is_known() -> None:
    assert own_window(()) is None
    assert own_window((5.0,)) is None


def test_uneven_pauses_are_no_rhythm() -> None:
    assert own_window((5.0, 10.0)) is not None
    assert own_window((5.0, 10.1)) is None


@pytest.mark.parametrize(("pauses_s", "likelihood"), [((10.0, 20.0), 1 / 3), ((20.0, 10.0, 12.0, 15.0), 3 / 5)])
def test_the_next_pause_is_between_the_others_as_often_as_chance_has_it(
    pauses_s: tuple[float, ...], likelihood: float
) -> None:
    window = own_window(pauses_s)
    assert window is not None
    assert (window.from_s, window.until_s, window.likelihood) == pytest.approx((9.0, 22.0, likelihood))


@given(
    st.lists(SECONDS, min_size=FEW_PAUSES, max_size=100),
    st.integers(0, 60),
    SECONDS,
    SECONDS,
    st.integers(FEW_PAUSES, 80),
)
def test_likelihoods_are_shares_of_what_was_seen(
    pauses_s: list[float], silent: int, silent_s: float, within_s: float, limit: int
) -> None:
    pauses = told(pauses_s, silent, limit)
    last = pauses_s[-limit:]
    # As many as there were, were it not that the oldest pauses are forgotten.
    if len(pauses_s) + silent <= 2 * limit:
        share = (len(pauses_s) + 1) / (len(pauses_s) + silent + 1)
        before = share * sum(each <= silent_s for each in last) / len(last)
        by_then = share * sum(each <= silent_s + within_s for each in last) / len(last)
        expected = (by_then - before) / (1 - before) if before < 1 else 0.0
        assert pauses.likelihood(1, silent_s, within_s) == pytest.approx(expected)
    assert 0 <= pauses.likelihood(1, silent_s, within_s) <= 1 + 1e-9


def test_while_little_is_known_anything_may_go_on() -> None:
    assert told([5.0] * (FEW_PAUSES - 1)).likelihood(1, 100.0, 1.0) == 1.0
    assert told([5.0] * FEW_PAUSES).likelihood(1, 100.0, 1.0) == 0.0


def test_of_all_conversations_the_half_counts_whose_pauses_are_closest_together() -> None:
    pauses = told([*(100.0 + each for each in range(20)), *(200.0 * each for each in range(2, 22))], silent=20)
    window = pauses.window(1, ())
    assert window is not None
    assert (window.from_s, window.until_s) == pytest.approx((90.0, 440.0))
    assert told([5.0] * (FEW_PAUSES - 1)).window(1, ()) is None


def test_a_rhythm_of_its_own_counts_more_than_others() -> None:
    pauses = told([float(each) for each in range(0, 400, 10)])
    own = pauses.window(1, (50.0, 51.0, 49.0))
    assert own is not None
    assert (own.from_s, own.until_s, own.likelihood) == pytest.approx((44.1, 56.1, 0.5))
    assert pauses.window(1, (1.0, 900.0)) == pauses.window(1, ()) != own


def test_later_turns_have_shares_of_their_own() -> None:
    pauses = told([5.0] * FEW_PAUSES, silent=FEW_PAUSES)
    pauses.ended(2)
    pauses.went_on(2, 5.0)
    assert pauses.likelihood(2, 0.0, 10.0) == pytest.approx(1.0)
    assert pauses.likelihood(1, 0.0, 10.0) == pytest.approx(33 / 65)
