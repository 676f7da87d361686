"""The guard of one `tidelane up`: ends the engines that are left when it and its agent were both killed.

Run as `python -m tidelane.agent.guard UP_PID STATE_DIR SCRATCH`. Standard input is a pipe from `up`: a word says that
all is stopped, its end without one that `up` was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tidelane.agent.engine_process import clear_up
from tidelane.agent.file_lock import FileLock, Held


def main(arguments: Sequence[str]) -> None:
    up, state, scratch = int(arguments[0]), *(Path(each).resolve() for each in arguments[1:])
    all_stopped = sys.stdin.buffer.read()
    if not all_stopped:
        _wait_for_end(up)
        _end_engines(state)
    shutil.rmtree(scratch, ignore_errors=True)


def _wait_for_end(process: int) -> None:
    """A dying process closes its files one by one: the end of its pipe is not yet the end of its locks."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process)
        select.select([descriptor], [], [])
        os.close(descriptor)


def _end_engines(state: Path) -> None:
    # Nothing to do where the folder is gone, or where another `up` has it: its agent takes over what still runs.
    with (
        contextlib.suppress(OSError, Held),
        FileLock(state / "lock", wait=True),  # The agent may still be draining its engines.
        FileLock(state / "up.lock"),
    ):
        for folder in (state / "engines").iterdir():
            asyncio.run(clear_up(folder, grace_s=0.0))


if __name__ == "__main__":
    main(sys.argv[1:])
