"""Processes: identity, ends, what an engine leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.rig import end_engines
from tidelane.agent.engine_process import EngineProcess, ProcessIdentity, clear_up, members

CHILD_THEN_SLEEP = """import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print("up", flush=True)
time.sleep(600)"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "engines" / "one"
    path.mkdir(parents=True)
    yield path
    end_engines(tmp_path)


def start(folder: Path, code: str) -> EngineProcess:
    return EngineProcess.start([sys.executable, "-c", code], folder, dict(os.environ), folder / "log")


async def until_log(folder: Path, text: str) -> None:
    async with asyncio.timeout(30):
        while text not in (folder / "log").read_text():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "told"),
    [("pass", 0), ("raise SystemExit(78)", 78), ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL)],
)
async def test_the_end_is_told_with_its_code(folder: Path, code: str, told: int) -> None:
    assert await start(folder, code).ended() == told


async def test_without_pidfd_the_end_is_seen_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise OSError("Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused)
    process = start(folder, "import time; time.sleep(600)")
    process.kill()
    assert await process.ended() == -signal.SIGKILL


async def test_one_that_another_started_is_watched_but_its_code_is_unknown(folder: Path) -> None:
    ours = start(folder, "import time; time.sleep(600)")
    adopted = EngineProcess(ours.identity, folder)
    waiting = asyncio.create_task(adopted.ended())
    await asyncio.sleep(0)
    assert not waiting.done()
    adopted.kill()
    assert await asyncio.wait_for(waiting, 30) is None
    await ours.ended()


async def test_an_identity_is_pid_start_and_boot(folder: Path) -> None:
    process = start(folder, "import time; time.sleep(600)")
    identity = process.identity
    assert identity.alive()
    assert not ProcessIdentity(identity.pid, identity.start_ticks + 1, identity.boot_id).alive()
    assert not ProcessIdentity(identity.pid, identity.start_ticks, "another boot").alive()
    # One with the same pid that started later is never signalled.
    EngineProcess(ProcessIdentity(identity.pid, identity.start_ticks + 1, identity.boot_id), folder).kill()
    process.terminate()
    assert await process.ended() == -signal.SIGTERM
    assert not identity.alive()


async def test_what_an_engine_left_is_ended_and_nobody_else(folder: Path) -> None:
    other_folder = folder.with_name("two")
    other_folder.mkdir()
    other = start(other_folder, "import time; time.sleep(600)")
    process = start(folder, CHILD_THEN_SLEEP)
    await until_log(folder, "up")
    assert len(list(members(folder))) == 2
    process.kill()
    await process.ended()
    assert process.identity.pid not in [member.pid for member in members(folder)]
    # The front's stdin closed with the engine, so it ends by itself within the grace, and nobody is killed.
    assert await clear_up(folder, grace_s=30) == 0
    assert not list(members(folder))
    assert other.identity.alive()
    other.kill()
    assert await other.ended() == -signal.SIGKILL


async def test_one_that_stays_is_killed_after_the_grace(folder: Path) -> None:
    code = CHILD_THEN_SLEEP.replace("input()", "import time; time.sleep(600)")
    process = start(folder, code)
    await until_log(folder, "up")
    process.kill()
    await process.ended()
    assert await clear_up(folder, grace_s=0.05) == 1
    assert not list(members(folder))


async def test_it_leads_a_session_and_inherits_no_descriptor(folder: Path) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    code = "import os, time; print(os.getsid(0) == os.getpid(), sorted(os.listdir('/proc/self/fd')), flush=True)"
    code += "; time.sleep(600)"
    process = start(folder, code)
    await until_log(folder, "]")
    os.close(writing)
    assert os.read(reading, 1) == b""  # Nobody else holds the other end.
    os.close(reading)
    # The fourth is the listing itself.
    assert (folder / "log").read_text() == "True ['0', '1', '2', '3']\n"
    process.kill()
    await process.ended()
