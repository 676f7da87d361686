"""Passes of the sequence whose context is larger than the pool, in slices of layers (docs/adr/0035)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tidelane.engine.execution.executor import Sampled
from tidelane.engine.execution.outcome import outcome
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.streaming import StreamedContext
from tidelane.engine.kv.traffic import Traffic
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.streamed import StreamedBatch
from tidelane.engine.scheduling.plan import PrefillSlice
from tidelane.engine.sequence import Sequence, StreamHolding


class StreamedPasses:
    """One sequence at a time, whose context is kept from its first pass until it is gone from `sequences`.

    All but `run` is for the loop's thread, and while nothing of the sequence is in flight.
    """

    def __init__(
        self,
        model: SlicedModel,
        pool: DevicePool,
        host: HostMemory,
        sequences: Mapping[str, Sequence],
        traffic: Traffic,
    ) -> None:
        self._model = model
        self._pool = pool
        self._host = host
        self._sequences = sequences
        self._traffic = traffic
        self._open: tuple[StreamHolding, StreamedContext] | None = None
        # Between two slices: the pass's number, its batch and hidden states.
        self._paused: tuple[int, StreamedBatch, torch.Tensor] | None = None

    def open(self, sequence: Sequence) -> StreamedContext:
        """The context of this one, which streams."""
        holding = sequence.stream
        assert holding is not None
        if self._open is None or self._open[0] is not holding:
            self.close()
            context = StreamedContext(self._pool, self._host, holding.run, holding.slots, self._traffic)
            self._open = holding, context
        return self._open[1]

    def run(self, prefill: PrefillSlice, context: StreamedContext) -> tuple[Sampled, ...]:
        """Some layers of a pass; what was sampled, if it reached the last. If it raises, nothing of the pass counts,
        and it may be begun again."""
        try:
            return self._run(prefill, context)
        except BaseException:
            self._paused = None
            context.settle()
            raise

    def forget(self, job: int) -> None:
        if self._paused is not None and self._paused[0] == job:
            self._paused = None

    def close_ended(self) -> None:
        """Let go of a context whose sequence is no more."""
        if self._open is not None and all(each.stream is not self._open[0] for each in self._sequences.values()):
            self.close()

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
        self._open = self._paused = None

    def _run(self, prefill: PrefillSlice, context: StreamedContext) -> tuple[Sampled, ...]:
        (span,) = prefill.spans
        first, last = prefill.first_layer, prefill.last_layer
        if first == 0:
            if context.length != span.start:
                raise RuntimeError(f"{context.length} tokens are there of a context that should have {span.start}")
            context.check(span.tokens)
            batch = StreamedBatch.build(self._sequences[span.id].tokens[span.start : span.stop], context)
            hidden = self._model.embed(batch)
        else:
            assert self._paused is not None
            _, batch, hidden = self._paused
        hidden = self._model.run(hidden, batch, first, last)
        if last < self._model.layers:
            self._paused = prefill.job, batch, hidden
            return ()
        self._paused = None
        sampled = outcome(self._model, self._sequences, [span], hidden[0])
        context.advance(span.tokens)  # last: what fails before it leaves the context as it was
        return sampled
