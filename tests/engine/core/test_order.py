"""The order of prompts: as many on time as can be, and no one forgotten."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tidelane.engine.lanes.partition import partition_table
from tidelane.engine.request import FLEX_RANK
from tidelane.engine.scheduling.order import PROMOTED_AFTER_S, PROMOTION_PASSES, FirstCome, MooreHodgson
from tidelane.engine.scheduling.plan import Objective, PoolState, Prefilling, Queued, State, Waiting

from .virtual import SLO, true_estimates

NOW_S = 100.0


def queued(name: str, work_s: float, due_s: float, rank: int = 1, arrival_s: float = NOW_S) -> Queued:
    return Queued(name, (rank, arrival_s, name), 100, due_s, work_s)


def state(*waiting: Waiting, next_job: int = 1) -> State:
    by_priority = sorted((job for job in waiting if isinstance(job, Queued)), key=lambda job: job.priority)
    by_due = sorted(by_priority, key=lambda job: (job.priority[0], job.ttft_due_s, job.id))
    return State(
        table=partition_table(4),
        layers=6,
        pool=PoolState(1000, 16),
        objective=Objective(SLO),
        estimates=true_estimates(4, 6),
        next_job=next_job,
        queued=tuple(by_priority),
        queued_by_due=tuple(by_due),
        prefilling=tuple(job for job in waiting if isinstance(job, Prefilling)),
    )


def served(*waiting: Waiting, pace: float = 1.0, next_job: int = 1) -> list[str]:
    return [job.id for job in MooreHodgson().arrange(state(*waiting, next_job=next_job), NOW_S, pace).jobs]


def on_time(order: list[str], jobs: dict[str, Queued]) -> int:
    clock_s, count = NOW_S, 0
    for name in order:
        clock_s += jobs[name].work_s
        count += clock_s <= jobs[name].ttft_due_s
    return count


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), max_size=7))
def test_as_many_are_on_time_as_any_order_allows(sizes: list[tuple[int, int]]) -> None:
    jobs = {f"j{i}": queued(f"j{i}", float(work), NOW_S + due) for i, (work, due) in enumerate(sizes)}
    # A set of jobs can all be on time just when it is in the order of their deadlines.
    best = max(
        len(chosen)
        for size in range(len(jobs) + 1)
        for chosen in combinations(sorted(jobs, key=lambda name: jobs[name].ttft_due_s), size)
        if on_time(list(chosen), jobs) == len(chosen)
    )
    assert on_time(served(*jobs.values()), jobs) == best


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0.1, 5), st.floats(-5, 20), st.booleans(), st.floats(0, 5)), max_size=12
    ),
    st.sampled_from([FirstCome(), MooreHodgson()]),
    st.integers(1, 16),
)
def test_everyone_stands_in_line_once(
    sizes: list[tuple[int, float, float, bool, float]], order: FirstCome | MooreHodgson, next_job: int
) -> None:
    waiting: list[Waiting] = []
    for i, (rank, work_s, due_s, holds_blocks, age_s) in enumerate(sizes):
        job = queued(f"j{i:02}", work_s, NOW_S + due_s, rank, NOW_S - age_s)
        held = Prefilling(job.id, job.priority, job.tokens, 10, job.ttft_due_s, job.work_s)
        waiting.append(held if holds_blocks else job)
    arranged = order.arrange(state(*waiting, next_job=next_job), NOW_S, 1.0)
    assert sorted(job.id for job in arranged.jobs) == sorted(job.id for job in waiting)


def test_the_longest_is_set_aside_when_one_would_be_late() -> None:
    long, short, third = queued("long", 5, NOW_S + 6), queued("short", 1, NOW_S + 6.5), queued("third", 1, NOW_S + 6.9)
    assert served(long, short, third) == ["short", "third", "long"]


def test_at_a_slower_pace_fewer_are_on_time() -> None:
    jobs = [queued(f"j{i}", 1, NOW_S + 2 * i + 2) for i in range(3)]
    assert served(*jobs) == ["j0", "j1", "j2"]
    assert served(jobs[0], queued("big", 1.4, NOW_S + 3), pace=2.0) == ["j0", "big"]


def test_a_higher_tier_goes_first_and_flex_last() -> None:
    tight = queued("default", 1, NOW_S + 1.5)
    assert served(tight, queued("priority", 1, NOW_S + 9, rank=0)) == ["priority", "default"]
    flex = queued("flex", 1, NOW_S + 0.5, rank=FLEX_RANK, arrival_s=0)
    late = queued("late", 1, NOW_S - 5)
    assert served(flex, late, tight) == ["default", "late", "flex"]


def test_those_set_aside_follow_in_order_of_arrival_and_the_pass_is_known_to_be_late() -> None:
    jobs = [queued("b", 1, NOW_S - 3, arrival_s=95), queued("a", 1, NOW_S - 2, arrival_s=96)]
    assert served(*jobs) == ["b", "a"]
    assert MooreHodgson().arrange(state(*jobs), NOW_S, 1.0).late
    assert not MooreHodgson().arrange(state(queued("c", 1, NOW_S + 3)), NOW_S, 1.0).late


def test_who_is_late_for_long_gets_every_eighth_pass() -> None:
    old = queued("old", 9, NOW_S - PROMOTED_AFTER_S - 1, arrival_s=1)
    fresh = queued("fresh", 1, NOW_S + 5)
    turns = [served(old, fresh, next_job=job)[0] for job in range(1, 2 * PROMOTION_PASSES + 1)]
    assert turns.count("old") == 2
    patient = replace(old, ttft_due_s=NOW_S - PROMOTED_AFTER_S + 1)
    assert served(patient, fresh, next_job=PROMOTION_PASSES)[0] == "fresh"
    # However much time one that came before it still has.
    leisurely = queued("leisurely", 900, NOW_S + 600, arrival_s=0)
    assert served(leisurely, old, fresh, next_job=PROMOTION_PASSES)[0] == "old"


def test_so_does_one_that_was_begun_and_holds_blocks() -> None:
    half_done = Prefilling("half done", (1, 1.0, "half done"), 100_000, 50_000, NOW_S - PROMOTED_AFTER_S - 1, 9.0)
    fresh = queued("fresh", 1, NOW_S + 5)
    assert served(half_done, fresh, next_job=PROMOTION_PASSES)[0] == "half done"
    assert served(half_done, fresh, next_job=PROMOTION_PASSES + 1)[0] == "fresh"


def test_a_tier_above_makes_nobody_wait_for_ever() -> None:
    old = queued("old", 9, NOW_S - PROMOTED_AFTER_S - 1, rank=1, arrival_s=1)
    urgent = [queued(f"u{number}", 1, NOW_S + 60, rank=0, arrival_s=2) for number in range(3)]
    turns = [served(*urgent, old, next_job=job)[0] for job in range(1, 2 * PROMOTION_PASSES + 1)]
    assert turns.count("old") == 2


@pytest.mark.parametrize("count", [10, 3000])
def test_thousands_may_wait(count: int) -> None:
    jobs = [queued(f"j{i:04}", 0.001, NOW_S + 1 + i / 100) for i in range(count)]
    assert len(served(*jobs)) == count
