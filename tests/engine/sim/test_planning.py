"""How many GPUs: on made-up machines with a capacity that is known."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from tidelane.engine.sim import planning
from tidelane.engine.sim.contestants import Contestant
from tidelane.engine.sim.planning import Sizing, best, size_all
from tidelane.engine.sim.scene import Job, Scene
from tidelane.engine.sim.workers import Run

from .scenes import APART, AUTO, made_up, scene


def use(monkeypatch: pytest.MonkeyPatch, attainment: Callable[[Job], float]) -> list[Job]:
    run, asked = made_up(attainment)

    @contextlib.asynccontextmanager
    async def workers(_scene: Scene, _processes: int) -> AsyncIterator[Run]:
        yield run

    monkeypatch.setattr(planning, "workers", workers)
    return asked


async def size(*competing: Contestant, demand_rps: float, level: float = 0.9) -> tuple[Sizing | None, ...]:
    told: list[int] = []
    sizings = await size_all(scene(), competing, demand_rps=demand_rps, level=level, processes=1, tell=told.append)
    assert told == list(range(1, len(told) + 1))
    return sizings


def pooled(job: Job) -> float:
    """A GPU alone bears 2 a second; in company each bears a tenth more for each doubling of their number."""
    return 1.0 if job.rate <= 2.0 * (1 + 0.1 * (job.gpus.bit_length() - 1)) else 0.2


@pytest.mark.parametrize(("demand_rps", "gpus"), [(0.5, 1), (2.1, 2), (4.3, 2), (9.0, 4), (9.7, 5)])
async def test_the_fewest_that_do(monkeypatch: pytest.MonkeyPatch, demand_rps: float, gpus: int) -> None:
    use(monkeypatch, pooled)
    (sizing,) = await size(AUTO, demand_rps=demand_rps)
    assert sizing is not None
    assert sizing.mode == "Auto"
    assert sizing.gpus == gpus
    assert sizing.figures.rate == pytest.approx(demand_rps / gpus)
    assert sizing.figures.attainment >= 0.9
    capacity = 2.0 * (1 + 0.1 * (gpus.bit_length() - 1)) * gpus
    assert sizing.margin == pytest.approx(capacity / demand_rps - 1, abs=0.1)


async def test_many_are_found_to_within_a_twentieth(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = use(monkeypatch, pooled)
    (sizing,) = await size(AUTO, demand_rps=1000.0)
    assert sizing is not None
    fewest = next(gpus for gpus in range(1, 1000) if pooled(Job(AUTO, asked[0].setting, 1000.0 / gpus, gpus)) == 1.0)
    assert fewest <= sizing.gpus <= fewest * 1.06
    assert len(asked) < 30


async def test_targets_that_nothing_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, lambda job: 0.5)
    sizings = await size(AUTO, APART, demand_rps=3.0)
    assert sizings == (None, None)
    assert best(sizings) is None


async def test_gpus_apart_come_in_pairs_and_fewer_gpus_win(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, lambda job: 1.0 if job.rate <= 2.0 else 0.0)
    together, apart = await size(AUTO, APART, demand_rps=5.5)
    assert together is not None
    assert apart is not None
    assert (together.gpus, apart.gpus) == (3, 4)
    assert best((apart, together)) is together


async def test_in_earnest() -> None:
    (sizing,) = await size(AUTO, demand_rps=4.0)
    assert sizing is not None
    assert sizing.gpus >= 1
    assert sizing.figures.attainment >= 0.9
