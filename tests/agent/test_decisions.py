"""The agent's pure parts: back-off, lifecycle, feedback, claims. Virtual time only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.rig import GIB, cpu, gpu, spec
from tidelane.agent.backoff import Failures, RestartPolicy
from tidelane.agent.claims import Claim, Slot, choose
from tidelane.agent.command import claimed_cores, engine_arguments, engine_environment, kv_pool_bytes
from tidelane.agent.devices import Device
from tidelane.agent.errors import NoRoom
from tidelane.agent.feedback import HIGHEST_SHARE, LOWEST_SHARE, Measured, next_objective, ttft_ratio
from tidelane.agent.footprint import Footprint
from tidelane.agent.lifecycle import (
    Drain,
    End,
    Ending,
    EngineView,
    Kill,
    Launch,
    Limits,
    SendObjective,
    Situation,
    Wait,
    Wanted,
    next_action,
    phase,
)
from tidelane.engine.slo import Slo
from tidelane.rpc.node_agent_pb2 import ReplicaStatus
from tidelane.rpc.wire import ExecutionMode, KvCacheSpec, LateRequests, ModelSpec, Objective, ReplicaSpec, ShareBounds

# ---- back-off --------------------------------------------------------------------------------------------------------

POLICY = RestartPolicy(first_delay_s=1.0, longest_delay_s=60.0, stable_after_s=30.0)


def test_delays_double_up_to_the_longest() -> None:
    assert [POLICY.delay_s(n) for n in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert POLICY.delay_s(10**6) == 60


def test_failures_add_up_until_one_stable_run() -> None:
    failures = Failures()
    for expected in (1, 2, 4):
        failures = failures.another(now_s=100, ready_for_s=29.9, policy=POLICY)
        assert failures.restart_at_s == 100 + expected
    assert failures.another(200, ready_for_s=30, policy=POLICY) == Failures(1, 201)


# ---- lifecycle -------------------------------------------------------------------------------------------------------

LIMITS = Limits(first_word_s=100, silence_s=10, replace_drain_s=20, exit_grace_s=5)
CLAIM = Claim((Slot("cpu", 0),), 1)
WANTED = Wanted(spec(), CLAIM)
LIVING = EngineView(spec(), CLAIM, heard=True, ready=True)


def situation(engine: EngineView | None = None, wanted: Wanted = WANTED, **rest: Any) -> Situation:
    return replace(Situation(wanted, engine), **rest)


@pytest.mark.parametrize(
    ("now", "action", "shown"),
    [
        (situation(), Launch(), ReplicaStatus.STARTING),
        (situation(failures=Failures(1, 1001.0)), Wait(1001.0), ReplicaStatus.BACKING_OFF),
        (situation(failures=Failures(1, 1000.0)), Launch(), ReplicaStatus.STARTING),
        (situation(failed_generation=1), Wait(), ReplicaStatus.FAILED),
        (situation(failed_generation=7), Launch(), ReplicaStatus.STARTING),
        (situation(wanted=replace(WANTED, ending=Ending(1005, True))), End(), ReplicaStatus.DRAINING),
        (situation(LIVING), Wait(), ReplicaStatus.READY),
        (situation(replace(LIVING, ready=False)), Wait(), ReplicaStatus.STARTING),
        (situation(replace(LIVING, quiet_s=10)), Kill("said nothing for 10 s"), ReplicaStatus.READY),
        (situation(replace(LIVING, heard=False, ready=False, quiet_s=99)), Wait(), ReplicaStatus.STARTING),
        (
            situation(replace(LIVING, heard=False, ready=False, quiet_s=100)),
            Kill("said nothing for 100 s"),
            ReplicaStatus.STARTING,
        ),
        (situation(replace(LIVING, killed=True, quiet_s=50)), Wait(), ReplicaStatus.STARTING),
        (situation(replace(LIVING, objective_in_force=False)), SendObjective(), ReplicaStatus.READY),
        (
            situation(replace(LIVING, objective_in_force=False, heard=False, ready=False)),
            Wait(),
            ReplicaStatus.STARTING,
        ),
        (situation(replace(LIVING, objective_refused=True)), Drain(1020, "generation 1"), ReplicaStatus.READY),
        (situation(replace(LIVING, drain_by_s=1003)), Wait(1008), ReplicaStatus.DRAINING),
        (situation(replace(LIVING, drain_by_s=995)), Kill("did not end after draining"), ReplicaStatus.DRAINING),
        (
            situation(LIVING, replace(WANTED, ending=Ending(1004, True))),
            Drain(1004, "removed"),
            ReplicaStatus.DRAINING,
        ),
        (
            situation(LIVING, replace(WANTED, ending=Ending(1004, False))),
            Drain(1004, "agent stops"),
            ReplicaStatus.DRAINING,
        ),
        (
            situation(replace(LIVING, drain_by_s=1020), replace(WANTED, ending=Ending(1004, True))),
            Drain(1004, "shorter deadline"),
            ReplicaStatus.DRAINING,
        ),
    ],
)
def test_what_to_do_and_what_to_call_it(now: Situation, action: object, shown: int) -> None:
    assert next_action(now, 1000.0, LIMITS) == action
    assert phase(now, 1000.0) == shown


@pytest.mark.parametrize(
    ("changed", "replaced"),
    [
        (spec(generation=2), False),
        (spec(generation=2, tpot_s=0.01), False),
        (spec(generation=2, objective=replace(spec().objective, mode=ExecutionMode.MIXED_BATCH)), False),
        (spec(generation=2, objective=replace(spec().objective, late_requests=LateRequests.REFUSE)), False),
        (spec(generation=2, model=ModelSpec("builtin://other", "chat")), True),
        (spec(generation=2, model=replace(spec().model, max_context_tokens=100)), True),
        (spec(generation=2, port=8080), True),
        (spec(generation=2, devices=2), True),
    ],
)
def test_only_more_than_an_objective_replaces_the_engine(changed: ReplicaSpec, replaced: bool) -> None:
    action = next_action(situation(LIVING, Wanted(changed, CLAIM)), 1000.0, LIMITS)
    assert action == (Drain(1020, "generation 2") if replaced else Wait())


def test_a_claim_that_moved_replaces_the_engine() -> None:
    moved = Wanted(spec(), Claim((Slot("cpu", 1),), 1))
    assert next_action(situation(LIVING, moved), 1000.0, LIMITS) == Drain(1020, "generation 1")


# ---- feedback --------------------------------------------------------------------------------------------------------

SPEC = Objective(Slo(ttft_s=1.0, tpot_s=0.05), ExecutionMode.LANES)
START = next_objective(SPEC, None, None)


def measured(tpot: float, ttft: float, requests: int = 100, since_move_s: float = 100) -> Measured:
    return Measured(requests, tpot, ttft, window_s=30, since_move_s=since_move_s)


def share(objective: Objective) -> float | None:
    return objective.bounds.min_decode_share if objective.bounds else None


def test_the_first_objective_is_the_services_own() -> None:
    assert replace(SPEC, revision=1) == START


def test_missed_tpot_raises_decode_and_missed_ttft_with_slack_lowers_it() -> None:
    raised = next_objective(SPEC, measured(tpot=1.2, ttft=0.5), START)
    assert (share(raised), raised.revision) == (LOWEST_SHARE + 0.1, 2)
    lowered = next_objective(SPEC, measured(tpot=0.5, ttft=1.5), raised)
    assert share(lowered) == pytest.approx(0.15)
    assert lowered.revision == 3


@pytest.mark.parametrize(
    "quiet",
    [
        measured(tpot=0.9, ttft=0.5),  # both met
        measured(tpot=0.9, ttft=1.5),  # TTFT missed, but TPOT has no slack to give
        measured(tpot=1.5, ttft=0.5, requests=4),  # too few to tell
        measured(tpot=1.5, ttft=0.5, since_move_s=29),  # the last move is not seen yet
        None,
    ],
)
def test_otherwise_nothing_moves(quiet: Measured | None) -> None:
    raised = next_objective(SPEC, measured(tpot=1.2, ttft=0.5), START)
    assert next_objective(SPEC, quiet, raised) is raised


@pytest.mark.parametrize("mode", [ExecutionMode.MIXED_BATCH, ExecutionMode.CHUNKED_PREFILL, ExecutionMode.STATIC_LANES])
def test_modes_without_a_moving_border_are_left_alone(mode: ExecutionMode) -> None:
    objective = replace(SPEC, mode=mode)
    first = next_objective(objective, None, None)
    assert next_objective(objective, measured(tpot=2, ttft=2), first) is first


def test_another_slo_starts_from_the_services_own_bounds() -> None:
    raised = next_objective(SPEC, measured(tpot=1.2, ttft=0.5), START)
    tighter = replace(SPEC, slo=replace(SPEC.slo, tpot_s=0.02))
    assert next_objective(tighter, measured(tpot=1.2, ttft=0.5), raised) == replace(tighter, revision=3)


def test_what_becomes_of_late_requests_changes_without_the_bounds() -> None:
    raised = next_objective(SPEC, measured(tpot=1.2, ttft=0.5), START)
    refusing = replace(SPEC, late_requests=LateRequests.REFUSE)
    assert next_objective(refusing, None, raised) == replace(refusing, bounds=raised.bounds, revision=3)


def test_bounds_that_the_service_changes_hold_at_once() -> None:
    raised = next_objective(SPEC, measured(tpot=1.2, ttft=0.5), START)
    bounded = replace(SPEC, bounds=ShareBounds(0.3, 0.6))
    assert next_objective(bounded, None, raised) == replace(bounded, revision=3)
    assert next_objective(SPEC, None, replace(bounded, revision=3)) == replace(SPEC, revision=4)


bounds = st.none() | st.lists(st.floats(0, 1), min_size=2, max_size=2).map(lambda two: ShareBounds(*sorted(two)))
measurements = st.none() | st.builds(
    Measured,
    requests=st.integers(0, 50),
    tpot_ratio=st.floats(0, 10),
    ttft_ratio=st.floats(0, 10),
    window_s=st.just(30.0),
    since_move_s=st.floats(0, 100),
)


@given(st.lists(st.tuples(bounds, st.lists(measurements, max_size=20)), max_size=5))
def test_whatever_is_measured_the_bounds_stay_legal_and_revisions_count_changes(
    episodes: list[tuple[ShareBounds | None, list[Measured | None]]],
) -> None:
    objective = START
    for asked, seen in episodes:
        wanted = replace(SPEC, bounds=asked)
        for measurement in seen:
            previous, objective = objective, next_objective(wanted, measurement, objective)
            assert objective.slo == SPEC.slo
            if objective is previous:
                continue
            assert objective.revision == previous.revision + 1
            assert objective.bounds != previous.bounds
            if asked and objective.bounds:
                assert asked.min_decode_share <= objective.bounds.min_decode_share
                assert objective.bounds.max_decode_share == asked.max_decode_share
            elif objective.bounds:
                assert LOWEST_SHARE <= objective.bounds.min_decode_share <= HIGHEST_SHARE


@given(st.floats(0.15, 0.85))
def test_against_a_plant_it_settles_at_a_share_that_meets_tpot_and_stays(needed: float) -> None:
    """TPOT is in proportion to needed share over given share; an engine gives decode no more than it must."""
    objective, moves = START, []
    for _ in range(60):
        given_share = share(objective) or LOWEST_SHARE
        after = next_objective(SPEC, measured(tpot=needed / given_share, ttft=0.5), objective)
        moves.append(after is not objective)
        objective = after
    assert not any(moves[-40:])
    settled = share(objective)
    assert settled is not None
    assert needed <= settled <= needed + 0.1 + 1e-9


def test_ttft_is_judged_by_the_engines_ratio_or_else_without_the_allowance() -> None:
    slo = Slo(ttft_s=0.5, tpot_s=0.05, ttft_per_1k_input_tokens_s=0.1)
    assert ttft_ratio(0.8, 2.0, slo) == 0.8
    assert ttft_ratio(0.0, 2.0, slo) == 4.0


# ---- claims ----------------------------------------------------------------------------------------------------------

SMALL = Footprint(device_bytes=GIB, host_bytes=GIB)


def test_the_cpu_adds_up_both_needs_and_a_gpu_only_its_part() -> None:
    assert choose(1, SMALL, [cpu()], held=()).bytes_per_slot == 2 * GIB
    assert choose(2, SMALL, [gpu(0), gpu(1)], held=()) == Claim((Slot("GPU-0"), Slot("GPU-1")), GIB // 2)


def test_what_is_held_is_kept() -> None:
    keep = (Slot("GPU-1"),)
    assert choose(1, SMALL, [gpu(0), gpu(1)], held=(), keep=keep).slots == keep
    assert choose(2, SMALL, [gpu(0), gpu(1)], held=(), keep=keep).device_ids == ("GPU-1", "GPU-0")


def test_the_sick_and_the_small_are_passed_over() -> None:
    sick = replace(gpu(0), healthy=False)
    assert choose(1, SMALL, [sick, gpu(1, memory_bytes=GIB // 2), gpu(2)], held=()).device_ids == ("GPU-2",)
    with pytest.raises(NoRoom, match="no healthy device; the node has 1"):
        choose(1, SMALL, [sick], held=())
    with pytest.raises(NoRoom, match="2 devices wanted; the node has 1 healthy of 2"):
        choose(2, SMALL, [sick, gpu(1)], held=())


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 3)), max_size=40
    ),  # (replica, devices wanted; 0: it ends)
    st.integers(1, 3),
)
def test_no_slot_ever_has_two_holders(calls: list[tuple[str, int]], slots: int) -> None:
    devices = [gpu(0), gpu(1), gpu(2), replace(cpu(slots=slots), id="cpu")]
    claims: dict[str, Claim] = {}
    for name, wanted in calls:
        if not wanted:
            claims.pop(name, None)
            continue
        others = {slot for other, claim in claims.items() if other != name for slot in claim.slots}
        free = {d.id for d in devices if any(Slot(d.id, i) not in others for i in range(d.slots))}
        try:
            claims[name] = choose(
                wanted, Footprint(0, 0), devices, others, claims[name].slots if name in claims else ()
            )
        except NoRoom:
            assert len(free) < wanted
        held = [slot for claim in claims.values() for slot in claim.slots]
        assert len(held) == len(set(held))
        assert all(len(set(claim.device_ids)) == len(claim.slots) for claim in claims.values())


@given(st.integers(1, 12), st.integers(1, 12))
def test_slots_split_the_cores_fairly(count: int, slots: int) -> None:
    device = replace(cpu(slots=slots), cores=tuple(range(count)), compute_units=count)
    parts = [device.slot_cores(index) for index in range(slots)]
    assert all(parts)
    assert {core for part in parts for core in part} == set(range(count))
    if slots <= count:
        assert sum(map(len, parts)) == count
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("mode", "flag"), [(ExecutionMode.AUTO, True), (ExecutionMode.DISAGGREGATED, False)])
def test_what_is_wanted_of_kv_for_later_prompts_is_passed_on_where_an_engine_has_use_for_it(
    mode: ExecutionMode, flag: bool
) -> None:
    kv_cache = KvCacheSpec("int8", host_memory_bytes=GIB, nvme_bytes=2 * GIB, idle_timeout_s=90.0, prefetch=True)
    wanted = spec(kv_cache=kv_cache)
    wanted = replace(wanted, objective=replace(wanted.objective, mode=mode))
    words = engine_arguments(wanted, wanted.objective, "127.0.0.1", 8000, Path("control"), None, (), 0, Path("kv"))
    assert ("--kv-prefetch" in words) is flag
    words = [word for word in words if word != "--kv-prefetch"]
    options = dict(zip(words[::2], words[1::2], strict=True))
    below = {name: options[name] for name in options if name.startswith("--kv-") and name != "--kv-pool-memory"}
    room = {"--kv-host-memory": str(GIB), "--kv-disk-memory": str(2 * GIB), "--kv-disk-folder": "kv"}
    assert below == ({**room, "--kv-dtype": "int8", "--kv-idle-timeout": "90.0"} if flag else {})


def test_the_command_gets_its_cores_gpus_and_memory() -> None:
    devices = {d.id: d for d in (cpu(slots=2), gpu(0), gpu(1))}
    on_cpu = Claim((Slot("cpu", 1),), GIB)
    on_gpus = Claim((Slot("GPU-1"), Slot("GPU-0")), GIB)
    assert claimed_cores(on_cpu, devices) == (2, 3)
    assert claimed_cores(on_gpus, devices) == ()
    assert engine_environment(on_cpu, devices)["CUDA_VISIBLE_DEVICES"] == ""
    assert engine_environment(on_gpus, devices)["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-0"
    assert kv_pool_bytes(on_cpu, devices, 1) == (4 * GIB - GIB) // 2
    assert kv_pool_bytes(on_cpu, devices, 2) == (4 * GIB - GIB) // 4
    assert kv_pool_bytes(on_gpus, devices, 1) == 0
    whole: dict[str, Device] = {"cpu": cpu(slots=1)}
    assert kv_pool_bytes(Claim((Slot("cpu"),), GIB), whole, 1) == 0
