"""Policies, ledger and loop together, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelane.engine.channel import ForLoop, RefusalReason, Refused, Submit
from tidelane.engine.kv.keys import TokenNames
from tidelane.engine.lanes.partition import Partition
from tidelane.engine.request import FinishReason, Request, ServiceTier
from tidelane.engine.scheduling.plan import Decoding, Objective, PoolState, Prefilling, PrefillSlice
from tidelane.engine.usage import Use

from .virtual import SLO, World, request

POLICIES = ("Lanes", "Auto", "ChunkedPrefill", "ChunkedByBudget", "MixedBatch")


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    count = draw(st.integers(1, 12))
    return [
        request(
            f"r{i:02}",
            draw(st.integers(1, 40)),
            draw(st.integers(1, 20)),
            arrival_s=draw(st.floats(0, 2)),
            tier=draw(st.sampled_from(ServiceTier)),
            first=draw(st.sampled_from([0, 0, 7])),
        )
        for i in range(count)
    ]


@settings(max_examples=150)
@given(
    workloads(),
    st.sampled_from(POLICIES),
    st.integers(15, 60),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["abort", "switch"]), st.integers(0, 11)), max_size=8),
    st.sampled_from([(None, 0, 0), *((TokenNames(b"", 4), *slots) for slots in ((0, 0), (7, 0), (60, 0), (7, 40)))]),
)
def test_every_request_ends_once_with_its_tokens_and_every_block_comes_back(
    requests: list[Request],
    policy: str,
    blocks: int,
    units: int,
    events: list[tuple[int, str, int]],
    sharing: tuple[TokenNames | None, int, int],
) -> None:
    names, host_slots, disk_slots = sharing
    world = World(policy=policy, units=units, blocks=blocks, names=names, host_slots=host_slots, disk_slots=disk_slots)
    by_turn = sorted(events)
    world.submit(*requests)
    aborted: set[str] = set()
    turn = 0
    while world.advance() or by_turn:
        turn += 1
        while by_turn and by_turn[0][0] <= turn:
            _, kind, which = by_turn.pop(0)
            if kind == "switch":
                world.desk.policy_name = POLICIES[which % len(POLICIES)]
            elif which < len(requests):
                aborted.add(requests[which].id)
                world.abort(requests[which].id)
        assert turn < 20_000
    assert world.ledger.pool.free == blocks
    assert world.ledger.empty
    for r in requests:
        if r.id not in aborted:
            assert world.endings(r.id) == [FinishReason.LENGTH]
            first = len(r.prompt)
            assert world.tokens(r.id) == [1000 + first + i for i in range(r.max_new_tokens)]
        assert len(world.endings(r.id)) <= 1


@pytest.mark.parametrize("policy", POLICIES)
def test_one_core_serves_too(policy: str) -> None:
    world = World(policy=policy, units=1)
    world.submit(request("a"), request("b"))
    world.run()
    assert world.endings("a") == world.endings("b") == [FinishReason.LENGTH]
    assert world.usage.seconds[Use.SPLIT] == 0


def test_decode_goes_on_while_a_long_prompt_is_prefilled() -> None:
    world = World(policy="Lanes", units=2, layers=30, blocks=2000)
    world.submit(request("chat", prompt=4, new=400))
    for _ in range(10):
        world.advance()
    before = len(world.tokens("chat"))
    world.submit(request("long", prompt=64, new=1))
    while not world.endings("long"):
        world.advance()
    during = len(world.tokens("chat")) - before
    # 64 tokens x 30 layers on one unit take 0.192 s; a step on the other takes 0.021 s.
    assert during >= 8
    assert world.usage.seconds[Use.SPLIT] > 0.15


def test_mixed_stalls_decode_for_the_whole_prompt() -> None:
    world = World(policy="MixedBatch", units=2, layers=30, blocks=2000)
    world.submit(request("chat", prompt=4, new=50))
    for _ in range(10):
        world.advance()
    before = len(world.tokens("chat"))
    world.submit(request("long", prompt=64, new=1))
    while not world.endings("long"):
        world.advance()
    assert len(world.tokens("chat")) - before <= 2


def test_a_finished_prefill_joins_the_next_step() -> None:
    world = World(policy="Lanes", units=2)
    world.submit(request("a", new=40))
    for _ in range(5):
        world.advance()
    world.submit(request("b", new=40))
    while not world.tokens("b"):
        world.advance()
    steps_before = len(world.executor.launched)
    world.advance()
    batches = [plan.decode.ids for _, plan in world.executor.launched[steps_before - 1 :] if plan.decode]
    assert ("a", "b") in batches


def test_with_one_side_empty_the_other_has_the_whole_device() -> None:
    world = World(policy="Lanes", units=4)
    world.submit(request("a", new=5))
    world.run()
    used = {(p.partition.prefill_units if p.prefill else p.partition.decode_units) for _, p in world.executor.launched}
    assert used == {4}


def test_the_border_keeps_to_the_objective_s_bounds() -> None:
    objective = Objective(SLO, min_decode_share=0.5, max_decode_share=0.6)
    world = World(policy="Lanes", units=4, objective=objective, layers=30)
    world.submit(request("a", new=60))
    for _ in range(5):
        world.advance()
    world.submit(request("b", prompt=60, new=2))
    world.run()
    splits = {plan.partition for _, plan in world.executor.launched} - {Partition(4, 4)}
    assert splits == {Partition(2, 2)}


def test_preemption_takes_the_newest_and_keeps_its_place_and_its_tokens() -> None:
    world = World(policy="Lanes", units=2, blocks=8, block_tokens=4)
    world.submit(request("old", prompt=8, new=20, arrival_s=0.0), request("new", prompt=8, new=20, arrival_s=1.0))
    world.run()
    assert world.ledger.preemptions >= 1
    assert world.tokens("new") == [1008 + i for i in range(20)]
    assert world.tokens("old") == [1008 + i for i in range(20)]
    assert world.finished() == ["old", "new"]


def test_a_lower_tier_never_preempts_a_higher_one() -> None:
    world = World(policy="Lanes", units=2, blocks=8, block_tokens=4)
    flex = request("flex", prompt=8, new=20, arrival_s=0.0, tier=ServiceTier.FLEX)
    priority = request("priority", prompt=8, new=20, arrival_s=1.0, tier=ServiceTier.PRIORITY)
    world.submit(flex)
    for _ in range(4):
        world.advance()
    world.submit(priority)
    world.run()
    assert world.finished() == ["priority", "flex"]


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    world = World(blocks=4, block_tokens=4)
    world.submit(request("big", prompt=10, new=7), request("fits", prompt=10, new=6))
    world.run()
    refusal = next(m for m in world.desk.sent if isinstance(m, Refused))
    assert refusal.request_id == "big"
    assert refusal.message == "10 prompt tokens and 7 new ones can never fit: the KV cache holds 16 tokens"
    assert world.endings("fits") == [FinishReason.LENGTH]


def test_a_prompt_that_fills_the_pool_is_refused_though_it_wants_no_token() -> None:
    world = World(blocks=4, block_tokens=4)
    world.submit(request("full", prompt=16, new=0), request("fits", prompt=4, new=2))
    world.run()
    assert world.endings("full") == [RefusalReason.NEVER_FITS]
    assert world.endings("fits") == [FinishReason.LENGTH]


def test_the_queue_is_bounded() -> None:
    world = World(queue_limit=2)
    world.submit(*(request(f"r{i}", arrival_s=i) for i in range(4)))
    world.turn()
    refusals = [m for m in world.desk.sent if isinstance(m, Refused)]
    assert [(m.request_id, m.reason) for m in refusals] == [("r2", "queue_full"), ("r3", "queue_full")]
    assert all(m.retry_after_s is not None and m.retry_after_s >= 1 for m in refusals)
    world.run()
    assert world.endings("r0") == world.endings("r1") == [FinishReason.LENGTH]


def test_a_queue_that_waits_for_blocks_is_told_when_they_come() -> None:
    world = World(queue_limit=1, blocks=128, block_tokens=4)
    world.submit(request("holder", prompt=20, new=401))
    while not world.tokens("holder"):
        world.advance()
    for _ in range(5):
        world.advance()
    world.submit(request("waits", prompt=480, new=4, arrival_s=1), request("refused", arrival_s=2))
    world.turn()
    (refusal,) = [m for m in world.desk.sent if isinstance(m, Refused)]
    assert refusal.retry_after_s is not None
    told_s = world.clock.now_s + refusal.retry_after_s
    assert world.endings("holder") == []
    while not world.endings("holder"):
        world.advance()
    assert world.clock.now_s == pytest.approx(told_s, rel=0.2)


def test_a_stop_token_ends_the_sequence_and_is_its_last() -> None:
    world = World()
    world.submit(request("a", prompt=8, new=50, stop=(1010,)))
    world.run()
    assert world.tokens("a") == [1008, 1009, 1010]
    assert world.endings("a") == [FinishReason.STOP]


def test_abort_between_two_slices_frees_the_blocks_and_the_activations() -> None:
    world = World(policy="Lanes", units=2, layers=30)
    world.submit(request("chat", new=100))
    for _ in range(5):
        world.advance()
    free = world.ledger.pool.free
    world.submit(request("long", prompt=60, new=5))
    while not any(plan.prefill and plan.prefill.spans[0].id == "long" for _, plan in world.executor.launched):
        world.advance()
    world.abort("long")
    for _ in range(30):
        world.advance()
    assert "long" not in world.ledger.sequences
    assert world.executor.forgotten
    assert world.ledger.pool.free >= free - 8
    assert world.tokens("long") == []


def test_a_failed_launch_ends_its_own_sequences_and_no_other() -> None:
    def fails(prefill: PrefillSlice | None) -> bool:
        return prefill is not None and any(span.id == "bad" for span in prefill.spans)

    world = World(policy="Lanes", units=2, fail=fails)
    world.submit(request("good", new=30))
    for _ in range(3):
        world.advance()
    world.submit(request("bad"))
    world.run()
    assert world.endings("bad") == [FinishReason.ERROR]
    assert world.endings("good") == [FinishReason.LENGTH]
    assert world.ledger.pool.free == world.ledger.pool.total


def test_draining_refuses_newcomers_and_finishes_the_rest() -> None:
    world = World()
    world.submit(request("running", new=10))
    world.advance()
    world.ledger.draining = True
    world.submit(request("late"))
    world.run()
    assert world.endings("running") == [FinishReason.LENGTH]
    assert world.endings("late") == ["draining"]


def test_a_request_s_own_targets_override_the_service_s() -> None:
    world = World()
    world.submit(replace(request("own"), ttft_s=0.5, tpot_s=0.02), request("plain"))
    world.run()
    targets = {(slo.ttft_s, slo.tpot_s) for _, slo in world.ended}
    assert targets == {(0.5, 0.02), (SLO.ttft_s, SLO.tpot_s)}


def test_the_timeline_has_the_queue_apart_from_the_service() -> None:
    world = World(policy="MixedBatch", units=1, blocks=8, block_tokens=4)
    world.submit(request("first", prompt=16, new=10), request("second", prompt=16, new=10, arrival_s=0.0))
    world.run()
    first, second = (timeline for timeline, _ in world.ended)
    assert first is not None
    assert second is not None
    assert first.queue_s == 0
    assert second.queue_s == pytest.approx(first.last_token_s, rel=0.3)
    assert second.ttft_s > second.queue_s
    assert second.output_tokens == 10


def test_a_launch_that_never_comes_back_is_noticed() -> None:
    world = World()
    world.clock.now_s = 50.0
    assert world.ledger.still_for_s(50.0) == 0.0
    world.submit(request("a"))
    world.turn()
    assert world.ledger.still_for_s(50.0 + 200.0) == 200.0
    world.run()
    assert world.ledger.still_for_s(1000.0) == 0.0


def test_a_prompt_never_starts_before_it_arrived() -> None:
    world = World(policy="Lanes")
    late = request("late", arrival_s=0.5)

    def arrives_during_the_turn() -> list[ForLoop]:
        world.clock.now_s = 0.5
        return [Submit(late)]

    world.desk.messages = arrives_during_the_turn  # type: ignore[method-assign]
    world.turn()
    world.desk.messages = list  # type: ignore[method-assign]
    world.run()
    ((timeline, _),) = world.ended
    assert timeline is not None
    assert timeline.queue_s == 0


@pytest.mark.parametrize("policy", ["ChunkedPrefill", "ChunkedByBudget", "MixedBatch", "Lanes", "Auto"])
def test_a_prompt_that_has_just_lost_its_blocks_is_not_launched(policy: str) -> None:
    world = World(policy=policy, units=1, blocks=18)
    running = tuple(
        Decoding(f"r{n}", (0, float(n), f"r{n}"), context=4, blocks=1, tpot_s=0.1, next_due_s=9.0) for n in range(2)
    )
    half_done = Prefilling("late", (2, 9.0, "late"), tokens=40, computed=16, ttft_due_s=9.0, work_s=1.0)
    state = world.ledger.state()
    state = msgspec.structs.replace(state, pool=PoolState(0, 4), decoding=running, prefilling=(half_done,), next_job=2)
    plan = world.policies[policy].plan(state, 0.0)
    assert plan.preempt == ("late",)
    assert plan.prefill is None
