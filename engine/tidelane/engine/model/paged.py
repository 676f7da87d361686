"""A batch for a GPU, as tensors there: its steps first, then its spans.

A *step* is one query of one sequence, as decode has them; a *span* several queries of one, as prefill has them. They
are attended by different kernels, so the batch keeps them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from tidelane.engine.kv.device import DevicePool
from tidelane.engine.model.batch import Rows


@dataclass(frozen=True, slots=True)
class Steps:
    """The first `len(contexts)` rows of a batch. A row of `blocks` may be longer than its context needs."""

    contexts: torch.Tensor  # [rows], int64: tokens in each sequence once this one is written
    blocks: torch.Tensor  # [rows, most], int32: where they are


@dataclass(frozen=True, slots=True)
class Spans:
    """The other rows: sequence i has rows [row_starts[i], row_starts[i + 1]) of them, the last of its context.

    `slots` are those of all contexts, one after another, with the bounds `context_starts`; None when every sequence
    begins here, so that the new rows are all there is. `blocks` is for kernels that read pages in place.
    """

    row_starts: torch.Tensor  # [sequences + 1], int32
    context_starts: torch.Tensor  # [sequences + 1], int32
    slots: torch.Tensor | None  # [all contexts], int64
    contexts: torch.Tensor  # [sequences], int32
    blocks: torch.Tensor  # [sequences, most], int32
    rows: tuple[int, ...]
    lengths: tuple[int, ...]  # of the contexts


@dataclass(frozen=True, slots=True)
class KeysValues:
    """[tokens, kv_heads, dim] and [tokens, kv_heads, value_dim] of one layer."""

    keys: torch.Tensor
    values: torch.Tensor
    block_tokens: int


class AttendSteps(Protocol):
    """Queries [rows, heads, dim] of steps to [rows, heads, value_dim]."""

    def __call__(
        self, query: torch.Tensor, pool: KeysValues, steps: Steps, scale: float, window: int | None, /
    ) -> torch.Tensor: ...


class AttendSpans(Protocol):
    """Queries [rows, heads, dim] of spans to [rows, heads, value_dim].

    `new` are the keys and values of the same rows, `pool` those of all slots, in which the new ones are by now.
    """

    def __call__(
        self, query: torch.Tensor, new: KeysValues, pool: KeysValues, spans: Spans, scale: float, window: int | None, /
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """How to attend. `captures`: a CUDA graph may hold `steps`."""

    steps: AttendSteps
    spans: AttendSpans
    captures: bool


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """`tokens`, `positions` and `write_slots` are [rows], int64."""

    pool: DevicePool
    kernels: Kernels
    tokens: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    steps: Steps | None
    spans: Spans | None

    @staticmethod
    def build(steps: Sequence[Rows], spans: Sequence[Rows], pool: DevicePool, kernels: Kernels) -> PagedBatch:
        """Each of `steps` has one token."""
        device = pool.keys[0].device
        block_tokens = pool.layout.block_tokens
        rows = [*steps, *spans]
        ends = [part.start + len(part.tokens) for part in rows]
        columns = (
            torch.tensor([token for part in rows for token in part.tokens]),
            torch.cat([torch.arange(part.start, end) for part, end in zip(rows, ends, strict=True)]),
            torch.cat(
                [slots_of(part.blocks, part.start, end, block_tokens) for part, end in zip(rows, ends, strict=True)]
            ),
        )
        tokens, positions, slots = torch.stack(columns).to(device)
        return PagedBatch(
            pool,
            kernels,
            tokens,
            positions,
            slots,
            _steps(steps, device) if steps else None,
            _spans(spans, device, block_tokens) if spans else None,
        )


def slots_of(blocks: Sequence[int], start: int, stop: int, block_tokens: int) -> torch.Tensor:
    """Where in the pool the tokens [start, stop) of a sequence are."""
    first = start // block_tokens
    firsts = torch.tensor(blocks[first : -(-stop // block_tokens)]).unsqueeze(1) * block_tokens
    return (firsts + torch.arange(block_tokens)).view(-1)[start - first * block_tokens :][: stop - start]


def _steps(steps: Sequence[Rows], device: torch.device) -> Steps:
    contexts = torch.tensor([part.start + 1 for part in steps])
    return Steps(contexts.to(device), _table(steps).to(device))


def _spans(spans: Sequence[Rows], device: torch.device, block_tokens: int) -> Spans:
    rows = tuple(len(part.tokens) for part in spans)
    lengths = tuple(part.start + len(part.tokens) for part in spans)
    slots = None
    if any(part.start for part in spans):
        every = [slots_of(part.blocks, 0, n, block_tokens) for part, n in zip(spans, lengths, strict=True)]
        slots = torch.cat(every).to(device)
    bounds = torch.tensor([[0, *accumulate(rows)], [0, *accumulate(lengths)]], dtype=torch.int32).to(device)
    contexts = torch.tensor(lengths, dtype=torch.int32).to(device)
    return Spans(bounds[0], bounds[1], slots, contexts, _table(spans).to(device), rows, lengths)


def _table(rows: Sequence[Rows]) -> torch.Tensor:
    """[rows, most blocks], int32, filled up with block 0."""
    most = max(len(part.blocks) for part in rows)
    return torch.tensor([part.blocks + [0] * (most - len(part.blocks)) for part in rows], dtype=torch.int32)
