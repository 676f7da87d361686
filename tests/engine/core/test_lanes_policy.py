"""What the lanes policy decides, seen from its plans."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelane.engine.estimation.estimates import Phase
from tidelane.engine.estimation.passes import decode_work, prefill_work
from tidelane.engine.lanes.partition import Partition, partition_table
from tidelane.engine.request import FLEX_RANK, ServiceTier
from tidelane.engine.scheduling.budget import FASTEST_PART, SAFE_PART, step_budget_s
from tidelane.engine.scheduling.lanes import SMALLEST_PASS, TINIEST_PASS
from tidelane.engine.scheduling.order import PROMOTED_AFTER_S
from tidelane.engine.scheduling.plan import (
    DecodeBatch,
    Decoding,
    Flight,
    Objective,
    Plan,
    PoolState,
    PrefillSlice,
    Queued,
    Scheduler,
    Span,
    State,
)
from tidelane.engine.scheduling.policies import policy
from tidelane.engine.slo import Slo

from .virtual import World, request, true_estimates

UNITS = 8
LAYERS = 6
NOW_S = 50.0


def decoding(count: int, tpot_s: float, *, rank: int = 1, due_in_s: float | None = None) -> tuple[Decoding, ...]:
    due_s = NOW_S + (tpot_s if due_in_s is None else due_in_s)
    return tuple(
        Decoding(f"d{rank}{i:02}", (rank, float(i), f"d{rank}{i:02}"), 10, 2, tpot_s, due_s) for i in range(count)
    )


def waiting(tokens: int, *, rank: int = 1) -> tuple[Queued, ...]:
    return (Queued("w", (rank, NOW_S, "w"), tokens, NOW_S + 5, work_s=0.01),)


def state(
    batch: tuple[Decoding, ...], queued: tuple[Queued, ...] = (), *, flight: Flight | None = None, tpot_s: float = 0.1
) -> State:
    return State(
        table=partition_table(UNITS),
        layers=LAYERS,
        pool=PoolState(10_000, 16),
        objective=Objective(Slo(ttft_s=1.0, tpot_s=tpot_s)),
        estimates=true_estimates(UNITS, LAYERS),
        flight=flight or Flight(),
        queued=queued,
        queued_by_due=queued,
        decoding=batch,
    )


def lanes(at: State) -> Plan:
    return policy("lanes").plan(at, NOW_S)


@pytest.mark.parametrize(
    ("tpot_s", "units"),
    # A step of 10 takes 0.030 s over the square root of the units; 0.95 of the target must hold it.
    [(0.05, 1), (0.0317, 1), (0.0315, 2), (0.0188, 3), (0.0130, 6), (0.0120, 7), (0.0115, 7)],
)
def test_decode_gets_the_smallest_lane_within_its_budget(tpot_s: float, units: int) -> None:
    plan = lanes(state(decoding(10, tpot_s), waiting(500), tpot_s=1.0))
    assert plan.partition == Partition(units, UNITS - units)
    assert plan.decode is not None
    assert plan.prefill is not None
    assert plan.why is not None
    assert plan.why.budget_s == pytest.approx(SAFE_PART * tpot_s)


def test_the_slice_ends_with_the_step() -> None:
    plan = lanes(state(decoding(10, 0.05), waiting(500)))
    assert plan.prefill is not None
    layer_s = 0.0001 * plan.prefill.tokens / 7
    assert plan.prefill.last_layer == min(LAYERS, -(-0.030 // layer_s))


def test_decode_goes_on_with_what_a_slice_leaves_and_the_border_follows() -> None:
    running = PrefillSlice(3, (Span("x", 0, 64),), 0, 2)
    # It would want 6 units, and has 3 until the slice ends.
    at = state(decoding(10, 0.0130), waiting(500), flight=Flight(None, 0, running, 5), tpot_s=1.0)
    plan = lanes(at)
    assert (plan.partition, plan.prefill) == (Partition(3, 5), None)
    # The next slice makes room, though the step still runs on 3.
    busy = Flight(DecodeBatch(tuple(d.id for d in at.decoding)), 3)
    plan = lanes(msgspec.structs.replace(at, flight=busy))
    assert (plan.partition, plan.decode) == (Partition(3, 2), None)


@pytest.mark.parametrize("name", ["lanes", "auto"])
def test_where_no_lane_keeps_the_target_the_whole_device_makes_up_for_slower_steps(name: str) -> None:
    """On all units a step of 10 takes 0.0106 s, on 7 of them 0.0113 s: more than 0.95 of the target."""

    def plan(due_in_s: float, flight: Flight | None = None) -> Plan:
        batch = decoding(10, 0.0118, due_in_s=due_in_s)
        return policy(name).plan(state(batch, waiting(500), tpot_s=0.0118, flight=flight), NOW_S)

    behind = plan(0.011)
    assert (behind.partition, behind.prefill) == (Partition(UNITS, UNITS), None)
    assert behind.decode is not None
    # Time saved up by such steps is spent on prefill.
    ahead = plan(0.030)
    assert ahead.partition == Partition(7, 1)
    assert ahead.prefill is not None
    # Prefill begins with a step, not during one, so that the next can have the whole device.
    step = Flight(DecodeBatch(tuple(d.id for d in decoding(10, 0.0118))), 7)
    assert not plan(0.030, step).launches
    # Steps that take longer than predicted save nothing: prefill does not wait for ever.
    beyond_help = plan(-0.030)
    assert beyond_help.partition == Partition(7, 1)
    assert beyond_help.prefill is not None


def test_where_the_whole_device_is_too_slow_as_well_prefill_goes_on() -> None:
    plan = lanes(state(decoding(10, 0.0117, due_in_s=0.0), waiting(500), tpot_s=0.0117))
    assert plan.prefill is not None


def test_a_pass_is_shorter_than_usual_where_the_usual_one_would_make_newcomers_late() -> None:
    """On 7 units a token takes 0.086 ms."""

    def tokens(ttft_s: float) -> int:
        at = state(decoding(10, 0.05), waiting(2000))
        plan = lanes(msgspec.structs.replace(at, objective=Objective(Slo(ttft_s=ttft_s, tpot_s=0.1))))
        assert plan.prefill is not None
        return plan.prefill.tokens

    assert tokens(10.0) > SMALLEST_PASS
    assert tokens(0.1) == SMALLEST_PASS
    assert TINIEST_PASS < tokens(0.05) < SMALLEST_PASS
    assert tokens(0.001) == TINIEST_PASS


def test_one_side_empty_leaves_the_whole_device_to_the_other() -> None:
    whole = Partition(UNITS, UNITS)
    alone = lanes(state(decoding(3, 0.1)))
    assert (alone.partition, alone.prefill) == (whole, None)
    alone = lanes(state((), waiting(100)))
    assert (alone.partition, alone.decode) == (whole, None)
    assert alone.prefill is not None
    assert alone.prefill.last_layer == LAYERS


def test_no_one_joins_whom_the_whole_device_could_not_serve_in_time() -> None:
    # On all units a step of 100 takes 0.042 s.
    assert lanes(state(decoding(100, 0.05), waiting(100), tpot_s=0.05)).prefill is not None
    full = lanes(state(decoding(100, 0.04), waiting(100), tpot_s=0.04))
    assert full.prefill is None
    assert full.decode is not None


def test_who_is_late_for_long_joins_even_so_but_not_flex() -> None:
    def late(rank: int, by_s: float) -> tuple[Queued, ...]:
        return (msgspec.structs.replace(waiting(100, rank=rank)[0], ttft_due_s=NOW_S - by_s),)

    crowd = decoding(100, 0.04)
    assert lanes(state(crowd, late(1, PROMOTED_AFTER_S - 1), tpot_s=0.04)).prefill is None
    assert lanes(state(crowd, late(1, PROMOTED_AFTER_S + 1), tpot_s=0.04)).prefill is not None
    assert lanes(state(crowd, late(FLEX_RANK, PROMOTED_AFTER_S + 1), tpot_s=0.04)).prefill is None


def test_a_chunk_may_be_as_long_as_a_pass_on_lanes() -> None:
    """It was once cut to 0.08 of the TTFT target, however few tokens that is: too few to fuse. And what prefill had
    learned of itself counted as a gain of fusing, which cut it further."""
    plain = true_estimates(UNITS, LAYERS)
    work = prefill_work(((0, 500),))
    slower = plain
    for _ in range(30):
        slower = slower.learned(Phase.PREFILL, UNITS, work, 1.0, 1.3 * plain.seconds(Phase.PREFILL, UNITS, work))
    at = msgspec.structs.replace(
        state(decoding(2, 0.1), waiting(500)), estimates=slower, objective=Objective(Slo(ttft_s=0.3, tpot_s=0.1))
    )
    plan = policy("auto").plan(at, NOW_S)
    assert plan.fused
    assert plan.prefill is not None
    assert plan.prefill.tokens == SMALLEST_PASS


@pytest.mark.parametrize("name", ["auto", "chunked"])
def test_a_chunk_that_goes_on_with_long_prompts_keeps_the_budget(name: str) -> None:
    """It once counted each prompt as if it stood at its beginning: a deep one costs pairs with all that is cached."""
    plain = true_estimates(UNITS, LAYERS)
    with_pairs = {
        phase: {units: replace(times, pair_s=1e-8 * UNITS / units) for units, times in plain.times[phase].items()}
        for phase in (Phase.PREFILL, Phase.FUSED)
    }
    estimates = replace(plain, times={**plain.times, **with_pairs})
    batch = decoding(2, 0.1)
    queued = tuple(
        Queued(f"w{i}", (1, NOW_S + i, f"w{i}"), 5000 + 40, NOW_S + 5 + i, work_s=0.01, cached=5000) for i in range(40)
    )
    at = msgspec.structs.replace(state(batch, queued), estimates=estimates)
    plan = policy(name).plan(at, NOW_S)
    assert plan.fused
    assert plan.prefill is not None
    assert len(plan.prefill.spans) > 1
    work = decode_work(2, 20) + prefill_work((span.start, span.stop) for span in plan.prefill.spans)
    assert estimates.seconds(Phase.FUSED, UNITS, work) <= SAFE_PART * 0.1


def test_a_target_out_of_reach_holds_no_one_back() -> None:
    # One sequence alone takes 0.0074 s on all units.
    assert lanes(state(decoding(3, 0.005), waiting(100), tpot_s=0.005)).prefill is not None
    assert lanes(state(decoding(3, 0.005), waiting(100, rank=FLEX_RANK), tpot_s=0.005)).prefill is None


def test_flex_joins_only_where_room_is_left_and_sits_out_what_it_would_make_late() -> None:
    assert lanes(state(decoding(60, 0.04), waiting(100), tpot_s=0.04)).prefill is not None
    assert lanes(state(decoding(60, 0.04), waiting(100, rank=FLEX_RANK), tpot_s=0.04)).prefill is None
    batch = (*decoding(20, 0.02), *decoding(60, 0.02, rank=FLEX_RANK))
    plan = lanes(state(batch, tpot_s=0.02))
    assert plan.decode == DecodeBatch(tuple(d.id for d in decoding(20, 0.02)))
    relaxed = lanes(state((*decoding(20, 0.2), *decoding(60, 0.2, rank=FLEX_RANK)), tpot_s=0.2))
    assert relaxed.decode is not None
    assert len(relaxed.decode.ids) == 80


def test_the_budget_is_the_tightest_remaining_one_within_bounds() -> None:
    objective = Objective(Slo(ttft_s=1, tpot_s=0.1))
    assert step_budget_s((), objective, NOW_S) is None
    assert step_budget_s(decoding(2, 0.1, rank=FLEX_RANK), objective, NOW_S) is None
    assert step_budget_s(decoding(2, 0.1, due_in_s=9.0), objective, NOW_S) == pytest.approx(SAFE_PART * 0.1)
    assert step_budget_s(decoding(2, 0.1, due_in_s=0.08), objective, NOW_S) == pytest.approx(0.08)
    assert step_budget_s(decoding(2, 0.1, due_in_s=-3), objective, NOW_S) == pytest.approx(FASTEST_PART * 0.1)
    mixed = (*decoding(1, 0.1), *decoding(1, 0.03, rank=0))
    assert step_budget_s(mixed, objective, NOW_S) == pytest.approx(SAFE_PART * 0.03)
    gap = Objective(Slo(ttft_s=1, tpot_s=0.1, max_token_gap_s=0.05))
    assert step_budget_s(decoding(1, 0.1), gap, NOW_S) == pytest.approx(SAFE_PART * 0.05)


def test_auto_takes_the_better_of_a_split_and_a_fused_chunk() -> None:
    auto = policy("auto")
    fused = auto.plan(state(decoding(2, 0.1), waiting(500)), NOW_S)
    assert fused.fused
    assert fused.why is not None
    assert fused.why.fused_tokens_s is not None
    assert fused.why.lanes_tokens_s is not None
    assert fused.why.fused_tokens_s > fused.why.lanes_tokens_s
    # With a step that alone takes most of the budget there is hardly a chunk to fuse.
    split = auto.plan(state(decoding(10, 0.0125), waiting(500), tpot_s=1.0), NOW_S)
    assert not split.fused
    assert split.prefill is not None


def test_an_objective_without_a_possible_split_still_serves() -> None:
    at = state(decoding(2, 0.1), waiting(50))
    plan = lanes(msgspec.structs.replace(at, objective=replace(at.objective, min_decode_share=0.99)))
    assert plan.decode is not None
    assert plan.prefill is not None


class _Twice:
    """Asks twice, and keeps what decode had while both sides had work."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def plan(self, state: State, now_s: float) -> Plan:
        plan = self._scheduler.plan(state, now_s)
        assert self._scheduler.plan(state, now_s) == plan
        flight = state.flight
        if plan.decode is not None and not plan.fused:
            assert plan.partition.decode_units >= 1
            assert plan.partition.decode_units + (flight.prefill_units or 0) <= state.table.units
        return plan


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20), st.sampled_from(ServiceTier)), min_size=1, max_size=14),
    st.sampled_from(["lanes", "auto", "chunked", "mixed", "static"]),
    st.sampled_from(["own", "ours"]),
    st.integers(20, 80),
)
def test_the_same_state_and_time_give_the_same_plan_and_decode_is_never_starved(
    sizes: list[tuple[int, int, ServiceTier]], name: str, order: str, blocks: int
) -> None:
    scheduler = _Twice(policy(name, order, split=Partition(1, 3)))
    world = World(policy="P", policies={"P": scheduler}, units=4, blocks=blocks, block_tokens=4)
    world.submit(*(request(f"r{i:02}", prompt, new, tier=tier) for i, (prompt, new, tier) in enumerate(sizes)))
    world.run()
    assert world.ledger.empty
    assert world.ledger.pool.free == blocks
