"""The CUDA executor: decode and prefill on streams, each with a thread that launches and watches.

A launch runs on the stream of its lane. Its thread fills in the batch, orders the kernels (a decode step is one graph),
and then polls the event at their end; so the loop never waits, and drawing tokens, which needs the host, holds up one
lane alone. Launching prefill layer by layer takes the host longer than a step: it must not stand in decode's way.

torch keeps a cuBLAS workspace for each handle and stream, so lanes share none; and memory of its caching allocator
belongs to the stream that asked for it, so activations that another stream reads are held until their reader has ended.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from tidelane.engine.errors import EngineStuck
from tidelane.engine.execution.executor import Completion, Sampled
from tidelane.engine.execution.graphs import DecodeSteps, bucket_for
from tidelane.engine.execution.outcome import computed_spans, draw, outcome, rows_of
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.lanes.partition import PartitionTable
from tidelane.engine.model.forward import SlicedModel
from tidelane.engine.model.paged import Kernels, PagedBatch
from tidelane.engine.model.sampling import is_plain
from tidelane.engine.request import NewToken
from tidelane.engine.scheduling.plan import DecodeBatch, Plan, PrefillSlice
from tidelane.engine.sequence import Sequence

_log = logging.getLogger(__name__)

# Between two looks at an event. Linux makes some 70 us of it, about what the driver's own wake-up takes.
POLL_S = 20e-6


class Event(Protocol):
    """torch.cuda.Event, as far as it is used here."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to `end`."""
        ...


class Stream(Protocol):
    """torch.cuda.Stream, as far as it is used here."""

    def wait_event(self, event: Any) -> None: ...


class Lanes(Protocol):
    @property
    def table(self) -> PartitionTable: ...

    def decode(self, units: int) -> Stream: ...

    def prefill(self, units: int) -> Stream: ...

    def close(self) -> None: ...


class Gpu(Protocol):
    """The device, as one thread meets it."""

    def enter_thread(self) -> None:
        """Make it this thread's device."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Within, what this thread launches goes to `stream`."""
        ...

    def event(self) -> Event: ...


class CudaGpu:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Lane(Enum):
    """Whose thread launches; a fused pass is decode's."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class _End:
    """Of a launch on `stream`: nothing that `event` does not come after."""

    lane: Lane
    stream: Stream
    event: Event
    completion: Completion


class Fences:
    """What a launch waits for on the device: the launches on other streams whose ends the loop was told of.

    The loop passes on a sequence, its activations or its blocks only after it was told of the end of who had them, so
    these are all that a launch can depend on; what is still in flight must not be waited for. Each launch waited in
    its turn, so the last of each lane stands for those before it.
    """

    def __init__(self) -> None:
        self._last: dict[Lane, tuple[Stream, Event]] = {}

    def told(self, lane: Lane, stream: Stream, event: Event) -> None:
        self._last[lane] = (stream, event)

    def before(self, stream: Stream) -> tuple[Event, ...]:
        """The events that a launch on `stream` has to wait for."""
        return tuple(event for other, event in self._last.values() if other is not stream)


class CudaExecutor:
    """`sequences` is the loop's own mapping, read while a launch runs. `notify` is called after each completion."""

    def __init__(
        self,
        *,
        gpu: Gpu,
        model: SlicedModel,
        pool: DevicePool,
        kernels: Kernels,
        lanes: Lanes,
        steps: DecodeSteps,
        sequences: Mapping[str, Sequence],
        notify: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpu = gpu
        self._model = model
        self._pool = pool
        self._kernels = kernels
        self._lanes = lanes
        self._steps = steps
        self._sequences = sequences
        self._notify = notify
        self._clock = clock
        self._fences = Fences()
        self._done: queue.SimpleQueue[_End] = queue.SimpleQueue()
        self._lost: str | None = None
        # Prefill passes between two slices: the batch and its hidden states.
        self._passes: dict[int, tuple[PagedBatch, torch.Tensor]] = {}
        self._threads = {lane: _LaneThread(lane.value, gpu) for lane in Lane}

    def launch(self, plan: Plan) -> None:
        units = plan.partition
        if plan.fused:
            self._submit(Lane.DECODE, plan.decode, plan.prefill, units.decode_units)
            return
        if plan.decode is not None:
            self._submit(Lane.DECODE, plan.decode, None, units.decode_units)
        if plan.prefill is not None:
            self._submit(Lane.PREFILL, None, plan.prefill, units.prefill_units)

    def poll(self) -> list[Completion]:
        """Raises EngineStuck once the device has failed for good."""
        if self._lost is not None:
            raise EngineStuck(f"the GPU has failed: {self._lost}")
        done: list[Completion] = []
        while True:
            try:
                end = self._done.get_nowait()
            except queue.Empty:
                return done
            self._fences.told(end.lane, end.stream, end.event)
            done.append(end.completion)

    def forget(self, job: int) -> None:
        self._passes.pop(job, None)

    def close(self) -> None:
        """Ends the threads; lanes and graphs are their maker's to close."""
        for thread in self._threads.values():
            thread.close()

    def _submit(self, lane: Lane, decode: DecodeBatch | None, prefill: PrefillSlice | None, units: int) -> None:
        stream = self._lanes.decode(units) if lane is Lane.DECODE else self._lanes.prefill(units)
        waits = self._fences.before(stream)

        def work() -> None:
            begun_s = self._clock()
            started, ended = self._gpu.event(), self._gpu.event()
            sampled: tuple[Sampled, ...] = ()
            failure = None
            try:
                with self._gpu.on(stream):
                    for event in waits:
                        stream.wait_event(event)
                    started.record(stream)
                    finish = self._order(decode, prefill, units)
                    ended.record(stream)
                    self._await(ended)
                    sampled = finish()
                ended_s = self._clock()
                begun_s = ended_s - started.elapsed_time(ended) / 1000
            except Exception as error:
                # The outermost frame of a lane: whatever goes wrong here concerns this launch, and a lane that died of
                # it would leave every later request unanswered.
                _log.exception("a launch failed")
                failure = f"{type(error).__name__}: {error}"
                self._settle(stream, ended)
                ended_s = self._clock()
                if prefill is not None:
                    self.forget(prefill.job)
            completion = Completion(decode, prefill, units, begun_s, ended_s, sampled, failure)
            self._done.put(_End(lane, stream, ended, completion))
            self._notify()

        self._threads[lane].submit(work)

    def _settle(self, stream: Stream, ended: Event) -> None:
        """After a failure, wait for what was ordered before it: it writes blocks that will be given to others."""
        try:
            ended.record(stream)
            self._await(ended)
        except RuntimeError as error:  # a fault on the device stays: nothing will run in this process again
            self._lost = str(error)

    def _await(self, event: Event) -> None:
        while not event.query():
            time.sleep(POLL_S)

    # ---- what is launched; each returns what is left to do once it has ended ----------------------------------------

    def _order(self, decode: DecodeBatch | None, prefill: PrefillSlice | None, units: int) -> _Finish:
        if decode is not None and prefill is None:
            rows = bucket_for(len(decode.ids), self._steps.sizes)
            if rows is not None:
                return self._order_step(decode, units, rows)
        return self._order_pass(decode, prefill)

    def _order_step(self, decode: DecodeBatch, units: int, rows: int) -> _Finish:
        """By graph, in the step's own buffers."""
        buffers = self._steps.buffers
        seats = buffers.fill(self._sequences, decode.ids, rows)
        self._steps.run(units, rows)
        buffers.send_back()
        row_of = {who: row for row, who in enumerate(seats) if who is not None}
        special = [i for i in decode.ids if not is_plain(self._sequences[i].request.sampling)]
        drawn: dict[str, NewToken | None] = {}
        if special:
            logits = buffers.logits[[row_of[i] for i in special]]
            drawn = dict(zip(special, draw(logits, [self._sequences[i] for i in special]), strict=True))

        def finish() -> tuple[Sampled, ...]:
            tokens, broken = buffers.likeliest()
            for who, row in row_of.items():
                if who not in drawn:
                    drawn[who] = None if broken[row] else NewToken(tokens[row])
            return tuple(Sampled(i, drawn[i], failed=drawn[i] is None) for i in decode.ids)

        return finish

    def _order_pass(self, decode: DecodeBatch | None, prefill: PrefillSlice | None) -> _Finish:
        """Kernel by kernel, over the given layers."""
        first = prefill.first_layer if prefill is not None else 0
        last = prefill.last_layer if prefill is not None else self._model.layers
        spans = computed_spans(self._sequences, decode, prefill)
        if first == 0:
            rows = [rows_of(self._sequences, span) for span in spans]
            steps = len(decode.ids) if decode is not None else 0
            batch = PagedBatch.build(rows[:steps], rows[steps:], self._pool, self._kernels)
            before = self._model.embed(batch)
        else:
            assert prefill is not None
            batch, before = self._passes[prefill.job]  # stays there: this slice reads it on another stream
        hidden = self._model.run(before, batch, first, last)
        if last < self._model.layers:
            assert prefill is not None
            return _keep(self._passes, prefill.job, (batch, hidden))
        sampled = outcome(self._model, self._sequences, spans, hidden[0])

        def finish() -> tuple[Sampled, ...]:
            if prefill is not None:
                self.forget(prefill.job)
            return sampled

        return finish


_Finish = Callable[[], tuple[Sampled, ...]]


def _keep(
    passes: dict[int, tuple[PagedBatch, torch.Tensor]], job: int, after: tuple[PagedBatch, torch.Tensor]
) -> _Finish:
    def finish() -> tuple[Sampled, ...]:
        passes[job] = after
        return ()

    return finish


class _LaneThread:
    """Runs what it is given, in order; it must not raise."""

    def __init__(self, name: str, gpu: Gpu) -> None:
        self._gpu = gpu
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"{name}-lane", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def close(self) -> None:
        """Finish what was submitted, then end the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._gpu.enter_thread()
        with torch.inference_mode():
            while (work := self._work.get()) is not None:
                work()
