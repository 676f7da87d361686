"""Decode steps on a GPU: the buffers that never move, and the CUDA graphs captured over them.

A graph replays kernels with the addresses and shapes it was captured with. So a step's inputs are written into buffers
made once, and batches are filled up to a few sizes. A graph's kernels also stay on the SMs of the stream that they were
captured on, so there is a set of graphs for each decode lane.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tidelane.engine.kv.device import DevicePool
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.paged import Kernels, PagedBatch, Steps
from tidelane.engine.sequence import Sequence

_log = logging.getLogger(__name__)

MOST_ROWS = 256


def buckets(most_rows: int) -> tuple[int, ...]:
    """Sizes that batches are filled up to: powers of two, and `most_rows`."""
    sizes = [1 << power for power in range(most_rows.bit_length()) if 1 << power < most_rows]
    return (*sizes, most_rows)


def bucket_for(rows: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest of the rising `sizes` that holds `rows`; None if none does."""
    return next((size for size in sizes if size >= rows), None)


def seat(ids: tuple[str, ...], seated: tuple[str | None, ...], rows: int) -> tuple[str | None, ...]:
    """Who sits in which of `rows` rows: `ids`, each where it sat before if it can, for its block table lies there."""
    wanted = set(ids)
    seats: list[str | None] = [who if who in wanted else None for who in seated[:rows]]
    seats += [None] * (rows - len(seats))
    newcomers = iter([who for who in ids if who not in set(seats)])
    return tuple(next(newcomers, None) if who is None else who for who in seats)


@dataclass(slots=True)
class _Table:
    """What a row of the block table holds: the first `held` of `blocks`."""

    blocks: list[int] | None = None
    held: int = 0


class StepBuffers:
    """Inputs and outputs of a step, at fixed addresses on the device, with twins on the host.

    A row that nobody sits in computes token 0 at position 0 of the last block of the pool, which must be nobody's: the
    pool has one more block than sequences are given.
    """

    # Rows of `inputs`.
    TOKEN, POSITION, SLOT, CONTEXT = range(4)

    def __init__(self, pool: DevicePool, most_rows: int, most_tokens: int, vocab_size: int) -> None:
        device = pool.keys[0].device
        pinned = device.type == "cuda"  # only then does a copy leave the host free to go on
        self._block_tokens = pool.layout.block_tokens
        self._spare_block = pool.keys[0].shape[0] // self._block_tokens - 1
        most_blocks = -(-most_tokens // self._block_tokens)
        self._host_inputs = torch.zeros(4, most_rows, dtype=torch.int64, pin_memory=pinned)
        self._host_table = torch.zeros(most_rows, most_blocks, dtype=torch.int32, pin_memory=pinned)
        self._host_outputs = torch.zeros(2, most_rows, dtype=torch.int64, pin_memory=pinned)
        self.inputs = torch.zeros_like(self._host_inputs, device=device, pin_memory=False)
        self.table = torch.zeros_like(self._host_table, device=device, pin_memory=False)
        # The likeliest token of each row, and whether its logit is not a number.
        self.outputs = torch.zeros_like(self._host_outputs, device=device, pin_memory=False)
        self.logits = torch.zeros(most_rows, vocab_size, dtype=torch.float32, device=device)
        self._seats: tuple[str | None, ...] = ()
        self._tables = [_Table() for _ in range(most_rows)]

    def empty(self) -> None:
        """As at first: every row computes nothing of anyone's."""
        self._seats = ()
        self._fill({}, self.inputs.shape[1])

    def fill(self, sequences: Mapping[str, Sequence], ids: tuple[str, ...], rows: int) -> tuple[str | None, ...]:
        """Write the step of `ids` into the first `rows` rows; who sits in which of them.

        The copies are ordered on the current stream. The step before must have ended.
        """
        self._seats = seat(ids, self._seats, rows)
        self._fill(sequences, rows)
        return self._seats

    def _fill(self, sequences: Mapping[str, Sequence], rows: int) -> None:
        columns: list[tuple[int, int, int, int]] = []
        for row in range(rows):
            who = self._seats[row] if row < len(self._seats) else None
            if who is None:
                self._write_table(row, [self._spare_block])
                columns.append((0, 0, self._spare_block * self._block_tokens, 1))
                continue
            sequence = sequences[who]
            at, blocks = sequence.computed, sequence.blocks
            self._write_table(row, blocks)
            slot = blocks[at // self._block_tokens] * self._block_tokens + at % self._block_tokens
            columns.append((sequence.tokens[at], at, slot, at + 1))
        self._host_inputs[:, :rows] = torch.tensor(columns).T
        self.inputs.copy_(self._host_inputs, non_blocking=True)

    def _write_table(self, row: int, blocks: list[int]) -> None:
        """Bring the row up to date. Lists of blocks only grow; after a pre-emption a sequence has a new one."""
        table = self._tables[row]
        if table.blocks is not blocks and table.blocks != blocks:
            table.held = 0
        table.blocks = blocks
        first, end = table.held, len(blocks)
        if first < end:
            self._host_table[row, first:end] = torch.tensor(blocks[first:end], dtype=torch.int32)
            self.table[row, first:end].copy_(self._host_table[row, first:end], non_blocking=True)
            table.held = end

    def batch(self, pool: DevicePool, kernels: Kernels, rows: int) -> PagedBatch:
        """The first `rows` rows, as views of the buffers."""
        inputs = self.inputs[:, :rows]
        steps = Steps(inputs[self.CONTEXT], self.table[:rows])
        return PagedBatch(pool, kernels, inputs[self.TOKEN], inputs[self.POSITION], inputs[self.SLOT], steps, None)

    def send_back(self) -> None:
        """Order the copy of the outputs to the host, on the current stream."""
        self._host_outputs.copy_(self.outputs, non_blocking=True)

    def likeliest(self) -> tuple[list[int], list[int]]:
        """What `send_back` brought: each row's token, and 1 where it was not a number."""
        tokens, broken = self._host_outputs.tolist()
        return tokens, broken


class DecodeSteps:
    """One decode step at a time, by graph where one was captured."""

    def __init__(
        self, model: SlicedModel, pool: DevicePool, kernels: Kernels, buffers: StepBuffers, sizes: tuple[int, ...]
    ) -> None:
        self.buffers = buffers
        self.sizes = sizes
        self._model = model
        self._batches = {rows: buffers.batch(pool, kernels, rows) for rows in self.sizes}
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def capture(self, lanes: Mapping[int, torch.cuda.Stream]) -> None:
        """Capture every size on every lane, by units. Nothing else may run meanwhile."""
        begun_s = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        self.buffers.empty()
        torch.cuda.synchronize()
        for units, rows in self._captures(lanes):
            stream = lanes[units]
            with torch.cuda.stream(stream):
                # Libraries set themselves up, and Triton compiles, at the first call; a capture has no room for that.
                self.compute(rows)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self.compute(rows)
            self._graphs[units, rows] = graph
        _log.info("captured %d decode graphs in %.1f s", len(self._graphs), time.monotonic() - begun_s)

    def _captures(self, lanes: Mapping[int, torch.cuda.Stream]) -> Iterator[tuple[int, int]]:
        """The largest first: the smaller ones then find room in the memory that it took."""
        for units in lanes:
            for rows in reversed(self.sizes):
                yield units, rows

    def drop_graphs(self) -> None:
        self._graphs.clear()

    def run(self, units: int, rows: int) -> None:
        """Order the step that is in the buffers, on the current stream, which is that of the lane with `units`."""
        graph = self._graphs.get((units, rows))
        if graph is None:
            self.compute(rows)
        else:
            graph.replay()

    def compute(self, rows: int) -> None:
        """From inputs to outputs, kernel by kernel."""
        batch = self._batches[rows]
        hidden = self._model.run(self._model.embed(batch), batch, 0, self._model.layers)
        logits, outputs = self.buffers.logits[:rows], self.buffers.outputs[:, :rows]
        logits.copy_(self._model.logits(hidden[0]))
        torch.argmax(logits, dim=-1, out=outputs[0])
        # To argmax nothing is greater than what is not a number, so one such logit shows here.
        outputs[1].copy_(torch.isnan(logits.gather(-1, outputs[0].unsqueeze(-1))).squeeze(-1))
