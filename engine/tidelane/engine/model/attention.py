"""Attention over the paged KV cache, as a transformers attention function.

transformers' decoder layers call it with the new tokens' queries, keys and values; it stores keys and values in the
pool and attends each sequence's queries to that sequence's slots. This is the CPU form, on torch's
scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tidelane.engine.model.batch import RaggedBatch, Segment
from tidelane.engine.model.streamed import StreamedBatch

NAME = "tidelane_paged"

# Queries of one masked call: bounds the mask to this many rows times the context.
MASKED_ROWS = 512


class UnsupportedAttention(NotImplementedError):
    """The model wants attention that is not plain: soft-capped logits, sinks, a bias."""


def refuse_special_attention(options: Mapping[str, object]) -> None:
    """Raise UnsupportedAttention if transformers passes what we would not heed."""
    for option in ("softcap", "s_aux", "position_bias"):
        if options.get(option) is not None:
            raise UnsupportedAttention(f"this model's attention uses {option}, which is not supported yet")


def register() -> None:
    """Make `NAME` known to transformers. The name has no mask function, so transformers builds no mask."""
    AttentionInterface.register(NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, rows, dim]
    key: torch.Tensor,  # [1, kv_heads, rows, dim]
    value: torch.Tensor,  # [1, kv_heads, rows, value_dim]
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers passes it; the ragged batch says it all
    scaling: float | None = None,
    sliding_window: int | None = None,
    ragged: RaggedBatch | StreamedBatch | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Returns [1, rows, heads, value_dim]. A sliding window of W lets a token see itself and the W - 1 before it."""
    if ragged is None:
        raise ValueError("paged attention needs its batch: pass ragged= to the model")
    refuse_special_attention(options)
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(ragged, StreamedBatch):
        return ragged.attend(layer, query, key, value, scaling, sliding_window), None
    for arrival in ragged.arrivals:
        arrival.wait(layer)
    keys, values = ragged.pool.keys[layer], ragged.pool.values[layer]
    keys.index_copy_(0, ragged.write_slots, key.squeeze(0).transpose(0, 1))
    values.index_copy_(0, ragged.write_slots, value.squeeze(0).transpose(0, 1))
    keys, values = keys.unsqueeze(0), values.unsqueeze(0)
    parts = []
    for segment in ragged.segments:
        rows = segment.end - segment.first
        mine = query.narrow(2, segment.first, rows)
        attend = attend_step if rows == 1 else attend_span
        parts.append(attend(mine, _context(keys, segment), _context(values, segment), scaling, sliding_window))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def _context(pool: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The sequence's part of the pool [1, slots, kv_heads, dim] as [1, kv_heads, context, dim]: a view if its slots are
    adjacent."""
    if segment.slots is None:
        return pool.narrow(1, segment.run_start, segment.context).transpose(1, 2)
    return pool.index_select(1, segment.slots).transpose(1, 2)


# Both of these take one sequence's queries [1, heads, rows, dim], of which the last is the last of the context, and its
# keys and values [1, kv_heads, context, dim]; they return [1, rows, heads, value_dim].


def attend_step(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """The heads that share a KV head stand as rows of one matrix."""
    if window is not None:
        keys, values = keys[:, :, -window:], values[:, :, -window:]
    grouped = query.reshape(1, keys.shape[1], -1, query.shape[3])
    out = scaled_dot_product_attention(grouped, keys, values, scale=scaling)
    return out.reshape(1, 1, query.shape[1], values.shape[3])


def attend_span(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    _, heads, rows, dim = query.shape
    _, kv_heads, context, value_dim = values.shape
    start = context - rows
    # [kv_heads, group, rows, dim]; expanding instead of repeating copies no keys
    grouped = query.reshape(kv_heads, heads // kv_heads, rows, dim)
    k = keys.squeeze(0).unsqueeze(1).expand(-1, heads // kv_heads, -1, -1)
    v = values.squeeze(0).unsqueeze(1).expand(-1, heads // kv_heads, -1, -1)
    out = query.new_empty(1, rows, heads, value_dim)
    result = out[0].transpose(0, 1).view(kv_heads, heads // kv_heads, rows, value_dim)
    if start == 0 and (window is None or window >= context):
        result.copy_(scaled_dot_product_attention(grouped, k, v, is_causal=True, scale=scaling))
        return out
    for first in range(0, rows, MASKED_ROWS):
        end = min(rows, first + MASKED_ROWS)
        low = 0 if window is None else max(0, start + first - window + 1)
        high = start + end
        query_at = torch.arange(start + first, high, device=query.device).unsqueeze(1)
        key_at = torch.arange(low, high, device=query.device)
        mask = key_at <= query_at
        if window is not None:
            mask &= key_at > query_at - window
        result[:, :, first:end] = scaled_dot_product_attention(
            grouped[:, :, first:end], k[:, :, low:high], v[:, :, low:high], attn_mask=mask, scale=scaling
        )
    return out
