"""Slots on files with and without O_DIRECT, and on a medium that could fail: one contract. And the record itself."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from typing_extensions import Buffer
from xxhash import xxh3_64_intdigest

from engine.kv.file_systems import without_direct_io
from engine.kv.records import flip, key_of, noise, off_a_page, on_a_page, overwrite, payload_of
from engine.kv.slots_contract import *  # noqa: F403 - the contract's tests
from engine.kv.slots_contract import NAMESPACE, Disk, read
from tidelane.engine.errors import CannotServe
from tidelane.engine.kv.faulty_pages import FaultRates, FaultyPages
from tidelane.engine.kv.page_file import PAGE, PageFile
from tidelane.engine.kv.slot_file import FILE_NAME, NotThere, SlotFile, SlotLayout

HEADER_FIELDS_BYTES = 104


@pytest.fixture(params=["direct", "buffered", "faulty"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    if request.param == "buffered":
        without_direct_io(monkeypatch)
    faultless = FaultRates()
    medium = (lambda pages: FaultyPages(pages, faultless, seed=0)) if request.param == "faulty" else None
    disk = Disk(tmp_path / "kv", medium)
    yield disk
    disk.close()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "kv")
    yield disk
    disk.close()


# ---- the record ------------------------------------------------------------------------------------------------------


def test_a_record_is_what_the_docs_say(plain: Disk) -> None:
    slots, _ = plain.open(payload_bytes=PAGE + 1)
    payload = noise(PAGE + 1)
    key = b"0123456789abcdef" + bytes(16)
    slots.write(1, key, payload)
    record = plain.path.read_bytes()[slots.layout.record_bytes :][: slots.layout.record_bytes]
    written_s = int.from_bytes(record[12:16], "little")
    assert abs(written_s - time.time()) < 3600
    fields = b"TDLN-KV\0" + (1).to_bytes(4, "little") + record[12:16] + (PAGE + 1).to_bytes(8, "little") + NAMESPACE
    fields += key + xxh3_64_intdigest(payload).to_bytes(8, "little")
    assert record[:96] == fields
    assert record[96:104] == xxh3_64_intdigest(fields).to_bytes(8, "little")
    assert record[104:PAGE] == bytes(PAGE - 104)
    assert record[PAGE:][: PAGE + 1] == payload
    assert len(record) == 3 * PAGE


@pytest.mark.parametrize(
    ("payload_bytes", "record_bytes"),
    [(1, 2 * PAGE), (PAGE, 2 * PAGE), (PAGE + 1, 3 * PAGE), (1 << 21, PAGE + (1 << 21))],
)
def test_as_many_slots_as_the_capacity_holds(payload_bytes: int, record_bytes: int) -> None:
    layout = SlotLayout.within(3 * record_bytes + record_bytes - 1, payload_bytes)
    assert (layout.slots, layout.record_bytes, layout.file_bytes) == (3, record_bytes, 3 * record_bytes)
    with pytest.raises(
        CannotServe, match=f"{record_bytes - 1} bytes of disk hold no KV block: one takes {record_bytes}"
    ):
        SlotLayout.within(record_bytes - 1, payload_bytes)


def test_memory_on_whole_pages_is_handed_to_the_disk_itself(tmp_path: Path) -> None:
    class Watched:
        direct = True

        def __init__(self, pages: PageFile) -> None:
            self.pages = pages
            self.addresses: list[int] = []

        def read(self, into: Sequence[Buffer], offset: int) -> int:
            self._note(into)
            return self.pages.read(into, offset)

        def write(self, data: Sequence[Buffer], offset: int) -> int:
            self._note(data)
            return self.pages.write(data, offset)

        def close(self) -> None:
            self.pages.close()

        def _note(self, buffers: Sequence[Buffer]) -> None:
            self.addresses.append(address(memoryview(buffers[-1])))

    def address(memory: memoryview) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))

    layout = SlotLayout(4 * PAGE, 1)
    watched = Watched(PageFile.open(tmp_path / FILE_NAME, layout.file_bytes))
    slots = SlotFile(watched, layout, NAMESPACE)
    fine, unfit = on_a_page(4 * PAGE), off_a_page(4 * PAGE)
    for memory in (fine, unfit):
        slots.write(0, key_of(1), memory)
        slots.read(0, key_of(1), memory)
    slots.close()
    assert watched.addresses[:2] == [address(fine)] * 2
    assert address(unfit) not in watched.addresses
    assert all(at % PAGE == 0 for at in watched.addresses)


def test_what_was_written_is_found_in_the_order_in_which_it_was(tmp_path: Path) -> None:
    layout = SlotLayout(PAGE, 4)
    pages = PageFile.open(tmp_path / FILE_NAME, layout.file_bytes)
    times_s = iter([2e9, -5.0, 1e9, 1e30])  # a clock that was never set, and one that was set wrong
    slots = SlotFile(pages, layout, NAMESPACE, clock=lambda: next(times_s))
    for slot in range(4):
        slots.write(slot, key_of(slot), payload_of(key_of(slot), PAGE))
    assert list(slots.recover()) == [1, 2, 0, 3]
    assert [read(slots, slot, key_of(slot)) for slot in range(4)] == [payload_of(key_of(n), PAGE) for n in range(4)]
    slots.close()


# ---- what is damaged is a miss ---------------------------------------------------------------------------------------


def check_flips(disk: Disk, places: Sequence[int]) -> None:
    slots, _ = disk.open(slots=3)
    for slot in range(3):
        slots.write(slot, key_of(slot), payload_of(key_of(slot), 2 * PAGE))
    start = slots.layout.offset(1)
    for at in places:
        flip(disk.path, start + at)
        assert read(slots, 1, key_of(1)) is None, f"byte {at}"
        if at < PAGE:
            assert slots.recover() == {0: key_of(0), 2: key_of(2)}, f"byte {at}"
        flip(disk.path, start + at)
    assert read(slots, 1, key_of(1)) == payload_of(key_of(1), 2 * PAGE)
    assert slots.recover() == {slot: key_of(slot) for slot in range(3)}


def test_one_flipped_byte_is_a_miss(plain: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    without_direct_io(monkeypatch)  # hundreds of reads: from memory
    ends = [PAGE - 1, PAGE, 2 * PAGE - 1, 2 * PAGE, 3 * PAGE - 1]
    check_flips(plain, [*range(HEADER_FIELDS_BYTES + 1), *ends, *random.Random(1).sample(range(3 * PAGE), 40)])


@pytest.mark.slow
def test_one_flipped_byte_anywhere_is_a_miss(plain: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    without_direct_io(monkeypatch)  # tens of thousands of reads: from memory
    check_flips(plain, range(3 * PAGE))


def test_what_was_written_in_part_is_neither_the_old_nor_the_new(plain: Disk) -> None:
    slots, _ = plain.open(slots=2)
    records: list[bytes] = []
    for number in range(2):
        slots.write(1, key_of(number), payload_of(key_of(number), 2 * PAGE))
        records.append(plain.path.read_bytes()[slots.layout.offset(1) :])
    sectors = range(0, 3 * PAGE, 512)
    prefixes = [set(sectors[:count]) for count in range(len(sectors) + 1)]
    lot = random.Random(2)  # a disk need not keep to an order
    subsets = [set(lot.sample(sectors, lot.randrange(len(sectors) + 1))) for _ in range(25)]
    for new in (*prefixes, *subsets):
        torn = b"".join(records[at in new][at : at + 512] for at in sectors)
        overwrite(plain.path, slots.layout.offset(1), torn)
        for number in range(2):
            wanted = payload_of(key_of(number), 2 * PAGE) if torn == records[number] else None
            assert read(slots, 1, key_of(number)) == wanted


def test_a_file_that_got_shorter_under_the_engine_is_missed_not_waited_for(plain: Disk) -> None:
    slots, _ = plain.open()
    for slot in range(4):
        slots.write(slot, key_of(slot), payload_of(key_of(slot), 2 * PAGE))
    os.truncate(plain.path, slots.layout.offset(2) + PAGE + 1000)
    assert [read(slots, slot, key_of(slot)) is None for slot in range(4)] == [False, False, True, True]
    slots.close()
    slots, found = plain.open()
    assert found == {0: key_of(0), 1: key_of(1), 2: key_of(2)}, "headers are there"
    assert read(slots, 2, key_of(2)) is None


@pytest.mark.parametrize("memory", [on_a_page, off_a_page])
def test_a_short_read_is_a_miss_though_memory_still_holds_the_bytes(
    plain: Disk, memory: Callable[[int], memoryview]
) -> None:
    slots, _ = plain.open(slots=1)
    payload = memory(2 * PAGE)
    payload[:] = noise(2 * PAGE)
    slots.write(0, key_of(0), payload)
    slots.read(0, key_of(0), payload)
    os.truncate(plain.path, 0)
    with pytest.raises(NotThere, match="slot 0 ends early"):
        slots.read(0, key_of(0), payload)


def test_a_disk_that_is_gone_is_an_os_error(plain: Disk) -> None:
    slots, _ = plain.open()
    slots.write(0, key_of(0), noise(2 * PAGE))
    (ours,) = (int(entry.name) for entry in Path("/proc/self/fd").iterdir() if _is(entry, plain.path))
    nothing = os.open("/proc/self/mem", os.O_RDWR)  # at addresses that nothing lies at: EIO for reads and writes
    os.dup2(nothing, ours)
    os.close(nothing)
    memory = on_a_page(2 * PAGE)
    calls: list[Callable[[], None]] = [
        lambda: slots.read(0, key_of(0), memory),
        lambda: slots.write(0, key_of(0), memory),
        lambda: slots.erase(0),
    ]
    for call in calls:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
            call()
        assert caught.value.errno == errno.EIO


def _is(link: Path, path: Path) -> bool:
    return link.is_symlink() and link.readlink() == path


# ---- whose records they are ------------------------------------------------------------------------------------------


def test_another_namespace_finds_nothing_and_takes_the_slots(plain: Disk) -> None:
    """What differs in weights, dtype, layout or tenant must not be read, though every key is the same."""
    slots, _ = plain.open()
    for slot in range(4):
        slots.write(slot, key_of(slot), payload_of(key_of(slot), 2 * PAGE))
    slots.close()
    other, found = plain.open(namespace=b"m" * 16)
    assert found == {}
    assert [read(other, slot, key_of(slot)) for slot in range(4)] == [None] * 4
    other.write(2, key_of(2), noise(2 * PAGE))
    other.close()
    slots, found = plain.open()
    assert found == {slot: key_of(slot) for slot in (0, 1, 3)}
    assert read(slots, 2, key_of(2)) is None


def test_another_payload_size_finds_nothing(plain: Disk) -> None:
    slots, _ = plain.open(slots=6, payload_bytes=2 * PAGE)
    for slot in range(6):
        slots.write(slot, key_of(slot), payload_of(key_of(slot), 2 * PAGE))
    slots.close()
    for payload_bytes in (2 * PAGE - 1, PAGE, 5 * PAGE):  # records as large, smaller, and twice as large
        other, found = plain.open(slots=6, payload_bytes=payload_bytes)
        assert found == {}
        assert [read(other, slot, key_of(slot)) for slot in range(6)] == [None] * 6
        other.close()


def test_another_schema_finds_nothing(plain: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, _ = plain.open()
    slots.write(0, key_of(0), noise(2 * PAGE))
    slots.close()
    monkeypatch.setattr("tidelane.engine.kv.slot_file._SCHEMA", 2)
    slots, found = plain.open()
    assert (found, read(slots, 0, key_of(0))) == ({}, None)


@pytest.mark.parametrize("namespace", [b"", b"n" * 15, b"n" * 33])
def test_a_namespace_is_a_digest(plain: Disk, namespace: bytes) -> None:
    with pytest.raises(ValueError, match=f"not {len(namespace)}"):
        plain.open(namespace=namespace)
    plain.open()  # and the folder is free again


def test_of_two_slots_with_one_key_the_first_is_kept(plain: Disk) -> None:
    slots, _ = plain.open(slots=200)
    for slot in (190, 7, 71, 8):
        slots.write(slot, key_of(slot % 2), payload_of(key_of(slot % 2), 2 * PAGE))
    slots.close()
    slots, found = plain.open(slots=200)
    assert list(found.items()) == [(7, key_of(1)), (8, key_of(0))]


def test_a_smaller_capacity_drops_the_last_slots_and_a_larger_adds_free_ones(plain: Disk) -> None:
    slots, _ = plain.open(slots=8)
    for slot in range(8):
        slots.write(slot, key_of(slot), payload_of(key_of(slot), 2 * PAGE))
    slots.close()
    for count, left in ((3, 3), (8, 3), (20, 3)):
        slots, found = plain.open(slots=count)
        assert found == {slot: key_of(slot) for slot in range(left)}
        assert [read(slots, slot, key) for slot, key in found.items()] == [
            payload_of(key, 2 * PAGE) for key in found.values()
        ]
        assert [read(slots, slot, key_of(slot)) for slot in range(left, count)] == [None] * (count - left)
        assert plain.path.stat().st_size == slots.layout.file_bytes
        slots.close()


def test_a_file_of_something_else_is_all_free(plain: Disk) -> None:
    plain.folder.mkdir()
    plain.path.write_bytes(noise(50_000))
    slots, found = plain.open()
    assert found == {}
    slots.write(1, key_of(1), payload_of(key_of(1), 2 * PAGE))
    assert read(slots, 1, key_of(1)) == payload_of(key_of(1), 2 * PAGE)
