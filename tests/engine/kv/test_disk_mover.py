"""Blocks between host memory and a file: what comes back is what went, or nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tidelane.engine.kv.disk_mover import MOST_FAILURES, DiskMover, recovered
from tidelane.engine.kv.faulty_pages import FaultRates, FaultyPages
from tidelane.engine.kv.host_memory import HostMemory
from tidelane.engine.kv.layout import KVLayout
from tidelane.engine.kv.moves import Fetch, Move, Spill
from tidelane.engine.kv.page_file import PageFile
from tidelane.engine.kv.slot_file import FILE_NAME, SlotFile, SlotLayout

LAYOUT = KVLayout(4, 2, key_dim=32, value_dim=32, element_bytes=4, block_tokens=4)
SLOTS = 6
SPACE = b"n" * 16
A, B = b"a" * 16, b"b" * 16


class Bench:
    """A mover over a file in `folder`, whose moves are waited for."""

    def __init__(self, folder: Path, rates: FaultRates | None = None) -> None:
        self.host = HostMemory.allocate(LAYOUT, SLOTS)
        layout = SlotLayout.within(SLOTS * (LAYOUT.block_bytes + 2 * 4096), LAYOUT.block_bytes)
        pages = PageFile.open(folder / FILE_NAME, layout.file_bytes)
        self.pages = FaultyPages(pages, rates or FaultRates(), seed=1)
        self.slots = SlotFile(self.pages, layout, SPACE)
        self._rang = threading.Semaphore(0)
        self.mover = DiskMover(self.host, self.slots, self._rang.release)

    def run(self, *moves: Move) -> list[bool]:
        """Whether each went well."""
        self.mover.start(moves)
        ended: dict[int, bool] = {}
        while len(ended) < len(moves):
            assert self._rang.acquire(timeout=30)
            ended.update((move.number, well) for move, well in self.mover.poll())
        return [ended[move.number] for move in moves]


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
    assert not bench.mover.gave_up
    bench.pages.rates = FaultRates()
    assert bench.run(Fetch(9, A, b"", 4, 1)) == [True]


def test_a_disk_that_fails_again_and_again_is_left_alone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.pages.rates = FaultRates(io_error=1.0)
    with caplog.at_level(logging.ERROR):
        assert bench.run(*(Spill(number, A, b"", 2, 4) for number in range(5))) == [False] * 5
    assert bench.mover.gave_up
    assert sum("left alone" in record.message for record in caplog.records) == 1
    assert len(caplog.records) == MOST_FAILURES + 1
    bench.pages.rates = FaultRates()
    assert bench.run(Spill(9, A, b"", 2, 4)) == [False]


def test_a_failure_now_and_then_is_not_the_end(bench: Bench) -> None:
    for number in range(0, 8, 2):
        bench.pages.rates = FaultRates(io_error=1.0)
        assert bench.run(Spill(number, A, b"", 2, 4)) == [False]
        bench.pages.rates = FaultRates()
        assert bench.run(Spill(number + 1, A, b"", 2, 4)) == [True]
    assert not bench.mover.gave_up


def test_a_move_that_dies_of_something_else_ends_all_the_same(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert bench.run(Spill(0, A, b"", 2, SLOTS + 9), Spill(1, A, b"", 2, 4)) == [False, True]
    assert not bench.mover.gave_up
