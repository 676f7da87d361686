"""Opening: whose the file is, whether there is room for it, and how it can be read."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from typing_extensions import Buffer

from engine.kv.file_systems import raising, without_direct_io
from engine.kv.records import noise, on_a_page
from tidelane.engine.errors import CannotServe
from tidelane.engine.kv.page_file import PAGE, DiskTooSmall, FolderInUse, PageFile

SIZE = 16 * PAGE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv" / "slots"


def test_all_its_room_is_taken_at_once(path: Path) -> None:
    pages = PageFile.open(path, SIZE)
    assert path.stat().st_size == SIZE
    assert path.stat().st_blocks * 512 >= SIZE
    pages.close()


def test_nobody_else_can_read_it(path: Path) -> None:
    PageFile.open(path, SIZE).close()
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize(("size", "kept"), [(SIZE, SIZE), (2 * SIZE, SIZE), (PAGE, PAGE)])
def test_opened_again_it_has_the_size_asked_for_and_keeps_what_fits(path: Path, size: int, kept: int) -> None:
    data = noise(SIZE)
    pages = PageFile.open(path, SIZE)
    source = on_a_page(SIZE)
    source[:] = data
    assert pages.write([source], 0) == SIZE
    pages.close()
    PageFile.open(path, size).close()
    assert path.read_bytes() == data[:kept] + bytes(size - kept)
    assert path.stat().st_blocks * 512 >= size


# ---- whose it is -----------------------------------------------------------------------------------------------------


def test_a_second_opener_is_told_and_touches_nothing(path: Path) -> None:
    pages = PageFile.open(path, SIZE)
    source = on_a_page(SIZE)
    source[:] = data = noise(SIZE)
    pages.write([source], 0)
    for size in (PAGE, 4 * SIZE):
        with pytest.raises(FolderInUse, match=f"{path.parent} is in use by another engine; give each a folder"):
            PageFile.open(path, size)
    assert path.read_bytes() == data
    pages.close()
    pages.close()
    PageFile.open(path, SIZE).close()
    assert path.read_bytes() == data


def test_of_many_that_come_at_once_one_gets_it(path: Path) -> None:
    barrier = Barrier(8)

    def come(size: int) -> PageFile | None:
        barrier.wait()
        try:
            return PageFile.open(path, size)
        except FolderInUse:
            return None

    sizes = [SIZE * (1 + number) for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        came = dict(zip(sizes, threads.map(come, sizes), strict=True))
    ((size, pages),) = ((size, pages) for size, pages in came.items() if pages is not None)
    assert path.stat().st_size == size
    pages.close()


# ---- room ------------------------------------------------------------------------------------------------------------


def test_a_disk_too_small_is_told_with_what_is_missing(path: Path) -> None:
    PageFile.open(path, SIZE).close()
    path.write_bytes(data := noise(SIZE))
    free = shutil.disk_usage(path).free
    asked = (free + (1 << 40)) // PAGE * PAGE
    with pytest.raises(DiskTooSmall, match=rf"{path} of {asked} bytes lacks \d+ bytes of disk: free them") as caught:
        PageFile.open(path, asked)
    (missing,) = re.findall(r"lacks (\d+) bytes", str(caught.value))
    assert abs(int(missing) - (1 << 40)) < 1 << 38, "others use the disk meanwhile"
    assert path.read_bytes() == data


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_runs_full_meanwhile_gets_back_what_was_taken(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    PageFile.open(path, SIZE).close()
    path.write_bytes(data := noise(SIZE))

    def half(file: int, offset: int, size: int) -> None:
        os.ftruncate(file, size // 2)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", half)
    with pytest.raises(DiskTooSmall, match=rf"lacks up to {99 * SIZE} bytes of disk \({os.strerror(number)}\)"):
        PageFile.open(path, 100 * SIZE)
    assert path.read_bytes() == data


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_where_room_cannot_be_taken_the_file_has_its_size(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", raising(number))
    pages = PageFile.open(path, SIZE)
    assert path.stat().st_size == SIZE
    assert pages.write([on_a_page(PAGE)], SIZE - PAGE) == PAGE
    pages.close()


# ---- folders and disks that will not do ------------------------------------------------------------------------------


def test_what_is_no_folder_to_write_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "slots").mkdir(parents=True)
    for path, reason in [
        (tmp_path / "file" / "slots", "Not a directory"),
        (tmp_path / "folder" / "slots", "Is a directory"),
        (tmp_path / "not mounted" / "kv" / "slots", "No such file or directory"),
        (Path("/proc/slots"), ""),  # the kernel's, not even for root: which error differs
    ]:
        with pytest.raises(CannotServe, match=rf"cannot keep KV in {path}: {reason}.*; name a folder that can be"):
            PageFile.open(path, SIZE)
    assert not (tmp_path / "not mounted").exists()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_may_only_be_read_is_told(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "open", raising(number))
    with pytest.raises(CannotServe, match=f"cannot keep KV in {path}: {os.strerror(number)}"):
        PageFile.open(path, SIZE)


@pytest.mark.parametrize("call", ["posix_fallocate", "preadv", "fstatvfs"])
def test_a_disk_that_fails_is_an_os_error_and_the_folder_is_free_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(os, call, raising(errno.EIO))
        with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
            PageFile.open(path, SIZE)
        assert caught.value.errno == errno.EIO
    PageFile.open(path, SIZE).close()


# ---- past the page cache ---------------------------------------------------------------------------------------------


def test_past_the_page_cache_where_the_file_system_lets_us(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        lets_us = True
    except OSError:
        lets_us = False
    pages = PageFile.open(path, SIZE)
    assert pages.direct == lets_us
    pages.close()


def test_without_o_direct_where_setting_it_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_direct_io(monkeypatch)
    assert_takes_any_memory(path)


def test_without_o_direct_where_the_first_read_refuses_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def refuses(file: int, buffers: Sequence[Buffer], offset: int) -> int:
        direct = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
        return raising(errno.EINVAL)() if direct else real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuses)
    assert_takes_any_memory(path)


def assert_takes_any_memory(path: Path) -> None:
    pages = PageFile.open(path, SIZE)
    assert not pages.direct
    into = bytearray(5)
    assert pages.write([b"abc", b"de"], 7) == 5
    assert pages.read([into], 7) == 5
    assert into == b"abcde"
    pages.close()
