"""The stand on an executor in virtual time, whose times are known."""

from __future__ import annotations

from dataclasses import dataclass

from tidelane.engine.estimation.estimates import Contention, Estimates, Phase
from tidelane.engine.estimation.passes import PassTimes
from tidelane.engine.lanes.partition import PartitionTable, partition_table
from tidelane.engine.profiling.probes import Room
from tidelane.engine.profiling.stand import Stand
from tidelane.engine.sequence import Sequence
from tidelane.engine.sim.clock import VirtualClock
from tidelane.engine.sim.executor import VirtualExecutor
from tidelane.engine.sim.noise import Noise
from tidelane.engine.sim.shares import LaneShares

UNITS = 3
LAYERS = 6
ROOM = Room(context_tokens=8192, blocks=8192, block_tokens=16)
KNOTS = tuple(2**power for power in range(14))


def true_times(units: int) -> PassTimes:
    """Of arithmetic by units, and memory by their square root."""
    line = tuple(max(0.010 / units**0.5, 0.0004 * tokens / units) for tokens in KNOTS)
    return PassTimes(KNOTS, line, pair_s=2e-7 / units, context_s=1e-6 / units**0.5, sequence_s=2e-5)


def true_estimates(contention: Contention) -> Estimates:
    by_units = {units: true_times(units) for units in range(1, UNITS + 1)}
    return Estimates(dict.fromkeys(Phase, by_units), contention)


@dataclass
class VirtualStand:
    truth: Estimates
    sigma: float = 0.0

    def __post_init__(self) -> None:
        self.table: PartitionTable = partition_table(UNITS)
        self.clock = VirtualClock()
        self.sequences: dict[str, Sequence] = {}
        self.executor = VirtualExecutor(
            clock=self.clock,
            units=UNITS,
            layers=LAYERS,
            sequences=self.sequences,
            times=self.truth,
            shares=LaneShares(UNITS, 1.0),
            noise=Noise(self.sigma, "profile"),
        )
        self.stand = Stand(
            self.executor, self.sequences, self._wait, layers=LAYERS, block_tokens=ROOM.block_tokens, vocab_size=100
        )

    def _wait(self) -> None:
        end_s = self.executor.next_end_s
        assert end_s is not None, "waiting for what was never launched"
        self.clock.now_s = end_s
