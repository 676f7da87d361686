"""Processes that run jobs: what they return, and what is said when one is killed."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import textwrap

import psutil
import pytest

from tidelane.engine.sim.contestants import Setting
from tidelane.engine.sim.scene import Job
from tidelane.engine.sim.workers import WorkerDied, workers

from .scenes import AUTO, scene

JOB = Job(AUTO, Setting(), 2.0, 1)


async def test_here() -> None:
    small = scene(5)
    async with workers(small, 1) as run:
        assert await run(JOB) == small.run(JOB)


@pytest.mark.slow
async def test_elsewhere_until_one_is_killed() -> None:
    small = scene(5)

    async def kill_and_run() -> None:
        async with workers(small, 2) as run:
            assert await run(JOB) == small.run(JOB)
            for process in multiprocessing.active_children():
                process.kill()
                process.join()
            await run(JOB)

    with pytest.raises(WorkerDied, match="--processes 1"):
        await kill_and_run()
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_they_end_with_who_started_them() -> None:
    program = textwrap.dedent(
        """
        import asyncio, multiprocessing, time
        from tests.engine.sim.test_workers import JOB, scene, workers

        async def main():
            async with workers(scene(5), 2) as run:
                await run(JOB)
                print(*(process.pid for process in multiprocessing.active_children()), flush=True)
                time.sleep(600)

        if __name__ == "__main__":
            asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        started = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert started
    assert psutil.wait_procs(started, timeout=30)[1] == []


@pytest.mark.slow
def test_an_interrupt_while_they_start_neither_hangs_nor_prints_a_traceback() -> None:
    """A terminal sends it to all of them; those that died of it before they were ready once made the pool hang."""
    program = textwrap.dedent(
        """
        import asyncio, os, signal
        from tests.engine.sim.test_workers import JOB, scene, workers

        async def main():
            async with workers(scene(5), 2) as run:
                jobs = [asyncio.create_task(run(JOB)) for _ in range(20)]
                await asyncio.sleep(0)
                os.killpg(0, signal.SIGINT)
                await asyncio.gather(*jobs)

        if __name__ == "__main__":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                asyncio.run(main())
            except KeyboardInterrupt:
                print("interrupted")
        """
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
