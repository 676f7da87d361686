"""Copies between host memory and a file on disk, on threads of their own."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.keys import KEY_BYTES, Key
from tidelane.engine.kv.moves import Fetch, Move, Mover, Spill
from tidelane.engine.kv.slot_file import NotThere, SlotFile

_log = logging.getLogger(__name__)

# A disk answers a few reads at once sooner than one after the other; nobody waits for writes.
_FETCHERS = 4
# So many failures one after the other are the disk's, not one block's.
MOST_FAILURES = 3


class DiskMover:
    """What goes wrong is a miss: the books are told, and the tokens are computed again. A disk that fails again and
    again is left alone from then on."""

    def __init__(self, host: HostMemory, slots: SlotFile, notify: Callable[[], None]) -> None:
        self._host = host
        self._slots = slots
        self._notify = notify
        self._failures = 0
        self._ended: queue.SimpleQueue[tuple[Move, bool]] = queue.SimpleQueue()
        self._spilling = ThreadPoolExecutor(1, thread_name_prefix="kv-spill")
        self._fetching = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="kv-fetch")

    @property
    def gave_up(self) -> bool:
        """The disk is left alone."""
        return self._failures >= MOST_FAILURES

    def start(self, moves: Sequence[Move]) -> None:
        for move in moves:
            if isinstance(move, Spill):
                self._spilling.submit(self._run, move, self._write).add_done_callback(_report)
            elif isinstance(move, Fetch):
                self._fetching.submit(self._run, move, self._read).add_done_callback(_report)

    def poll(self) -> list[tuple[Move, bool]]:
        ended = []
        while True:
            try:
                ended.append(self._ended.get_nowait())
            except queue.Empty:
                return ended

    def close(self) -> None:
        """What has not begun is dropped; then the file is another engine's."""
        for pool in (self._spilling, self._fetching):
            pool.shutdown(cancel_futures=True)
        self._slots.close()

    def _run(self, move: Spill | Fetch, copy: Callable[[Spill | Fetch], None]) -> None:
        well = False
        try:
            if not self.gave_up:
                copy(move)
                well, self._failures = True, 0
        except NotThere as miss:
            _log.warning("KV on disk: %s", miss)
        except OSError as error:
            self._failed(error)
        finally:
            # Whatever else happens: a move that never ended would hold its slots for ever.
            self._ended.put((move, well))
            self._notify()

    def _failed(self, error: OSError) -> None:
        self._failures += 1
        _log.error("KV on disk: %s", error)
        if self._failures == MOST_FAILURES:
            _log.error("the disk has failed %d times in a row, and is left alone from now on", MOST_FAILURES)

    def _write(self, move: Spill | Fetch) -> None:
        self._slots.write(move.disk_slot, _full(move.key, move.parent), self._host.record(move.host_slot))

    def _read(self, move: Spill | Fetch) -> None:
        self._slots.read(move.disk_slot, _full(move.key, move.parent), self._host.record(move.host_slot))


class Movers:
    """Each move by the one whose it is. Both are this one's to close."""

    def __init__(self, host: Mover, disk: Mover) -> None:
        self._host = host
        self._disk = disk

    def start(self, moves: Sequence[Move]) -> None:
        self._host.start([move for move in moves if not isinstance(move, Spill | Fetch)])
        self._disk.start([move for move in moves if isinstance(move, Spill | Fetch)])

    def poll(self) -> Sequence[tuple[Move, bool]]:
        return [*self._host.poll(), *self._disk.poll()]

    def close(self) -> None:
        self._host.close()
        self._disk.close()


def recovered(found: dict[int, bytes]) -> dict[int, tuple[Key, Key]]:
    """By slot the name of a block and of that before it, as `SlotBlocks.restore` takes them."""
    no_parent = bytes(KEY_BYTES)
    return {
        slot: (full[:KEY_BYTES], b"" if full[KEY_BYTES:] == no_parent else full[KEY_BYTES:])
        for slot, full in found.items()
    }


def _report(done: Future[None]) -> None:
    """What nobody foresaw is at least told."""
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.error("a copy of KV to or from the disk failed", exc_info=error)


def _full(key: Key, parent: Key) -> bytes:
    return key + (parent or bytes(KEY_BYTES))
