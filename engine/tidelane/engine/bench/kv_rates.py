"""How fast KV is copied and read, beside what this machine does with the same bytes and nothing else to do."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import torch
from typing_extensions import Buffer

from tidelane.engine.bench.ratio import Measured, Ratio, interleaved
from tidelane.engine.kv.device import DevicePool
from tidelane.engine.kv.disk_copier import DiskCopier
from tidelane.engine.kv.host_copier import HostCopier
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.keys import KEY_BYTES
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.mover import CopyingMover, give_way_to_lanes
from tidelane.engine.kv.moves import Arrival, Fetch, Load, Move, Mover, Spill
from tidelane.engine.kv.page_file import PageFile
from tidelane.engine.kv.slot_file import FILE_NAME, Pages, SlotFile, SlotLayout
from tidelane.engine.kv.traffic import Traffic

LOADS_AT_LEAST = 0.8
FETCHES_AT_LEAST = 0.8
_LONGEST_S = 60.0  # that moves are waited for
_NAMESPACE = b"kv-bench".ljust(16, b"\0")
_UNIT = "GB/s"


class MovesLost(RuntimeError):
    """Copies of KV failed or did not end: there is no rate of them."""


class Ended:
    """`notify` is for a mover; waits for what it was given."""

    def __init__(self) -> None:
        self._rang = threading.Semaphore(0)

    def notify(self) -> None:
        self._rang.release()

    def seconds(self, mover: Mover, moves: Sequence[Move]) -> float:
        """From the start of `moves` to the end of the last. Raises MovesLost."""
        begun_s = time.monotonic()
        mover.start(moves)
        ended: list[tuple[Move, bool]] = []
        while len(ended) < len(moves):
            if not self._rang.acquire(timeout=_LONGEST_S):
                raise MovesLost(f"{len(moves) - len(ended)} of {len(moves)} copies of KV have not ended")
            ended += mover.poll()
        took_s = time.monotonic() - begun_s
        lost = sum(not well for _, well in ended)
        if lost:
            raise MovesLost(f"{lost} of {len(moves)} copies of KV failed")
        return took_s


def load_rate(layout: KVLayout, dtype: torch.dtype, slots: Sequence[int], blocks: Sequence[int], rounds: int) -> Ratio:
    """Host slots to device blocks, paired as an engine's books paired them, over memcpy of as many bytes. Both by one
    thread."""
    pool = DevicePool.allocate(layout, max(blocks) + 1, dtype, torch.device("cpu"))
    host = HostMemory.allocate(layout, max(slots) + 1)
    host.memory.fill_(1)  # pages that nobody has written to are all one page of zeros
    size = len(blocks) * layout.block_bytes
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    ended = Ended()

    def load() -> float:
        move = Load(0, (bytes(KEY_BYTES),) * len(slots), tuple(slots), tuple(blocks), Arrival())
        return size / ended.seconds(mover, [move]) / 1e9

    def memcpy() -> float:
        # By a thread that is woken for it and gives way to others, as the one that loads does.
        begun_s = time.monotonic()
        copying.submit(ctypes.memmove, target.ctypes.data, source.ctypes.data, size).result()
        return size / (time.monotonic() - begun_s) / 1e9

    with (
        closing(CopyingMover([HostCopier(pool, host)], ended.notify, Traffic())) as mover,
        ThreadPoolExecutor(1, initializer=give_way_to_lanes) as copying,
    ):
        load()  # the first writes to memory that the kernel has yet to give
        memcpy()  # and the first starts its thread
        over, under = interleaved(load, memcpy, rounds)
    return Ratio(
        "loads over memcpy",
        Measured("loads", over, _UNIT),
        Measured("memcpy", under, _UNIT),
        at_least=LOADS_AT_LEAST,
        price=f"{size / 1e6:.0f} MB by one thread each",
    )


def fetch_rate(layout: KVLayout, records: int, folder: Path, rounds: int) -> Ratio:
    """Disk to host memory, verified, over reads of the same records by as many threads that do nothing else."""
    host = HostMemory.allocate(layout, records)
    host.memory.random_()
    made = SlotLayout(layout.block_bytes, records)
    chance = random.Random(0)
    ended = Ended()
    with ExitStack() as stack:
        pages = CountingPages(PageFile.open(folder / FILE_NAME, made.file_bytes))
        disk = DiskCopier(host, SlotFile(pages, made, _NAMESPACE))
        mover = stack.enter_context(closing(CopyingMover([disk], ended.notify, Traffic())))
        ended.seconds(mover, [Spill(slot, _key(slot), b"", slot, slot) for slot in range(records)])

        def fetch() -> float:
            order = chance.sample(range(records), records)
            moves = [Fetch(slot, _key(slot), b"", slot, slot) for slot in order]
            return made.file_bytes / ended.seconds(mover, moves) / 1e9

        fetch()  # tells how many it reads at once
        reads = stack.enter_context(_raw_reads(folder / FILE_NAME, made, pages.most_at_once, direct=pages.direct))

        def read() -> float:
            return made.file_bytes / reads(chance.sample(range(records), records)) / 1e9

        over, under = interleaved(fetch, read, rounds)
    return Ratio(
        "fetches over raw reads",
        Measured("fetches", over, _UNIT),
        Measured("reads", under, _UNIT),
        at_least=FETCHES_AT_LEAST,
        price=f"{records} records of {made.record_bytes} bytes, {pages.most_at_once} at once",
    )


@contextmanager
def _raw_reads(
    path: Path, made: SlotLayout, threads: int, *, direct: bool
) -> Iterator[Callable[[Sequence[int]], float]]:
    """Seconds that it takes to read these records into the same few buffers."""
    file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    buffers = [mmap.mmap(-1, made.record_bytes) for _ in range(threads)]

    def part(number: int, order: Sequence[int]) -> None:
        for slot in order[number::threads]:
            if os.preadv(file, [buffers[number]], made.offset(slot)) < made.record_bytes:
                raise OSError(f"{path} ends early")

    def read(order: Sequence[int]) -> float:
        begun_s = time.monotonic()
        done = [readers.submit(part, number, order) for number in range(threads)]
        for each in done:
            each.result()
        return time.monotonic() - begun_s

    try:
        with ThreadPoolExecutor(threads, initializer=give_way_to_lanes) as readers:
            read(range(min(threads, made.slots)))  # starts the threads
            yield read
    finally:
        os.close(file)


class CountingPages:
    """Another medium's, and how many reads were under way at once at most."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._lock = threading.Lock()
        self._now = 0
        self.most_at_once = 0

    @property
    def direct(self) -> bool:
        return self._pages.direct

    def read(self, into: Sequence[Buffer], offset: int) -> int:
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            return self._pages.read(into, offset)
        finally:
            with self._lock:
                self._now -= 1

    def write(self, data: Sequence[Buffer], offset: int) -> int:
        return self._pages.write(data, offset)

    def close(self) -> None:
        self._pages.close()


def _key(number: int) -> bytes:
    return (number + 1).to_bytes(KEY_BYTES, "little")
