"""What traffic was like: sketches add up, slide on, and stay small."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.estimation.estimates import Phase
from tidelane.engine.estimation.passes import PassWork
from tidelane.engine.estimation.profile import ProfileKey
from tidelane.engine.lanes.partition import partition_table
from tidelane.engine.sim.clock import VirtualClock
from tidelane.engine.sim.reported import reported
from tidelane.engine.workload import MOST_TOKENS, STARTS, Lengths, Sketch, Tally, bucket_of
from tidelane.engine.workload_report import WorkloadReport
from tidelane.engine.workload_window import WorkloadWindow
from tidelane.rpc.wire import Workload, workload_from_wire, workload_to_wire

from ..sim.machines import hand_made

tokens = st.integers(0, 3_000_000)
# Gaps as binary fractions, so that sums are exact whatever their order.
gaps_s = st.integers(0, 1 << 12).map(lambda eighths: eighths / 8)
rows = st.lists(st.tuples(gaps_s, tokens, tokens, tokens, st.booleans()), max_size=30)


def sketch_of(seen: list[tuple[float, int, int, int, bool]]) -> Sketch:
    tally = Tally()
    for gap_s, prompt, output, reused, flex in seen:
        tally.arrived(gap_s, prompt, flex=flex)
        tally.began(reused)
        tally.ended(output)
    return tally.sketch(sum(gap_s for gap_s, *_ in seen))


@given(tokens)
def test_every_length_has_one_bucket_that_holds_it(length: int) -> None:
    at = bucket_of(length)
    assert STARTS[at] <= min(length, MOST_TOKENS) < STARTS[at + 1]
    assert length > 8 or STARTS[at] == length
    assert STARTS[at + 1] - 1 <= max(9, 1.25 * STARTS[at])


@given(rows, rows, rows)
def test_sketches_of_parts_add_up_to_the_sketch_of_the_whole(
    one: list[tuple[float, int, int, int, bool]],
    two: list[tuple[float, int, int, int, bool]],
    three: list[tuple[float, int, int, int, bool]],
) -> None:
    assert sketch_of(one) + sketch_of(two) == sketch_of([*one, *two]) == sketch_of(two) + sketch_of(one)
    assert (sketch_of(one) + sketch_of(two)) + sketch_of(three) == sketch_of([*one, *two, *three])
    assert sketch_of(one) + Sketch() == sketch_of(one)


@given(rows)
def test_what_goes_over_the_wire_comes_back(seen: list[tuple[float, int, int, int, bool]]) -> None:
    workload = Workload(sketch_of(seen))
    assert workload_from_wire(workload_to_wire(workload)) == workload


def test_burstiness_tells_a_metronome_from_poisson_arrivals_and_from_bursts() -> None:
    draw = random.Random(5)

    def of(gaps: list[float]) -> float:
        return sketch_of([(gap_s, 1, 1, 0, False) for gap_s in gaps]).burstiness

    assert of([0.25] * 100) == 0
    assert of([draw.expovariate(3) for _ in range(20_000)]) == pytest.approx(1, rel=0.05)
    # Each tenth gap 9.1 s and the others 0.1 s: mean 1, mean square 8.29.
    assert of([*([0.1] * 9), 9.1] * 50) == pytest.approx(7.29)
    assert of([3.0]) == of([]) == 1  # too few to tell


def test_the_window_slides_on_and_forgets() -> None:
    clock = VirtualClock(1000.0)
    window = WorkloadWindow(clock, window_s=100.0)
    assert window.sketch() is None
    for second in range(300):
        clock.now_s = 1000.0 + second
        window.arrived(clock.now_s, 1000 if second < 150 else 40, flex=second % 4 == 0)
        window.began(16)
        window.ended(7)
    clock.now_s += 0.5
    sketch = window.sketch()
    assert sketch is not None
    assert sketch.rate_rps == pytest.approx(1, rel=0.01)
    assert 100 <= sketch.observed_s <= 110
    assert (sketch.prompts.mean, sketch.outputs.mean, sketch.reused.mean) == (40, 7, 16)
    assert sketch.flex_share == pytest.approx(0.25, abs=0.01)
    assert sketch.burstiness == pytest.approx(0, abs=1e-9)
    clock.now_s += 60
    sketch = window.sketch()
    assert sketch is not None
    assert sketch.rate_rps == pytest.approx(0.4, abs=0.06)  # the pause counts
    clock.now_s += 5000
    assert window.sketch() is None
    window.arrived(clock.now_s, 5, flex=False)
    clock.now_s += 1
    sketch = window.sketch()
    assert sketch is not None
    assert (sketch.requests, sketch.gaps_s) == (1, 100.0)  # a pause is no longer than the window


def test_a_busy_window_is_small_on_the_wire() -> None:
    clock, draw = VirtualClock(), random.Random(1)
    window = WorkloadWindow(clock)
    for _ in range(60_000):  # 200 a second, of all lengths
        clock.now_s += draw.expovariate(200)
        window.arrived(clock.now_s, round(10 ** draw.uniform(0, 6)), flex=False)
        window.began(round(10 ** draw.uniform(0, 6)))
        window.ended(round(10 ** draw.uniform(0, 6)))
    sketch = window.sketch()
    assert sketch is not None
    assert sketch.requests > 55_000
    assert len(workload_to_wire(Workload(sketch)).SerializeToString()) < 1000


def test_an_engine_tells_what_it_runs_on_by_what_it_has_learned() -> None:
    clock = VirtualClock()
    key = ProfileKey("digest", "cpu: some", 4, "float32", 10)
    report = WorkloadReport(WorkloadWindow(clock), key, partition_table(4), 16, 16_000)
    estimates = hand_made(4)
    assert report.message(estimates) is None
    report.window.arrived(0.0, 100, flex=False)
    clock.now_s = 1.0
    work = PassWork(200, pairs=300, context=0, sequences=2)
    for _ in range(40):  # prefill takes half as long again as was thought
        estimates = estimates.learned(Phase.PREFILL, 4, work, 1.0, 1.5 * hand_made(4).seconds(Phase.PREFILL, 4, work))
    message = report.message(estimates)
    assert message is not None
    workload = workload_from_wire(message)
    assert workload.machine is not None
    machine = reported(workload.machine)
    assert (machine.layers, machine.blocks, machine.block_tokens) == (10, 1000, 16)
    assert machine.table == partition_table(4)
    for phase in Phase:
        for units in (1, 2, 3, 4):
            assert machine.times.seconds(phase, units, work) == pytest.approx(
                estimates.seconds(phase, units, work), rel=1e-5
            )
    assert machine.times.seconds(Phase.PREFILL, 4, work) == pytest.approx(0.3, rel=0.03)
    assert len(message.SerializeToString()) < 2000


def test_wrong_workloads_are_refused_with_the_field() -> None:
    message = workload_to_wire(Workload(Sketch(1.0, 3, 1, prompts=Lengths((1, 2), 2))))
    message.flex_requests = 4
    with pytest.raises(ValueError, match=r"^workload: flex_requests must not be above requests$"):
        workload_from_wire(message)
    message.flex_requests = 0
    message.prompt_tokens.counts.extend([1] * 90)
    with pytest.raises(ValueError, match=r"^workload.prompt_tokens: 92 counts of lengths, of 80 at most$"):
        workload_from_wire(message)
    del message.prompt_tokens.counts[:]
    message.gaps_s = float("nan")
    with pytest.raises(ValueError, match=r"^workload.gaps_s: nan must be a finite number"):
        workload_from_wire(message)
    message.gaps_s = 0
    message.machine.units = 2
    with pytest.raises(ValueError, match=r"^workload.machine: units, layers and block_tokens must be at least 1$"):
        workload_from_wire(message)
