"""What a decision costs: `plan()` with many requests running and waiting, in each situation that it can meet."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from statistics import median

from msgspec.structs import replace

from tidelane.engine.bench.ratio import Measured, Ratio
from tidelane.engine.estimation.devices import device_facts
from tidelane.engine.estimation.estimates import Phase
from tidelane.engine.estimation.passes import decode_work
from tidelane.engine.estimation.roofline import prior
from tidelane.engine.estimation.shapes import model_shape
from tidelane.engine.lanes.partition import partition_table
from tidelane.engine.model.loading import LoadedModel
from tidelane.engine.scheduling.plan import (
    DecodeBatch,
    Decoding,
    Flight,
    Objective,
    PoolState,
    PrefillSlice,
    Queued,
    Scheduler,
    Span,
    State,
)
from tidelane.engine.scheduling.policies import policy
from tidelane.engine.slo import Slo, percentile

POLICIES = ("lanes", "auto", "chunked")
RUNNING = 128
WAITING = 500
MANY_WAITING = 2000
MEDIAN_MS = 0.5
P99_MS = 1.0
# For a 99th percentile that three plans are above.
PLANS = 300
LAST_STEP = decode_work(RUNNING, RUNNING * 2000)
LAST_STEP_S = 0.02
NOW_S = 1000.0
SLO = Slo(ttft_s=0.2, tpot_s=0.05, ttft_per_1k_input_tokens_s=0.1)


def decisions(_loaded: LoadedModel, _cores: Sequence[int], rounds: int) -> list[Ratio]:
    """The model is that of a large engine, from the files that we ship: what plans cost does not depend on this
    machine's. Times are of the processor, so that what else runs here is not counted."""
    few, many = situations(RUNNING, WAITING), situations(RUNNING, MANY_WAITING)
    return [ratio for name in POLICIES for ratio in _of_policy(name, few, many, rounds)]


def _of_policy(name: str, few: Sequence[State], many: Sequence[State], rounds: int) -> Iterator[Ratio]:
    scheduler = policy(name)
    medians: list[float] = []
    p99s: list[float] = []
    sums: list[tuple[float, float]] = []
    for _ in range(rounds):
        of_few = [_plan_ms(scheduler, state) for state in few]
        of_many = [_plan_ms(scheduler, state) for state in many]
        medians.append(max(median(times) for times in of_few))
        p99s.append(max(percentile(times, 99) for times in of_few))
        sums.append((sum(median(times) for times in of_many), sum(median(times) for times in of_few)))
    case = f"plan() of {name}, {RUNNING} running"
    wanted = "wanted at most"
    yield Ratio(
        f"{case} and {WAITING} waiting, median in the worst situation",
        Measured("plan()", tuple(medians), "ms"),
        Measured(wanted, (MEDIAN_MS,) * rounds, "ms"),
        at_most=1.0,
    )
    yield Ratio(
        f"{case} and {WAITING} waiting, p99 in the worst situation",
        Measured("plan()", tuple(p99s), "ms"),
        Measured(wanted, (P99_MS,) * rounds, "ms"),
        at_most=1.0,
    )
    yield Ratio(
        f"{case}, {MANY_WAITING} waiting over {WAITING}",
        Measured(f"{MANY_WAITING}", tuple(large for large, _ in sums), "ms"),
        Measured(f"{WAITING}", tuple(small for _, small in sums), "ms"),
        at_most=MANY_WAITING / WAITING,
    )


def _plan_ms(scheduler: Scheduler, state: State) -> list[float]:
    times = []
    for _ in range(PLANS):
        # As after each launch that ends: what the last decision had worked out of the estimates is forgotten.
        learned = state.estimates.learned(Phase.DECODE, state.table.units, LAST_STEP, 1.0, LAST_STEP_S)
        state = replace(state, estimates=learned)
        begun_s = time.thread_time()
        scheduler.plan(state, NOW_S)
        times.append(1000 * (time.thread_time() - begun_s))
    return times


def situations(running: int, waiting: int) -> tuple[State, State, State]:
    """Both lanes idle; beside a slice; beside a step. Prompts of 50 to 8,000 tokens, some of them late."""
    device = device_facts("h200")
    table = partition_table(device.units, minimum=device.min_units, step=device.unit_step)
    rows = {units for row in table.splits for units in (row.decode_units, row.prefill_units)}
    estimates = prior(model_shape("llama-3.1-8b"), device, rows)
    draw = random.Random(0)
    decoding = tuple(_decoding(number, draw) for number in range(running))
    queued = [_queued(number, draw) for number in range(waiting)]
    split = table.splits[len(table.splits) // 2]
    step = Flight(DecodeBatch(tuple(each.id for each in decoding)), split.decode_units)
    slice_ = Flight(None, 0, PrefillSlice(1, (Span("prompt", 0, 1000),), 0, 4), split.prefill_units)
    both_idle, beside_slice, beside_step = (
        State(
            table,
            layers=32,
            pool=PoolState(free_blocks=100_000, block_tokens=16),
            objective=Objective(SLO),
            estimates=estimates,
            flight=flight,
            queued=tuple(sorted(queued, key=lambda each: each.priority)),
            queued_by_due=tuple(sorted(queued, key=lambda each: (each.priority[0], each.ttft_due_s, each.id))),
            decoding=decoding,
        )
        for flight in (Flight(), slice_, step)
    )
    return both_idle, beside_slice, beside_step


def _decoding(number: int, draw: random.Random) -> Decoding:
    name = f"d{number}"
    due_s = NOW_S + draw.uniform(0, SLO.tpot_s)
    return Decoding(name, (1, NOW_S - 100 + number * 0.1, name), draw.randint(500, 4000), 400, SLO.tpot_s, due_s)


def _queued(number: int, draw: random.Random) -> Queued:
    name, tokens = f"q{number}", draw.randint(50, 8000)
    arrival_s = NOW_S - draw.uniform(0, 3)
    due_s = arrival_s + SLO.ttft_target_s(tokens) + draw.uniform(0, 3)
    # 27 microseconds a token, about what this model takes on that device.
    return Queued(name, (1, arrival_s, name), tokens, due_s, work_s=27e-6 * tokens)
