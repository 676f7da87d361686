"""Which backend gets a request: examples by hand, and what must hold whatever there is to choose between."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.request import ServiceTier
from tidelane.engine.slo import Slo
from tidelane.router.ask import Ask
from tidelane.router.choice import Fitness, View, Why, choose

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
# 400 tokens of its own take half a second.
ASK = Ask("chat", ServiceTier.DEFAULT, 400)
IDLE = View("a", Fitness.HEALTHY, prefill_tokens_per_s=800.0, step_s=0.02, kv_free_tokens=4000, slo=SLO)


def names(ask: Ask, *views: View) -> list[str]:
    return [each.name for each in choose(ask, views)]


def test_ttft_is_what_is_before_it_and_its_own_at_the_measured_rate_and_pace() -> None:
    (only,) = choose(ASK, [replace(IDLE, tokens_before=240, resident_tokens=128, pace=1.5)])
    assert only.ttft_s == pytest.approx((240 + 400 - 128) / 800 * 1.5)
    assert only.strain == pytest.approx(only.ttft_s / 1.0)
    assert only.why is Why.ONLY


def test_a_step_that_is_too_long_strains_as_well() -> None:
    (only,) = choose(ASK, [replace(IDLE, step_s=0.25)])
    assert only.strain == pytest.approx(2.5)
    assert not only.on_time


def test_the_requests_own_targets_count_before_the_services() -> None:
    (only,) = choose(replace(ASK, ttft_s=0.25, tpot_s=1.0), [IDLE])
    assert only.strain == pytest.approx(2.0)


def test_of_easy_ones_the_beginning_decides_though_it_takes_longer() -> None:
    there = replace(IDLE, name="b", tokens_before=300, resident_tokens=256)
    best, _ = choose(ASK, [IDLE, there])
    assert (best.name, best.why) == ("b", Why.RESIDENT)


def test_a_beginning_of_less_than_a_quarter_of_the_prompt_decides_nothing() -> None:
    there = replace(IDLE, name="b", tokens_before=120, resident_tokens=96)
    best, _ = choose(ASK, [IDLE, there])
    assert (best.name, best.why) == ("a", Why.SOONEST)


def test_a_beginning_does_not_make_up_for_being_nearly_late() -> None:
    there = replace(IDLE, name="b", tokens_before=480, resident_tokens=320)
    assert names(ASK, IDLE, there) == ["b", "a"]
    assert names(ASK, IDLE, replace(there, tokens_before=500)) == ["a", "b"]


def test_without_room_for_its_kv_a_backend_is_not_easy() -> None:
    full = replace(IDLE, name="b", kv_free_tokens=399)
    assert names(ASK, replace(IDLE, tokens_before=100), full) == ["a", "b"]


def test_where_all_are_late_the_least_late_gets_it_whatever_it_has_kept() -> None:
    late = replace(IDLE, tokens_before=2000)
    later = replace(IDLE, name="b", tokens_before=2500, resident_tokens=320)
    best, _ = choose(ASK, [later, late])
    assert (best.name, best.why, best.on_time) == ("a", Why.LEAST_LATE, False)


def test_flex_goes_where_the_fewest_interactive_requests_are() -> None:
    flex = replace(ASK, tier=ServiceTier.FLEX)
    calm = replace(IDLE, name="b", tokens_before=5000, interactive=1, requests=9)
    best, _ = choose(flex, [replace(IDLE, interactive=2, requests=2), calm])
    assert (best.name, best.why) == ("b", Why.LEAST_DISTURBED)


def test_an_unhealthy_one_is_the_last_resort() -> None:
    (best, second) = choose(ASK, [replace(IDLE, fitness=Fitness.DOUBTFUL), replace(IDLE, name="b", tokens_before=9e6)])
    assert (best.name, second.name, second.why) == ("b", "a", Why.LAST_RESORT)


def test_equals_are_told_apart_by_the_prompt_and_not_by_their_names() -> None:
    pair = [IDLE, replace(IDLE, name="b")]
    first = {names(replace(ASK, home=str(number).encode()), *pair)[0] for number in range(20)}
    assert first == {"a", "b"}


ASKS = st.builds(
    Ask,
    st.just("chat"),
    st.sampled_from(ServiceTier),
    st.integers(1, 5000),
    ttft_s=st.none() | st.floats(0.01, 10),
    tpot_s=st.none() | st.floats(0.01, 1),
    home=st.binary(max_size=4),
)
VIEWS = st.builds(
    View,
    name=st.just(""),
    fitness=st.sampled_from(Fitness),
    tokens_before=st.integers(0, 20_000).map(float),
    resident_tokens=st.integers(0, 5000),
    prefill_tokens_per_s=st.sampled_from((0.0, 100.0, 800.0, 20_000.0)),
    pace=st.sampled_from((0.5, 1.0, 2.0)),
    step_s=st.sampled_from((0.0, 0.02, 0.2)),
    requests=st.integers(0, 50),
    interactive=st.integers(0, 50),
    kv_free_tokens=st.none() | st.integers(-500, 5000),
    slo=st.just(SLO),
)
FLEETS = st.lists(VIEWS, min_size=1, max_size=6).map(
    lambda views: [replace(view, name=f"backend-{number}") for number, view in enumerate(views)]
)


@given(ASKS, FLEETS)
def test_never_an_unhealthy_one_before_a_healthy_one(ask: Ask, views: list[View]) -> None:
    ranked = [each.fitness for each in choose(ask, views)]
    assert ranked == sorted(ranked)
    assert len(ranked) == len(views)


@given(ASKS, FLEETS, st.randoms())
def test_neither_order_nor_repetition_matters(ask: Ask, views: list[View], chance: object) -> None:
    shuffled = list(views)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose(ask, shuffled) == choose(ask, views) == choose(ask, views)


@given(ASKS, FLEETS, st.data())
def test_one_that_is_better_is_never_passed_over(ask: Ask, views: list[View], data: st.DataObject) -> None:
    """Better in something that is weighed and worse in nothing."""
    worse = data.draw(st.sampled_from(views))
    rate = worse.prefill_tokens_per_s or 20_000.0
    worse = replace(worse, prefill_tokens_per_s=rate)
    better = replace(
        worse,
        name="better",
        fitness=data.draw(st.sampled_from([each for each in Fitness if each <= worse.fitness])),
        tokens_before=worse.tokens_before * data.draw(st.floats(0, 1)),
        resident_tokens=worse.resident_tokens + data.draw(st.integers(0, 500)),
        prefill_tokens_per_s=rate * data.draw(st.floats(1, 2)),
        step_s=worse.step_s * data.draw(st.floats(0, 1)),
        requests=worse.requests - data.draw(st.integers(1, 5)),
        interactive=worse.interactive - data.draw(st.integers(0, 5)),
        kv_free_tokens=None if worse.kv_free_tokens is None else worse.kv_free_tokens + data.draw(st.integers(0, 500)),
    )
    ranked = names(ask, better, *[worse if view.name == worse.name else view for view in views])
    assert ranked.index("better") < ranked.index(worse.name)
