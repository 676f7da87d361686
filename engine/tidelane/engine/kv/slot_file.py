"""KV blocks of one engine on disk, in the slots of one file, so that they outlive the process.

Which key is in which slot, and who may use it when, is the caller's book. Calls may come from several threads at once,
as long as one slot is not written while it is used otherwise.

Slot s is a record, `record_bytes` long, at s * record_bytes. All numbers are little-endian:

    offset  bytes
         0      8   magic, "TDLN-KV" and a zero
         8      4   schema, 1
        12      4   when it was written, in seconds since 1970; zeros: long ago
        16      8   length of the payload
        24     32   namespace digest; one of 16 bytes is followed by zeros
        56     32   key: the block's name, and that of the block before it in its chain (zeros: none)
        88      8   xxh3_64 of the payload
        96      8   xxh3_64 of the 96 bytes before
       104   3992   zeros
      4096          payload, then what fills its last page: anything

A slot whose first page is anything else is free. No bytes are given out but under the key, namespace and length that
they were written with, and with the checksum that they had then. Nothing is flushed: a killed process loses the records
it was writing; a power cut also those that the disk had not yet kept, and each of them is a miss.
"""

from __future__ import annotations

import errno
import mmap
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from typing_extensions import Buffer
from xxhash import xxh3_64_intdigest

from tidelane.engine.errors import CannotServe
from tidelane.engine.kv.page_file import PAGE, PageFile

FILE_NAME = "kv.slots"
KEY_BYTES = 32
NAMESPACE_BYTES = (16, 32)

_LATEST_S = 2**32 - 1  # in 2106
_MAGIC = b"TDLN-KV\0"
_SCHEMA = 1
_FIELDS = struct.Struct("<8sIIQ32s32sQ")
_CHECKSUM = struct.Struct("<Q")

# Headers lie far apart, and a disk answers many small reads at once almost as soon as one: on a cloud disk 16 threads
# scanned some 17 times as fast as one, 64 some 50 times.
_SCANNERS = 64


class NotThere(LookupError):
    """The slot does not hold, whole, what was asked for: a miss. Compute the tokens again, and free the slot."""


class Pages(Protocol):
    """The medium of the slots: a `PageFile`, or one that fails on purpose (`FaultyPages`)."""

    @property
    def direct(self) -> bool:
        """It takes only memory that lies on whole pages."""

    def read(self, into: Sequence[Buffer], offset: int) -> int: ...

    def write(self, data: Sequence[Buffer], offset: int) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SlotLayout:
    payload_bytes: int
    slots: int

    @staticmethod
    def within(capacity_bytes: int, payload_bytes: int) -> SlotLayout:
        """As many slots as the file may have. Raises CannotServe if that is none."""
        if payload_bytes < 1:
            raise ValueError("a payload has at least one byte")
        record_bytes = SlotLayout(payload_bytes, 1).record_bytes
        if capacity_bytes < record_bytes:
            raise CannotServe(f"{capacity_bytes} bytes of disk hold no KV block: one takes {record_bytes}; allow more")
        return SlotLayout(payload_bytes, capacity_bytes // record_bytes)

    @property
    def padded_bytes(self) -> int:
        """The payload in whole pages."""
        return -(-self.payload_bytes // PAGE) * PAGE

    @property
    def record_bytes(self) -> int:
        return PAGE + self.padded_bytes

    @property
    def file_bytes(self) -> int:
        return self.slots * self.record_bytes

    def offset(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return slot * self.record_bytes


class SlotFile:
    """Writes, reads and erases single slots. OSError, from any call, is the disk's: go on without this tier.

    Memory that starts on a page, of whole pages, is read and written in place; other memory is copied once. `clock`
    tells seconds since 1970.
    """

    def __init__(
        self, pages: Pages, layout: SlotLayout, namespace: bytes, clock: Callable[[], float] = time.time
    ) -> None:
        if len(namespace) not in NAMESPACE_BYTES:
            raise ValueError(f"a namespace has {NAMESPACE_BYTES} bytes, not {len(namespace)}")
        self.layout = layout
        self._pages = pages
        self._namespace = namespace
        self._clock = clock
        self._idle: deque[_Staging] = deque()  # as many as there were calls at once
        self._blank = mmap.mmap(-1, PAGE)  # zeros: never written to

    @staticmethod
    def open(
        folder: Path, *, namespace: bytes, payload_bytes: int, capacity_bytes: int
    ) -> tuple[SlotFile, dict[int, bytes]]:
        """The file in `folder`, made if need be, and what `recover` finds in it. Raises as `PageFile.open` does."""
        layout = SlotLayout.within(capacity_bytes, payload_bytes)
        pages = PageFile.open(folder / FILE_NAME, layout.file_bytes)
        try:
            slots = SlotFile(pages, layout, namespace)
            return slots, slots.recover()
        except BaseException:
            pages.close()
            raise

    def recover(self) -> dict[int, bytes]:
        """The key of each slot with a whole header of this namespace and length, from the one written longest ago on;
        of slots with one key the first. Payloads are not looked at: `read` finds those that are not whole."""
        slots = range(self.layout.slots)
        with ThreadPoolExecutor(_SCANNERS) as scanners:
            parts = scanners.map(self._written_in, (slots[first::_SCANNERS] for first in slots[:_SCANNERS]))
            written = sorted(each for part in parts for each in part)
        slot_of: dict[bytes, int] = {}
        for _, slot, key in written:
            slot_of.setdefault(key, slot)
        return {slot: key for key, slot in slot_of.items()}

    def write(self, slot: int, key: bytes, payload: Buffer) -> None:
        """`payload` must not change meanwhile. After an OSError, take the slot for empty."""
        offset, data = self.layout.offset(slot), self._sized(payload)
        header = self._header(key, xxh3_64_intdigest(data), min(_LATEST_S, max(0, int(self._clock()))))
        with self._staging() as staging:
            staging.header[:] = header
            if not self._in_place(data):
                _copy(data, staging.payload)
                data = staging.payload
            # One call, and no second one to commit it: if only parts reach the disk, a header, new or old, stands over
            # bytes that are not all its own, and its checksum says so at the first read.
            self._write_all([staging.header, data], PAGE + len(data), offset)

    def read(self, slot: int, key: bytes, into: Buffer) -> None:
        """Raises NotThere unless the slot holds `key`, whole; `into` may then hold anything."""
        offset, target = self.layout.offset(slot), self._sized(into)
        with self._staging() as staging:
            data = target if self._in_place(target) else staging.payload
            if self._pages.read([staging.header, data], offset) < PAGE + len(data):
                raise NotThere(f"slot {slot} ends early")
            # The header that these bytes would be written with under this key then, and no other, must be there.
            _, _, written_s, *_ = _FIELDS.unpack_from(staging.header)
            if staging.header[:] != self._header(key, xxh3_64_intdigest(data[: len(target)]), written_s):
                raise NotThere(f"slot {slot} does not hold {key.hex()}, or not whole")
            if data is not target:
                _copy(data, target)

    def erase(self, slot: int) -> None:
        self._write_all([self._blank], PAGE, self.layout.offset(slot))

    def close(self) -> None:
        """Lets another engine have the folder. No call may be under way."""
        self._pages.close()

    def _written_in(self, slots: range) -> list[tuple[int, int, bytes]]:
        """When, where, and under which key."""
        page = mmap.mmap(-1, PAGE)
        found = []
        for slot in slots:
            if self._pages.read([page], self.layout.offset(slot)) < PAGE:
                continue
            header = page[:]
            _, _, written_s, *_, key, checksum = _FIELDS.unpack_from(header)
            if header == self._header(key, checksum, written_s):
                found.append((written_s, slot, key))
        return found

    def _header(self, key: bytes, checksum: int, written_s: int) -> bytes:
        """The one page that may stand before a payload with this checksum, stored under `key` at that second."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        fields = _FIELDS.pack(_MAGIC, _SCHEMA, written_s, self.layout.payload_bytes, self._namespace, key, checksum)
        return (fields + _CHECKSUM.pack(xxh3_64_intdigest(fields))).ljust(PAGE, b"\0")

    def _sized(self, memory: Buffer) -> memoryview:
        data = memoryview(memory).cast("B")
        if len(data) != self.layout.payload_bytes:
            raise ValueError(f"a payload has {self.layout.payload_bytes} bytes, not {len(data)}")
        return data

    def _in_place(self, data: memoryview) -> bool:
        address = np.frombuffer(data, np.uint8).ctypes.data
        return not self._pages.direct or (address % PAGE == 0 and len(data) % PAGE == 0)

    def _write_all(self, data: Sequence[Buffer], size: int, offset: int) -> None:
        written = self._pages.write(data, offset)
        if written < size:  # into room that is there a write is only short where the disk fails
            raise OSError(errno.EIO, f"{written} of {size} bytes written")

    @contextmanager
    def _staging(self) -> Iterator[_Staging]:
        try:
            staging = self._idle.pop()
        except IndexError:
            staging = _Staging(self.layout)
        try:
            yield staging
        finally:
            self._idle.append(staging)


class _Staging:
    """Memory on whole pages for one record under way; the payload's takes none until something is copied there."""

    def __init__(self, layout: SlotLayout) -> None:
        self.header = mmap.mmap(-1, PAGE)
        self.payload = memoryview(mmap.mmap(-1, layout.padded_bytes))


def _copy(source: memoryview, to: memoryview) -> None:
    """As far as the shorter goes. By numpy, which lets other threads run meanwhile."""
    size = min(len(source), len(to))
    np.copyto(np.frombuffer(to[:size], np.uint8), np.frombuffer(source[:size], np.uint8))
