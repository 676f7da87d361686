"""An engine's process and what it leaves behind: starting it, finding it again, knowing when it ended, clearing up.

An engine leads a session of its own, so that it outlives the agent; every process it starts carries its folder in the
environment. Identity is never a pid alone, which the kernel gives out again: it is pid, start time and boot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

# Set for the engine and inherited by all it starts.
FOLDER_VARIABLE = "TIDELANE_REPLICA_FOLDER"
_POLL_S = 0.25
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, this boot and no other."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The living process that has `pid` now."""
        stat = _Stat.read(pid)
        return cls(pid, stat.start_ticks, _boot_id()) if stat and stat.alive else None

    def alive(self) -> bool:
        return ProcessIdentity.of(self.pid) == self


class EngineProcess:
    """A living or ended engine, started by this agent or by the one before it."""

    def __init__(self, identity: ProcessIdentity, folder: Path, child: subprocess.Popen[bytes] | None = None) -> None:
        self.identity = identity
        self._folder = folder
        self._child = child

    @classmethod
    def start(
        cls, command: Sequence[str], folder: Path, environment: Mapping[str, str], log_file: Path
    ) -> EngineProcess:
        """Raises OSError when the process cannot be made."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND  # O_APPEND: the log is cut while the engine writes to it.
        output = os.open(log_file, flags, 0o600)
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={**environment, FOLDER_VARIABLE: str(folder)},
                start_new_session=True,
            )
        finally:
            os.close(output)
        stat = _Stat.read(child.pid)
        # Not reaped yet, so the entry is there even if the engine has already ended.
        assert stat is not None
        return cls(ProcessIdentity(child.pid, stat.start_ticks, _boot_id()), folder, child)

    async def ended(self) -> int | None:
        """Waits for the end. The exit code, minus the signal's number if one ended it; None for another's child."""
        try:
            fd = os.pidfd_open(self.identity.pid)
        except ProcessLookupError:
            return self._exit_code()
        except OSError:  # No pidfd before Linux 5.3, or under a strict sandbox.
            while self.identity.alive():
                await asyncio.sleep(_POLL_S)
            return self._exit_code()
        try:
            if self.identity.alive():
                await _readable(fd)
        finally:
            os.close(fd)
        return self._exit_code()

    def terminate(self) -> None:
        """Asks the leader to end, if it is still the same process."""
        _signal(self.identity.pid, signal.SIGTERM, self.identity.start_ticks)

    def kill(self) -> None:
        """Ends the leader at once. What it started is `clear_up`'s."""
        _signal(self.identity.pid, signal.SIGKILL, self.identity.start_ticks)

    def let_go(self) -> None:
        """The engine stays when this agent goes."""
        if self._child and self._child.poll() is None:
            # Popen warns about a child that nobody waits for; here that is meant.
            self._child.returncode = 0

    def _exit_code(self) -> int | None:
        if self._child is None:
            return None
        return self._child.wait()


async def clear_up(folder: Path, grace_s: float) -> int:
    """Ends what still runs for `folder`, after `grace_s` to end by itself. The number of processes killed."""
    left = list(members(folder))
    if left and grace_s > 0:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + grace_s
        while left and loop.time() < give_up_at:
            await asyncio.sleep(0.02)
            left = [member for member in left if member.alive()]
        left = list(members(folder))
    killed: set[ProcessIdentity] = set()
    # Again until none is found: one may have started another while we looked, and one that the kernel holds in an
    # uninterruptible call still has the device.
    while left:
        for member in left:
            if member not in killed:
                log.warning("killing a process that its engine left behind pid=%d folder=%s", member.pid, folder)
            _signal(member.pid, signal.SIGKILL, member.start_ticks)
            killed.add(member)
        await asyncio.sleep(0.01)
        left = list(members(folder))
    return len(killed)


def members(folder: Path) -> Iterator[ProcessIdentity]:
    """Living processes that were started for `folder`, by what their environment says."""
    mark = f"{FOLDER_VARIABLE}={folder}".encode()
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
        if marked and (identity := ProcessIdentity.of(int(entry.name))):
            yield identity


@dataclass(frozen=True, slots=True)
class _Stat:
    alive: bool
    start_ticks: int

    @classmethod
    def read(cls, pid: int) -> _Stat | None:
        try:
            text = (_PROC / str(pid) / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The name, in parentheses, may itself hold spaces and parentheses.
        fields = text.rpartition(")")[2].split()
        return cls(alive=fields[0] not in "ZX", start_ticks=int(fields[19]))


def _signal(pid: int, number: signal.Signals, start_ticks: int) -> None:
    """Signals the process that has both pid and start time, and no later one with the same pid."""
    with contextlib.suppress(ProcessLookupError):
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError:
            fd = None
        try:
            stat = _Stat.read(pid)
            if stat is None or stat.start_ticks != start_ticks:
                return
            if fd is None:
                os.kill(pid, number)
            else:
                signal.pidfd_send_signal(fd, number)
        finally:
            if fd is not None:
                os.close(fd)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        loop.remove_reader(fd)
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, resolve)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


def _boot_id() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
