"""Early refusal: who would be late is told so at once, and when to come again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelane.engine.channel import Accepted, RefusalReason, Refused, Tokens
from tidelane.engine.request import FLEX_RANK, FinishReason, Request, ServiceTier
from tidelane.engine.scheduling.order import HORIZON
from tidelane.engine.scheduling.plan import Objective, Plan, Scheduler, State
from tidelane.engine.scheduling.policies import policy
from tidelane.engine.slo import Slo

from .virtual import SLO, World, request

# 4,000 tokens take 0.6 s on the whole virtual device of four units and six layers; the TTFT target is 1 s.
LONG = 4000
REFUSING = Objective(SLO, refuse_late=True)
OURS = ("mixed", "chunked", "lanes", "auto")


@dataclass
class Checked:
    """A scheduler whose every plan is looked at: whom it refuses, why, and that it is made of nothing but its input."""

    scheduler: Scheduler

    def plan(self, state: State, now_s: float) -> Plan:
        plan = self.scheduler.plan(state, now_s)
        assert self.scheduler.plan(state, now_s) == plan
        refused = {late.id for late in plan.refuse}
        assert len(refused) == len(plan.refuse)
        assert refused <= {job.id for job in state.newcomers if job.priority[0] < FLEX_RANK}
        assert refused.isdisjoint(each.id for each in state.prefilling)
        assert refused.isdisjoint(each.id for each in state.decoding)
        assert refused.isdisjoint(plan.admit)
        assert all(late.ttft_s > late.target_s for late in plan.refuse)
        return plan


def world(name: str = "lanes", objective: Objective = REFUSING, blocks: int = 40_000) -> World:
    return World(policy=name, policies={name: Checked(policy(name))}, blocks=blocks, objective=objective)


def refusals(at: World) -> dict[str, Refused]:
    return {message.request_id: message for message in at.desk.sent if isinstance(message, Refused)}


def accepted(at: World) -> list[str]:
    return [message.request_id for message in at.desk.sent if isinstance(message, Accepted)]


def computed(at: World) -> set[str]:
    slices = [plan.prefill for _, plan in at.executor.launched if plan.prefill is not None]
    return {span.id for each in slices for span in each.spans}


@pytest.mark.parametrize("name", OURS)
def test_who_would_be_late_is_refused_and_never_computed(name: str) -> None:
    one = world(name)
    one.submit(request("first", prompt=LONG), request("second", prompt=LONG))
    one.turn()
    (late,) = refusals(one).values()
    assert late.reason is RefusalReason.WOULD_BE_LATE
    assert accepted(one) == [({"first", "second"} - {late.request_id}).pop()]
    one.run()
    assert late.request_id not in computed(one)
    assert one.ended.count((None, SLO)) == 1
    assert one.ledger.refusals.total() == 1
    assert one.ledger.empty


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("ttft_s", "retry_after_s"), [(1.0, 1.0), (10.0, 3.0)])
def test_one_like_it_that_comes_when_told_is_on_time(name: str, ttft_s: float, retry_after_s: float) -> None:
    one = world(name, Objective(Slo(ttft_s, SLO.tpot_s), refuse_late=True))
    prompt = int(1900 * ttft_s)  # 0.285 of its target, so that three are on time
    one.submit(*(request(f"r{i}", prompt=prompt) for i in range(8)))
    one.turn()
    assert [late.retry_after_s for late in refusals(one).values()] == [retry_after_s] * 5
    while (end_s := one.executor.next_end_s) is not None and end_s <= retry_after_s:
        one.advance()
    one.clock.now_s = retry_after_s
    one.submit(request("again", prompt=prompt, arrival_s=retry_after_s))
    one.run()
    assert one.endings("again") == [FinishReason.LENGTH]
    assert all(timeline is None or timeline.ttft_s <= ttft_s for timeline, _ in one.ended)


def test_with_serve_everyone_is_accepted_at_once_and_served() -> None:
    one = world(objective=Objective(SLO))
    one.submit(request("first", prompt=LONG), request("second", prompt=LONG))
    one.turn()
    assert sorted(accepted(one)) == ["first", "second"]
    one.run()
    assert one.endings("first") == one.endings("second") == [FinishReason.LENGTH]


def test_first_come_sets_nobody_aside() -> None:
    one = World(policy="MixedBatch", blocks=40_000, objective=REFUSING)
    one.submit(request("first", prompt=LONG), request("second", prompt=LONG))
    one.run()
    assert not refusals(one)


def test_the_objective_changes_while_requests_wait() -> None:
    one = world(objective=Objective(SLO))
    one.submit(request("first", prompt=LONG), request("second", prompt=LONG))
    one.turn()
    one.ledger.objective = REFUSING
    one.submit(request("third", prompt=LONG))
    one.turn()
    assert list(refusals(one)) == ["third"]
    one.run()
    assert one.endings("first") == one.endings("second") == [FinishReason.LENGTH]


def test_flex_and_what_is_out_of_reach_on_an_idle_device_are_served() -> None:
    one = world()
    one.submit(
        request("first", prompt=LONG),
        request("flex", prompt=LONG, tier=ServiceTier.FLEX),
        request("huge", prompt=2 * LONG),
    )
    one.run()
    assert not refusals(one)
    assert one.endings("flex") == one.endings("huge") == [FinishReason.LENGTH]


def test_who_would_hardly_be_on_time_alone_is_served_since_no_later_try_could_be_promised_more() -> None:
    one = world()
    one.submit(request("first", prompt=LONG), request("barely", prompt=int(1.6 * LONG)))  # 0.96 s
    one.turn()
    assert not refusals(one)


def test_a_pass_that_runs_counts_as_half_done() -> None:
    one = world("mixed")
    one.submit(request("runs", prompt=LONG))
    one.turn()
    assert one.executor.launched
    one.submit(request("short", prompt=LONG // 2), request("long", prompt=LONG + 1000))
    one.turn()
    assert list(refusals(one)) == ["long"]


def test_the_decision_log_says_why() -> None:
    one = world("mixed")
    one.submit(request("runs", prompt=LONG))
    one.turn()
    one.submit(request("late", prompt=LONG + 1000))
    one.turn()
    (entry,) = one.loop.decisions.last(1)
    assert entry.why.reason == "late by prediction: refused"
    (late,) = entry.refused
    assert late.tokens == LONG + 1000
    assert late.target_s == pytest.approx(1.0)
    assert late.ttft_s == pytest.approx(0.3 + 0.75)


sizes = st.lists(
    st.tuples(st.integers(1, 7000), st.floats(0, 3), st.sampled_from(ServiceTier), st.integers(1, 6)),
    min_size=1,
    max_size=14,
)


# Room for all of them, and for the longest alone.
BLOCKS = (40_000, 1752)


def _run(name: str, coming: Sequence[Request], blocks: int) -> World:
    one = world(name, blocks=blocks)
    for each in sorted(coming, key=lambda each: each.arrival_s):
        while (end_s := one.executor.next_end_s) is not None and end_s <= each.arrival_s:
            one.advance()
        one.clock.now_s = max(one.clock.now_s, each.arrival_s)
        one.submit(each)
        one.turn()
    one.run()
    return one


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from(OURS), st.sampled_from(BLOCKS))
def test_each_ends_once_and_a_refused_one_was_never_accepted_nor_computed(
    drawn: list[tuple[int, float, ServiceTier, int]], name: str, blocks: int
) -> None:
    coming = [
        request(f"r{i}", prompt=prompt, new=new, arrival_s=arrival_s, tier=tier)
        for i, (prompt, arrival_s, tier, new) in enumerate(drawn)
    ]
    one = _run(name, coming, blocks)
    refused = refusals(one)
    for each in coming:
        assert len(one.endings(each.id)) == 1
        assert (each.id in refused) != (each.id in accepted(one))
        assert (each.id in refused) != (each.id in computed(one))
    assert not any(each.tier is ServiceTier.FLEX for each in coming if each.id in refused)
    for late in refused.values():
        assert late.retry_after_s is not None
        assert 1 <= late.retry_after_s <= 60
        assert late.retry_after_s == int(late.retry_after_s)
    assert one.ledger.empty
    again = _run(name, coming, blocks)
    assert again.desk.sent == one.desk.sent


def test_nobody_is_refused_only_for_being_behind_many() -> None:
    one = world()
    one.submit(*(request(f"r{i:03}", prompt=4, new=1) for i in range(HORIZON + 100)))
    one.turn()
    assert not refusals(one)


def test_one_that_leaves_before_it_was_answered_hears_nothing() -> None:
    one = world()
    one.submit(request("gone"))
    one.abort("gone")
    one.run()
    assert not one.desk.sent
    assert one.ledger.empty


def test_one_that_came_as_all_ends_was_accepted_before_it_fails() -> None:
    one = world()
    one.ledger.submit(request("last"))
    one.ledger.fail_all("the engine is shutting down", 0.0)
    accepted_first, ending = one.ledger.take_outbox()
    assert accepted_first == Accepted("last")
    assert isinstance(ending, Tokens)
    assert ending.finish is FinishReason.ERROR
    assert one.ledger.empty
