"""What the tier that keeps the book relies on, as tests that slots must pass on any medium.

A test module imports these tests (`from engine.kv.slots_contract import *`) and gives a fixture `disk` of type `Disk`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kv.records import key_of, noise, off_a_page, on_a_page, overwrite, payload_of
from tidelane.engine.kv.page_file import PAGE, PageFile
from tidelane.engine.kv.slot_file import FILE_NAME, NotThere, Pages, SlotFile, SlotLayout

__all__ = [
    "Disk",
    "test_a_slot_holds_what_it_was_written_with_last",
    "test_agrees_with_a_dict",
    "test_an_erased_slot_is_a_miss",
    "test_another_key_is_a_miss",
    "test_slots_are_there_after_reopening",
    "test_threads_do_not_disturb_each_other",
    "test_what_does_not_fit_is_refused_and_changes_nothing",
    "test_what_is_read_is_what_was_written_and_nothing_else_changes",
]

NAMESPACE = b"n" * 32


class Disk:
    """A folder and how slots are opened in it. `medium` is put between the slots and the file."""

    def __init__(self, folder: Path, medium: Callable[[PageFile], Pages] | None = None) -> None:
        self.folder = folder
        self._medium = medium
        self._opened: list[SlotFile] = []

    @property
    def path(self) -> Path:
        return self.folder / FILE_NAME

    def open(
        self, slots: int = 4, payload_bytes: int = 2 * PAGE, namespace: bytes = NAMESPACE
    ) -> tuple[SlotFile, dict[int, bytes]]:
        layout = SlotLayout(payload_bytes, slots)
        if self._medium is None:
            opened, found = SlotFile.open(
                self.folder, namespace=namespace, payload_bytes=payload_bytes, capacity_bytes=layout.file_bytes
            )
        else:
            pages = self._medium(PageFile.open(self.path, layout.file_bytes))
            opened = SlotFile(pages, layout, namespace)
            found = opened.recover()
        self._opened.append(opened)
        return opened, found

    def within(self, folder: str) -> Disk:
        """The same kind, with nothing in it."""
        return Disk(self.folder / folder, self._medium)

    def close(self) -> None:
        for slots in self._opened:
            slots.close()


def read(slots: SlotFile, slot: int, key: bytes) -> bytes | None:
    """The payload; None for a miss."""
    into = on_a_page(slots.layout.payload_bytes)
    into[:] = noise(len(into))
    try:
        slots.read(slot, key, into)
    except NotThere:
        return None
    return bytes(into)


@pytest.mark.parametrize("payload_bytes", [2 * PAGE, PAGE + 904, 17])
@pytest.mark.parametrize("memory", [on_a_page, off_a_page])
def test_what_is_read_is_what_was_written_and_nothing_else_changes(
    disk: Disk, payload_bytes: int, memory: Callable[[int], memoryview]
) -> None:
    slots, _ = disk.open(payload_bytes=payload_bytes)
    for slot in range(4):
        slots.write(slot, key_of(slot), payload_of(key_of(slot), payload_bytes))
    before = disk.path.read_bytes()
    source = memory(payload_bytes)
    wanted = noise(payload_bytes)
    source[:] = wanted
    slots.write(2, key_of(9), source)
    assert source == wanted
    start, end = slots.layout.offset(2), slots.layout.offset(3)
    after = disk.path.read_bytes()
    assert (after[:start], after[end:]) == (before[:start], before[end:])

    source[:] = bytes(payload_bytes)
    around = memory(payload_bytes + 2 * PAGE)
    around[:] = was = noise(len(around))
    into = around[PAGE : PAGE + payload_bytes]
    slots.read(2, key_of(9), into)
    assert into == wanted
    assert around[:PAGE] == was[:PAGE]
    assert around[PAGE + payload_bytes :] == was[PAGE + payload_bytes :]
    assert disk.path.read_bytes() == after


def test_a_slot_holds_what_it_was_written_with_last(disk: Disk) -> None:
    slots, found = disk.open()
    assert found == {}
    for number in (5, 6, 5):
        slots.write(1, key_of(number), payload_of(key_of(number), 2 * PAGE))
    assert read(slots, 1, key_of(6)) is None
    assert read(slots, 1, key_of(5)) == payload_of(key_of(5), 2 * PAGE)


def test_another_key_is_a_miss(disk: Disk) -> None:
    slots, _ = disk.open()
    slots.write(1, key_of(5), noise(2 * PAGE))
    for bit in range(0, 128, 9):
        assert read(slots, 1, key_of(5 ^ 1 << bit)) is None
    assert read(slots, 0, key_of(5)) is None


def test_an_erased_slot_is_a_miss(disk: Disk) -> None:
    slots, _ = disk.open()
    for slot in range(4):
        slots.write(slot, key_of(slot), payload_of(key_of(slot), 2 * PAGE))
    slots.erase(1)
    slots.erase(1)
    assert [read(slots, slot, key_of(slot)) is None for slot in range(4)] == [False, True, False, False]
    assert slots.recover() == {slot: key_of(slot) for slot in (0, 2, 3)}


def test_what_does_not_fit_is_refused_and_changes_nothing(disk: Disk) -> None:
    slots, _ = disk.open()
    slots.write(3, key_of(1), noise(2 * PAGE))
    before = disk.path.read_bytes()
    for size in (0, 1, 2 * PAGE - 1, 2 * PAGE + 1):
        with pytest.raises(ValueError, match=f"a payload has 8192 bytes, not {size}"):
            slots.write(3, key_of(1), bytes(size))
        with pytest.raises(ValueError, match=f"a payload has 8192 bytes, not {size}"):
            slots.read(3, key_of(1), bytearray(size))
    for key in (b"", key_of(1)[:31], key_of(1) + b"\0"):
        with pytest.raises(ValueError, match=f"a key has 32 bytes, not {len(key)}"):
            slots.write(3, key, bytes(2 * PAGE))
        with pytest.raises(ValueError, match=f"a key has 32 bytes, not {len(key)}"):
            slots.read(3, key, bytearray(2 * PAGE))
    for slot in (-1, 4):
        with pytest.raises(IndexError, match=f"slot {slot} of 4"):
            slots.write(slot, key_of(1), bytes(2 * PAGE))
        with pytest.raises(IndexError, match=f"slot {slot} of 4"):
            slots.read(slot, key_of(1), bytearray(2 * PAGE))
        with pytest.raises(IndexError, match=f"slot {slot} of 4"):
            slots.erase(slot)
    assert disk.path.read_bytes() == before


def test_slots_are_there_after_reopening(disk: Disk) -> None:
    slots, _ = disk.open()
    for slot in (0, 3):
        slots.write(slot, key_of(slot), payload_of(key_of(slot), 2 * PAGE))
    slots.close()
    assert list(disk.folder.iterdir()) == [disk.path], "one file, however many slots"
    slots, found = disk.open()
    assert found == {0: key_of(0), 3: key_of(3)}
    for slot, key in found.items():
        assert read(slots, slot, key) == payload_of(key, 2 * PAGE)


def test_threads_do_not_disturb_each_other(disk: Disk) -> None:
    slots, _ = disk.open(slots=12, payload_bytes=16 * PAGE)

    def use(own: range) -> list[bool]:
        alike = []
        for number in range(3):
            for slot in own:
                slots.write(slot, key_of(slot + 100 * number), payload_of(key_of(slot), 16 * PAGE))
            alike += [
                read(slots, slot, key_of(slot + 100 * number)) == payload_of(key_of(slot), 16 * PAGE) for slot in own
            ]
        return alike

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(use, (range(first, 12, 4) for first in range(4)))) == [[True] * 9] * 4


Step = tuple[str, int, int]


@given(st.lists(st.tuples(st.sampled_from("wwweroc"), st.integers(0, 5), st.integers(0, 7)), max_size=25))
# The fixture gives a place to make folders in: one for each example.
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_agrees_with_a_dict(disk: Disk, steps: list[Step]) -> None:
    """Steps: write, erase, read, reopen with another number of slots, corrupt."""
    fresh = disk.within(noise(8).hex())
    disk.folder.mkdir(exist_ok=True)
    slots, _ = fresh.open(payload_bytes=PAGE)
    book: dict[int, bytes] = {}
    torn: set[bytes] = set()
    for action, slot, number in steps:
        slot %= slots.layout.slots
        if action == "w":
            slots.write(slot, key_of(number), payload_of(key_of(number), PAGE))
            book[slot] = key_of(number)
        elif action == "e":
            slots.erase(slot)
            book.pop(slot, None)
        elif action == "r":
            wanted = payload_of(key_of(number), PAGE) if book.get(slot) == key_of(number) else None
            assert read(slots, slot, key_of(number)) == wanted
        elif action == "o":
            slots.close()
            slots, _ = fresh.open(slots=number + 1, payload_bytes=PAGE)
            book = {slot: key for slot, key in book.items() if slot <= number}
        else:
            slots.close()
            overwrite(fresh.path, slots.layout.offset(slot) + number * 1000, b"torn")
            slots, _ = fresh.open(slots=slots.layout.slots, payload_bytes=PAGE)
            key = book.pop(slot, None)
            if key is not None and number * 1000 >= PAGE:
                torn.add(key)
    for slot in range(slots.layout.slots):
        key = book.get(slot)
        assert key is None or read(slots, slot, key) == payload_of(key, PAGE)
        assert read(slots, slot, key_of(8)) is None
    held = set(book.values())
    assert held <= set(slots.recover().values()) <= held | torn, "headers alone do not tell what is torn"
    fresh.close()
