"""Waking the loop from another thread."""

from __future__ import annotations

import os


class Wakeup:
    """An event with a file descriptor, so that one poll can wait for it and for sockets. Any thread may notify."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget notifications so far. Call before looking at what they announced, never after."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self._fd)
