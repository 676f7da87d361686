"""Copies between the device and host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.mover import Way
from tidelane.engine.kv.moves import Load, Store


class HostCopier:
    """The books see to it that no block is written while it is copied from or to."""

    def __init__(self, pool: DevicePool, host: HostMemory) -> None:
        self._pool = pool
        self._host = host

    def ways(self) -> tuple[Way[Store], Way[Load]]:
        return Way(Store, self._store), Way(Load, self._load)

    def close(self) -> None:
        """Memory stays."""

    @torch.inference_mode()
    def _store(self, stores: Sequence[Store]) -> int:
        self._host.store(self._pool, [move.block for move in stores], [move.slot for move in stores])
        return len(stores) * self._host.record_bytes

    @torch.inference_mode()
    def _load(self, loads: Sequence[Load]) -> int:
        (load,) = loads
        for layer in range(self._host.layout.layers):
            self._host.load(self._pool, load.blocks, load.slots, layer)
            load.arrival.reached(layer + 1)
        return len(load.blocks) * self._host.record_bytes
