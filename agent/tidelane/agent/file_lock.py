"""A lock that one process holds until it ends, however it ends, in a file that tells which process that is."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self


class Held(Exception):
    """Another process has it. The text tells which, and fits behind the name of what is locked."""


class FileLock:
    """Held from construction until `close`, or the end of a `with`."""

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        """Raises Held, unless it is to wait, and OSError when the file cannot be made or written."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            os.ftruncate(self._descriptor, os.write(self._descriptor, f"{os.getpid()}\n".encode()))
        except BlockingIOError as error:
            holder = os.read(self._descriptor, 32).decode(errors="replace").strip()
            self.close()
            raise Held(f"process {holder} is using it" if holder else "another process is using it") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)
