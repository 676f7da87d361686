"""A model over a context larger than the sequence's blocks on the device: prefill in chunks, and decode, with each
layer's older KV coming from host memory part by part (docs/adr/0034)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tidelane.engine.kv.streaming import StreamedContext
from tidelane.engine.model.attention_parts import attend_part
from tidelane.engine.model.forward import SlicedModel


@dataclass(frozen=True, slots=True)
class StreamedBatch:
    """Adjacent tokens of one sequence, after its context: `tokens` and `positions` are [rows]."""

    context: StreamedContext
    tokens: torch.Tensor
    positions: torch.Tensor

    @staticmethod
    def build(tokens: Sequence[int], context: StreamedContext) -> StreamedBatch:
        start = context.length
        return StreamedBatch(context, torch.tensor(tokens), torch.arange(start, start + len(tokens)))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [1, heads, rows, dim]
        key: torch.Tensor,  # [1, kv_heads, rows, dim]
        value: torch.Tensor,  # [1, kv_heads, rows, value_dim]
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Writes the keys and values, and returns [1, rows, heads, value_dim]."""
        start, rows = self.context.length, query.shape[2]
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        # Before anything is computed, so that the first part comes meanwhile.
        parts = self.context.parts(layer, 0 if window is None else start - window + 1)
        self.context.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        queries = query[0].contiguous()
        attended = attend_part(queries, start, self.context.own(layer, rows), scale, window)
        for part in parts:
            attended = attended.merged(attend_part(queries, start, part, scale, window))
        return attended.out.to(query.dtype).transpose(0, 1).unsqueeze(0)


class StreamedModel:
    """One sequence, greedy or not: it tells logits. The model's attention must be `attention.NAME`."""

    def __init__(self, model: SlicedModel, context: StreamedContext) -> None:
        self._model = model
        self._context = context

    @torch.inference_mode()
    def run(self, tokens: Sequence[int]) -> torch.Tensor:
        """One pass, a chunk of a prompt or one token: logits [vocab] after its last token. Raises ContextFull, and
        LoadLost, after which the same pass may be run again."""
        self._context.check(len(tokens))
        batch = StreamedBatch.build(tokens, self._context)
        hidden = self._model.run(self._model.embed(batch), batch, 0, self._model.layers)[0]
        self._context.advance(len(tokens))
        return self._model.logits(hidden[-1:])[0]

    def prefill(self, tokens: Sequence[int], chunk_tokens: int) -> torch.Tensor:
        """Logits [vocab] after the last of `tokens`, one or more."""
        last = (len(tokens) - 1) // chunk_tokens * chunk_tokens
        for at in range(0, last, chunk_tokens):
            self.run(tokens[at : at + chunk_tokens])
        return self.run(tokens[last:])
