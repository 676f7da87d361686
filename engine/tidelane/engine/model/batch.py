"""A ragged batch: rows of several sequences one after another, without padding, and where their KV is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidelane.engine.kv.device import DevicePool


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens of one sequence to compute: they stand at positions `start` and on, and its KV lies in `blocks`."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


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

    @staticmethod
    def build(rows: Sequence[Rows], pool: DevicePool) -> RaggedBatch:
        block_tokens = pool.layout.block_tokens
        tokens: list[int] = []
        positions: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        writes: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        segments: list[Segment] = []
        for part in rows:
            first, context = len(tokens), part.start + len(part.tokens)
            at = np.arange(part.start, context)
            blocks = np.asarray(part.blocks, dtype=np.int64)
            adjacent = len(blocks) == 1 or bool((np.diff(blocks) == 1).all())
            slots = None
            if not adjacent:
                slots = torch.from_numpy((blocks[:, None] * block_tokens + np.arange(block_tokens)).ravel()[:context])
            tokens.extend(part.tokens)
            positions.append(at)
            writes.append(blocks[at // block_tokens] * block_tokens + at % block_tokens)
            segments.append(Segment(first, len(tokens), context, int(blocks[0]) * block_tokens, slots))
        return RaggedBatch(
            pool,
            torch.tensor(tokens, dtype=torch.int64),
            torch.from_numpy(np.concatenate(positions)),
            torch.from_numpy(np.concatenate(writes)),
            tuple(segments),
        )
