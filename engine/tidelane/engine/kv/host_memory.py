"""The host tier's memory: blocks that do not fit on the device, each in one piece."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tidelane.engine.kv.codecs import RAW, Codec
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.memory import zeroed


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
        pages = zeroed(slots * codec.block_bytes(layout))  # whole pages: a disk takes them as they are
        memory = torch.frombuffer(pages, dtype=torch.uint8).view(slots, layout.layers, -1)
        return HostMemory(layout, codec, memory, memoryview(pages))

    def record(self, slot: int) -> memoryview:
        """All bytes of a block."""
        return self._bytes[slot * self.record_bytes : (slot + 1) * self.record_bytes]

    def store(self, pool: DevicePool, blocks: Sequence[int], slots: Sequence[int]) -> None:
        pieces = [(first, torch.tensor(slots[at : at + count])) for first, at, count in runs(blocks)]
        store = self._store_as_it_is if self.codec is RAW else self._store_encoded
        for layer in range(self.layout.layers):
            for first, places in pieces:
                store(pool, layer, first, places)

    def load(self, pool: DevicePool, blocks: Sequence[int], slots: Sequence[int], layer: int) -> None:
        for first, at, count in runs(blocks):
            self.load_run(pool, layer, first, torch.tensor(slots[at : at + count]))

    def load_run(self, pool: DevicePool, layer: int, first: int, slots: torch.Tensor) -> None:
        """Adjacent blocks from `first` on, of `slots` [blocks]: a block costs the time of its bytes, and no more."""
        load = self._load_as_it_is if self.codec is RAW else self._load_encoded
        load(pool, layer, first, slots)

    def _store_as_it_is(self, pool: DevicePool, layer: int, first: int, places: torch.Tensor) -> None:
        for device, host in self._parts(pool, layer):
            host.index_copy_(0, places, device[first : first + len(places)])

    def _load_as_it_is(self, pool: DevicePool, layer: int, first: int, places: torch.Tensor) -> None:
        for device, host in self._parts(pool, layer):
            torch.index_select(host, 0, places, out=device[first : first + len(places)])

    def _store_encoded(self, pool: DevicePool, layer: int, first: int, places: torch.Tensor) -> None:
        records = self.memory.new_empty(len(places), self.memory.shape[2])
        self.codec.encode(*_run(pool, layer, first, len(places)), records)
        self.memory[:, layer].index_copy_(0, places, records)

    def _load_encoded(self, pool: DevicePool, layer: int, first: int, places: torch.Tensor) -> None:
        self.codec.decode(self.memory[:, layer].index_select(0, places), *_run(pool, layer, first, len(places)))

    def _parts(self, pool: DevicePool, layer: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Keys and values of a layer, [blocks, elements] on the device and [slots, elements] here: whole rows, which
        take a third as long to copy as by way of the codec."""
        layout, keys, values = self.layout, pool.keys[layer], pool.values[layer]
        sizes = [math.prod((layout.block_tokens, layout.heads, dim)) for dim in (layout.key_dim, layout.value_dim)]
        here = self.memory[:, layer].view(keys.dtype)
        device = (part.view(pool.blocks, -1) for part in (keys, values))
        return tuple(zip(device, (here[:, : sizes[0]], here[:, sizes[0] : sum(sizes)]), strict=True))


def _run(pool: DevicePool, layer: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of adjacent blocks in a layer, [blocks, tokens, heads, dim]."""
    keys, values = (
        part[layer].view(pool.blocks, -1, *part[layer].shape[1:]).narrow(0, first, count)
        for part in (pool.keys, pool.values)
    )
    return keys, values


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
