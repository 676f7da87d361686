"""The number of replicas by load: what must hold whatever was measured, and with queues whose waits are known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelane.engine.slo import Slo
from tidelane.operator.observation import Measured, Phase, Reach, Replica, TtftParts
from tidelane.operator.resources import ScalingBounds
from tidelane.operator.scaling import Decision, Wanted, decide, load_behind, wait_p90_s
from tidelane.rpc.wire import ReplicaRef

START = datetime(2030, 1, 1, tzinfo=UTC)
STABILISATION_S = 300.0
PREFILL_S = 0.1
SLO = Slo(ttft_s=1.0, tpot_s=0.05, percentile=90)


def replica(
    index: int = 0,
    requests: int = 50,
    attainment: float = 1.0,
    queue_p90_s: float = 0.0,
    tpot_s: float = 0.02,
    window_s: float = 60.0,
    idle: bool = False,
    parts: bool = True,
) -> Replica:
    waited = TtftParts(queue_p90_s, PREFILL_S, queue_p90_s, PREFILL_S) if parts else None
    measured = Measured(requests, 0.3, tpot_s, attainment, 1.0, 0.2, tpot_s, window_s, waited)
    ref = ReplicaRef("default", "chat", "uid-1", index)
    return Replica(ref, 1, 1, Phase.READY, measured=measured, idle=idle, reach=Reach(100, PREFILL_S, 0.015))


replicas = st.builds(
    replica,
    requests=st.integers(0, 200),
    attainment=st.floats(0, 1),
    queue_p90_s=st.floats(0, 30),
    tpot_s=st.floats(0, 0.2),
    window_s=st.sampled_from([5.0, 20.0, 60.0]),
    idle=st.booleans(),
    parts=st.booleans(),
)
bounds = st.tuples(st.integers(1, 12), st.integers(1, 12)).map(lambda pair: ScalingBounds(min(pair), max(pair)))
calm = st.none() | st.floats(0, 400).map(lambda ago_s: START - timedelta(seconds=ago_s))


def numbered(of: Sequence[Replica]) -> list[Replica]:
    return [replace(each, ref=replace(each.ref, index=index)) for index, each in enumerate(of)]


def decided(
    within: ScalingBounds, of: Sequence[Replica | None], calm_since: datetime | None = None, present: int | None = None
) -> Decision:
    return decide(Wanted(within, SLO), present or len(of), of, calm_since, START, STABILISATION_S)


@settings(max_examples=40)
@given(within=bounds, present=st.integers(1, 14), of=st.lists(replicas | st.none(), max_size=14), calm_since=calm)
def test_within_the_bounds_and_never_by_too_much(
    within: ScalingBounds, present: int, of: list[Replica | None], calm_since: datetime | None
) -> None:
    made = decided(within, of, calm_since, present)
    assert within.min <= made.replicas <= within.max
    if within.min <= present <= within.max:
        assert present - 1 <= made.replicas <= 2 * present
    assert bool(made.reason) == (made.replicas != present)


@settings(max_examples=40)
@given(within=bounds, of=st.lists(replicas, min_size=1, max_size=6), calm_since=calm, data=st.data())
def test_the_order_of_replicas_does_not_matter(
    within: ScalingBounds, of: list[Replica], calm_since: datetime | None, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(numbered(of)))
    assert decided(within, shuffled, calm_since) == decided(within, numbered(of), calm_since)


@settings(max_examples=40)
@given(
    within=bounds,
    of=st.lists(replicas, min_size=1, max_size=6),
    calm_since=calm,
    worse=st.tuples(st.floats(0, 1), st.floats(0, 20), st.floats(0, 0.1)),
    data=st.data(),
)
def test_more_load_never_means_fewer(
    within: ScalingBounds,
    of: list[Replica],
    calm_since: datetime | None,
    worse: tuple[float, float, float],
    data: st.DataObject,
) -> None:
    share, waits_s, slower_s = worse
    index = data.draw(st.integers(0, len(of) - 1))
    measured = of[index].measured
    assert measured
    parts = measured.parts
    heavier = replace(
        measured,
        attainment=measured.attainment * share,
        tpot_s=measured.tpot_s + slower_s,
        tpot_median_s=measured.tpot_median_s + slower_s,
        parts=replace(parts, queue_p90_s=parts.queue_p90_s + waits_s) if parts else None,
    )
    after = [*of[:index], replace(of[index], measured=heavier, idle=False), *of[index + 1 :]]
    assert decided(within, after, calm_since).replicas >= decided(within, of, calm_since).replicas


@settings(max_examples=40)
@given(within=bounds, figures=replicas, present=st.integers(1, 12))
def test_steady_figures_move_the_number_one_way_only(within: ScalingBounds, figures: Replica, present: int) -> None:
    present, calm_since, numbers = min(max(present, within.min), within.max), None, []
    for step in range(40):
        now = START + timedelta(seconds=60 * step)
        same = numbered([figures] * present)
        made = decide(Wanted(within, SLO), present, same, calm_since, now, STABILISATION_S)
        present, calm_since = made.replicas, made.calm_since
        numbers.append(present)
    assert numbers in (sorted(numbers), sorted(numbers, reverse=True))


def prompts_of_any_length(load: float) -> float:
    return wait_p90_s(load, PREFILL_S)


def prompts_of_one_length(load: float) -> float:
    """They wait half as long."""
    return wait_p90_s(load, PREFILL_S) / 2


@pytest.mark.parametrize("wait", [prompts_of_any_length, prompts_of_one_length])
@settings(max_examples=25)
@given(load=st.floats(0.01, 9), present=st.integers(1, 12), target_s=st.floats(0.1, 20))
def test_with_a_known_queue_the_number_comes_to_rest_where_it_is_short_enough(
    wait: Callable[[float], float], load: float, present: int, target_s: float
) -> None:
    """`load` is that of all replicas together, so that n of them wait as at load / n."""
    within, calm_since, numbers = ScalingBounds(1, 64), None, []
    slo = replace(SLO, ttft_s=target_s)
    for step in range(120):
        waits_s = min(wait(load / present), 60.0)
        now = START + timedelta(seconds=60 * step)
        each = [replica(index, queue_p90_s=waits_s) for index in range(present)]
        made = decide(Wanted(within, slo), present, each, calm_since, now, STABILISATION_S)
        present, calm_since = made.replicas, made.calm_since
        numbers.append(present)
    assert len(set(numbers[-30:])) == 1
    assert wait(load / present) <= target_s / 2
    turns = [after - before for before, after in itertools.pairwise(numbers) if after != before]
    # Once it goes down it does not go up again.
    assert turns == sorted(turns, key=lambda step: step < 0)


class TestWhenToDoNothing:
    CALM = START - timedelta(seconds=STABILISATION_S)

    @pytest.mark.parametrize(
        "other",
        [None, replica(1, window_s=10.0), replica(1, window_s=40.0), replace(replica(1), measured=None)],
        ids=["not serving", "young", "of another number", "unmeasured"],
    )
    @pytest.mark.parametrize("attainment", [0.2, 1.0])
    def test_one_that_cannot_tell(self, other: Replica | None, attainment: float) -> None:
        made = decided(ScalingBounds(1, 8), [replica(attainment=attainment), other], self.CALM)
        assert made == Decision(2)

    def test_few_requests_ask_for_no_more(self) -> None:
        assert decided(ScalingBounds(1, 8), [replica(requests=2, attainment=0.0)]).replicas == 1
        assert decided(ScalingBounds(1, 8), [replica(requests=9, queue_p90_s=5.0)]).replicas == 1
        assert decided(ScalingBounds(1, 8), [replica(requests=10, queue_p90_s=5.0)]).replicas == 2

    def test_nothing_ended_is_calm_only_where_nothing_runs(self) -> None:
        for idle, expected in ((True, 1), (False, 2)):
            busy = [replica(0, requests=0, idle=idle), replica(1, requests=0, idle=True)]
            assert decided(ScalingBounds(1, 8), busy, self.CALM).replicas == expected

    @pytest.mark.parametrize(
        ("figures", "expected"),
        [
            ({}, 1),
            ({"attainment": 0.89, "requests": 20}, 2),
            ({"queue_p90_s": 0.2}, 2),
            # Alone 15 ms; at 24 ms three eighths are taken, at twice that three quarters: 60 ms.
            ({"tpot_s": 0.024}, 2),
            ({"tpot_s": 0.022}, 1),
            ({"parts": False}, 2),
        ],
    )
    def test_the_busiest_replica_decides(self, figures: dict[str, float], expected: int) -> None:
        both = [replica(0), replica(1, **figures)]  # type: ignore[arg-type]
        assert decided(ScalingBounds(1, 8), both, self.CALM).replicas == expected

    def test_a_clock_that_is_set_back_begins_the_window_again(self) -> None:
        later = START + timedelta(hours=1)
        made = decided(ScalingBounds(1, 8), [replica(0), replica(1)], later)
        assert made == Decision(2, calm_since=START, again_in_s=STABILISATION_S)


def test_need_follows_how_many_are_late() -> None:
    for share, expected in ((0.89, 5), (0.7, 6), (0.6, 6), (0.5, 8), (0.1, 8), (0.0, 8)):
        of = [*(replica(index) for index in range(3)), replica(3, attainment=share)]
        assert decided(ScalingBounds(1, 64), of).replicas == expected
    assert decided(ScalingBounds(1, 5), of).replicas == 5


def test_need_follows_how_long_prompts_wait() -> None:
    waits_s = (0.49, 0.51, 0.8, 1.5, 60.0)
    six = [[replica(index, queue_p90_s=queue_p90_s) for index in range(6)] for queue_p90_s in waits_s]
    numbers = [decided(ScalingBounds(1, 64), each).replicas for each in six]
    assert numbers == sorted(numbers)
    assert numbers[0] == 6
    assert 6 < numbers[1] < numbers[-1] <= 12


@given(load=st.floats(0.11, 0.999), prefill_s=st.floats(0.001, 10))
def test_the_load_behind_a_wait(load: float, prefill_s: float) -> None:
    assert load_behind(wait_p90_s(load, prefill_s), prefill_s) == pytest.approx(load, abs=1e-6)
    assert load_behind(0.0, prefill_s) == pytest.approx(0.1)
    # Of the waits at load 0.5, a tenth are longer: 0.5 * exp(-0.5 * t) = 0.1.
    assert wait_p90_s(0.5, 1.0) == pytest.approx(2 * math.log(5))
