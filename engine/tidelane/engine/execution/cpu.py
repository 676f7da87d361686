"""The CPU executor: decode and prefill on lanes of cores, in threads."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from tidelane.engine.execution.executor import Completion, Sampled
from tidelane.engine.execution.outcome import computed_spans, outcome, rows_of
from tidelane.engine.execution.streamed import StreamedPasses
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.traffic import Traffic
from tidelane.engine.lanes.cores import CpuLanes
from tidelane.engine.model.batch import RaggedBatch
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.scheduling.plan import DecodeBatch, Plan, PrefillSlice
from tidelane.engine.sequence import Sequence

_log = logging.getLogger(__name__)


class CpuExecutor:
    """`sequences` is the loop's own mapping, read while a launch runs. `notify` is called after each completion.

    With `below`, host memory and what is told of reading it, contexts larger than the pool stream.
    """

    def __init__(
        self,
        model: SlicedModel,
        pool: DevicePool,
        lanes: CpuLanes,
        sequences: Mapping[str, Sequence],
        notify: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        below: tuple[HostMemory, Traffic] | None = None,
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
        self._streamed: StreamedPasses | None = None
        if below is not None:
            host, traffic = below
            self._streamed = StreamedPasses(model, pool, host, sequences, traffic)

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
        if self._streamed is not None:
            self._streamed.close_ended()
        done = []
        while True:
            try:
                done.append(self._done.get_nowait())
            except queue.Empty:
                return done

    def forget(self, job: int) -> None:
        self._passes.pop(job, None)
        if self._streamed is not None:
            self._streamed.forget(job)

    def close(self) -> None:
        self._lanes.close()
        if self._streamed is not None:
            self._streamed.close()

    def _submit(
        self, decode: DecodeBatch | None, prefill: PrefillSlice | None, units: int, *, decode_lane: bool
    ) -> None:
        run = partial(self._run, decode, prefill)
        streams = None if prefill is None else self._sequences[prefill.spans[0].id]
        if prefill is not None and streams is not None and streams.stream is not None:
            assert self._streamed is not None
            assert decode is None
            run = partial(self._streamed.run, prefill, self._streamed.open(streams))

        def work() -> None:
            started_s = self._clock()
            sampled: tuple[Sampled, ...] = ()
            failure = None
            try:
                sampled = run()
            except Exception as error:
                # The outermost frame of a lane: whatever goes wrong here concerns this launch, and a lane that died of
                # it would leave every later request unanswered.
                _log.exception("a launch failed")
                failure = f"{type(error).__name__}: {error}"
                if prefill is not None:
                    self._passes.pop(prefill.job, None)
            self._done.put(Completion(decode, prefill, units, started_s, self._clock(), sampled, failure))
            self._notify()

        lane = self._lanes.decode(units) if decode_lane else self._lanes.prefill(units)
        lane.submit(work)

    def _run(self, decode: DecodeBatch | None, prefill: PrefillSlice | None) -> tuple[Sampled, ...]:
        """One pass over the given layers; what was sampled, if it reached the last layer."""
        spans = computed_spans(self._sequences, decode, prefill)
        first = prefill.first_layer if prefill is not None else 0
        last = prefill.last_layer if prefill is not None else self._model.layers
        if first == 0:
            batch = RaggedBatch.build([rows_of(self._sequences, span) for span in spans], self._pool)
            hidden = self._model.embed(batch)
        else:
            assert prefill is not None
            batch, hidden = self._passes.pop(prefill.job)
        hidden = self._model.run(hidden, batch, first, last)
        if last < self._model.layers:
            assert prefill is not None
            self._passes[prefill.job] = (batch, hidden)
            return ()
        return outcome(self._model, self._sequences, spans, hidden[0])
