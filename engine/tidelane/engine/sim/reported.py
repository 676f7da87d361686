"""A machine as the engine on it reports it."""

from __future__ import annotations

from tidelane.engine.estimation.estimates import Contention, Estimates, Phase
from tidelane.engine.estimation.passes import PassTimes
from tidelane.engine.lanes.partition import Partition, PartitionTable
from tidelane.engine.machine_report import MachineReport
from tidelane.engine.sim.machine import Machine
from tidelane.engine.sim.synthetic import BLOCK_TOKENS


def reported(report: MachineReport) -> Machine:
    times = estimates_of(report)
    splits = tuple(Partition(units, report.units - units) for units in report.decode_units)
    blocks = max(1, report.kv_tokens // BLOCK_TOKENS)
    return Machine(PartitionTable(report.units, splits), report.layers, blocks, BLOCK_TOKENS, times, times)


def estimates_of(report: MachineReport) -> Estimates:
    by_phase: dict[Phase, dict[int, PassTimes]] = {}
    for each in report.times:
        times = PassTimes(each.knots, each.linear_s, each.pair_s, each.context_s, each.sequence_s)
        by_phase.setdefault(Phase(each.phase), {})[each.units] = times
    return Estimates(by_phase, Contention(report.decode_slowdown, report.prefill_slowdown, report.guard))
