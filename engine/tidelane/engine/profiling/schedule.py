"""When to measure what: every probe several times, spread over the whole time, in an order without a pattern.

A machine's speed drifts within seconds, and others use it too. So the times of one probe lie far apart, and neighbours
in time are strangers in size: a slow minute makes all probes a little worse rather than some of them wrong.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from tidelane.engine.profiling.probes import Kind, Probe

# How the time is shared out.
SHARES: Mapping[Kind, float] = MappingProxyType(
    {Kind.DECODE: 0.25, Kind.PREFILL: 0.35, Kind.FUSED: 0.25, Kind.BESIDE: 0.15}
)
# How often each probe is timed; the least counts. Short passes more often: what disturbs them is as long as they are.
REPEATS = 3
REPEATS_OF_SHORT = 5
SHORT_S = 0.1
# A fit needs some points on each lane, whatever they cost.
FEWEST_POINTS = 10


def rounds(probes: Sequence[Probe], seconds: Callable[[Probe], float], budget_s: float, seed: int) -> list[list[Probe]]:
    """Rounds that take `budget_s` together if each probe takes `seconds(probe)`; what is too long for it is left out.

    The first is what the fits need in any case, should the machine be slower than that; the second all others, and in
    the next ones each probe comes again, in the last of them the short ones alone.
    """
    order = random.Random(seed)
    needed: list[Probe] = []
    others: list[Probe] = []
    for kind, share in SHARES.items():
        shortest, more = _affordable([each for each in probes if each.kind is kind], seconds, share * budget_s)
        needed += shortest
        others += more
    found = [_shuffled(needed, order), _shuffled(others, order)]
    for number in range(1, max(REPEATS, REPEATS_OF_SHORT)):
        again = [probe for probe in (*needed, *others) if number < _repeats(seconds(probe))]
        found.append(_shuffled(again, order))
    return found


def _affordable(
    probes: Sequence[Probe], seconds: Callable[[Probe], float], budget_s: float
) -> tuple[list[Probe], list[Probe]]:
    """The shortest of each lane, whatever they cost, and the shortest others that the budget has room for."""
    needed, others = [], []
    points: dict[int, int] = defaultdict(int)
    for probe in sorted(probes, key=seconds):
        cost_s = _repeats(seconds(probe)) * seconds(probe)
        points[probe.units] += 1
        if points[probe.units] <= FEWEST_POINTS:
            needed.append(probe)
        elif cost_s <= budget_s:
            others.append(probe)
        else:
            continue
        budget_s -= cost_s
    return needed, others


def _shuffled(probes: Sequence[Probe], order: random.Random) -> list[Probe]:
    return order.sample(probes, len(probes))


def _repeats(seconds: float) -> int:
    return REPEATS_OF_SHORT if seconds <= SHORT_S else REPEATS
