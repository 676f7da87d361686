"""Whole replays: every request ends once, and the same arguments give the same result to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tidelane.engine.bench.traffic import Arrival, Traffic
from tidelane.engine.channel import RefusalReason
from tidelane.engine.execution.executor import Completion
from tidelane.engine.scheduling.plan import Plan, Scheduler, State
from tidelane.engine.scheduling.policies import policy
from tidelane.engine.sim.executor import VirtualExecutor
from tidelane.engine.sim.figures import figures_of
from tidelane.engine.sim.world import Replay, Settings, Stalled, replay

from .machines import SLO, machine, traffic

POLICIES = ("mixed", "chunked", "static", "lanes", "auto")


def make(name: str, order: str = "own") -> Callable[[], Scheduler]:
    split = machine().table.splits[0]
    return lambda: policy(name, order, split=split if name == "static" else None)


@pytest.mark.parametrize("order", ["own", "ours"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("blocks", "engines"), [(1000, 1), (40, 1), (40, 3)])
def test_every_request_ends_once(name: str, order: str, blocks: int, engines: int) -> None:
    sent = traffic()
    done = replay(sent, machine(blocks=blocks), make(name, order), Settings(SLO, engines=engines))
    assert [answer.arrival for answer in done.answers] == list(sent.arrivals)
    assert done.gpus == engines
    tokens = 0
    for answer in done.answers:
        assert answer.timeline is not None
        assert answer.timeline.output_tokens == answer.arrival.output_tokens
        assert answer.timeline.input_tokens == answer.arrival.input_tokens
        assert answer.timeline.arrival_s == answer.arrival.at_s
        assert answer.timeline.prefill_start_s >= answer.arrival.at_s
        tokens += answer.timeline.output_tokens
    assert done.gaps.count == tokens - len(sent.arrivals)


@pytest.mark.parametrize("name", POLICIES)
def test_a_replay_can_be_repeated_to_the_bit(name: str) -> None:
    settings = Settings(SLO, engines=2, noise=0.1, seed=4)
    first, second = (replay(traffic(), machine(blocks=60), make(name), settings) for _ in range(2))
    assert first.answers == second.answers
    assert first.shares == second.shares
    assert first.busy_s == second.busy_s
    assert first.gaps.percentiles(50, 99, 100) == second.gaps.percentiles(50, 99, 100)
    other = replay(traffic(), machine(blocks=60), make(name), Settings(SLO, engines=2, noise=0.1, seed=5))
    assert other.answers != first.answers


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("blocks", "engines", "rate", "noise"), [(1000, 1, 1.0, 0.0), (40, 2, 2.0, 0.1), (25, 1, 3.0, 0.0)]
)
def test_steps_in_a_row_come_to_what_turn_after_turn_would(
    name: str, blocks: int, engines: int, rate: float, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals = traffic(40, rate).arrivals
    some_flex = tuple(replace(each, tier="flex") if at % 9 == 4 else each for at, each in enumerate(arrivals))
    run_on, ran_on = VirtualExecutor.run_on, 0

    def counted(executor: VirtualExecutor, most: int, until_s: float) -> list[Completion]:
        nonlocal ran_on
        steps = run_on(executor, most, until_s)
        ran_on += len(steps)
        return steps

    def replayed() -> Replay:
        settings = Settings(SLO, engines=engines, noise=noise)
        sent = Traffic(some_flex, arrivals[-1].at_s)
        return replay(sent, machine(blocks=blocks, overhead_s=0.001), make(name, "ours"), settings)

    monkeypatch.setattr(VirtualExecutor, "run_on", counted)
    in_a_row = replayed()
    assert ran_on > 20
    monkeypatch.setattr(VirtualExecutor, "run_on", lambda executor, most, until_s: [])
    turn_by_turn = replayed()
    assert replace(in_a_row, gaps=turn_by_turn.gaps) == turn_by_turn
    every = range(0, 101, 5)
    assert in_a_row.gaps.percentiles(*every) == turn_by_turn.gaps.percentiles(*every)


def test_one_request_by_hand() -> None:
    sent = Traffic((Arrival(2.0, 100, 3),), 10.0)
    (answer,) = replay(sent, machine(), make("mixed"), Settings(SLO)).answers
    assert answer.timeline is not None
    assert answer.timeline.first_token_s == pytest.approx(2.1)
    assert answer.timeline.last_token_s == pytest.approx(2.12)
    assert answer.timeline.longest_gap_s == pytest.approx(0.01)


def test_flex_work_waits_for_what_came_later() -> None:
    at_once = tuple(Arrival(0.0, 300, 20, tier="flex") for _ in range(8))
    done = replay(Traffic((*at_once, Arrival(0.01, 300, 20)), 1.0), machine(), make("lanes"), Settings(SLO))
    first_tokens_s = [answer.timeline.first_token_s for answer in done.answers if answer.timeline is not None]
    assert len(first_tokens_s) == 9
    assert sum(each < first_tokens_s[-1] for each in first_tokens_s) <= 1  # what had begun when it came


def test_refused_as_late_counts_as_missed_and_is_told_apart() -> None:
    # Each prompt takes most of its TTFT target, so that of those that come at once only one can be on time.
    tokens = int(700 * SLO.ttft_s)
    sent = Traffic((Arrival(0.0, tokens, 2),) * 4, 1.0)
    served, refused = (
        figures_of(replay(sent, machine(), make("lanes", "ours"), Settings(SLO, refuse_late=late)), 1.0, SLO)
        for late in (False, True)
    )
    assert (served.attainment, served.refused_late) == (0.25, 0.0)
    assert (refused.attainment, refused.refused_late) == (0.25, 0.75)
    assert served.aside is not None
    assert refused.aside is None


def test_refusals_are_answers() -> None:
    sent = Traffic((Arrival(0.0, 100, 300), Arrival(0.0, 100, 3), Arrival(0.0, 5, 1), Arrival(0.0, 5, 1)), 1.0)
    done = replay(sent, machine(blocks=10), make("mixed"), Settings(SLO, queue_limit=2))
    assert [answer.refusal for answer in done.answers] == [
        RefusalReason.NEVER_FITS,
        None,
        None,
        RefusalReason.QUEUE_FULL,
    ]


def test_engines_share_the_load() -> None:
    alone = replay(traffic(), machine(), make("mixed"), Settings(SLO))
    shared = replay(traffic(), machine(), make("mixed"), Settings(SLO, engines=3))
    assert shared.ended_s <= alone.ended_s
    ttft = [sum(a.timeline.ttft_s for a in done.answers if a.timeline) for done in (alone, shared)]
    assert ttft[1] < ttft[0]


def test_known_beginnings_are_not_computed_again() -> None:
    first, again = Arrival(0.0, 1100, 2, hash_ids=(1, 2, 3)), Arrival(5.0, 1100, 2, hash_ids=(1, 2, 4))
    done = replay(Traffic((first, again), 6.0), machine(), make("mixed"), Settings(SLO))
    ttft = [answer.timeline.ttft_s for answer in done.answers if answer.timeline]
    assert ttft == pytest.approx([1.1, 1.1 - 1.024])


class _Lazy:
    def plan(self, state: State, now_s: float) -> Plan:
        return Plan(state.table.whole)


def test_a_policy_that_launches_nothing_is_caught() -> None:
    with pytest.raises(Stalled, match="1 queued, 0 prefilling"):
        replay(Traffic((Arrival(0.0, 5, 1),), 1.0), machine(), _Lazy, Settings(SLO))
