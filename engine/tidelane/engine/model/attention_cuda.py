"""Attention over the paged KV cache on a GPU, as a transformers attention function.

Spans go to torch's FlashAttention (`varlen_attn`). It reads blocks in place only where its pages may be as small as
ours, which FlashAttention 3 allows and the kernel built into torch 2.11 to 2.14 does not (it wants multiples of 256
tokens): `choose_kernels` finds out by trying. Else the contexts are gathered first, which costs a few percent of what
attending them does. Steps have a kernel of their own (step_kernel.py). In float32, which FlashAttention has not, and
on a CPU, both go sequence by sequence to scaled_dot_product_attention.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from transformers import AttentionInterface

from tidelane.engine.kv.device import DevicePool
from tidelane.engine.model.attention import attend_span, attend_step, refuse_special_attention
from tidelane.engine.model.batch import Rows
from tidelane.engine.model.paged import AttendSpans, AttendSteps, Kernels, KeysValues, PagedBatch, Spans, Steps

_log = logging.getLogger(__name__)

NAME = "tidelane_paged_cuda"

VarlenAttn = Callable[..., torch.Tensor]


def register() -> None:
    """Make `NAME` known to transformers. The name has no mask function, so transformers builds no mask."""
    AttentionInterface.register(NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, rows, dim]
    key: torch.Tensor,  # [1, kv_heads, rows, dim]
    value: torch.Tensor,  # [1, kv_heads, rows, value_dim]
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers passes it; the batch says it all
    scaling: float | None = None,
    sliding_window: int | None = None,
    ragged: PagedBatch | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Returns [1, rows, heads, value_dim]."""
    if ragged is None:
        raise ValueError("paged attention needs its batch: pass ragged= to the model")
    refuse_special_attention(options)
    layer: int = module.layer_idx  # type: ignore[assignment]
    block_tokens = ragged.pool.layout.block_tokens
    pool = KeysValues(ragged.pool.keys[layer], ragged.pool.values[layer], block_tokens)
    queries, keys, values = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    pool.keys.index_copy_(0, ragged.write_slots, keys)
    pool.values.index_copy_(0, ragged.write_slots, values)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    first = 0
    parts = []
    if ragged.steps is not None:
        first = len(ragged.steps.contexts)
        parts.append(ragged.kernels.steps(queries[:first], pool, ragged.steps, scale, sliding_window))
    if ragged.spans is not None:
        new = KeysValues(keys[first:], values[first:], block_tokens)
        parts.append(ragged.kernels.spans(queries[first:], new, pool, ragged.spans, scale, sliding_window))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


# ---- which kernels ---------------------------------------------------------------------------------------------------


def choose_kernels(pool: DevicePool, sms: int, query_heads: int) -> Kernels:
    """The fastest that work here on queries of the pool's dtype: each is tried, and compared with the plain ones."""
    if pool.keys[0].device.type != "cuda":
        return PLAIN
    trial = Trial.like(pool, query_heads)
    steps = next((kernel for kernel in _step_kernels(sms) if trial.accepts_steps(kernel)), steps_one_by_one)
    spans = next((kernel for kernel in _span_kernels() if trial.accepts_spans(kernel)), spans_one_by_one)
    _log.info("attention: %s, %s", _name(steps), _name(spans))
    return Kernels(steps, spans, captures=steps is not steps_one_by_one)


def _step_kernels(sms: int) -> Iterator[AttendSteps]:
    try:
        from tidelane.engine.model import step_kernel
    except ImportError:
        _log.warning("Triton is not installed: decode goes sequence by sequence, without graphs")
        return

    def steps_in_place(
        query: torch.Tensor, pool: KeysValues, steps: Steps, scale: float, window: int | None
    ) -> torch.Tensor:
        parts = step_kernel.parts_for(query.shape[0], pool.keys.shape[1], sms)
        return step_kernel.attend_steps(
            query, pool.keys, pool.values, steps.blocks, steps.contexts, pool.block_tokens, scale, window, parts
        )

    yield steps_in_place


def _span_kernels() -> Iterator[AttendSpans]:
    from torch.nn.attention.varlen import varlen_attn

    options = inspect.signature(varlen_attn).parameters
    # torch 2.12 and later want to be told that heads share keys.
    flash = cast("VarlenAttn", partial(varlen_attn, enable_gqa=True) if "enable_gqa" in options else varlen_attn)
    if "block_table" in options:
        yield partial(spans_in_place, flash)
    yield partial(spans_gathered, flash)


def _name(kernel: object) -> str:
    return str(getattr(getattr(kernel, "func", kernel), "__name__", kernel))


@dataclass(frozen=True, slots=True)
class Trial:
    """A small batch to try kernels on, and what must come out."""

    batch: PagedBatch
    pool: KeysValues
    query: torch.Tensor
    steps: torch.Tensor
    spans: torch.Tensor

    @staticmethod
    def like(pool: DevicePool, query_heads: int) -> Trial:
        """With the pool's shapes and dtype, not its memory."""
        tokens = pool.layout.block_tokens
        rows = [Rows([0], tokens, [3, 1]), Rows([0], 0, [2])], [Rows([0] * tokens, 3, [4, 0]), Rows([0, 0], 0, [5])]
        batch = PagedBatch.build(*rows, pool, PLAIN)
        keys, values = (torch.randn_like(each[0][:1].expand(6 * tokens, -1, -1)) for each in (pool.keys, pool.values))
        layer = KeysValues(keys, values, tokens)
        query = torch.randn_like(
            keys[:1].repeat_interleave(query_heads // keys.shape[1], 1).expand(2 + tokens + 2, -1, -1)
        )
        assert batch.steps is not None
        assert batch.spans is not None
        new = KeysValues(keys[:0], values[:0], tokens)  # not looked at: one of the spans does not begin here
        return Trial(
            batch,
            layer,
            query,
            PLAIN.steps(query[:2], layer, batch.steps, 1.0, None),
            PLAIN.spans(query[2:], new, layer, batch.spans, 1.0, None),
        )

    def accepts_steps(self, kernel: AttendSteps) -> bool:
        steps = self.batch.steps
        assert steps is not None
        return self._accepts(kernel, lambda: kernel(self.query[:2], self.pool, steps, 1.0, None), self.steps)

    def accepts_spans(self, kernel: AttendSpans) -> bool:
        spans = self.batch.spans
        assert spans is not None
        new = KeysValues(self.pool.keys[:0], self.pool.values[:0], self.pool.block_tokens)
        return self._accepts(kernel, lambda: kernel(self.query[2:], new, self.pool, spans, 1.0, None), self.spans)

    def _accepts(self, kernel: object, attend: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
        try:
            right = torch.allclose(attend(), expected, rtol=0.0, atol=0.03)
        except Exception as refusal:
            # A shape it will not take, a compiler it does not find: whatever it is, there is another kernel.
            _log.info("%s does not work here: %s", _name(kernel), str(refusal).split("\n")[0])
            return False
        if not right:
            _log.warning("%s is wrong here, and is not used", _name(kernel))
        return right


# ---- the kernels -----------------------------------------------------------------------------------------------------


def spans_in_place(
    varlen_attn: VarlenAttn,
    query: torch.Tensor,
    new: KeysValues,  # noqa: ARG001 - they are in the pool
    pool: KeysValues,
    spans: Spans,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """By `varlen_attn`, which reads the blocks where they are."""
    paged = [each.view(-1, pool.block_tokens, *each.shape[1:]) for each in (pool.keys, pool.values)]
    return varlen_attn(
        query.contiguous(),
        *paged,
        spans.row_starts,
        None,
        max(spans.rows),
        max(spans.lengths),
        scale=scale,
        window_size=_window_size(window),
        seqused_k=spans.contexts,
        block_table=spans.blocks,
    )


def spans_gathered(
    varlen_attn: VarlenAttn,
    query: torch.Tensor,
    new: KeysValues,
    pool: KeysValues,
    spans: Spans,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """By `varlen_attn`, over a copy of the contexts in one piece; the new rows themselves where they are all of it."""
    keys, values = new.keys, new.values
    if spans.slots is not None:
        keys, values = pool.keys.index_select(0, spans.slots), pool.values.index_select(0, spans.slots)
    return varlen_attn(
        query.contiguous(),
        keys,
        values,
        spans.row_starts,
        spans.context_starts,
        max(spans.rows),
        max(spans.lengths),
        scale=scale,
        window_size=_window_size(window),
    )


def _window_size(window: int | None) -> tuple[int, int]:
    """(left, right) for FlashAttention: how far back a token sees besides itself, and not ahead."""
    return (-1 if window is None else window - 1, 0)


def spans_one_by_one(
    query: torch.Tensor, new: KeysValues, pool: KeysValues, spans: Spans, scale: float, window: int | None
) -> torch.Tensor:
    parts = []
    context = new
    if spans.slots is not None:
        context = KeysValues(pool.keys[spans.slots], pool.values[spans.slots], pool.block_tokens)
    row = at = 0
    for rows, length in zip(spans.rows, spans.lengths, strict=True):
        keys, values = (each[at : at + length].transpose(0, 1).unsqueeze(0) for each in (context.keys, context.values))
        parts.append(attend_span(query[row : row + rows].transpose(0, 1).unsqueeze(0), keys, values, scale, window))
        row, at = row + rows, at + length
    return torch.cat(parts, dim=1).squeeze(0)


def steps_one_by_one(
    query: torch.Tensor, pool: KeysValues, steps: Steps, scale: float, window: int | None
) -> torch.Tensor:
    within = torch.arange(pool.block_tokens, device=query.device)
    parts = []
    for row, length in enumerate(steps.contexts.tolist()):
        slots = (steps.blocks[row].long().unsqueeze(1) * pool.block_tokens + within).view(-1)[:length]
        keys, values = (each[slots].transpose(0, 1).unsqueeze(0) for each in (pool.keys, pool.values))
        parts.append(attend_step(query[row : row + 1].transpose(0, 1).unsqueeze(0), keys, values, scale, window))
    return torch.cat(parts, dim=1).squeeze(0)


PLAIN = Kernels(steps_one_by_one, spans_one_by_one, captures=False)
