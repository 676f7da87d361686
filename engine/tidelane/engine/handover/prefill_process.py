"""The prefill side: a process that computes slices of prompts and hands their KV over, until the decode side is gone.

It keeps nothing that anyone would miss: told to end or killed at any moment, it leaves no file, no memory and no
process behind.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
from typing_extensions import override

from tidelane.engine.errors import CannotServe
from tidelane.engine.estimation.estimates import Phase
from tidelane.engine.execution.calibration import calibrate
from tidelane.engine.execution.cpu import CpuExecutor
from tidelane.engine.handover.carrier import Carrier, SharedMemoryCarrier
from tidelane.engine.handover.config import PrefillConfig
from tidelane.engine.handover.messages import Compute, Computed, Forget, FromPrefill, Ready, ToPrefill, Unable
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.shared import mapped
from tidelane.engine.lanes.cores import CpuLanes, leave_compute_to_lanes
from tidelane.engine.lanes.partition import Partition, PartitionTable
from tidelane.engine.model.batch import RaggedBatch
from tidelane.engine.model.forward import Batch, SlicedModel
from tidelane.engine.model.loading import LoadedModel, load
from tidelane.engine.scheduling.plan import Plan
from tidelane.engine.sequence import Sequence


def prefill(config: PrefillConfig, link: Connection) -> int:
    """Returns the process's exit code once the decode side is gone, or has been told why it cannot be served."""
    os.sched_setaffinity(0, config.cores)
    try:
        side = _Side(config, link)
    except CannotServe as error:
        link.send_bytes(msgspec.msgpack.encode(Unable(str(error))))
        return os.EX_CONFIG
    try:
        side.run()
    except (EOFError, ConnectionError):
        return 0
    return 0


class HandingModel(SlicedModel):
    """Goes layer by layer, and hands over what each has written as soon as it is done."""

    def __init__(self, loaded: LoadedModel, checked: SlicedModel, carrier: Carrier) -> None:
        super().__init__(loaded.module)
        self.layers = checked.layers  # 1 if it was found that it cannot be sliced
        self._carrier = carrier

    @override
    def run(self, hidden: torch.Tensor, batch: Batch, first: int, last: int) -> torch.Tensor:
        assert isinstance(batch, RaggedBatch)
        blocks = {slot // batch.pool.layout.block_tokens for slot in batch.write_slots.tolist()}
        for layer in range(first, last):
            hidden = super().run(hidden, batch, layer, layer + 1)
            for written in range(batch.pool.layout.layers) if self.layers == 1 else (layer,):
                self._carrier.send(written, blocks)
        self._carrier.arrived()
        return hidden


class _Side:
    """Computes on one lane. Only `run` reads the link; once it runs, only the lane's thread writes to it."""

    def __init__(self, config: PrefillConfig, link: Connection) -> None:
        leave_compute_to_lanes()
        loaded = load(Path(config.folder), config.dtype, config.max_context_tokens, torch.device("cpu"))
        layout, dtype = loaded.facts.kv_layout, loaded.facts.dtype
        pool = DevicePool.allocate(layout, config.blocks, dtype, torch.device("cpu"))
        memory = mapped(config.memory_fd, config.blocks * layout.block_bytes)
        carrier = SharedMemoryCarrier(pool, DevicePool.within(memory, layout, config.blocks, dtype))
        units = len(config.cores)
        lanes = CpuLanes(config.cores, PartitionTable(units, ()))
        model = SlicedModel(loaded.module)
        self._link = link
        self._sequences: dict[str, Sequence] = {}
        # Timed without handing over: blocks of the decode side may be in use, if this is not its first prefill side.
        times = calibrate(model, pool, lanes).times[Phase.PREFILL][units]
        handing = HandingModel(loaded, model, carrier)
        self._executor = CpuExecutor(handing, pool, lanes, self._sequences, self._tell)
        self._say(Ready(times))

    def run(self) -> None:
        """Raises EOFError or ConnectionError when the decode side has closed the link."""
        decoder = msgspec.msgpack.Decoder(ToPrefill)
        while True:
            match decoder.decode(self._link.recv_bytes()):
                case Compute(part=part, units=units, prompts=prompts):
                    self._sequences.clear()
                    self._sequences.update((prompt.request.id, prompt.sequence()) for prompt in prompts)
                    self._executor.launch(Plan(Partition(units, units), prefill=part))
                case Forget(job=job):
                    self._executor.forget(job)

    def _tell(self) -> None:
        for completion in self._executor.poll():
            self._say(Computed(completion))

    def _say(self, message: FromPrefill) -> None:
        self._link.send_bytes(msgspec.msgpack.encode(message))
