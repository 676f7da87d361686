"""A small comparison, and runs that are made up instead of simulated."""

from __future__ import annotations

from collections.abc import Callable

from tidelane.engine.bench.report import Spread
from tidelane.engine.estimation.shapes import model_shape
from tidelane.engine.scheduling.policies import OrderName
from tidelane.engine.sim.contestants import Contestant
from tidelane.engine.sim.figures import Figures
from tidelane.engine.sim.machine import in_pairs
from tidelane.engine.sim.scene import Job, Scene
from tidelane.engine.sim.shares import Share
from tidelane.engine.sim.workers import Run
from tidelane.engine.sim.world import Found

from .machines import SLO, machine, traffic

CHUNKED = Contestant("chunked", OrderName.OWN)
STATIC = Contestant("static", OrderName.OURS)
AUTO = Contestant("auto", OrderName.OURS)
APART = Contestant("disaggregated", OrderName.OURS)


def scene(requests: int = 40) -> Scene:
    return Scene(traffic(requests), machine(), in_pairs(machine(), model_shape("smollm2-135m")), SLO)


def figures(rate: float, attainment: float, *, late: bool = True) -> Figures:
    spread = Spread(0.1, 0.2, 0.4, 0.8)
    return Figures(
        rate=rate,
        attainment=attainment,
        goodput=rate * attainment,
        ttft=spread,
        tpot=spread,
        gap=spread,
        aside=Spread(1.0, 2.0, 3.0, 4.0) if late else None,
        refused_late=0.125,
        ttft_curve=(0.05, 0.1, 0.8),
        tpot_curve=(0.02, 0.04, 0.06),
        shares=(Share(0.0, 1.0, 0.25, 0.5, 0.0), Share(1.0, 2.0, 0.0, 0.0, 1.0)),
        found=Found(1000, 400, 200, 100),
    )


def made_up(attainment: Callable[[Job], float]) -> tuple[Run, list[Job]]:
    """Runs whose attainment is what `attainment` says, and the list that they will have been asked for."""
    asked: list[Job] = []

    async def run(job: Job) -> Figures:
        asked.append(job)
        return figures(job.rate, attainment(job))

    return run, asked
