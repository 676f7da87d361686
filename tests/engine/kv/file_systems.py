"""What file systems do that we have not got here: `os` and `fcntl` as they would answer."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable

import pytest


def raising(number: int) -> Callable[..., int]:
    def fails(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fails


def without_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuses(file: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuses)
