"""A run against a real server in the form of a simulated one, so that both make the same report."""

from __future__ import annotations

from dataclasses import dataclass

from tidelane.engine.bench.load import LoadRun
from tidelane.engine.bench.report import Spread
from tidelane.engine.sim.contestants import Setting
from tidelane.engine.sim.figures import Figures, curve
from tidelane.engine.sim.sweep import Result
from tidelane.engine.slo import Slo


@dataclass(frozen=True, slots=True)
class Server:
    """What competes in such a report: whatever answers there."""

    name: str

    @property
    def policy(self) -> str:
        return self.name

    @property
    def dashed(self) -> bool:
        return False


def result_of(name: str, run: LoadRun, rate_rps: float, gpus: int, slo: Slo) -> Result:
    """Requests that failed count as missed. A client sees neither who was set aside nor how a device was shared."""
    timelines = [timeline for each in run.outcomes if (timeline := each.timeline()) is not None]
    attainment = sum(timeline.meets(slo) for timeline in timelines) / len(run.outcomes)
    ttft_s = [timeline.ttft_s for timeline in timelines]
    tpot_s = [timeline.tpot_s for timeline in timelines if timeline.output_tokens > 1]
    rate = rate_rps / gpus
    figures = Figures(
        rate=rate,
        attainment=attainment,
        goodput=attainment * rate,
        ttft=Spread.of(ttft_s),
        tpot=Spread.of(tpot_s),
        gap=Spread.of([gap_s for each in run.outcomes for gap_s in each.gaps_s]),
        aside=None,
        refused_late=None,
        ttft_curve=curve(ttft_s),
        tpot_curve=curve(tpot_s),
        shares=(),
        found=None,
    )
    return Result(Server(name), gpus, (figures,), (Setting(),), {})
