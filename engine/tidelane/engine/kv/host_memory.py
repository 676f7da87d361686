"""The host tier's memory: blocks that do not fit on the device, each in one piece."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.memory import zeroed


@dataclass(frozen=True, slots=True)
class HostMemory:
    """[slots, layers, layer bytes], uint8: of each layer of a block the keys, then the values, as they are.

    Block by block, other than the device pool: a block is one piece to write to a disk, and a layer of it one to load.
    """

    layout: KVLayout
    memory: torch.Tensor
    dtype: torch.dtype
    _bytes: memoryview

    @property
    def slots(self) -> int:
        return self.memory.shape[0]

    @staticmethod
    def allocate(layout: KVLayout, slots: int, dtype: torch.dtype) -> HostMemory:
        pages = zeroed(slots * layout.block_bytes)  # whole pages: a disk takes them as they are
        memory = torch.frombuffer(pages, dtype=torch.uint8).view(slots, layout.layers, -1)
        return HostMemory(layout, memory, dtype, memoryview(pages))

    def record(self, slot: int) -> memoryview:
        """All bytes of a block."""
        return self._bytes[slot * self.layout.block_bytes : (slot + 1) * self.layout.block_bytes]

    def store(self, pool: DevicePool, blocks: Sequence[int], slots: Sequence[int]) -> None:
        pieces = [(first, torch.tensor(slots[at : at + count])) for first, at, count in runs(blocks)]
        for layer in range(self.layout.layers):
            for device, host in self._parts(pool, layer):
                for first, places in pieces:
                    host.index_copy_(0, places, device[first : first + len(places)])

    def load(self, pool: DevicePool, blocks: Sequence[int], slots: Sequence[int], layer: int) -> None:
        for device, host in self._parts(pool, layer):
            for first, at, count in runs(blocks):
                places = torch.tensor(slots[at : at + count])
                torch.index_select(host, 0, places, out=device[first : first + count])

    def _parts(self, pool: DevicePool, layer: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Keys and values of a layer, [blocks, elements] on the device and [slots, elements] here."""
        layout = self.layout
        here = self.memory[:, layer].view(self.dtype)
        keys = math.prod((layout.block_tokens, layout.heads, layout.key_dim))
        device = (part[layer].view(pool.blocks, -1) for part in (pool.keys, pool.values))
        return tuple(zip(device, (here[:, :keys], here[:, keys:]), strict=True))


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Adjacent blocks, as (the first of them, where it stands, how many): one copy each, wherever their slots are.

    Slots of a chain lie in any order once others have been evicted from them, a piece of memory for each; to copy each
    by a call of its own took over twice the time of the bytes.
    """
    first = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
            yield blocks[first], first, at - first
            first = at
