"""The guard of one `tidelane up`: ends the engines that are left when it and its agent were both killed.

Run as `python -m tidelane.agent.guard STATE_DIR SCRATCH`; standard input is a pipe that closes when `up` is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tidelane.agent.engine_process import clear_up
from tidelane.agent.file_lock import FileLock, Held


def main(arguments: Sequence[str]) -> None:
    state, scratch = (Path(each).resolve() for each in arguments)
    sys.stdin.buffer.read()
    # Nothing to do where the folder is gone, or where another `up` has it: its agent takes over what still runs.
    with (
        contextlib.suppress(OSError, Held),
        FileLock(state / "lock", wait=True),  # The agent may still be draining its engines.
        FileLock(state / "up.lock"),
    ):
        for folder in (state / "engines").iterdir():
            asyncio.run(clear_up(folder, grace_s=0.0))
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
