"""The KV of a sequence that is longer than its blocks on the device: older blocks lie in host memory, and come up part
by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from functools import partial

import torch

from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.moves import LOST_AFTER_S, LoadLost
from tidelane.engine.kv.stream_run import StreamRun
from tidelane.engine.kv.traffic import PartRead, Traffic


class ContextFull(ValueError):
    """The sequence cannot take these tokens: it needs more room, or fewer tokens at a time."""


@dataclass(frozen=True, slots=True)
class Part:
    """KV of one layer at positions `first` and on: keys [tokens, kv_heads, dim], values [tokens, kv_heads, value_dim].

    A view of the pool: see who made it for how long it holds.
    """

    first: int
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def end(self) -> int:
        return self.first + self.keys.shape[0]

    def between(self, first: int, end: int) -> Part:
        """Positions [first, end) of it."""
        at = first - self.first
        return Part(first, self.keys[at : at + end - first], self.values[at : at + end - first])


class PartReader:
    """Blocks from host memory through two staging buffers: while one part is computed with, the next is copied."""

    def __init__(self, pool: DevicePool, host: HostMemory, blocks: StreamRun, traffic: Traffic) -> None:
        self._pool = pool
        self._host = host
        self._blocks = blocks
        self._traffic = traffic
        # One thread, and so one order: a copy that nobody waits for any more is over before the next into its buffer.
        # It does not give way to lanes, as other copies do: whoever streams computes nothing without it.
        self._thread = ThreadPoolExecutor(1, "kv-parts", partial(torch.set_num_threads, 1))
        # Begun here: a thread keeps to the cores of the one that begins it, and a lane's are not all that there are.
        self._thread.submit(_nothing)

    def read(self, layer: int, slots: torch.Tensor, first_block: int) -> Iterator[Part]:
        """A layer of blocks `first_block` and on of a sequence whose blocks lie in `slots` [blocks], in order.

        The first copies begin with the call, and a part holds until the next is asked for. One read at a time. Raises
        LoadLost if a part does not come.
        """
        size = self._blocks.part_blocks
        spans = [(at, slots[at : at + size]) for at in range(first_block, len(slots), size)]
        copies = [self._copy(layer, number % 2, slots) for number, (_, slots) in enumerate(spans[:2])]
        return self._parts(layer, spans, copies)

    def settle(self) -> None:
        """Returns when no copy is under way any more."""
        self._thread.submit(_nothing).result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _parts(self, layer: int, spans: list[tuple[int, torch.Tensor]], copies: list[Future[None]]) -> Iterator[Part]:
        tokens = self._pool.layout.block_tokens
        try:
            for number, (block, slots) in enumerate(spans):
                try:
                    copies[number].result(LOST_AFTER_S)
                except (OSError, RuntimeError, NotInTime) as error:
                    raise LoadLost(f"layer {layer} of KV from block {block} on did not come") from error
                at = (self._blocks.first + number % 2 * self._blocks.part_blocks) * tokens
                here = slice(at, at + len(slots) * tokens)
                yield Part(block * tokens, self._pool.keys[layer][here], self._pool.values[layer][here])
                if number + 2 < len(spans):  # this part is done with: its buffer takes the one after the next
                    copies.append(self._copy(layer, number % 2, spans[number + 2][1]))
        finally:
            for copy in copies:
                copy.cancel()

    def _copy(self, layer: int, buffer: int, slots: torch.Tensor) -> Future[None]:
        first = self._blocks.first + buffer * self._blocks.part_blocks
        return self._thread.submit(self._load, layer, first, slots)

    @torch.inference_mode()
    def _load(self, layer: int, first: int, slots: torch.Tensor) -> None:
        copied: int | None = None
        try:
            with self._traffic.copying(PartRead):
                self._host.load_run(self._pool, layer, first, slots)
            copied = len(slots) * self._host.record_bytes // self._pool.layout.layers
        finally:
            self._traffic.ended(PartRead, 1, copied)


def _nothing() -> None:
    """Once it has run, all that was asked for before it has."""


class StreamedContext:
    """One sequence's KV. All full blocks are in host memory, from `slots` in order; on the device are the tokens after
    them, at most a block less one, and those of the pass under way.

    A pass writes each layer's KV and attends; `advance` then makes it part of the context. A pass that has failed may
    be made again, once `settle` has returned. The blocks, the slots and what lies there are this one's alone. `traffic`
    is told of all that comes up.
    """

    def __init__(
        self, pool: DevicePool, host: HostMemory, blocks: StreamRun, slots: Sequence[int], traffic: Traffic
    ) -> None:
        if blocks.part_blocks < 1 or blocks.own_blocks < 2:
            raise ValueError("streaming needs one block or more for each part, and two for what is computed")
        if blocks.first + blocks.count > pool.blocks:
            raise ValueError(
                f"the pool has {pool.blocks} blocks, not the {blocks.first + blocks.count} that this takes"
            )
        self._pool = pool
        self._host = host
        self._blocks = blocks
        self._slots = torch.tensor(slots)
        self._reader = PartReader(pool, host, blocks, traffic)
        self._stored_blocks = 0
        self.length = 0

    @property
    def pass_tokens(self) -> int:
        """What a pass can take, whatever lies on the device before it."""
        return self._blocks.pass_blocks * self._pool.layout.block_tokens

    @property
    def stored(self) -> int:
        """Tokens in host memory."""
        return self._stored_blocks * self._pool.layout.block_tokens

    @property
    def stored_slots(self) -> torch.Tensor:
        """Host slots of the stored tokens [blocks], in order."""
        return self._slots[: self._stored_blocks]

    def check(self, rows: int) -> None:
        """Raises ContextFull if a pass of `rows` tokens cannot be taken."""
        if rows > self.pass_tokens:
            raise ContextFull(f"{rows} tokens at once, and the device has room for {self.pass_tokens}: send fewer")
        room = len(self._slots) * self._pool.layout.block_tokens
        if self.length + rows > room:
            raise ContextFull(f"{self.length + rows} tokens, and host memory has slots for {room}: give it more")

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Of the pass's tokens, [rows, kv_heads, dim] each."""
        at = self._own_slot + self.length - self.stored
        for pool, new in ((self._pool.keys, keys), (self._pool.values, values)):
            pool[layer][at : at + new.shape[0]].copy_(new)

    def own(self, layer: int, rows: int) -> Part:
        """What is on the device, the `rows` tokens of the pass included, once they are written. Holds for the pass."""
        here = slice(self._own_slot, self._own_slot + self.length - self.stored + rows)
        return Part(self.stored, self._pool.keys[layer][here], self._pool.values[layer][here])

    def parts(self, layer: int, first: int) -> Iterator[Part]:
        """What is in host memory, from the block of position `first` on: see PartReader.read."""
        return self._reader.read(layer, self.stored_slots, max(0, first) // self._pool.layout.block_tokens)

    @torch.inference_mode()
    def advance(self, rows: int) -> None:
        """The pass has written its `rows` tokens to all layers: full blocks go to host memory, and leave the device."""
        tokens, length = self._pool.layout.block_tokens, self.length + rows
        full = (length - self.stored) // tokens
        if full > 0:
            first, slots = self._blocks.first_own, self._slots[self._stored_blocks : self._stored_blocks + full]
            self._host.store(self._pool, range(first, first + full), slots.tolist())
            self._stored_blocks += full
            left, end = length - self.stored, self._own_slot + full * tokens
            for part in (*self._pool.keys, *self._pool.values):
                part[self._own_slot : self._own_slot + left].copy_(part[end : end + left])
        self.length = length

    def settle(self) -> None:
        """Wait until nothing of a pass that has failed is written to the blocks any more."""
        self._reader.settle()

    def close(self) -> None:
        """No copy is under way any more."""
        self._reader.close()

    @property
    def _own_slot(self) -> int:
        return self._blocks.first_own * self._pool.layout.block_tokens
