"""How many replicas a service should have by its load. Pure.

More are wanted where requests miss their targets or prompts wait: by need, at most twice as many at once. One fewer is
wanted where, for a whole stabilisation window, every target was met and by prediction would be with one fewer. How busy
a device is does not matter: a busy one may meet every target, and an idle-looking one miss them.

Two textbook models predict what another number would change; both are asked about ratios of load only:

- Waiting, as in M/M/1: P(wait > t) = load * exp(-(1 - load) * t / prefill time) (Kleinrock, Queueing Systems 1, 1975).
  Prompts of equal length wait half as long at the same load (M/D/1), so the load is taken to be that behind twice the
  wait.
- Decode, as processor sharing: TPOT alone over TPOT measured is the part of decode that is left over. Where no engine
  says what TPOT alone would be, TPOT is taken to grow as the load does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from tidelane.engine.slo import Slo
from tidelane.operator.observation import Measured, Replica
from tidelane.operator.quantities import format_duration
from tidelane.operator.resources import ScalingBounds

# Parts of the TTFT target that P90 of the queue time may take: above the first there are too few replicas; one fewer
# must keep it below the second. The gap between them is what keeps the number steady.
QUEUE_TOO_LONG: Final = 0.5
QUEUE_SHORT: Final = 0.25
# One or two late requests in a window may be chance, and so may a P90 of few.
FEWEST_MISSES: Final = 3
FEWEST_REQUESTS: Final = 10
# A younger window than that is of an engine that is still getting into its stride.
SHORTEST_WINDOW_S: Final = 15.0
# Windows of engines that started together; those further apart speak of different numbers of replicas.
_SAME_AGE_S: Final = 10.0
_TAIL: Final = 0.1


@dataclass(frozen=True, slots=True)
class Decision:
    """How many there should be. `reason` is empty where that is as many as there are.

    `calm_since` is since when one fewer would do without a break; it belongs into the next decision. `again_in_s`: when
    it will have been long enough.
    """

    replicas: int
    reason: str = ""
    calm_since: datetime | None = None
    again_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the service asks for. `reachable`: its targets are not known to be out of reach, for any number."""

    bounds: ScalingBounds
    slo: Slo
    reachable: bool = True


def decide(
    wanted: Wanted,
    present: int,
    replicas: Sequence[Replica | None],
    calm_since: datetime | None,
    now: datetime,
    stabilisation_s: float,
) -> Decision:
    """Of `present` replicas, those that have a node are `replicas`, in any order; None: it does not serve, or not yet.

    `calm_since` is that of the last decision on this number.
    """
    bounds = wanted.bounds
    clamped = min(max(present, bounds.min), bounds.max)
    if clamped != present:
        return Decision(clamped, f"spec.scaling.{'min' if clamped > present else 'max'} is {clamped}")
    telling = [replica for replica in replicas if replica is not None]
    if not telling or len(telling) < len(replicas) or not _settled(telling):
        return Decision(present)
    needs = list(_needs(wanted, telling))
    if needs:
        need = max(needs, key=lambda each: (each.replicas, each.reason))
        more = min(need.replicas, bounds.max)
        # Without room for those wanted already, to want still more helps nobody.
        return Decision(more, need.reason) if more > present and len(telling) == present else Decision(present)
    if present == bounds.min or not _fewer_would_do(wanted, telling):
        return Decision(present)
    since = now if calm_since is None else min(calm_since, now)
    left_s = (since + timedelta(seconds=stabilisation_s) - now).total_seconds()
    if left_s > 0:
        return Decision(present, calm_since=since, again_in_s=left_s)
    reason = f"one fewer would have met every target for {format_duration(stabilisation_s)}"
    return Decision(present - 1, reason, calm_since=now)


@dataclass(frozen=True, slots=True)
class _Need:
    replicas: int
    reason: str


def _settled(replicas: Sequence[Replica]) -> bool:
    """Whether all of them have measured for long enough, and what they did under the present number."""
    windows_s = [0.0 if each.measured is None else each.measured.window_s for each in replicas]
    return min(windows_s) >= SHORTEST_WINDOW_S and max(windows_s) - min(windows_s) <= _SAME_AGE_S


def _needs(wanted: Wanted, replicas: Sequence[Replica]) -> Iterator[_Need]:
    """By each replica that has too much to do."""
    count, percent = len(replicas), wanted.slo.percentile
    for replica in replicas:
        measured, index = replica.measured, replica.ref.index
        assert measured is not None
        missed = measured.requests * (1 - measured.attainment)
        if wanted.reachable and not _met(measured, percent) and missed > FEWEST_MISSES - 0.5:
            # As if all that may be late were: the requests within their targets are as many as it can serve so.
            share = max(measured.attainment * 100 / percent, 0.5)
            yield _Need(
                max(count + 1, _up(count / share)),
                f"replica {index} kept {math.floor(measured.attainment * 100 + 1e-9)} % of requests within their "
                f"targets, {percent} % wanted",
            )
        target_s, parts = _ttft_target_s(replica, wanted.slo), measured.parts
        longest_s = QUEUE_TOO_LONG * target_s
        if parts and parts.queue_p90_s > longest_s and measured.requests >= FEWEST_REQUESTS:
            load = load_behind(2 * parts.queue_p90_s, parts.prefill_median_s)
            enough = (
                more
                for more in range(count + 1, 2 * count)
                if wait_p90_s(load * count / more, parts.prefill_median_s) <= longest_s
            )
            wait = format_duration(float(f"{parts.queue_p90_s:.2g}"))
            yield _Need(
                next(enough, 2 * count),
                f"prompts wait {wait} at P90 on replica {index}, more than half of the "
                f"TTFT target of {format_duration(target_s)}",
            )


def _fewer_would_do(wanted: Wanted, replicas: Sequence[Replica]) -> bool:
    """Whether each target is met, and would be by prediction if one fewer shared the load."""
    count = len(replicas)
    # Of replicas wanted without room, one can go and leave the others what they have.
    ratio = count / max(1, count - 1)
    return all(_would_do(wanted, replica, ratio) for replica in replicas)


def _would_do(wanted: Wanted, replica: Replica, ratio: float) -> bool:
    measured, slo = replica.measured, wanted.slo
    assert measured is not None
    if not measured.requests:
        return replica.idle
    parts = measured.parts
    if parts is None or not _met(measured, slo.percentile):
        return False
    load = load_behind(2 * parts.queue_p90_s, parts.prefill_median_s)
    queue_s = max(parts.queue_p90_s, wait_p90_s(load * ratio, parts.prefill_median_s))
    return queue_s <= QUEUE_SHORT * _ttft_target_s(replica, slo) and _tpot_s(replica, measured, ratio) <= slo.tpot_s


def _met(measured: Measured, percent: int) -> bool:
    return measured.attainment * 100 >= percent - 1e-9


def _ttft_target_s(replica: Replica, slo: Slo) -> float:
    """That of its median prompt."""
    return slo.ttft_target_s(replica.reach.input_tokens if replica.reach else 0)


def wait_p90_s(load: float, prefill_s: float) -> float:
    """P90 of the time that a prompt waits at such a load, which is 1 where the wait has no end."""
    if load >= 1:
        return math.inf
    return prefill_s * math.log(load / _TAIL) / (1 - load) if load > _TAIL else 0.0


def load_behind(wait_s: float, prefill_s: float) -> float:
    """The load at which P90 of the wait is that. At most one prompt in ten waits: at most a tenth."""
    low, high = _TAIL, 1.0
    # Each turn halves the gap: 2^-40 is nothing beside what is measured.
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if wait_p90_s(middle, prefill_s) < wait_s else (low, middle)
    return low


def _tpot_s(replica: Replica, measured: Measured, ratio: float) -> float:
    """At the SLO's percentile, at so many times the load."""
    if replica.reach is None or not replica.reach.tpot_s or not measured.tpot_median_s:
        return measured.tpot_s * ratio
    spare = min(1.0, replica.reach.tpot_s / measured.tpot_median_s)
    left = 1 - ratio * (1 - spare)
    return measured.tpot_s * spare / left if left > 0 else math.inf


def _up(value: float) -> int:
    return math.ceil(value - 1e-9)
