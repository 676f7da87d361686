"""The host tier's memory: blocks that do not fit on the device, each in one piece."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tidelane.engine.kv.codecs import RAW, Codec
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.layout import KVLayout


@dataclass(frozen=True, slots=True)
class HostMemory:
    """[slots, layers, layer bytes], uint8: of each layer of a block the keys, then the values, as `codec` writes them.

    Block by block, other than the device pool: a block is one piece to write to a disk, and a layer of it one to load.
    """

    layout: KVLayout
    codec: Codec
    memory: torch.Tensor
    _bytes: memoryview

    @property
    def slots(self) -> int:
        return self.memory.shape[0]

    @property
    def record_bytes(self) -> int:
        """Of one block."""
        return self.codec.block_bytes(self.layout)

    @staticmethod
    def allocate(layout: KVLayout, slots: int, codec: Codec = RAW) -> HostMemory:
        # Whole pages, zeroed by the kernel when they are touched: a disk takes them as they are.
        pages = mmap.mmap(-1, slots * codec.block_bytes(layout), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(pages, dtype=torch.uint8).view(slots, layout.layers, -1)
        return HostMemory(layout, codec, memory, memoryview(pages))

    def record(self, slot: int) -> memoryview:
        """All bytes of a block."""
        return self._bytes[slot * self.record_bytes : (slot + 1) * self.record_bytes]

    def store(self, pool: DevicePool, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for layer in range(self.layout.layers):
            keys, values = _blocks_of(pool, layer)
            for block, slot, count in runs(blocks, slots):
                here = self.memory[slot : slot + count, layer]
                self.codec.encode(keys[block : block + count], values[block : block + count], here)

    def load(self, pool: DevicePool, blocks: Sequence[int], slots: Sequence[int], layer: int) -> None:
        keys, values = _blocks_of(pool, layer)
        for block, slot, count in runs(blocks, slots):
            here = self.memory[slot : slot + count, layer]
            self.codec.decode(here, keys[block : block + count], values[block : block + count])


def _blocks_of(pool: DevicePool, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer, [blocks, tokens, heads, dim]."""
    keys, values = pool.keys[layer], pool.values[layer]
    return keys.view(pool.blocks, -1, *keys.shape[1:]), values.view(pool.blocks, -1, *values.shape[1:])


def runs(blocks: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Pairs that are adjacent on both sides, as (first block, first slot, how many): one copy each."""
    first = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or (blocks[at], slots[at]) != (blocks[at - 1] + 1, slots[at - 1] + 1):
            yield blocks[first], slots[first], at - first
            first = at
