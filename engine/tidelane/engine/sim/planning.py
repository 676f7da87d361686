"""How many GPUs a service needs, in each mode, for its traffic and its targets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidelane.engine.sim.contestants import Contestant
from tidelane.engine.sim.figures import Figures
from tidelane.engine.sim.scene import Job, Scene
from tidelane.engine.sim.search import next_probe, rate_at
from tidelane.engine.sim.workers import Run, workers

# `spec.execution.mode` of each policy.
MODES = {
    "mixed": "MixedBatch",
    "chunked": "ChunkedPrefill",
    "static": "StaticLanes",
    "lanes": "Lanes",
    "auto": "Auto",
    "disaggregated": "Disaggregated",
}
_PROBES = 5
_MOST_RAISES = 6
# A larger fleet is no longer one service; and it would be simulated engine by engine.
MOST_GPUS = 1024
# Requests by which a first guess at a GPU's capacity is made.
SATURATION_REQUESTS = 600


class TooManyGpus(ValueError):
    """Plan for less traffic."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """The fewest GPUs that serve the demand in one mode, to within a twentieth. `margin`: the part of the demand that
    could come on top of it, all targets kept.
    """

    contestant: Contestant
    gpus: int
    figures: Figures
    margin: float

    @property
    def mode(self) -> str:
        return MODES[self.contestant.policy]


async def size_all(
    scene: Scene,
    competing: Sequence[Contestant],
    *,
    demand_rps: float,
    level: float,
    processes: int,
    tell: Callable[[int], None],
) -> tuple[Sizing | None, ...]:
    """For each of `competing`, what it needs for `level` of attainment; None where no number of GPUs would do.

    Raises TooManyGpus.
    `tell` hears how many runs are done.
    """
    done = 0
    async with workers(scene, processes) as run:

        async def counted(job: Job) -> Figures:
            nonlocal done
            figures = await run(job)
            done += 1
            tell(done)
            return figures

        saturation = min(demand_rps, scene.saturation(SATURATION_REQUESTS))
        sizings = (_size(counted, scene, each, demand_rps, level, saturation) for each in competing)
        return tuple(await asyncio.gather(*sizings))


def best(sizings: Sequence[Sizing | None]) -> Sizing | None:
    """The one with the fewest GPUs; of these the one with the widest margin."""
    found = [sizing for sizing in sizings if sizing is not None]
    return min(found, key=lambda sizing: (sizing.gpus, -sizing.margin), default=None)


async def _size(
    run: Run, scene: Scene, contestant: Contestant, demand_rps: float, level: float, saturation: float
) -> Sizing | None:
    each = scene.gpus(contestant, 1)

    async def run_on(machines: int) -> Figures:
        gpus = machines * each
        return await run(_job(scene, contestant, demand_rps / gpus, gpus))

    alone = await _capacity(run, scene, contestant, each, level, await run(_job(scene, contestant, saturation, each)))
    if alone is None:
        return None
    # Engines that share one stream of requests do better than one with its part of it: so from here on by runs.
    too_few, machines = 0, max(1, math.ceil(demand_rps / (alone * each)))
    if machines * each > MOST_GPUS:
        raise TooManyGpus(f"{demand_rps:.3g} requests a second need some {machines * each} GPUs, above {MOST_GPUS}")
    figures = await run_on(machines)
    for _ in range(_MOST_RAISES):
        if figures.attainment >= level:
            break
        too_few, machines = machines, math.ceil(machines * 1.25)
        figures = await run_on(machines)
    else:
        return None
    while machines - too_few > max(1, machines // 20):
        middle = (too_few + machines) // 2
        tried = await run_on(middle)
        if tried.attainment >= level:
            machines, figures = middle, tried
        else:
            too_few = middle
    most = await _capacity(run, scene, contestant, machines * each, level, figures)
    assert most is not None  # as these figures attain it
    return Sizing(contestant, machines * each, figures, most * machines * each / demand_rps - 1)


async def _capacity(
    run: Run, scene: Scene, contestant: Contestant, gpus: int, level: float, known: Figures
) -> float | None:
    """The highest rate for each of `gpus`, searched from what is `known` on."""
    tried = {known.rate: known.attainment}
    for _ in range(_PROBES):
        rate = next_probe(tried, level)
        if rate is None:
            break
        tried[rate] = (await run(_job(scene, contestant, rate, gpus))).attainment
    return rate_at(tried, level)


def _job(scene: Scene, contestant: Contestant, rate: float, gpus: int) -> Job:
    return Job(contestant, contestant.as_served(scene.machine(contestant).table), rate, gpus)
