"""The books of contexts larger than the device's pool: who streams, who waits for it, and what the one holds."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from operator import attrgetter

from tidelane.engine.execution.executor import Completion
from tidelane.engine.kv.cache import KVCache
from tidelane.engine.kv.stream_run import StreamRun
from tidelane.engine.scheduling.plan import PrefillSlice, Streaming
from tidelane.engine.sequence import Sequence, StreamHolding

_PRIORITY = attrgetter("priority")
# A pass that failed so often in a row may well fail for ever.
MOST_FAILURES = 3
# How fast what a slice took, for what was predicted, moves the pace; and how far that may go.
LEARNING_RATE = 0.3
LARGEST_PACE = 64.0


class StreamLine:
    """One streams at a time, by priority; none makes another give way. The first in line has blocks and slots kept for
    it as they get free, and begins when it has them all.

    Without a `run` none streams. `read_s` predicts how long it takes to read so many blocks from host memory.
    """

    def __init__(
        self, cache: KVCache, run: StreamRun | None, block_tokens: int, read_s: Callable[[int], float]
    ) -> None:
        self._cache = cache
        self._run = run
        self._block_tokens = block_tokens
        self._read_s = read_s
        self._line: list[Sequence] = []  # by priority
        self._sequence: Sequence | None = None  # that has its room, or gets it
        self._blocks = 0  # of host memory, that it needs
        self._ready = False
        self._paused: PrefillSlice | None = None
        self._failures = 0
        self._had_last = False
        self._idle_since_s = 0.0
        self._slice_s = 0.0
        self._expected_s = 0.0
        self._pace = 1.0

    @property
    def resident_blocks(self) -> int:
        """What a sequence may need that does not stream: the rest of the pool may be taken by one that does."""
        return self._cache.total - (0 if self._run is None else self._run.count)

    @property
    def most_tokens(self) -> int:
        """Of a sequence that streams; 0: none can."""
        return 0 if self._run is None else self._cache.host.total * self._block_tokens

    @property
    def running(self) -> int:
        return int(self._ready)

    @property
    def waiting(self) -> int:
        return len(self._line) + (self._sequence is not None and not self._ready)

    @property
    def paused(self) -> PrefillSlice | None:
        return self._paused

    def add(self, sequence: Sequence) -> None:
        """It waits for its turn."""
        assert self._run is not None
        sequence.stream = StreamHolding(self._run)
        insort(self._line, sequence, key=_PRIORITY)

    def remove(self, sequence: Sequence) -> None:
        """It has ended: what it holds is free, and the next has its turn. Nothing of it is in flight."""
        if sequence is not self._sequence:
            self._line.remove(sequence)
            return
        assert sequence.stream is not None
        self._cache.host.unpin(sequence.stream.slots)
        self._cache.device.unfence()
        self._sequence, self._paused, self._ready = None, None, False

    def collect(self, now_s: float) -> None:
        """Take what the first in line lacks and can have by now."""
        if self._sequence is None:
            if not self._line:
                return
            self._sequence = self._line.pop(0)
            self._blocks = self._most_blocks(self._sequence)
            assert self._run is not None
            self._cache.device.fence(self._run.first)
        if self._ready:
            return
        holding = self._sequence.stream
        assert holding is not None
        holding.slots += self._cache.host.pin(self._blocks - len(holding.slots))
        if len(holding.slots) == self._blocks and self._cache.device.kept == holding.run.count:
            self._ready, self._had_last, self._failures = True, False, 0
            self._idle_since_s, self._slice_s = now_s, 0.0

    def view(self) -> Streaming | None:
        """What schedulers see of the one that has its room."""
        sequence = self._sequence
        if sequence is None or not self._ready or self._run is None:
            return None
        return Streaming(
            sequence.id,
            len(sequence.tokens),
            sequence.computed,
            self._run.pass_blocks * self._block_tokens,
            self._paused,
            self._had_last,
            self._idle_since_s,
            self._slice_s,
            self._read_s(sequence.computed // self._block_tokens),
            self._pace,
        )

    def owns(self, prefill: PrefillSlice | None) -> bool:
        return prefill is not None and self._sequence is not None and prefill.spans[0].id == self._sequence.id

    def launched(self, expected_s: float) -> None:
        """A slice that takes so long by prediction."""
        self._paused = None
        self._expected_s = expected_s

    def ended(self, completion: Completion, layers: int) -> None:
        """Its slice, well."""
        prefill = completion.prefill
        assert prefill is not None
        self._paused = prefill if prefill.last_layer < layers else None
        self._failures = 0
        self._note_end(completion)
        if self._expected_s > 0 and self._slice_s > 0:
            off = math.log(self._slice_s / self._expected_s)
            self._pace = min(LARGEST_PACE, max(1 / LARGEST_PACE, self._pace * math.exp(LEARNING_RATE * off)))

    def failed(self, completion: Completion) -> bool:
        """Its slice: the pass is run again from its first layer. Whether it has failed too often for that."""
        self._failures += 1
        self._note_end(completion)
        return self._failures >= MOST_FAILURES

    def others_ended(self) -> None:
        """A launch without it."""
        self._had_last = False

    def _note_end(self, completion: Completion) -> None:
        self._had_last = True
        self._idle_since_s = completion.ended_s
        self._slice_s = completion.ended_s - completion.started_s

    def _most_blocks(self, sequence: Sequence) -> int:
        """In host memory, at its longest."""
        tokens = len(sequence.request.prompt) + max(1, sequence.request.max_new_tokens)
        return -(-tokens // self._block_tokens)
