"""Ctrl-C for commands that run an event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def run_interruptible(work: Coroutine[None, None, T]) -> T:
    """asyncio.run, but Ctrl-C cancels `work` between two callbacks; raises KeyboardInterrupt once it has ended.

    asyncio's own handler cancels in the middle of whatever callback runs, which may then find its future cancelled
    behind its back and print a traceback.
    """
    return asyncio.run(_interruptible(work))


async def _interruptible(work: Coroutine[None, None, T]) -> T:
    task = asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        if task.cancelling():
            raise KeyboardInterrupt  # asked twice: do not wait for it to end
        task.cancel()

    # A shell's background job ignores it, and then it stays so; only the main thread may set signals.
    heard = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if heard and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
    try:
        return await work
    except asyncio.CancelledError:
        if task.cancelling():
            raise KeyboardInterrupt from None
        raise
