"""A run of vLLM that somebody measured, against the same run simulated: is virtual time true to life?

The folder holds `meta.json` (`engine_kwargs` with the token budget and the cap on sequences) and `requests.jsonl` (for
each request its lengths and when it arrived, got its first token and its last), as LLMServingSim publishes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tidelane.engine.bench.traffic import Arrival, Traffic
from tidelane.engine.estimation.estimates import Estimates
from tidelane.engine.estimation.fields import Field, WrongField, parse
from tidelane.engine.estimation.fit import nonnegative_least_squares
from tidelane.engine.estimation.passes import PassTimes
from tidelane.engine.scheduling.policies import OrderName, policy
from tidelane.engine.sim.machine import DoesNotFit, Machine
from tidelane.engine.sim.world import Settings, replay
from tidelane.engine.slo import Slo, Timeline

Vector = NDArray[np.float64]

# The fit stops when a round changes no cost by more than this part, or after this many.
STEADY = 0.01
ROUNDS = 8
# No round goes further than this: how durations answer to costs bends where a queue begins to form.
FARTHEST = 0.3
# By how much each cost is changed to see what it does to durations.
_NUDGE = 0.1
# How strongly costs are drawn to the prior: as much as this many requests, squared, that are wrong by 100 %.
PULL = 0.3
# Nothing is refused or timed by targets here: the policy has a fixed budget of tokens and serves first come.
_NO_TARGETS = Slo(ttft_s=3600.0, tpot_s=3600.0)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """`timelines` by arrival, in seconds from the first; prefill starts when the engine scheduled the request."""

    name: str
    model: str
    token_budget: int
    sequence_cap: int
    timelines: tuple[Timeline, ...]

    @property
    def traffic(self) -> Traffic:
        arrivals = tuple(Arrival(each.arrival_s, each.input_tokens, each.output_tokens) for each in self.timelines)
        return Traffic(arrivals, max(1.0, arrivals[-1].at_s))


@dataclass(frozen=True, slots=True)
class Costs:
    """What corrects a prior: factors of its linear layers and of its reading of KV, and a cost of each pass on top."""

    pass_s: float = 0.0
    linear: float = 1.0
    context: float = 1.0

    def of(self, times: PassTimes) -> PassTimes:
        return PassTimes(
            times.knots,
            tuple(self.pass_s + self.linear * each for each in times.linear_s),
            times.pair_s,
            self.context * times.context_s,
            self.linear * times.sequence_s,
        )


# Costs as a vector: a millisecond for each pass counts as much as a factor of 1.
_SCALES = np.array([1e-3, 1.0, 1.0])
_PRIOR = np.array([0.0, 1.0, 1.0])


def read_run(folder: Path) -> MeasuredRun:
    """Raises WrongField, naming file, line and field, or OSError."""
    meta = parse(str(folder / "meta.json"), (folder / "meta.json").read_text(encoding="utf-8"))
    engine = _member(meta, "engine_kwargs")
    path = folder / "requests.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [parse(f"{path}:{number}", line) for number, line in enumerate(lines, start=1)]
    if len(rows) < 3:
        raise WrongField(f"{path}: holds {len(rows)} requests: at least 3 are needed to fit on a third of them")
    return MeasuredRun(
        folder.resolve().name,
        _member(meta, "model").text(),
        _member(engine, "max_num_batched_tokens").integer(1),
        _member(engine, "max_num_seqs").integer(1),
        _timelines(rows),
    )


def fitted(run: MeasuredRun, machine: Machine) -> Costs:
    """What corrects the times of `machine` so that the first third of the requests take, from their first token to
    their last, as long as they were measured to.

    By simulating the run and changing the costs until durations agree (Gauss and Newton's method), since which passes a
    request was in depends on the costs too. What the other requests took is not looked at.
    """
    measured = run.timelines[: len(run.timelines) // 3]

    def errors(at: Vector) -> Vector:
        virtual = simulated(run, corrected(machine, _costs(at)))
        pairs = zip(virtual, measured, strict=False)
        return np.array([_longer(one, real) for one, real in pairs if real.last_token_s > real.first_token_s])

    at = _PRIOR
    for _ in range(ROUNDS):
        off = errors(at)
        slopes = np.stack([(errors(at + nudge) - off) / _NUDGE for nudge in _NUDGE * np.eye(len(at))], axis=1)
        # The costs that undo the errors, if they answer as these slopes say, and stay near the prior.
        matrix = np.vstack([slopes, PULL * np.eye(len(at))])
        wanted = nonnegative_least_squares(matrix, np.concatenate([slopes @ at - off, PULL * _PRIOR]))
        step = np.clip(wanted - at, -FARTHEST, FARTHEST)
        at = at + step
        if np.abs(step).max() < STEADY:
            break
    return _costs(at)


def corrected(machine: Machine, costs: Costs) -> Machine:
    by_phase = {
        phase: {units: costs.of(times) for units, times in by_units.items()}
        for phase, by_units in machine.times.times.items()
    }
    times = Estimates(by_phase, machine.times.contention)
    return replace(machine, times=times, believed=times)


def simulated(run: MeasuredRun, machine: Machine) -> tuple[Timeline, ...]:
    """The whole run in virtual time, by arrival. Raises DoesNotFit if the machine is too small for it."""
    done = replay(
        run.traffic,
        machine,
        lambda: policy("chunked", OrderName.OWN, chunk_tokens=run.token_budget, max_running=run.sequence_cap),
        Settings(_NO_TARGETS),
    )
    timelines = tuple(answer.timeline for answer in done.answers if answer.timeline is not None)
    if len(timelines) < len(run.timelines):
        raise DoesNotFit("some requests of this run fit no such device: name the one that it was measured on")
    return timelines


def _longer(virtual: Timeline, real: Timeline) -> float:
    """By which part, as a logarithm, it took longer in virtual time."""
    return math.log((virtual.last_token_s - virtual.first_token_s) / (real.last_token_s - real.first_token_s))


def _costs(at: Vector) -> Costs:
    return Costs(*(at * _SCALES).tolist())


def _timelines(rows: list[Field]) -> tuple[Timeline, ...]:
    """Arrivals are told by another clock than the rest: the least time from arrival to queue is taken for nothing."""
    arrived = [_member(row, "arrival_time").number() for row in rows]
    behind_s = min(_member(row, "queued_ts").number() - at for row, at in zip(rows, arrived, strict=True))
    start_s = min(arrived)
    timelines = [
        Timeline(
            arrival_s=at - start_s,
            prefill_start_s=_member(row, "scheduled_ts").number() - behind_s - start_s,
            first_token_s=_member(row, "first_token_ts").number() - behind_s - start_s,
            last_token_s=_member(row, "last_token_ts").number() - behind_s - start_s,
            input_tokens=_member(row, "input_toks").integer(1),
            output_tokens=_member(row, "output_toks").integer(1),
        )
        for row, at in zip(rows, arrived, strict=True)
    ]
    return tuple(sorted(timelines, key=lambda each: each.arrival_s))


def _member(of: Field, name: str) -> Field:
    """The one we need; there may be others."""
    found = dict(of.items()).get(name)
    if found is None:
        raise of.wrong(f"lacks {name}: add it")
    return found
