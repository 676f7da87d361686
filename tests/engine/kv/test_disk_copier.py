"""Blocks between host memory and a file: what comes back is what went, or nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tidelane.engine.kv.disk_copier import MOST_FAILURES, DiskCopier, recovered
from tidelane.engine.kv.faulty_pages import FaultRates, FaultyPages
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.mover import CopyingMover
from tidelane.engine.kv.moves import Fetch, Move, Spill
from tidelane.engine.kv.page_file import PageFile
from tidelane.engine.kv.slot_file import FILE_NAME, SlotFile, SlotLayout
from tidelane.engine.kv.traffic import Traffic

LAYOUT = KVLayout(4, 2, key_dim=32, value_dim=32, element_bytes=4, block_tokens=4)
SLOTS = 6
SPACE = b"n" * 16
A, B = b"a" * 16, b"b" * 16


class Bench:
    """A mover over a file in `folder`, whose moves are waited for."""

    def __init__(self, folder: Path, wait: Callable[[float], None] = time.sleep) -> None:
        self.host = HostMemory.allocate(LAYOUT, SLOTS)
        layout = SlotLayout.within(SLOTS * (LAYOUT.block_bytes + 2 * 4096), LAYOUT.block_bytes)
        pages = PageFile.open(folder / FILE_NAME, layout.file_bytes)
        self.pages = FaultyPages(pages, FaultRates(), seed=1, wait=wait)
        self.slots = SlotFile(self.pages, layout, SPACE)
        self._rang = threading.Semaphore(0)
        self._ended: dict[int, bool] = {}
        self.copier = DiskCopier(self.host, self.slots)
        self.traffic = Traffic()
        self.mover = CopyingMover([self.copier], self._rang.release, self.traffic)

    def run(self, *moves: Move) -> list[bool]:
        """Whether each went well."""
        self.mover.start(moves)
        return self.ended(*moves)

    def ended(self, *moves: Move) -> list[bool]:
        """Once they have: whether well."""
        while any(move.number not in self._ended for move in moves):
            assert self._rang.acquire(timeout=30)
            self._ended.update((move.number, well) for move, well in self.mover.poll())
        return [self._ended[move.number] for move in moves]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.mover.close()


def test_a_block_comes_back_as_it_went_and_no_other_changes(bench: Bench) -> None:
    memory = bench.host.memory
    memory.random_()
    before = memory.clone()
    assert bench.run(Spill(0, A, b"", 2, 4), Spill(1, B, A, 3, 0)) == [True, True]
    assert torch.equal(memory, before)
    memory[[2, 3]] = 0
    assert bench.run(Fetch(2, B, A, 0, 5), Fetch(3, A, b"", 4, 1)) == [True, True]
    assert torch.equal(memory[[1, 5]], before[[2, 3]])
    assert torch.equal(memory[[0, 4]], before[[0, 4]])
    assert not memory[[2, 3]].any()


def test_what_is_not_there_is_a_miss(bench: Bench) -> None:
    bench.run(Spill(0, A, b"", 2, 4))
    wrong = [Fetch(1, B, b"", 4, 0), Fetch(2, A, B, 4, 1), Fetch(3, A, b"", 5, 3), Fetch(4, A, b"", 4, 4)]
    assert bench.run(*wrong) == [False, False, False, True]


def test_another_process_finds_the_names_of_both(bench: Bench, tmp_path: Path) -> None:
    bench.run(Spill(0, A, b"", 2, 4), Spill(1, B, A, 3, 0))
    bench.mover.close()
    again, found = SlotFile.open(
        tmp_path, namespace=SPACE, payload_bytes=LAYOUT.block_bytes, capacity_bytes=bench.slots.layout.file_bytes
    )
    again.close()
    assert recovered(found) == {4: (A, b""), 0: (B, A)}


def test_wrong_bytes_are_a_miss_each_and_the_disk_stays_in_use(bench: Bench) -> None:
    bench.run(Spill(0, A, b"", 2, 4))
    bench.pages.rates = FaultRates(wrong_data=1.0)
    # Each to a place of its own, as the books have it: reads go on at once.
    places = (0, 1, 3, 4, 5)
    assert bench.run(*(Fetch(number, A, b"", 4, place) for number, place in enumerate(places))) == [False] * 5
    assert not bench.copier.gave_up
    bench.pages.rates = FaultRates()
    assert bench.run(Fetch(9, A, b"", 4, 1)) == [True]


def test_a_disk_that_fails_again_and_again_is_left_alone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.pages.rates = FaultRates(io_error=1.0)
    with caplog.at_level(logging.ERROR):
        assert bench.run(*(Spill(number, A, b"", 2, 4) for number in range(5))) == [False] * 5
    assert bench.copier.gave_up
    assert sum("left alone" in record.message for record in caplog.records) == 1
    assert len(caplog.records) == MOST_FAILURES + 1
    bench.pages.rates = FaultRates()
    assert bench.run(Spill(9, A, b"", 2, 4)) == [False]


def test_what_was_under_way_when_the_disk_was_given_up_does_not_bring_it_back(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait(_: float) -> None:
        begun.set()
        assert go_on.wait(30)

    bench = Bench(tmp_path, wait)
    try:
        assert bench.run(Spill(0, A, b"", 2, 4)) == [True]
        bench.pages.rates = FaultRates(delay=1.0)
        late = Fetch(1, A, b"", 4, 1)
        bench.mover.start([late])
        assert begun.wait(30)
        bench.pages.rates = FaultRates(io_error=1.0)
        assert bench.run(*(Spill(number, B, b"", 2, 5) for number in range(2, 5))) == [False] * 3
        bench.pages.rates = FaultRates()
        go_on.set()
        assert bench.ended(late) == [True]
        assert bench.run(Spill(9, A, b"", 2, 4)) == [False]
        assert bench.copier.gave_up
    finally:
        bench.mover.close()
    assert bench.traffic.of(Fetch).bytes == LAYOUT.block_bytes
    assert bench.traffic.of(Spill).failed == 4


def test_reads_that_fail_again_and_again_are_the_end_whatever_writes_do(bench: Bench) -> None:
    bench.run(Spill(0, A, b"", 2, 4))
    for number in range(1, 2 * MOST_FAILURES, 2):
        assert not bench.copier.gave_up
        bench.pages.rates = FaultRates(io_error=1.0)
        assert bench.run(Fetch(number, A, b"", 4, 1)) == [False]
        bench.pages.rates = FaultRates()
        assert bench.run(Spill(number + 1, B, b"", 3, 5)) == [number + 1 < 2 * MOST_FAILURES]
    assert bench.copier.gave_up


def test_failures_of_reads_and_of_writes_do_not_add_up(bench: Bench) -> None:
    bench.run(Spill(0, A, b"", 2, 4))
    bench.pages.rates = FaultRates(io_error=1.0)
    for number in range(1, MOST_FAILURES):
        assert bench.run(Fetch(2 * number, A, b"", 4, 1), Spill(2 * number + 1, B, b"", 3, 5)) == [False, False]
    assert not bench.copier.gave_up
    bench.pages.rates = FaultRates()
    assert bench.run(Fetch(90, A, b"", 4, 1)) == [True]


def test_a_failure_now_and_then_is_not_the_end(bench: Bench) -> None:
    for number in range(0, 8, 2):
        bench.pages.rates = FaultRates(io_error=1.0)
        assert bench.run(Spill(number, A, b"", 2, 4)) == [False]
        bench.pages.rates = FaultRates()
        assert bench.run(Spill(number + 1, A, b"", 2, 4)) == [True]
    assert not bench.copier.gave_up


def test_a_move_that_dies_of_something_else_ends_all_the_same(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert bench.run(Spill(0, A, b"", 2, SLOTS + 9), Spill(1, A, b"", 2, 4)) == [False, True]
    assert not bench.copier.gave_up
