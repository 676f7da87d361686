"""Contestants over a grid of rates: each tuned, run, and searched for the rates that it can sustain.

Each contestant is tuned for each rate on the beginning of the same traffic, by goodput. The search between the points
of the grid takes the setting of the nearest point.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tidelane.engine.sim.contestants import Competitor, Contestant, Setting
from tidelane.engine.sim.figures import Figures
from tidelane.engine.sim.scene import Job, Scene
from tidelane.engine.sim.search import next_probe, rate_at
from tidelane.engine.sim.workers import Run, workers

LEVELS = (0.9, 0.99)
# Of the rate at which a device works its traffic off: from light load to twice what it can bear. Where requests come in
# bursts, targets are missed long before that rate, and by policies without an order of deadlines far below it.
GRID = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0)

Tell = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to run: `rates` for each GPU, the first `tuning_requests` for each setting that could be chosen, and up
    to `refinements` runs for each level of attainment.
    """

    rates: tuple[float, ...]
    tuning_requests: int
    refinements: int
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """Of one contestant: `points` by rising rate, each with the setting it was tuned to; `rates_at` by attainment."""

    contestant: Competitor
    gpus: int
    points: tuple[Figures, ...]
    settings: tuple[Setting, ...]
    rates_at: Mapping[float, float | None]

    @property
    def best(self) -> Figures:
        return max(self.points, key=lambda point: point.goodput)

    @property
    def best_setting(self) -> Setting:
        return self.settings[self.points.index(self.best)]


async def sweep(
    scene: Scene, competing: Sequence[Contestant], effort: Effort, *, processes: int, tell: Tell
) -> tuple[Result, ...]:
    """`tell` hears how many runs are done, and of how many at most. Results do not depend on `processes`."""
    at_most = sum(_runs_at_most(scene, each, effort) for each in competing)
    done = 0

    async with workers(scene, processes) as run:

        async def counted(job: Job) -> Figures:
            nonlocal done
            figures = await run(job)
            done += 1
            tell(done, at_most)
            return figures

        return tuple(await asyncio.gather(*(compete(counted, scene, each, effort) for each in competing)))


async def compete(run: Run, scene: Scene, contestant: Contestant, effort: Effort) -> Result:
    gpus = scene.gpus(contestant, effort.gpus)
    rates = sorted(effort.rates)
    tuned = await _tuned(run, contestant, scene.settings(contestant), rates, gpus, effort.tuning_requests)
    points = await asyncio.gather(
        *(run(Job(contestant, setting, rate, gpus)) for rate, setting in zip(rates, tuned, strict=True))
    )
    tried = {point.rate: point.attainment for point in points}
    rates_at: dict[float, float | None] = {}
    for level in LEVELS if effort.refinements else ():
        for _ in range(effort.refinements):
            rate = next_probe(tried, level)
            if rate is None:
                break
            setting = tuned[_nearest(rates, rate)]
            tried[rate] = (await run(Job(contestant, setting, rate, gpus))).attainment
        rates_at[level] = rate_at(tried, level)
    return Result(contestant, gpus, tuple(points), tuple(tuned), rates_at)


async def _tuned(
    run: Run, contestant: Contestant, settings: Sequence[Setting], rates: Sequence[float], gpus: int, requests: int
) -> list[Setting]:
    """For each of `rates` the setting with the most goodput; of several, the one that serves best at higher rates."""
    if len(settings) == 1:
        return [settings[0]] * len(rates)
    jobs = [Job(contestant, setting, rate, gpus, requests) for rate in rates for setting in settings]
    goodputs = [figures.goodput for figures in await asyncio.gather(*(run(job) for job in jobs))]
    return best_settings(settings, [goodputs[at : at + len(settings)] for at in range(0, len(jobs), len(settings))])


def best_settings(settings: Sequence[Setting], goodputs: Sequence[Sequence[float]]) -> list[Setting]:
    """`goodputs[rate][setting]`, by rising rates."""
    chosen: list[Setting] = []
    for of_settings in reversed(goodputs):
        most = max(of_settings)
        best = [setting for setting, goodput in zip(settings, of_settings, strict=True) if goodput == most]
        chosen.append(chosen[-1] if chosen and chosen[-1] in best else best[0])
    return chosen[::-1]


def _nearest(rates: Sequence[float], rate: float) -> int:
    return min(range(len(rates)), key=lambda at: abs(math.log(rates[at]) - math.log(rate)))


def _runs_at_most(scene: Scene, contestant: Contestant, effort: Effort) -> int:
    settings = len(scene.settings(contestant))
    tuning = settings if settings > 1 else 0
    return len(effort.rates) * (1 + tuning) + len(LEVELS) * effort.refinements
