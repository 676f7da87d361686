"""One file of a fixed size that one process has to itself, read and written past the page cache where that is possible.

Knows nothing of what the file holds. All of its room is taken when it is opened, so that a disk too small is found then
and not in the middle of a write.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

from typing_extensions import Buffer

from tidelane.engine.errors import CannotServe

# What O_DIRECT asks at most, on the disks and file systems we know, of memory, offsets and lengths: whole pages.
PAGE = 4096


class FolderInUse(CannotServe):
    """Another engine has it; give each engine a folder of its own, or wait for the other to end."""


class DiskTooSmall(CannotServe):
    """There is no room for the whole file; free some, or ask for a smaller one."""


class PageFile:
    """Made by `open`. Several threads may read and write at once; `close` only when none does."""

    def __init__(self, file: FileIO, *, direct: bool) -> None:
        self._file = file
        self.direct = direct

    @staticmethod
    def open(path: Path, size: int) -> PageFile:
        """The file at `path`, made `size` bytes, a multiple of PAGE; what fits stays in it. Makes its folder, but none
        above: that would hide a disk that is not mounted.

        Raises CannotServe, FolderInUse or DiskTooSmall, with what was in the file as it was, and OSError if the disk
        fails.
        """
        try:
            with suppress(FileExistsError):
                path.parent.mkdir(mode=0o700)
            file = FileIO(path, "r+", opener=_for_us_alone)
        except OSError as error:
            raise CannotServe(
                f"cannot keep KV in {path}: {error.strerror}; name a folder that can be written to"
            ) from error
        try:
            _lock(file, path)
            _reserve(file, path, size)
            return PageFile(file, direct=_past_the_page_cache(file))
        except BaseException:
            file.close()
            raise

    def read(self, into: Sequence[Buffer], offset: int) -> int:
        """Bytes read: fewer than asked for at the end of the file."""
        return os.preadv(self._file.fileno(), into, offset)

    def write(self, data: Sequence[Buffer], offset: int) -> int:
        """Bytes written: fewer than given where the disk ran full or failed on the way."""
        return os.pwritev(self._file.fileno(), data, offset)

    def close(self) -> None:
        """Lets the next opener in."""
        self._file.close()


def _for_us_alone(path: str, flags: int) -> int:
    # KV tells what was asked: no other user reads it. No O_TRUNC: until it is locked it may be another engine's.
    return os.open(path, flags | os.O_CREAT, 0o600)


def _lock(file: FileIO, path: Path) -> None:
    """Until `file` is closed, which the kernel sees to if this process is killed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FolderInUse(f"{path.parent} is in use by another engine; give each a folder of its own") from error


def _reserve(file: FileIO, path: Path, size: int) -> None:
    former = os.fstat(file.fileno()).st_size
    if former > size:
        file.truncate(size)
    needed = size - os.fstat(file.fileno()).st_blocks * 512  # its unit, whatever the file system's
    disk = os.fstatvfs(file.fileno())
    missing = needed - disk.f_bavail * disk.f_frsize
    if missing > 0:  # asked first: to find out by filling the disk would hurt everybody on it
        raise DiskTooSmall(
            f"{path} of {size} bytes lacks {missing} bytes of disk: free them, or lower the capacity by as much"
        )
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            file.truncate(size)  # room can only be counted here, not taken
            return
        file.truncate(min(former, size))  # what it did get
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskTooSmall(
            f"{path} of {size} bytes lacks up to {needed} bytes of disk ({error.strerror}): free them, or lower the "
            "capacity by as much"
        ) from error


def _past_the_page_cache(file: FileIO) -> bool:
    """Sets O_DIRECT if the file system takes it, which some tell only at the first read."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(file.fileno(), [mmap.mmap(-1, PAGE)], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        # Slots are used in no order: what the kernel reads ahead is for nothing, when headers are scanned most of all.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        return False
    return True
