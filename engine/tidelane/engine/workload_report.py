"""What the agent hears of traffic and device, for predictions of what other targets would come to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tidelane.engine.estimation.estimates import Estimates
from tidelane.engine.estimation.profile import ProfileKey
from tidelane.engine.lanes.partition import PartitionTable
from tidelane.engine.machine_report import MachineReport, ReportedTimes
from tidelane.engine.workload_window import WorkloadWindow
from tidelane.rpc import serving_pb2
from tidelane.rpc.wire import Workload, workload_to_wire

# Times between these follow from their neighbours, and a report is sent each second.
_MOST_ROWS: Final = 4


class WorkloadReport:
    """`key` None: an engine that cannot be simulated, whose traffic is told all the same."""

    def __init__(
        self, window: WorkloadWindow, key: ProfileKey | None, table: PartitionTable, block_tokens: int, kv_tokens: int
    ) -> None:
        self.window = window
        self._key = key
        self._table = table
        self._block_tokens = block_tokens
        self._kv_tokens = kv_tokens

    def message(self, estimates: Estimates) -> serving_pb2.Workload | None:
        """None: no request came lately."""
        sketch = self.window.sketch()
        return None if sketch is None else workload_to_wire(Workload(sketch, self._machine(estimates)))

    def _machine(self, estimates: Estimates) -> MachineReport | None:
        key, contention = self._key, estimates.contention
        if key is None:
            return None
        return MachineReport(
            device=key.device,
            units=key.units,
            dtype=key.dtype,
            layers=key.layers,
            block_tokens=self._block_tokens,
            kv_tokens=self._kv_tokens,
            decode_units=tuple(split.decode_units for split in self._table.splits),
            times=tuple(_times(estimates)),
            decode_slowdown=contention.decode_slowdown,
            prefill_slowdown=contention.prefill_slowdown,
            guard=contention.guard,
        )


def _times(estimates: Estimates) -> Iterator[ReportedTimes]:
    for phase, by_units in estimates.times.items():
        for units in _spread(sorted(by_units)):
            times, factor = by_units[units], estimates.correction_factor(phase, units)
            yield ReportedTimes(
                phase.value,
                units,
                times.knots,
                tuple(factor * each for each in times.linear_s),
                factor * times.pair_s,
                factor * times.context_s,
                factor * times.sequence_s,
            )


def _spread(units: list[int]) -> list[int]:
    """The first, the last, and some evenly between."""
    if len(units) <= _MOST_ROWS:
        return units
    return [units[round(at * (len(units) - 1) / (_MOST_ROWS - 1))] for at in range(_MOST_ROWS)]
