"""Ctrl-C for commands that run an event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterable
from typing import TypeVar

T = TypeVar("T")


def run_interruptible(work: Coroutine[None, None, T]) -> T:
    """asyncio.run, but Ctrl-C cancels `work` between two callbacks; raises KeyboardInterrupt once it has ended.

    asyncio's own handler cancels in the middle of whatever callback runs, which may then find its future cancelled
    behind its back and print a traceback. So is any other signal taken that Python would make a KeyboardInterrupt of;
    one that is ignored, as Ctrl-C in a shell's background job, stays so.
    """
    heard: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():  # no other thread may set signals
        candidates = (signal.SIGINT, signal.SIGTERM)
        heard = [number for number in candidates if signal.getsignal(number) is signal.default_int_handler]
    try:
        return asyncio.run(_interruptible(work, heard))
    finally:
        for number in heard:
            signal.signal(number, signal.default_int_handler)  # the loop has put SIGTERM's first handler back


async def _interruptible(work: Coroutine[None, None, T], heard: Iterable[signal.Signals]) -> T:
    task = asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        if task.cancelling():
            raise KeyboardInterrupt  # asked twice: do not wait for it to end
        task.cancel()

    for number in heard:
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    try:
        return await work
    except asyncio.CancelledError:
        if task.cancelling():
            raise KeyboardInterrupt from None
        raise
