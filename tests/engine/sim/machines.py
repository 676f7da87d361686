"""Small machines and traffic with times that can be worked out by hand."""

from __future__ import annotations

import random

from tidelane.engine.bench.traffic import Arrival, Traffic
from tidelane.engine.estimation.estimates import Contention, Estimates, Phase
from tidelane.engine.estimation.passes import PassTimes
from tidelane.engine.lanes.partition import PartitionTable, partition_table
from tidelane.engine.sim.executor import Handover
from tidelane.engine.sim.machine import Machine
from tidelane.engine.sim.tiers import NO_TIERS, Tiers
from tidelane.engine.slo import Slo

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def hand_made(units: int = 4) -> Estimates:
    """On all units a step takes 10 ms and a prompt token 1 ms; on n of 4, steps sqrt(4 / n), prompts 4 / n as long."""

    def decode(n: int) -> PassTimes:
        return PassTimes((1,), (0.01 * (units / n) ** 0.5,))

    def prefill(n: int) -> PassTimes:
        slope = 0.001 * units / n
        return PassTimes((1, 1001), (slope, slope * 1001))

    every = range(1, units + 1)
    return Estimates(
        {
            Phase.DECODE: {n: decode(n) for n in every},
            Phase.PREFILL: {n: prefill(n) for n in every},
            Phase.FUSED: {n: prefill(n) for n in every},
        },
        Contention(decode_slowdown=1.25, prefill_slowdown=1.1, guard=1.3),
    )


def machine(
    *,
    blocks: int = 1000,
    table: PartitionTable | None = None,
    overhead_s: float = 0.0,
    handover: Handover | None = None,
    tiers: Tiers = NO_TIERS,
) -> Machine:
    table = table or partition_table(4)
    times = hand_made(table.units)
    return Machine(table, 10, blocks, 16, times, times, 1, overhead_s, handover, tiers)


def traffic(requests: int = 60, rate: float = 4.0, seed: int = 1) -> Traffic:
    """Prompts of 5 to 400 tokens, answers of 1 to 40, every second prompt with a known beginning."""
    draw = random.Random(seed)
    at_s, arrivals = 0.0, []
    for number in range(requests):
        at_s += draw.expovariate(rate)
        hashes = (0, number) if number % 2 else ()
        arrivals.append(Arrival(at_s, draw.randint(5, 400), draw.randint(1, 40), hash_ids=hashes))
    return Traffic(tuple(arrivals), at_s)
