"""Runs in processes of their own, as one run keeps one core busy."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from tidelane.engine.sim.figures import Figures
from tidelane.engine.sim.scene import Job, Scene

Run = Callable[[Job], Awaitable[Figures]]


class WorkerDied(RuntimeError):
    """A process was killed, by hand or for want of memory: run fewer of them."""


@contextlib.asynccontextmanager
async def workers(scene: Scene, processes: int) -> AsyncIterator[Run]:
    """Gives what runs jobs in `scene`, `processes` of them at a time; in this process if that is 1."""
    if processes == 1:
        yield _here(scene)
        return
    # Spawned: a fork would copy the threads of progress bars in whatever state they are.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin)

    async def run(job: Job) -> Figures:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, scene.run, job)
        except BrokenProcessPool as error:
            raise WorkerDied("one of the processes was killed; for fewer of them, --processes 1") from error

    try:
        yield run
    except WorkerDied:
        pool.shutdown()
        raise
    except BaseException:
        # Whoever interrupts the whole does not want to wait for runs under way.
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    pool.shutdown()


def _here(scene: Scene) -> Run:
    async def run(job: Job) -> Figures:
        await asyncio.sleep(0)  # lets progress be shown, and an interrupt through
        return scene.run(job)

    return run


def _begin() -> None:
    """In each new process."""
    # Without a traceback: the process that waits says what happened. Where it ignores interrupts, so do we.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """However the parent ends, if need be by SIGKILL, nobody wants the rest."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
