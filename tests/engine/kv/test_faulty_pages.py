"""The disk that fails on purpose: each fault is what it says, comes as often as asked for, and never makes wrong KV."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.kv.records import key_of, noise, on_a_page, payload_of
from engine.kv.slots_contract import NAMESPACE, read
from tidelane.engine.kv.faulty_pages import FaultRates, FaultyPages
from tidelane.engine.kv.page_file import PAGE, PageFile
from tidelane.engine.kv.slot_file import FILE_NAME, NotThere, SlotFile, SlotLayout

LAYOUT = SlotLayout(4 * PAGE, 8)


class Rig:
    """Slots on a disk that is well until `pages.rates` says otherwise. `waited_s` is what delays added up to."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.waited_s: list[float] = []
        file = PageFile.open(folder / FILE_NAME, LAYOUT.file_bytes)
        self.pages = FaultyPages(file, FaultRates(), seed, wait=self.waited_s.append)
        self.slots = SlotFile(self.pages, LAYOUT, NAMESPACE)

    def write(self, slot: int, key: bytes) -> None:
        self.slots.write(slot, key, payload_of(key, LAYOUT.payload_bytes))

    def holds(self, slot: int, key: bytes) -> bool:
        return read(self.slots, slot, key) == payload_of(key, LAYOUT.payload_bytes)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    for slot in range(LAYOUT.slots):
        rig.write(slot, key_of(slot))
    yield rig
    rig.slots.close()


@pytest.mark.parametrize(
    ("rates", "number"), [(FaultRates(io_error=1.0), errno.EIO), (FaultRates(disk_full=1.0), errno.ENOSPC)]
)
def test_a_failed_write_is_an_os_error_and_never_half_a_record(rig: Rig, rates: FaultRates, number: int) -> None:
    rig.pages.rates = rates
    for slot in range(LAYOUT.slots):
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            rig.write(slot, key_of(100 + slot))
        assert caught.value.errno == number
    rig.pages.rates = FaultRates()
    old = [rig.holds(slot, key_of(slot)) for slot in range(LAYOUT.slots)]
    new = [read(rig.slots, slot, key_of(100 + slot)) for slot in range(LAYOUT.slots)]
    assert 0 < sum(old) < LAYOUT.slots, "some had not begun, some were torn"
    assert new == [None] * LAYOUT.slots
    for slot in range(LAYOUT.slots):  # and once it is well again, the slots are as good as ever
        rig.write(slot, key_of(100 + slot))
        assert rig.holds(slot, key_of(100 + slot))


def test_a_short_write_is_an_os_error(rig: Rig) -> None:
    rig.pages.rates = FaultRates(short=1.0)
    with pytest.raises(OSError, match=rf"\d+ of {5 * PAGE} bytes written"):
        rig.write(0, key_of(100))
    with pytest.raises(OSError, match=f"0 of {PAGE} bytes written"):
        rig.slots.erase(1)
    rig.pages.rates = FaultRates()
    assert read(rig.slots, 0, key_of(100)) is None
    assert rig.holds(1, key_of(1))


@pytest.mark.parametrize("rates", [FaultRates(short=1.0), FaultRates(wrong_data=1.0)])
def test_a_short_read_or_a_wrong_bit_is_a_miss_this_time(rig: Rig, rates: FaultRates) -> None:
    rig.pages.rates = rates
    assert [read(rig.slots, slot, key_of(slot)) for slot in range(LAYOUT.slots)] == [None] * LAYOUT.slots
    assert rig.slots.recover() == {}
    rig.pages.rates = FaultRates()
    assert all(rig.holds(slot, key_of(slot)) for slot in range(LAYOUT.slots))
    assert len(rig.slots.recover()) == LAYOUT.slots


def test_a_failed_read_is_an_os_error(rig: Rig) -> None:
    rig.pages.rates = FaultRates(io_error=1.0)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        rig.slots.read(0, key_of(0), on_a_page(LAYOUT.payload_bytes))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        rig.slots.recover()


def test_a_delay_is_waited_for_and_changes_nothing_else(rig: Rig) -> None:
    rig.pages.rates = FaultRates(delay=1.0, delay_s=0.25)
    rig.write(3, key_of(100))
    assert rig.holds(3, key_of(100))
    assert rig.waited_s == [0.25, 0.25]


def outcomes(rig: Rig, slots: list[int]) -> dict[int, list[str]]:
    """What came of writing and reading each of `slots`, in that order."""
    came: dict[int, list[str]] = {slot: [] for slot in slots}
    rig.pages.rates = FaultRates(short=0.2, io_error=0.2, disk_full=0.2, wrong_data=0.2, delay=0.2)
    for slot in slots:
        try:
            rig.write(slot, key_of(slot))
            rig.slots.read(slot, key_of(slot), on_a_page(LAYOUT.payload_bytes))
            came[slot].append("well")
        except (OSError, NotThere) as fault:
            came[slot].append(str(fault))
    rig.slots.close()
    return came


def test_the_seed_decides_and_not_the_order_among_slots(tmp_path: Path) -> None:
    one_by_one = sorted(list(range(4)) * 6)
    in_turn = list(range(4)) * 6
    came = outcomes(Rig(tmp_path / "a", seed=1), one_by_one)
    assert outcomes(Rig(tmp_path / "b", seed=1), in_turn) == came
    assert outcomes(Rig(tmp_path / "c", seed=2), in_turn) != came
    assert len({outcome for slot in came.values() for outcome in slot}) > 3


def test_under_all_faults_at_once_no_wrong_byte_comes_back(rig: Rig) -> None:
    rig.pages.rates = FaultRates(short=0.1, io_error=0.1, disk_full=0.1, wrong_data=0.1, delay=0.1)
    lot = random.Random(3)
    book = {slot: key_of(slot) for slot in range(LAYOUT.slots)}
    came: Counter[str] = Counter()
    into = on_a_page(LAYOUT.payload_bytes)
    for _ in range(300):
        slot, key = lot.randrange(LAYOUT.slots), key_of(lot.randrange(20))
        try:
            if lot.random() < 0.5:
                book.pop(slot, None)  # published again only once the write has returned
                rig.write(slot, key)
                book[slot] = key
                came["written"] += 1
            elif slot in book:
                into[:] = noise(len(into))
                rig.slots.read(slot, book[slot], into)
                assert into == payload_of(book[slot], len(into))
                came["hit"] += 1
        except NotThere:
            came["miss"] += 1
        except OSError as error:
            came[errno.errorcode[error.errno or 0]] += 1
    assert set(came) == {"written", "hit", "miss", "EIO", "ENOSPC"}
    assert min(came.values()) > 5
    assert rig.waited_s
