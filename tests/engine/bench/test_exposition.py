"""Reading /metrics."""

from __future__ import annotations

import pytest

from tidelane.engine.bench.exposition import Exposition, LaneUse
from tidelane.engine.slo import Slo

BEFORE = """# HELP tidelane_lane_busy_seconds_total Time by what the device did
# TYPE tidelane_lane_busy_seconds_total counter
tidelane_lane_busy_seconds_total{kind="split",model_name="chat"} 1.0
tidelane_lane_busy_seconds_total{kind="idle",model_name="chat"} 100.0
tidelane_lane_switches_total{model_name="chat"} 3.0
tidelane_lane_switches_to_total{border="1+1",model_name="chat"} 2.0
process_cpu_seconds_total 5.0
"""
AFTER = """tidelane_lane_busy_seconds_total{kind="split",model_name="chat"} 4.0
tidelane_lane_busy_seconds_total{kind="idle",model_name="chat"} 101.0
tidelane_lane_switches_total{model_name="chat"} 8.0
tidelane_lane_switches_to_total{border="1+1",model_name="chat"} 4.0
tidelane_lane_switches_to_total{border="whole",model_name="chat"} 3.0
tidelane_slo_target_seconds{model_name="chat",target="ttft"} 0.5
tidelane_slo_target_seconds{model_name="chat",target="ttft_per_1k_input_tokens"} 3.0
tidelane_slo_target_seconds{model_name="chat",target="tpot"} 0.15
tidelane_num_requests_running{model_name="chat"} 2.0
"""


def test_what_the_lanes_did_between_two_readings() -> None:
    use = LaneUse.between(Exposition.parse(BEFORE), Exposition.parse(AFTER))
    assert use == LaneUse({"split": 3.0, "idle": 1.0}, 5.0, {"1+1": 2.0, "whole": 3.0})
    assert use.share("split") == 0.75
    assert use.share("mixed") == 0.0


def test_targets_and_values_are_found() -> None:
    reading = Exposition.parse(AFTER)
    assert reading.slo(90) == Slo(0.5, 0.15, 3.0, 90)
    assert reading.value("num_requests_running") == 2.0
    assert reading.value("lane_switches_to_total", border="whole") == 3.0
    assert reading.value("no_such_thing") is None


def test_another_server_tells_nothing() -> None:
    reading = Exposition.parse('vllm:num_requests_running{model_name="m"} 1.0\n')
    assert reading.samples == ()
    assert reading.slo(90) is None
    assert LaneUse.between(reading, reading).share("split") == pytest.approx(0.0)
