"""How much moves between tiers, and how long that takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

import msgspec

from tidelane.engine.kv.moves import Fetch, Load, Move, Spill, Store


class PartRead:
    """Not a move of the books: a part of a context that streams is read, and stays where it was, too."""


Kind = type[Move] | type[PartRead]

# Fewer say more of the start of a copy than of its rate.
_ENOUGH_BYTES = 4 << 20


class Flow(msgspec.Struct, frozen=True):
    """Moves of one kind since the start: bytes copied by those that went well, seconds during which at least one was
    being copied, and how many did not end well."""

    bytes: int
    seconds: float
    failed: int


class RecentTimes:
    """How long moves of a kind take, by the last that were made; nothing, until some were.

    `flow` tells what there has been of them, `record_bytes` what one block has.
    """

    def __init__(self, flow: Callable[[], Flow], record_bytes: int) -> None:
        self._flow = flow
        self._record_bytes = record_bytes
        self._seen = Flow(0, 0.0, 0)
        self._byte_s = 0.0

    def seconds(self, blocks: int) -> float:
        flow = self._flow()
        copied = flow.bytes - self._seen.bytes
        if copied >= _ENOUGH_BYTES:
            self._byte_s = (flow.seconds - self._seen.seconds) / copied
            self._seen = flow
        return self._byte_s * self._record_bytes * blocks


class _Tally(msgspec.Struct):
    bytes: int = 0
    seconds: float = 0.0  # up to `since_s`
    failed: int = 0
    copying: int = 0
    since_s: float = 0.0


class Traffic:
    """Told by the threads that copy, asked by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._tallies: dict[Kind, _Tally] = {kind: _Tally() for kind in (Store, Load, Spill, Fetch, PartRead)}

    def of(self, kind: Kind) -> Flow:
        """As of now."""
        with self._lock:
            tally = self._up_to_now(kind)
            return Flow(tally.bytes, tally.seconds, tally.failed)

    @contextmanager
    def copying(self, kind: Kind) -> Iterator[None]:
        with self._lock:
            self._up_to_now(kind).copying += 1
        try:
            yield
        finally:
            with self._lock:
                self._up_to_now(kind).copying -= 1

    def ended(self, kind: Kind, moves: int, copied: int | None) -> None:
        """So many `moves`, in one copy of so many bytes; None: nothing came of them."""
        with self._lock:
            tally = self._tallies[kind]
            if copied is None:
                tally.failed += moves
            else:
                tally.bytes += copied

    def _up_to_now(self, kind: Kind) -> _Tally:
        tally, now_s = self._tallies[kind], self._clock()
        if tally.copying:
            tally.seconds += now_s - tally.since_s
        tally.since_s = now_s
        return tally
