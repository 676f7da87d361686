"""Copies between host memory and a file on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock

from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.keys import KEY_BYTES, Key
from tidelane.engine.kv.mover import Way
from tidelane.engine.kv.moves import Fetch, Spill
from tidelane.engine.kv.slot_file import NotThere, SlotFile

_log = logging.getLogger(__name__)

# A disk answers a few reads at once sooner than one after the other; nobody waits for writes.
_FETCHERS = 4
# So many failures of reads, or of writes, one after the other are the disk's, not one block's. Counted apart: a disk
# that takes what it cannot give back would else be asked for it for ever.
MOST_FAILURES = 3


class DiskCopier:
    """What goes wrong is a miss: the books are told, and the tokens are computed again. A disk that fails again and
    again is left alone from then on. Once closed, the file is another engine's."""

    def __init__(self, host: HostMemory, slots: SlotFile) -> None:
        self._host = host
        self._slots = slots
        self._failures: dict[type[Spill | Fetch], int] = {Spill: 0, Fetch: 0}
        self._counting = Lock()

    @property
    def gave_up(self) -> bool:
        """The disk is left alone."""
        return max(self._failures.values()) >= MOST_FAILURES

    def ways(self) -> tuple[Way[Spill], Way[Fetch]]:
        write, read = partial(self._tried, self._slots.write), partial(self._tried, self._slots.read)
        return Way(Spill, write), Way(Fetch, read, _FETCHERS)

    def close(self) -> None:
        self._slots.close()

    def _tried(self, copy: Callable[[int, bytes, memoryview], None], moves: Sequence[Spill | Fetch]) -> int | None:
        if self.gave_up:
            return None
        (move,) = moves
        record = self._host.record(move.host_slot)
        try:
            copy(move.disk_slot, move.key + (move.parent or bytes(KEY_BYTES)), record)
        except NotThere as miss:
            _log.warning("KV on disk: %s", miss)
        except OSError as error:
            self._failed(type(move), error)
        else:
            self._went_well(type(move))
            return len(record)
        return None

    def _went_well(self, kind: type[Spill | Fetch]) -> None:
        with self._counting:
            if not self.gave_up:  # one that was under way then does not bring the disk back
                self._failures[kind] = 0

    def _failed(self, kind: type[Spill | Fetch], error: OSError) -> None:
        with self._counting:
            before = self.gave_up
            self._failures[kind] += 1
            last = self.gave_up and not before
        _log.error("KV on disk: %s", error)
        if last:
            _log.error("the disk has failed %d times in a row, and is left alone from now on", MOST_FAILURES)


def recovered(found: dict[int, bytes]) -> dict[int, tuple[Key, Key]]:
    """By slot the name of a block and of that before it, as `SlotBlocks.restore` takes them."""
    no_parent = bytes(KEY_BYTES)
    return {
        slot: (full[:KEY_BYTES], b"" if full[KEY_BYTES:] == no_parent else full[KEY_BYTES:])
        for slot, full in found.items()
    }
