"""What a service with such traffic would come to under an objective: attainment, latencies, replicas.

Each replica is simulated alone, with its part of the traffic, by the scheduler of the objective's mode. Not simulated
are the agent's slow loop, which moves the least share of decode each minute, and requests with targets of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from tidelane.engine.scheduling.policies import live_policies
from tidelane.engine.sim.machine import Machine
from tidelane.engine.sim.synthetic import synthetic
from tidelane.engine.sim.world import Replay, Settings
from tidelane.engine.sim.world import replay as replay_in
from tidelane.engine.slo import percentile
from tidelane.engine.workload import Sketch
from tidelane.rpc.wire import ExecutionMode, Objective

# So many, and attainment of 90 % is known to within 2.4 points, 19 times of 20.
REQUESTS: Final = 600
# How far the fewest replicas are looked for, up or down.
_STEPS: Final = 4


class CannotSimulate(ValueError):
    """The simulator does not know this."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """`attainment` from 0 to 1; latencies at the percentile of the targets, None of no answers. `replicas` are the
    fewest that would meet the targets, None where none of those tried would."""

    attainment: float
    ttft_s: float | None
    tpot_s: float | None
    replicas: int | None = None

    def meets(self, percent: int) -> bool:
        return self.attainment * 100 >= percent


def forecast(machine: Machine, sketch: Sketch, objective: Objective, replicas: int, *, seed: int = 0) -> Forecast:
    """`sketch` is of `replicas` replicas. Raises CannotSimulate or TooLittleSeen."""
    policies = live_policies(machine.table)
    if objective.mode not in policies:
        raise CannotSimulate(f"no simulating the mode {ExecutionMode(objective.mode).value}")
    traffic = synthetic(sketch, REQUESTS, seed)
    bounds = objective.bounds
    settings = Settings(
        objective.slo,
        seed=seed,
        refuse_late=objective.late_requests == "Refuse",
        min_decode_share=bounds.min_decode_share if bounds else 0.0,
        max_decode_share=bounds.max_decode_share if bounds else 1.0,
    )

    def on(count: int) -> Forecast:
        """Each of so many, with its part of what comes to all."""
        shared = traffic.faster(replicas / count)
        policy = live_policies(machine.table)[objective.mode]
        return _told(replay_in(shared, machine, lambda: policy, settings), objective)

    found = on(replicas)
    return replace(found, replicas=_fewest(on, found, replicas, objective.slo.percentile))


def _fewest(on: Callable[[int], Forecast], found: Forecast, replicas: int, percent: int) -> int | None:
    if found.meets(percent):
        least = replicas
        while least > max(1, replicas - _STEPS) and on(least - 1).meets(percent):
            least -= 1
        return least
    # The most first: often a target is out of reach, and no number of replicas would do.
    most = replicas + _STEPS
    if not on(most).meets(percent):
        return None
    return next((more for more in range(replicas + 1, most) if on(more).meets(percent)), most)


def _told(done: Replay, objective: Objective) -> Forecast:
    slo = objective.slo
    timelines = [answer.timeline for answer in done.answers if answer.timeline is not None]
    return Forecast(
        sum(timeline.meets(slo) for timeline in timelines) / len(done.answers),
        percentile([each.ttft_s for each in timelines], slo.percentile) if timelines else None,
        percentile([each.tpot_s for each in timelines], slo.percentile) if timelines else None,
    )
