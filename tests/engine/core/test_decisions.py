"""What the loop remembers of its decisions."""

from __future__ import annotations

import time

from tidelane.engine.channel import Decisions, DecisionsWanted
from tidelane.engine.decisions import DecisionLog
from tidelane.engine.lanes.partition import Partition
from tidelane.engine.scheduling.plan import Decision, DecodeBatch, Plan, PrefillSlice, Span

from .virtual import World, request

WHY = Decision("a reason", running=2, waiting=1, budget_s=0.05, step_s=0.04, slice_s=0.03)


def plan(decode: int = 2, why: Decision | None = WHY) -> Plan:
    return Plan(
        Partition(3, 1),
        admit=("p",),
        preempt=("x", "y"),
        decode=DecodeBatch(tuple(f"d{i}" for i in range(decode))),
        prefill=PrefillSlice(1, (Span("p", 4, 10), Span("q", 0, 30)), 2, 5),
        why=why,
    )


def test_sizes_are_kept_and_not_ids() -> None:
    log = DecisionLog()
    log.add(plan(), 12.5)
    (logged,) = log.last(10)
    assert (logged.time_s, logged.why, logged.partition, logged.fused) == (12.5, WHY, Partition(3, 1), False)
    assert (logged.decode_sequences, logged.prefill_tokens, logged.layers) == (2, 36, (2, 5))
    assert (logged.admitted, logged.preempted) == (1, 2)


def test_a_plan_with_one_side() -> None:
    log = DecisionLog()
    log.add(Plan(Partition(4, 4), decode=DecodeBatch(("a",)), why=WHY), 1.0)
    log.add(Plan(Partition(4, 4), prefill=PrefillSlice(1, (Span("p", 0, 7),), 0, 6), why=WHY), 2.0)
    first, second = log.last(2)
    assert (first.decode_sequences, first.prefill_tokens, first.layers) == (1, 0, None)
    assert (second.decode_sequences, second.prefill_tokens, second.layers) == (0, 7, (0, 6))


def test_looking_without_deciding_is_not_logged() -> None:
    log = DecisionLog()
    log.add(Plan(Partition(4, 4)), 1.0)
    assert log.last(10) == ()


def test_a_ring_forgets_the_oldest() -> None:
    log = DecisionLog(kept=3)
    for at in range(5):
        log.add(plan(), float(at))
    assert [each.time_s for each in log.last(10)] == [2.0, 3.0, 4.0]
    assert [each.time_s for each in log.last(2)] == [3.0, 4.0]


def test_logging_takes_next_to_nothing() -> None:
    """At each decision, some tens a second: microseconds. The best of many counts, as this machine has other work."""
    log = DecisionLog()
    full = plan(decode=128)
    seconds = []
    for _ in range(50):
        begun_s = time.perf_counter()
        for _ in range(200):
            log.add(full, 1.0)
        seconds.append((time.perf_counter() - begun_s) / 200)
    assert min(seconds) < 2e-6


def test_the_loop_logs_what_it_launches() -> None:
    world = World(policy="Lanes")
    world.submit(request("a", prompt=12, new=6), request("b", prompt=20, new=3))
    world.run()
    logged = world.loop.decisions.last(10_000)
    launched = [(time_s, plan) for time_s, plan in world.executor.launched if plan.why is not None]
    assert [(each.time_s, each.why, each.partition) for each in logged] == [
        (time_s, plan.why, plan.partition) for time_s, plan in launched
    ]
    assert len(logged) == len(world.executor.launched)  # each launch has a reason
    assert sum(each.decode_sequences for each in logged) == (6 - 1) + (3 - 1)  # each prefill makes the first token
    layers = world.ledger.state().layers
    assert sum(
        each.prefill_tokens * (each.layers[1] - each.layers[0]) for each in logged if each.layers is not None
    ) == layers * (12 + 20)
    assert sum(each.admitted for each in logged) == 2


def test_whoever_asks_the_loop_hears_the_last_ones() -> None:
    world = World(policy="MixedBatch")
    world.submit(request("a", new=4))
    world.run()
    world.desk.inbox.append(DecisionsWanted(5, 2))
    world.turn()
    assert world.desk.sent[-1] == Decisions(5, world.loop.decisions.last(2))
