"""A made-up run in vLLM's format: read, fitted to, and simulated again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidelane.engine.estimation.fields import WrongField
from tidelane.engine.scheduling.policies import policy
from tidelane.engine.sim.measured import Costs, corrected, fitted, read_run, simulated
from tidelane.engine.sim.world import Settings, replay
from tidelane.engine.slo import percentile

from .machines import SLO, machine, traffic

META = {"model": "org/model", "engine_kwargs": {"max_num_seqs": 6, "max_num_batched_tokens": 256}}
WALL_CLOCK_S = 1.7e9
ENGINE_CLOCK_S = 4000.0


def write_run(folder: Path, factor: float) -> None:
    """What a machine `factor` times as slow as the one that we know would have measured."""
    known = traffic(90, rate=3.0)
    sent = replace(known, arrivals=tuple(replace(each, hash_ids=()) for each in known.arrivals))
    slower = machine(overhead_s=0.002)
    times = replace(
        slower.times,
        times={
            phase: {units: each.scaled(factor) for units, each in by_units.items()}
            for phase, by_units in slower.times.times.items()
        },
    )
    slower = replace(slower, times=times, believed=times)
    done = replay(sent, slower, lambda: policy("chunked", "own", chunk_tokens=256, max_running=6), Settings(SLO))
    rows = []
    for answer in done.answers:
        line = answer.timeline
        assert line is not None
        rows.append(
            {
                "request_id": "made-up",
                "input_toks": line.input_tokens,
                "output_toks": line.output_tokens,
                "arrival_time": WALL_CLOCK_S + line.arrival_s,
                "queued_ts": ENGINE_CLOCK_S + line.arrival_s,
                "scheduled_ts": ENGINE_CLOCK_S + line.prefill_start_s,
                "first_token_ts": ENGINE_CLOCK_S + line.first_token_s,
                "last_token_ts": ENGINE_CLOCK_S + line.last_token_s,
            }
        )
    write(folder, META, rows)


def write(folder: Path, meta: Any, rows: list[Any]) -> None:
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_times_are_told_from_the_first_arrival(tmp_path: Path) -> None:
    write_run(tmp_path, 1.0)
    run = read_run(tmp_path)
    assert (run.model, run.token_budget, run.sequence_cap) == ("org/model", 256, 6)
    assert run.timelines[0].arrival_s == 0.0
    assert len(run.timelines) == 90
    assert [arrival.at_s for arrival in run.traffic.arrivals] == [each.arrival_s for each in run.timelines]
    assert all(each.ttft_s > 0 for each in run.timelines)


def test_a_third_of_the_requests_tells_the_times_of_all(tmp_path: Path) -> None:
    write_run(tmp_path, 1.3)
    run = read_run(tmp_path)
    costs = fitted(run, machine())
    assert costs.linear == pytest.approx(1.3, rel=0.05)
    virtual = simulated(run, corrected(machine(), costs))
    for figure, within in (("ttft_s", 0.1), ("tpot_s", 0.03)):
        for percent in (50, 90):
            real = percentile([getattr(each, figure) for each in run.timelines], percent)
            found = percentile([getattr(each, figure) for each in virtual], percent)
            assert found == pytest.approx(real, rel=within), (figure, percent, costs)
    unfitted = percentile([each.tpot_s for each in simulated(run, machine())], 50)
    assert unfitted < 0.85 * percentile([each.tpot_s for each in run.timelines], 50)


def test_costs_of_nothing_more_are_the_prior() -> None:
    (times, *_) = machine().times.times["decode"].values()  # type: ignore[index]
    assert Costs().of(times) == times


@pytest.mark.parametrize(
    ("meta", "row", "message"),
    [
        ({"model": "m"}, {}, r"meta\.json: the file lacks engine_kwargs"),
        ({"model": "m", "engine_kwargs": {"max_num_seqs": 3}}, {}, r"engine_kwargs lacks max_num_batched_tokens"),
        (META, {"input_toks": 0}, r"requests\.jsonl:1: input_toks must be an integer of at least 1"),
        (META, {"first_token_ts": None}, r"requests\.jsonl:1: first_token_ts must be a number"),
        (META, "not a row", r"requests\.jsonl:1: "),
    ],
)
def test_what_is_no_such_run_is_refused(tmp_path: Path, meta: Any, row: Any, message: str) -> None:
    write_run(tmp_path, 1.0)
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    first = {**json.loads(lines[0]), **row} if isinstance(row, dict) else row
    write(tmp_path, meta, [first, *map(json.loads, lines[1:])])
    with pytest.raises(WrongField, match=message):
        read_run(tmp_path)


def test_a_run_of_nothing_is_refused(tmp_path: Path) -> None:
    write(tmp_path, META, [])
    with pytest.raises(WrongField, match="at least 3"):
        read_run(tmp_path)
