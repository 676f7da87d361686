"""Tuning, grid and refinement on made-up runs; then a small sweep in earnest."""

from __future__ import annotations

import pytest

from tidelane.engine.scheduling.policies import OrderName
from tidelane.engine.sim.contestants import POLICIES, Contestant, Setting, contestants
from tidelane.engine.sim.report import Header, as_json
from tidelane.engine.sim.scene import Job
from tidelane.engine.sim.sweep import Effort, best_settings, compete, sweep

from .machines import SLO
from .scenes import APART, AUTO, CHUNKED, STATIC, made_up, scene


def falling(job: Job) -> float:
    """100 % up to 3 a second, nothing from 5 on; chunks of 1,024 do best, but by budget above 3.5 a second."""
    best = "1024 tokens" if job.rate <= 3.5 else "by TPOT budget"
    worse = 0.0 if job.setting.name in (best, "") else 0.1
    return min(1.0, max(0.0, (5 - job.rate) / 2 - worse))


async def test_each_rate_has_its_setting_and_full_runs_use_it() -> None:
    run, asked = made_up(falling)
    result = await compete(run, scene(), CHUNKED, Effort((4.0, 3.2), tuning_requests=7, refinements=0))
    assert [point.rate for point in result.points] == [3.2, 4.0]
    assert [setting.name for setting in result.settings] == ["1024 tokens", "by TPOT budget"]
    assert result.best.goodput == pytest.approx(3.2 * 0.9)
    assert result.best_setting.name == "1024 tokens"
    assert result.rates_at == {}
    tuning = [job for job in asked if job.requests == 7]
    full = [job for job in asked if job.requests is None]
    assert len(tuning) == 2 * 5
    assert [job.setting.name for job in full] == ["1024 tokens", "by TPOT budget"]


async def test_the_rate_at_a_level_is_refined_with_the_nearest_setting() -> None:
    run, asked = made_up(falling)
    effort = Effort((1.0, 3.0, 5.0), tuning_requests=7, refinements=3)
    result = await compete(run, scene(), CHUNKED, effort)
    assert result.rates_at[0.9] == pytest.approx(3.2, rel=0.01)
    assert result.rates_at[0.99] == pytest.approx(3.02, rel=0.01)
    probes = [job for job in asked if job.requests is None and job.rate not in effort.rates]
    assert 1 <= len(probes) <= 6
    assert {job.setting.name for job in probes} == {"1024 tokens"}  # as at 3 a second, the nearest of the grid


async def test_two_gpus_apart_are_two_gpus() -> None:
    run, asked = made_up(falling)
    result = await compete(run, scene(), APART, Effort((2.0,), 7, 0, gpus=1))
    assert result.gpus == 2
    assert [job.gpus for job in asked] == [2]
    assert (await compete(run, scene(), APART, Effort((2.0,), 7, 0, gpus=5))).gpus == 4
    assert (await compete(run, scene(), AUTO, Effort((2.0,), 7, 0, gpus=5))).gpus == 5


def test_where_settings_are_equal_the_one_for_higher_rates_is_taken() -> None:
    small, large = Setting("small"), Setting("large")
    assert best_settings((small, large), [(1.0, 1.0), (2.0, 2.0), (2.5, 3.0)]) == [large, large, large]
    assert best_settings((small, large), [(1.0, 1.0), (2.0, 1.5), (2.0, 3.0)]) == [small, small, large]
    assert best_settings((small, large), [(1.0, 1.0)]) == [small]


def test_what_can_be_tuned() -> None:
    table = scene().together.table
    assert [setting.chunk_tokens for setting in CHUNKED.settings(table)] == [256, 512, 1024, 2048, None]
    assert [setting.split for setting in STATIC.settings(table)] == list(table.splits)
    assert STATIC.as_served(table).split == table.splits[1]
    assert CHUNKED.as_served(table).chunk_tokens is None
    assert len(AUTO.settings(table)) == 1


def test_disaggregated_counts_both_gpus_in_its_rate() -> None:
    small = scene(10)
    figures = small.run(Job(APART, APART.settings(small.apart.table)[0], 2.0, 2))
    assert figures.goodput == pytest.approx(figures.attainment * 2.0)
    assert figures.ttft is not None


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_sweep_can_be_repeated_to_the_bit(processes: int) -> None:
    told: list[tuple[int, int]] = []

    async def once(processes: int) -> object:
        competing = contestants(POLICIES, tuple(OrderName))
        results = await sweep(
            scene(12), competing, Effort((2.0, 8.0), 6, 1), processes=processes, tell=lambda *at: told.append(at)
        )
        header = Header("trace", 12, "model", "gpu", 1, SLO, 0, {}, "command")
        return as_json(header, results)

    first = await once(1)
    assert await once(processes) == first
    assert told[0][0] == 1
    assert all(done <= of for done, of in told)


def test_names() -> None:
    assert Contestant("mixed", OrderName.OURS).name == "mixed/ours"
    assert [each.name for each in contestants(("auto", "mixed"), (OrderName.OWN, OrderName.OURS))] == [
        "auto/own",
        "auto/ours",
        "mixed/own",
        "mixed/ours",
    ]
