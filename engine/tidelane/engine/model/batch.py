"""A ragged batch: rows of several sequences one after another, without padding, and where their KV is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.moves import Arrival


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens of one sequence to compute: they stand at positions `start` and on, and its KV lies in `blocks`."""

    tokens: Sequence[int]
    start: int
    blocks: list[int]
    arrivals: tuple[Arrival, ...] = ()  # of blocks that may not be there yet


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [first, end) of the batch belong to one sequence, whose context is `context` tokens once they are written.

    Its slots are `run_start` and on, if they are adjacent; else `slots`, an index tensor [context].
    """

    first: int
    end: int
    context: int
    run_start: int
    slots: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """`tokens`, `positions` and `write_slots` are [rows]; `segments` cover the rows in order."""

    pool: DevicePool
    tokens: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    segments: tuple[Segment, ...]
    arrivals: tuple[Arrival, ...] = ()

    @staticmethod
    def build(rows: Sequence[Rows], pool: DevicePool) -> RaggedBatch:
        # Lists, not arrays: most batches are decode steps of a few rows, where a numpy call costs more than it saves.
        block_tokens = pool.layout.block_tokens
        tokens: list[int] = []
        positions: list[int] = []
        writes: list[int] = []
        segments: list[Segment] = []
        for part in rows:
            first, context, blocks = len(tokens), part.start + len(part.tokens), part.blocks
            tokens += part.tokens
            positions += range(part.start, context)
            writes += [
                blocks[at // block_tokens] * block_tokens + at % block_tokens for at in range(part.start, context)
            ]
            adjacent = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
            slots = None if adjacent else _slots(blocks, block_tokens, context)
            segments.append(Segment(first, len(tokens), context, blocks[0] * block_tokens, slots))
        arrivals = tuple(arrival for part in rows for arrival in part.arrivals)
        return RaggedBatch(
            pool, torch.tensor(tokens), torch.tensor(positions), torch.tensor(writes), tuple(segments), arrivals
        )


def _slots(blocks: list[int], block_tokens: int, context: int) -> torch.Tensor:
    """[context]"""
    first = torch.tensor(blocks).unsqueeze(1) * block_tokens
    return (first + torch.arange(block_tokens)).view(-1)[:context]
