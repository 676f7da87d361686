"""Runs in processes of their own, as one run keeps one core busy."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from tidelane.engine.sim.figures import Figures
from tidelane.engine.sim.scene import Job, Scene

Run = Callable[[Job], Awaitable[Figures]]


class WorkerDied(RuntimeError):
    """A process was killed, by hand or for want of memory: run fewer of them."""


# What a process of the pool runs jobs in: given to it once, as it starts, since it may hold a trace of many megabytes.
# A global, since a pool has no other place for what its processes keep.
_scene: Scene | None = None


@contextlib.asynccontextmanager
async def workers(scene: Scene, processes: int) -> AsyncIterator[Run]:
    """Gives what runs jobs in `scene`, `processes` of them at a time; in this process if that is 1."""
    if processes == 1:
        yield _here(scene)
        return
    # Spawned: a fork would copy the threads of progress bars in whatever state they are.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin, (scene,))
    loop = asyncio.get_running_loop()

    async def run(job: Job) -> Figures:
        ended = asyncio.Event()
        try:
            with _interrupts_held():
                figures = pool.submit(_run, job)
            # Whoever waits may be cancelled, but not the future: a pool whose processes end would hang on that.
            figures.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
            await ended.wait()
            return figures.result()
        except BrokenProcessPool as error:
            raise WorkerDied("one of the processes was killed; for fewer of them, --processes 1") from error

    try:
        yield run
    except BaseException:
        # Whoever interrupts the whole does not want to wait for runs under way.
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        pool.shutdown()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """What is started within never hears of a Ctrl-C, not even while it starts: who started it ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _here(scene: Scene) -> Run:
    async def run(job: Job) -> Figures:
        await asyncio.sleep(0)  # lets progress be shown, and an interrupt through
        return scene.run(job)

    return run


def _begin(scene: Scene) -> None:
    global _scene
    _scene = scene
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _run(job: Job) -> Figures:
    assert _scene is not None
    return _scene.run(job)


def _die_with_parent() -> None:
    """However the parent ends, if need be by SIGKILL, nobody wants the rest."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
