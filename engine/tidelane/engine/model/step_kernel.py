"""Attention of one query per sequence over its blocks, as a Triton kernel: what decode needs, and graphs can hold.

Each sequence's context is cut into parts that are attended side by side and put together afterwards (Flash-Decoding,
Dao and others 2023): a few sequences alone would leave most of a GPU idle, and one long among many short ones would be
waited for. How many parts there may be is settled by the size of the batch and of the lane, not by the contexts, which
a captured graph must leave open; a short context leaves most of them empty.

Imported only where Triton is. `TRITON_INTERPRET=1` runs it on a CPU, as the tests do.
"""

# ruff: noqa: N803 - Triton's custom for what is known when compiling

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

# Of a context, looked at together: enough loads in flight, and small enough to keep in registers.
TILE = 64
LEAST_PARTS, MOST_PARTS = 8, 32
# A part is worth its share of the joining from this many tiles on.
LEAST_TILES = 4
PARTS_PER_SM = 4
# The tensor cores' smallest number of rows: queries that share a KV head are filled up to it.
LEAST_ROWS = 16
NO_WINDOW = 1 << 30


def parts_for(rows: int, kv_heads: int, sms: int) -> int:
    """Into how many parts each context of a batch may be cut. A power of two, so that few kernels are compiled."""
    wanted = PARTS_PER_SM * sms // (rows * kv_heads)
    return 1 << min(max(wanted, LEAST_PARTS), MOST_PARTS).bit_length() - 1


def attend_steps(
    query: torch.Tensor,  # [rows, heads, dim]
    keys: torch.Tensor,  # [slots, kv_heads, dim]
    values: torch.Tensor,  # [slots, kv_heads, value_dim]
    blocks: torch.Tensor,  # [rows, most], int32
    contexts: torch.Tensor,  # [rows], int64
    block_tokens: int,
    scale: float,
    window: int | None,
    parts: int,
) -> torch.Tensor:
    """[rows, heads, value_dim]"""
    rows, heads, dim = query.shape
    kv_heads, value_dim = values.shape[1:]
    query = query.contiguous()
    partial = query.new_empty(rows, heads, parts, value_dim, dtype=torch.float32)
    weights = query.new_empty(rows, heads, parts, 2, dtype=torch.float32)
    out = query.new_empty(rows, heads, value_dim)
    _attend_part[(rows, kv_heads, parts)](
        query,
        keys,
        values,
        blocks,
        contexts,
        partial,
        weights,
        scale,
        window or NO_WINDOW,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        blocks.stride(0),
        GROUP=heads // kv_heads,
        GROUP_ROWS=max(LEAST_ROWS, triton.next_power_of_2(heads // kv_heads)),
        DIM=dim,
        DIM_ROWS=max(16, triton.next_power_of_2(dim)),
        VALUE_DIM=value_dim,
        VALUE_ROWS=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_TOKENS=block_tokens,
        TILE=TILE,
        LEAST_TILES=LEAST_TILES,
    )
    _join_parts[(rows, heads)](
        partial,
        weights,
        contexts,
        out,
        window or NO_WINDOW,
        PARTS=parts,
        TILE=TILE,
        LEAST_TILES=LEAST_TILES,
        VALUE_DIM=value_dim,
        VALUE_ROWS=triton.next_power_of_2(value_dim),
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _part_tokens(tokens, parts, TILE: tl.constexpr, LEAST_TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.maximum(tl.cdiv(tl.cdiv(tokens, TILE), parts), LEAST_TILES) * TILE


@triton.jit  # type: ignore[untyped-decorator]
def _attend_part(  # type: ignore[no-untyped-def]  # Triton reads annotations as its own
    query,
    keys,
    values,
    blocks,
    contexts,
    partial,
    weights,
    scale,
    window,
    key_slot,
    key_head,
    value_slot,
    value_head,
    table_row,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    LEAST_TILES: tl.constexpr,
):
    """The queries that share one KV head, over one part of their sequence's context."""
    row, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(2)
    heads = tl.num_programs(1) * GROUP

    context = tl.load(contexts + row).to(tl.int32)
    first = tl.maximum(context - window, 0)
    length = _part_tokens(context - first, parts, TILE, LEAST_TILES)
    low = first + part * length
    high = tl.minimum(low + length, context)
    if low >= high:
        return

    member = tl.arange(0, GROUP_ROWS)
    head = kv_head * GROUP + member
    dims, value_dims = tl.arange(0, DIM_ROWS), tl.arange(0, VALUE_ROWS)
    of_group = member < GROUP
    q = tl.load(
        query + (row * heads + head)[:, None] * DIM + dims[None, :],
        mask=of_group[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )

    # Softmax as one goes along: the highest score so far, the sum of weights, and the weighted values.
    highest = tl.full([GROUP_ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_ROWS], dtype=tl.float32)
    sums = tl.zeros([GROUP_ROWS, VALUE_ROWS], dtype=tl.float32)
    for start in range(low, high, TILE):
        at = start + tl.arange(0, TILE)
        there = at < high
        block = tl.load(blocks + row * table_row + at // BLOCK_TOKENS, mask=there, other=0)
        slot = block.to(tl.int64) * BLOCK_TOKENS + at % BLOCK_TOKENS
        k = tl.load(
            keys + slot[None, :] * key_slot + kv_head * key_head + dims[:, None],
            mask=there[None, :] & (dims < DIM)[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp(highest - higher)
        weight = tl.exp(scores - higher[:, None])
        v = tl.load(
            values + slot[:, None] * value_slot + kv_head * value_head + value_dims[None, :],
            mask=there[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weight, 1)
        sums = sums * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        highest = higher

    place = (row * heads + head) * parts + part
    tl.store(
        partial + place[:, None] * VALUE_DIM + value_dims[None, :],
        sums,
        mask=of_group[:, None] & (value_dims < VALUE_DIM)[None, :],
    )
    tl.store(weights + place * 2, highest, mask=of_group)
    tl.store(weights + place * 2 + 1, total, mask=of_group)


@triton.jit  # type: ignore[untyped-decorator]
def _join_parts(  # type: ignore[no-untyped-def]
    partial,
    weights,
    contexts,
    out,
    window,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_ROWS: tl.constexpr,
):
    """One head of one sequence."""
    row = tl.program_id(0)
    head = row * tl.num_programs(1) + tl.program_id(1)
    tokens = tl.minimum(tl.load(contexts + row).to(tl.int32), window)
    part, dims = tl.arange(0, PARTS), tl.arange(0, VALUE_ROWS)
    filled = part * _part_tokens(tokens, PARTS, TILE, LEAST_TILES) < tokens
    place = head * PARTS + part
    highest = tl.load(weights + place * 2, mask=filled, other=float("-inf"))
    total = tl.load(weights + place * 2 + 1, mask=filled, other=0.0)
    share = tl.exp(highest - tl.max(highest, 0))
    sums = tl.load(
        partial + place[:, None] * VALUE_DIM + dims[None, :],
        mask=filled[:, None] & (dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    joined = tl.sum(sums * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + head * VALUE_DIM + dims, joined.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
