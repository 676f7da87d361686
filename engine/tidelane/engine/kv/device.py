"""The device tier: one pair of tensors per layer that every sequence's blocks are parts of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.memory import zeroed

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class DevicePool:
    """`keys[layer]` and `values[layer]` are [slots, heads, dim]; block b holds slots b * block_tokens and on.

    Layer by layer rather than block by block, so that a run of adjacent blocks is one strided view that attention can
    read in place (docs/adr/0004-kv-pool-by-layer.md).
    """

    layout: KVLayout
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @property
    def blocks(self) -> int:
        return self.keys[0].shape[0] // self.layout.block_tokens

    @staticmethod
    def allocate(layout: KVLayout, blocks: int, dtype: torch.dtype, device: torch.device) -> DevicePool:
        if device.type == "cpu":
            memory = torch.frombuffer(zeroed(blocks * layout.block_bytes), dtype=torch.uint8)
            return DevicePool.within(memory, layout, blocks, dtype)
        slots = blocks * layout.block_tokens

        def tensors(dim: int) -> tuple[torch.Tensor, ...]:
            shape = (slots, layout.heads, dim)
            return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(layout.layers))

        return DevicePool(layout, tensors(layout.key_dim), tensors(layout.value_dim))

    @staticmethod
    def within(memory: torch.Tensor, layout: KVLayout, blocks: int, dtype: torch.dtype) -> DevicePool:
        """All of `memory` [blocks * block_bytes, uint8]: the keys of each layer, then the values."""
        slots = blocks * layout.block_tokens
        sizes = [slots * layout.heads * dim * dtype.itemsize for dim in (layout.key_dim, layout.value_dim)]
        keys, values = torch.split(memory, [layout.layers * size for size in sizes])

        def tensors(part: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
            return part.view(dtype).view(layout.layers, slots, layout.heads, dim).unbind()

        return DevicePool(layout, tensors(keys, layout.key_dim), tensors(values, layout.value_dim))

    def prints(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """A number for each of `slots` that changes with any of its bytes, keys and values of all layers: [slots]."""
        at = torch.from_numpy(slots).to(self.keys[0].device)
        sums = torch.zeros(len(slots), dtype=torch.int64, device=at.device)
        for number, part in enumerate((*self.keys, *self.values), start=1):
            bits = part[at].flatten(1).view(_BITS[part.element_size()])
            # Weighted, so that elements which change places are noticed.
            sums += number * (bits * torch.arange(1, bits.shape[1] + 1, device=at.device)).sum(dim=1)
        return sums.cpu().numpy()
