"""The CPU executor: decode and prefill on lanes of cores, in threads."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping

import torch

from tidelane.engine.execution.executor import Completion, Sampled
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.lanes.cores import CpuLanes
from tidelane.engine.model.batch import RaggedBatch, Rows
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.sampling import logprob_of, sample
from tidelane.engine.request import TokenLogprob
from tidelane.engine.scheduling.plan import DecodeBatch, Plan, PrefillSlice, Span
from tidelane.engine.sequence import Sequence

_log = logging.getLogger(__name__)

# Rows of logits made at a time for prompt log-probabilities: [256, vocab] floats at once, not [prompt, vocab].
LOGIT_ROWS = 256


class CpuExecutor:
    """`sequences` is the loop's own mapping, read while a launch runs. `notify` is called after each completion."""

    def __init__(
        self,
        model: SlicedModel,
        pool: DevicePool,
        lanes: CpuLanes,
        sequences: Mapping[str, Sequence],
        notify: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._pool = pool
        self._lanes = lanes
        self._sequences = sequences
        self._notify = notify
        self._clock = clock
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        # Prefill passes between two slices: the batch and its hidden states.
        self._passes: dict[int, tuple[RaggedBatch, torch.Tensor]] = {}

    def launch(self, plan: Plan) -> None:
        units = plan.partition
        if plan.fused:
            self._submit(plan.decode, plan.prefill, units.decode_units, decode_lane=True)
            return
        if plan.decode is not None:
            self._submit(plan.decode, None, units.decode_units, decode_lane=True)
        if plan.prefill is not None:
            self._submit(None, plan.prefill, units.prefill_units, decode_lane=False)

    def poll(self) -> list[Completion]:
        done = []
        while True:
            try:
                done.append(self._done.get_nowait())
            except queue.Empty:
                return done

    def forget(self, job: int) -> None:
        self._passes.pop(job, None)

    def close(self) -> None:
        self._lanes.close()

    def _submit(
        self, decode: DecodeBatch | None, prefill: PrefillSlice | None, units: int, *, decode_lane: bool
    ) -> None:
        def work() -> None:
            started_s = self._clock()
            sampled: tuple[Sampled, ...] = ()
            failure = None
            try:
                sampled = self._run(decode, prefill)
            except Exception as error:
                # The outermost frame of a lane: whatever goes wrong here concerns this launch, and a lane that died of
                # it would leave every later request unanswered.
                _log.exception("a launch failed")
                failure = f"{type(error).__name__}: {error}"
                if prefill is not None:
                    self.forget(prefill.job)
            self._done.put(Completion(decode, prefill, units, started_s, self._clock(), sampled, failure))
            self._notify()

        lane = self._lanes.decode(units) if decode_lane else self._lanes.prefill(units)
        lane.submit(work)

    def _run(self, decode: DecodeBatch | None, prefill: PrefillSlice | None) -> tuple[Sampled, ...]:
        """One pass over the given layers; what was sampled, if it reached the last layer."""
        spans = [self._next_token(i) for i in decode.ids] if decode is not None else []
        spans += prefill.spans if prefill is not None else ()
        first = prefill.first_layer if prefill is not None else 0
        last = prefill.last_layer if prefill is not None else self._model.layers
        if first == 0:
            batch = RaggedBatch.build([self._rows(span) for span in spans], self._pool)
            hidden = self._model.embed(batch)
        else:
            assert prefill is not None
            batch, hidden = self._passes.pop(prefill.job)
        hidden = self._model.run(hidden, batch, first, last)
        if last < self._model.layers:
            assert prefill is not None
            self._passes[prefill.job] = (batch, hidden)
            return ()
        return self._sample(spans, batch, hidden[0])

    def _next_token(self, sequence_id: str) -> Span:
        computed = self._sequences[sequence_id].computed
        return Span(sequence_id, computed, computed + 1)

    def _rows(self, span: Span) -> Rows:
        sequence = self._sequences[span.id]
        return Rows(sequence.tokens[span.start : span.stop], span.start, sequence.blocks)

    def _sample(self, spans: list[Span], batch: RaggedBatch, hidden: torch.Tensor) -> tuple[Sampled, ...]:
        sequences = [self._sequences[span.id] for span in spans]
        reports = [
            self._prompt_logprobs(sequence, span, hidden[segment.first : segment.end])
            for sequence, span, segment in zip(sequences, spans, batch.segments, strict=True)
        ]
        due = [
            i
            for i, (sequence, span) in enumerate(zip(sequences, spans, strict=True))
            if span.stop == len(sequence.tokens) and sequence.request.max_new_tokens > 0
        ]
        if not due:
            return tuple(Sampled(span.id, None, report) for span, report in zip(spans, reports, strict=True))
        logits = self._model.logits(hidden[[batch.segments[i].end - 1 for i in due]])
        drawn = sample(
            logits,
            [sequences[i].request.sampling for i in due],
            [sequences[i].tokens for i in due],
            [sequences[i].output_counts for i in due],
        )
        tokens = dict(zip(due, drawn, strict=True))
        return tuple(
            Sampled(span.id, tokens.get(i), reports[i], failed=i in tokens and tokens[i] is None)
            for i, span in enumerate(spans)
        )

    def _prompt_logprobs(
        self, sequence: Sequence, span: Span, hidden: torch.Tensor
    ) -> tuple[TokenLogprob | None, ...] | None:
        """Log-probabilities of prompt tokens [start, stop), shifted by one: a row tells about the token after it.

        The first token of the prompt has none. `hidden` [span.tokens, hidden size].
        """
        alternatives = sequence.request.sampling.prompt_logprobs
        prompt = sequence.request.prompt
        if alternatives is None or span.start >= len(prompt) or sequence.prompt_logprobs_sent:
            return None
        report: list[TokenLogprob | None] = [None] if span.start == 0 else []
        targets = prompt[span.start + 1 : span.stop + 1]
        for first in range(0, len(targets), LOGIT_ROWS):
            chunk = targets[first : first + LOGIT_ROWS]
            rows = torch.log_softmax(self._model.logits(hidden[first : first + len(chunk)]), dim=-1)
            report += [logprob_of(row, token, alternatives) for row, token in zip(rows, chunk, strict=True)]
        return tuple(report)
