"""What all contestants of one comparison share, and one run of one of them in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tidelane.engine.bench.traffic import Traffic
from tidelane.engine.scheduling.policies import OrderName
from tidelane.engine.sim.contestants import Contestant, Setting
from tidelane.engine.sim.figures import Figures, figures_of
from tidelane.engine.sim.machine import Machine
from tidelane.engine.sim.world import Replay, Settings
from tidelane.engine.sim.world import replay as replay_in
from tidelane.engine.slo import Slo

_WORKED_OFF_BY = Contestant("mixed", OrderName.OWN)
_ALL_AT_ONCE = 1e6


@dataclass(frozen=True, slots=True)
class Job:
    """One run: `rate` requests a second for each of `gpus`, only the first `requests` of them unless None."""

    contestant: Contestant
    setting: Setting
    rate: float
    gpus: int
    requests: int | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """`together` is one GPU, `apart` two of them as one machine, for decode and for prefill."""

    traffic: Traffic
    together: Machine
    apart: Machine
    slo: Slo
    seed: int = 0
    refuse_late: bool = False

    def machine(self, contestant: Contestant) -> Machine:
        return self.apart if contestant.apart else self.together

    def gpus(self, contestant: Contestant, wanted: int) -> int:
        """As many of `wanted` as its machines can use, but one machine at least."""
        each = self.machine(contestant).gpus
        return max(1, wanted // each) * each

    def settings(self, contestant: Contestant) -> Sequence[Setting]:
        return contestant.settings(self.machine(contestant).table)

    def run(self, job: Job) -> Figures:
        return figures_of(self.replay(job), job.rate, self.slo)

    def replay(self, job: Job) -> Replay:
        traffic = self.traffic.at_rate(job.rate * job.gpus)
        if job.requests is not None:
            traffic = traffic.limited(job.requests)
        machine = self.machine(job.contestant)
        engines = job.gpus // machine.gpus
        settings = Settings(self.slo, engines=engines, seed=self.seed, refuse_late=self.refuse_late)
        return replay_in(traffic, machine, lambda: job.contestant.scheduler(job.setting), settings)

    def saturation(self, requests: int) -> float:
        """Requests a second that one GPU works off if the first `requests` come all at once and nothing is promised."""
        first = replace(self, traffic=self.traffic.limited(requests), refuse_late=False)
        run = first.replay(Job(_WORKED_OFF_BY, Setting(), _ALL_AT_ONCE, 1))
        return len(first.traffic.arrivals) / run.ended_s
