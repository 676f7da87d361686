"""From a loaded model to two sides that are warm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tidelane.engine.errors import CannotServe
from tidelane.engine.estimation.estimates import Estimates, Phase
from tidelane.engine.estimation.passes import PassTimes
from tidelane.engine.execution.calibration import calibrate
from tidelane.engine.execution.cpu import CpuExecutor
from tidelane.engine.handover.config import PrefillConfig
from tidelane.engine.handover.executor import ApartExecutor
from tidelane.engine.handover.prefill_side import PrefillSide
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.shared import SharedMemory
from tidelane.engine.lanes.cores import CpuLanes
from tidelane.engine.lanes.partition import Partition, PartitionTable
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.loading import LoadedModel
from tidelane.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Cores:
    """Those of each side; none has both."""

    decode: tuple[int, ...]
    prefill: tuple[int, ...]

    @staticmethod
    def split(cores: tuple[int, ...]) -> Cores:
        """Half and half, one more for prefill where they are odd. Raises CannotServe if there is only one."""
        distinct = tuple(dict.fromkeys(cores))
        if len(distinct) < 2:
            raise CannotServe(
                "execution mode Disaggregated needs two cores, one for each of its processes; "
                f"this engine may use one, core {distinct[0]}"
            )
        half = len(distinct) // 2
        return Cores(distinct[:half], distinct[half:])

    @property
    def partition(self) -> Partition:
        return Partition(len(self.decode), len(self.prefill))

    @property
    def table(self) -> PartitionTable:
        return PartitionTable(len(self.decode) + len(self.prefill), (self.partition,))


@dataclass(frozen=True, slots=True)
class Sides:
    """Both, ready to compute; whoever has them makes an executor of them, once, and closes that."""

    model: SlicedModel
    pool: DevicePool
    lanes: CpuLanes
    side: PrefillSide
    estimates: Estimates

    def executor(self, sequences: Mapping[str, Sequence], notify: Callable[[], None]) -> ApartExecutor:
        decode = CpuExecutor(self.model, self.pool, self.lanes, sequences, notify)
        return ApartExecutor(decode, self.side, sequences)


def open_sides(
    loaded: LoadedModel,
    cores: Cores,
    blocks: int,
    notify: Callable[[], None],
    *,
    max_context_tokens: int | None,
    log_level: str = "info",
) -> Sides:
    """Warms up and times each side, one after the other, so that neither is measured beside the other's start.

    Raises CannotServe if they can never run so, and PrefillSideLost if the prefill side ends before it is ready.
    """
    facts = loaded.facts
    memory = SharedMemory(blocks * facts.kv_layout.block_bytes)
    pool = DevicePool.within(memory.mapped(), facts.kv_layout, blocks, facts.dtype)
    units = len(cores.decode)
    lanes = CpuLanes(cores.decode, PartitionTable(units, ()))
    model = SlicedModel(loaded.module)
    alone = calibrate(model, pool, lanes)
    config = PrefillConfig(
        folder=str(facts.folder),
        dtype=str(facts.dtype).removeprefix("torch."),
        max_context_tokens=max_context_tokens,
        cores=cores.prefill,
        blocks=blocks,
        memory_fd=memory.fd,
        log_level=log_level,
    )
    side = PrefillSide(config, memory, notify)
    try:
        prefill = side.ready()
    except (CannotServe, RuntimeError):
        side.close()
        lanes.close()
        raise
    return Sides(model, pool, lanes, side, _estimates(alone, alone.times[Phase.DECODE][units], prefill, cores.table))


def _estimates(alone: Estimates, decode: PassTimes, prefill: PassTimes, table: PartitionTable) -> Estimates:
    """Each side is all of the device to its phase, so that `table.units`, on which nothing runs, takes as long."""
    (row,) = table.splits
    times = {
        Phase.DECODE: {row.decode_units: decode, table.units: decode},
        Phase.PREFILL: {row.prefill_units: prefill, table.units: prefill},
    }
    return Estimates(times, alone.contention)
