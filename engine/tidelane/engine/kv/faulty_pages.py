"""A disk that fails on purpose, to see how what stands on it bears it: `SlotFile(FaultyPages(...), ...)`."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from threading import Lock

from typing_extensions import Buffer

from tidelane.engine.kv.page_file import PAGE
from tidelane.engine.kv.slot_file import Pages


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Each is the share of calls, from 0 to 1, that it befalls."""

    short: float = 0.0  # fewer pages are read or written than asked for, and the call says so
    io_error: float = 0.0  # EIO; a write may have got part of the way
    disk_full: float = 0.0  # ENOSPC, of writes, likewise
    wrong_data: float = 0.0  # one bit of what is read is another, and nothing says so
    delay: float = 0.0  # takes `delay_s` longer
    delay_s: float = 0.05


class FaultyPages:
    """`pages`, but for the faults. `rates` may be set anew at any time.

    What befalls the n-th read or write at an offset depends on `seed` alone: threads change nothing about it.
    """

    def __init__(self, pages: Pages, rates: FaultRates, seed: int, wait: Callable[[float], None] = time.sleep) -> None:
        self.rates = rates
        self._pages = pages
        self._seed = seed
        self._wait = wait
        self._calls: Counter[tuple[str, int]] = Counter()
        self._counting = Lock()

    @property
    def direct(self) -> bool:
        return self._pages.direct

    def read(self, into: Sequence[Buffer], offset: int) -> int:
        lot = self._lot("read", offset)
        if lot.random() < self.rates.delay:
            self._wait(self.rates.delay_s)
        if lot.random() < self.rates.io_error:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if lot.random() < self.rates.short:
            into = _some_pages(into, lot)
        done = self._pages.read(into, offset)
        if lot.random() < self.rates.wrong_data and done:
            _flip_a_bit(into, lot.randrange(done * 8))
        return done

    def write(self, data: Sequence[Buffer], offset: int) -> int:
        lot = self._lot("write", offset)
        if lot.random() < self.rates.delay:
            self._wait(self.rates.delay_s)
        for rate, number in ((self.rates.io_error, errno.EIO), (self.rates.disk_full, errno.ENOSPC)):
            if lot.random() < rate:
                self._pages.write(_some_pages(data, lot), offset)
                raise OSError(number, os.strerror(number))
        if lot.random() < self.rates.short:
            data = _some_pages(data, lot)
        return self._pages.write(data, offset)

    def close(self) -> None:
        self._pages.close()

    def _lot(self, call: str, offset: int) -> Random:
        with self._counting:
            self._calls[call, offset] += 1
            return Random(f"{self._seed} {call} {offset} {self._calls[call, offset]}")


def _some_pages(buffers: Sequence[Buffer], lot: Random) -> list[Buffer]:
    """The first of them, not all: none, maybe."""
    left = PAGE * lot.randrange(sum(memoryview(buffer).nbytes for buffer in buffers) // PAGE)
    some: list[Buffer] = []
    for buffer in buffers:
        view = memoryview(buffer).cast("B")[:left]
        left -= view.nbytes
        some.append(view)
    return some


def _flip_a_bit(buffers: Sequence[Buffer], bit: int) -> None:
    at = bit // 8
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if at < view.nbytes:
            view[at] ^= 1 << bit % 8
            return
        at -= view.nbytes
