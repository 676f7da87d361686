"""Forecasts against what can be worked out, and the process that makes them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from google.protobuf.json_format import MessageToDict

from tidelane.engine.machine_report import MachineReport, ReportedTimes
from tidelane.engine.sim.answering import answer
from tidelane.engine.sim.forecast import CannotSimulate, forecast
from tidelane.engine.sim.reported import reported
from tidelane.engine.slo import Slo
from tidelane.engine.workload import Sketch, Tally
from tidelane.rpc.wire import ExecutionMode, Objective, Workload, objective_to_wire, workload_to_wire

from .machines import hand_made


def report() -> MachineReport:
    """Of `hand_made`: on all units a step takes 10 ms and a prompt token 1 ms."""
    estimates = hand_made()
    times = tuple(
        ReportedTimes(phase.value, units, each.knots, each.linear_s)
        for phase, by_units in estimates.times.items()
        for units, each in by_units.items()
    )
    return MachineReport("cpu", 4, "float32", 10, 16, 16_000, (1, 2, 3), times, 1.25, 1.1, 1.3)


def sketch(rate_rps: float, prompt: int = 100, output: int = 11) -> Sketch:
    """A metronome of one kind of request."""
    tally = Tally()
    for number in range(200):
        tally.arrived(1 / rate_rps if number else None, prompt, flex=False)
        tally.began(0)
        tally.ended(output)
    return tally.sketch(200 / rate_rps)


def objective(ttft_s: float, tpot_s: float, mode: ExecutionMode = ExecutionMode.CHUNKED_PREFILL) -> Objective:
    return Objective(Slo(ttft_s, tpot_s, percentile=90), mode)


def test_a_lone_request_takes_what_the_times_say() -> None:
    """One request in 10 s: 100 ms of prefill, then 10 steps of 10 ms."""
    found = forecast(reported(report()), sketch(0.1), objective(0.11, 0.011), 1)
    assert found.attainment > 0.95
    # A bucket of lengths is 19 % wide, and only their mean is kept.
    assert found.ttft_s == pytest.approx(0.1, rel=0.08)
    assert found.tpot_s == pytest.approx(0.01, rel=0.02)
    assert found.replicas == 1
    late = forecast(reported(report()), sketch(0.1), objective(0.05, 0.011), 1)
    assert (late.attainment, late.replicas) == (0.0, None)  # no number of replicas makes a prompt faster


def test_replicas_that_are_needed_and_that_are_not() -> None:
    """Prompts take 0.1 s: 8 a second keep one replica busy, 16 are too many for it, and 1 is nothing for three."""
    asked = objective(1.0, 0.5)
    assert forecast(reported(report()), sketch(16), asked, 1).replicas in (2, 3)
    spare = forecast(reported(report()), sketch(1), asked, 3)
    assert (spare.attainment, spare.replicas) == (1.0, 1)


def test_a_tighter_target_costs_the_other() -> None:
    """Which bounds by what was measured cannot know: for a tighter TPOT prompts wait."""
    traffic = sketch(3.0, prompt=200, output=12)
    loose = forecast(reported(report()), traffic, objective(5.0, 0.1, ExecutionMode.LANES), 1)
    tight = forecast(reported(report()), traffic, objective(5.0, 0.015, ExecutionMode.LANES), 1)
    assert loose.ttft_s is not None
    assert tight.ttft_s is not None
    assert tight.tpot_s is not None
    assert tight.tpot_s <= 0.015
    assert tight.ttft_s > 2 * loose.ttft_s


def test_the_same_question_has_the_same_answer() -> None:
    asked, traffic = objective(0.3, 0.1, ExecutionMode.LANES), sketch(2)
    assert forecast(reported(report()), traffic, asked, 1) == forecast(reported(report()), traffic, asked, 1)


def test_two_processes_are_not_simulated() -> None:
    with pytest.raises(CannotSimulate, match="no simulating the mode Disaggregated"):
        forecast(reported(report()), sketch(1), objective(1, 1, ExecutionMode.DISAGGREGATED), 1)


def question(workload: Workload, asked: Objective) -> str:
    return json.dumps(
        {
            "workload": MessageToDict(workload_to_wire(workload)),
            "objective": MessageToDict(objective_to_wire(asked)),
            "replicas": 1,
        }
    )


def test_questions_that_have_no_answer_are_told_why() -> None:
    asked = objective(1.0, 0.5)
    assert answer(question(Workload(sketch(1)), asked)) == {"why": "its engines do not say what they run on"}
    assert answer(question(Workload(Sketch(), report()), asked)) == {"why": "no request has come and ended"}


def test_the_process_needs_neither_torch_nor_numpy() -> None:
    """They are not in the operator's image."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = sys.modules['transformers'] = None; "
        "from tidelane.engine.sim.answering import main; main()"
    )
    asked = question(Workload(sketch(1), report()), objective(1.0, 0.5))
    done = subprocess.run([sys.executable, "-c", code], input=asked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == answer(asked)
