"""Attention to a context that is seen part by part.

The softmax over all keys is that over each part, weighted by the part's share of the sum of exponentials. So attention
to a part is kept as its output and the logarithm of its sum, and two parts are merged into one in any order. That is
the online softmax (Milakov and Gimelshein, arXiv 1805.02867) as FlashAttention (arXiv 2205.14135) uses it between tiles
and Ring Attention (arXiv 2310.01889) between devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidelane.engine.kv.streaming import Part

# Queries of one masked call: bounds its scores to this many rows, times heads, times the part's tokens.
MASKED_ROWS = 128


@dataclass(frozen=True, slots=True)
class Attended:
    """Queries' attention to some keys, float32: `out` [heads, rows, value_dim], and `log_sum` [heads, rows], the
    logarithm of the sum of the exponentials of the scaled scores. A query that sees none of the keys has 0 and -inf."""

    out: torch.Tensor
    log_sum: torch.Tensor

    def merged(self, other: Attended) -> Attended:
        """Attention to the keys of both, which have none in common."""
        log_sum = torch.logaddexp(self.log_sum, other.log_sum)
        # A query that sees no key of either: -inf less -inf is no number, and whatever its shares, they are of 0.
        shares = [(each.log_sum - log_sum).nan_to_num_(nan=0.0).exp_().unsqueeze(-1) for each in (self, other)]
        return Attended(torch.addcmul(self.out * shares[0], other.out, shares[1]), log_sum)


def attend_part(query: torch.Tensor, start: int, part: Part, scale: float, window: int | None) -> Attended:
    """`query` [heads, rows, dim] at positions `start` and on to `part`, each to keys no later than itself.

    A sliding window of W lets a token see itself and the W - 1 before it. Heads stand in groups, one for each KV head.
    """
    rows = query.shape[1]
    if part.first < start < part.end:  # a part seen whole, and one that is causal: faster than a mask over both
        own = attend_part(query, start, part.between(start, part.end), scale, window)
        return own.merged(attend_part(query, start, part.between(part.first, start), scale, window))
    seen_back = window is None or part.first > start + rows - 1 - window
    if seen_back and part.end <= start + 1:
        return _unmasked(query, part, scale)
    if seen_back and (part.first, part.end) == (start, start + rows) and _flash_takes(part):
        return _causal(query, part, scale)
    strips = [
        _masked(query[:, first : first + MASKED_ROWS], start + first, part, scale, window)
        for first in range(0, rows, MASKED_ROWS)
    ]
    return Attended(torch.cat([each.out for each in strips], 1), torch.cat([each.log_sum for each in strips], 1))


def _unmasked(query: torch.Tensor, part: Part, scale: float) -> Attended:
    """The heads that share a KV head stand as rows of one matrix."""
    heads, rows, _ = query.shape
    grouped = query.reshape(part.keys.shape[1], -1, query.shape[2])
    keys, values = part.keys.transpose(0, 1), part.values.transpose(0, 1)
    attended = _flash(grouped, keys, values, scale) if _flash_takes(part) else _plain(grouped, keys, values, scale)
    return Attended(attended.out.reshape(heads, rows, -1), attended.log_sum.reshape(heads, rows))


def _causal(query: torch.Tensor, part: Part, scale: float) -> Attended:
    """The part's tokens are the queries'. Expanding instead of repeating copies no keys; it leaves them in groups."""
    heads, rows, _ = query.shape
    kv_heads = part.keys.shape[1]
    group = heads // kv_heads
    outs = query.new_empty(heads, rows, part.values.shape[2], dtype=torch.float32)
    sums = query.new_empty(heads, rows, dtype=torch.float32)
    for head in range(kv_heads):
        mine = slice(head * group, (head + 1) * group)
        keys, values = (side[:, head].expand(group, -1, -1) for side in (part.keys, part.values))
        attended = _flash(query[mine], keys, values, scale, causal=True)
        outs[mine], sums[mine] = attended.out, attended.log_sum
    return Attended(outs, sums)


def _masked(query: torch.Tensor, start: int, part: Part, scale: float, window: int | None) -> Attended:
    heads, rows, _ = query.shape
    query_at = torch.arange(start, start + rows).unsqueeze(1)
    key_at = torch.arange(part.first, part.end)
    hidden = key_at > query_at
    if window is not None:
        hidden |= key_at <= query_at - window
    grouped = query.reshape(part.keys.shape[1], -1, query.shape[2])  # [kv_heads, group * rows, dim]
    group = heads // part.keys.shape[1]
    attended = _plain(grouped, part.keys.transpose(0, 1), part.values.transpose(0, 1), scale, hidden.repeat(group, 1))
    return Attended(attended.out.reshape(heads, rows, -1), attended.log_sum.reshape(heads, rows))


# ---- query, keys and values as [heads, rows or tokens, dim] ----------------------------------------------------------


def _flash_takes(part: Part) -> bool:
    return part.keys.shape[2] == part.values.shape[2]


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, causal: bool = False
) -> Attended:
    """torch's own kernel for CPUs, which scaled_dot_product_attention calls, too, and does not tell the sums of."""
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), 0.0, causal, scale=scale
    )
    return Attended(out[0].float(), log_sum[0])


def _plain(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, hidden: torch.Tensor | None = None
) -> Attended:
    """`hidden` [rows, tokens]: what a row does not see."""
    scores = torch.matmul(query.float() * scale, keys.float().transpose(1, 2))
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    log_sum = scores.logsumexp(-1)
    # A row that sees nothing has a sum of 0; its weights are to be 0 and not 0 / 0.
    weights = (scores - log_sum.nan_to_num(neginf=0.0).unsqueeze(-1)).exp_()
    return Attended(weights @ values.float(), log_sum)
