"""Whether another backend is asked: by hand, and what must hold whatever happened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.http.errors import ApiError, Unavailable
from tidelane.router.choice import Fitness, Ranked, Why
from tidelane.router.retries import (
    MOST_BROKEN_OFF,
    BackendLost,
    Ended,
    Refusal,
    Try,
    last_word,
    next_backend,
    soonest_retry_s,
)


def ranked(name: str, ttft_s: float = 0.1, strain: float = 0.1, fitness: Fitness = Fitness.HEALTHY) -> Ranked:
    return Ranked(name, ttft_s, strain, 0, fitness, Why.SOONEST)


def refused(name: str, status: int, retry_after_s: float | None) -> Try:
    ended = Ended.BUSY if status == 429 else Ended.CLOSED
    return Try(name, ended, Refusal(status, (), name.encode(), retry_after_s))


def test_who_should_be_on_time_is_asked_after_a_429_and_who_is_late_only_if_sooner_than_coming_again() -> None:
    tries = [refused("a", 429, 5.0)]
    assert next_backend([ranked("a"), ranked("b", ttft_s=9.0, strain=0.9)], tries, 3) is not None
    assert next_backend([ranked("a"), ranked("b", ttft_s=4.9, strain=2.0)], tries, 3) is not None
    assert next_backend([ranked("a"), ranked("b", ttft_s=5.1, strain=2.0)], tries, 3) is None
    assert next_backend([ranked("a"), ranked("b", fitness=Fitness.DOUBTFUL)], tries, 3) is None


def test_the_soonest_429_is_the_last_word_then_the_soonest_503() -> None:
    busy, busier, closed = refused("a", 429, 3.0), refused("b", 429, 8.0), refused("c", 503, 1.0)
    assert last_word([closed, busier, busy]) is busy.refusal
    assert last_word([Try("d", Ended.UNREACHABLE), closed, refused("e", 503, None)]) is closed.refusal


@pytest.mark.parametrize(
    ("tries", "kind", "text"),
    [
        ([], Unavailable, "No replica can be reached (none is known)."),
        ([Try("a", Ended.UNREACHABLE), Try("b", Ended.UNREACHABLE)], Unavailable, "(a, b)"),
        ([Try("a", Ended.BROKEN_OFF), Try("b", Ended.UNREACHABLE)], BackendLost, "broke off (a, b)"),
    ],
)
def test_where_none_said_anything_it_is_said_what_happened(tries: list[Try], kind: type[ApiError], text: str) -> None:
    word = last_word(tries)
    assert isinstance(word, kind)
    assert text in word.message


NAMES = [f"backend-{number}" for number in range(5)]
FLEETS = st.permutations(NAMES).flatmap(
    lambda names: st.tuples(
        *(
            st.builds(ranked, st.just(name), st.floats(0, 10), st.floats(0, 3), st.sampled_from(Fitness))
            for name in names
        )
    )
)
TRIES = st.lists(
    st.one_of(
        st.builds(Try, st.sampled_from(NAMES), st.sampled_from((Ended.UNREACHABLE, Ended.BROKEN_OFF))),
        st.builds(refused, st.sampled_from(NAMES), st.sampled_from((429, 503)), st.none() | st.floats(1, 60)),
    ),
    max_size=5,
    unique_by=lambda each: each.name,
)


@given(FLEETS, TRIES, st.integers(1, 5))
def test_nobody_twice_no_more_than_allowed_and_nobody_before_who_is_better(
    fleet: tuple[Ranked, ...], tries: list[Try], most: int
) -> None:
    chosen = next_backend(fleet, tries, most)
    tried = {each.name for each in tries}
    broken_off = sum(each.ended is Ended.BROKEN_OFF for each in tries)
    if chosen is not None:
        assert chosen is next(each for each in fleet if each.name not in tried)
        assert len(tries) < most
        assert broken_off < MOST_BROKEN_OFF
    elif not any(each.ended is Ended.BUSY for each in tries):
        assert len(tries) >= most or broken_off >= MOST_BROKEN_OFF or tried == set(NAMES)


@given(TRIES)
def test_a_client_is_told_the_soonest_time_of_its_kind(tries: list[Try]) -> None:
    word = last_word(tries)
    if isinstance(word, Refusal) and word.status == 429 and word.retry_after_s is not None:
        of_kind = [each for each in tries if each.ended is Ended.BUSY]
        assert word.retry_after_s == soonest_retry_s(of_kind)
