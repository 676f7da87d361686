"""The agent that `tidelane up` starts: a child process that ends with it, started again if it dies.

Beside it a guard, which does nothing until both are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidelane.operator.agents import plain_channel

log = logging.getLogger(__name__)

NODE_NAME: Final = "local"
_STOP_GRACE_S: Final = 15.0
_RESTART_DELAY_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.02
_LOG_TAIL: Final = 2000
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class LocalAgentSettings:
    """`scratch` is a folder of this run alone, with a short path; `folder` keeps state and log, and is there already.

    `arguments` are passed on to `tidelane agent`.
    """

    scratch: Path
    folder: Path
    drain_s: float
    arguments: tuple[str, ...]


class AgentEnded(Exception):
    """It could not start; the text says why."""


class LocalAgent:
    """One process after another, on one state folder: engines that outlive an agent are found by the next."""

    def __init__(self, settings: LocalAgentSettings) -> None:
        self._settings = settings
        self._socket = settings.scratch / "agent.sock"
        self._process: asyncio.subprocess.Process | None = None
        self._guard: asyncio.subprocess.Process | None = None
        self._came_up = False

    @property
    def target(self) -> str:
        """Its address for gRPC."""
        return f"unix:{self._socket}"

    @property
    def log_file(self) -> Path:
        return self._settings.folder / "agent.log"

    def _why(self, code: int) -> str:
        told = self.log_file.read_text(errors="replace")[-_LOG_TAIL:]
        last_line = told.rstrip().rpartition("\n")[2]
        # What it refuses by itself it says in one line; anything else needs more to be understood.
        _, by_itself, why = last_line.partition("tidelane agent: ")
        return why if by_itself else f"the agent ended with code {code}:\n{told}"

    async def run(self) -> None:
        """Until cancelled; whoever cancels calls `stop`. Raises AgentEnded when it cannot start."""
        while True:
            try:
                if self._guard is None:
                    self._guard = await self._guard_started()
                self._process = process = await self._started()
            except OSError as error:
                raise AgentEnded(f"the agent cannot be started: {error}") from error
            code = await process.wait()
            if not self._came_up:
                raise AgentEnded(self._why(code))
            log.error("the agent ended with code %s and is started again; its log: %s", code, self.log_file)
            await asyncio.sleep(_RESTART_DELAY_S)

    async def listening(self) -> None:
        """Waits until the agent answers at its address for the first time."""
        while not self._socket.exists():
            await asyncio.sleep(_LOOK_EVERY_S)
        # It binds its socket before it looks at its state, which it may refuse.
        async with plain_channel(self.target) as channel:
            await channel.channel_ready()
        self._came_up = True

    async def stop(self) -> None:
        """With its engines."""
        await self._stop_agent()
        if self._guard:
            with contextlib.suppress(ConnectionError):
                await self._guard.communicate(b"all stopped")

    async def _stop_agent(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(self._settings.drain_s + _STOP_GRACE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        settings = self._settings
        self._socket.unlink(missing_ok=True)
        arguments = [
            *("--listen", self.target),
            *("--node-name", NODE_NAME),
            *("--state-dir", str(settings.folder)),
            *("--drain", str(settings.drain_s)),
            "--stop-engines",
            *settings.arguments,
        ]
        with self.log_file.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tidelane.cli.main", "agent", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Away from the terminal's Ctrl-C: engines must drain first.
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    async def _guard_started(self) -> asyncio.subprocess.Process:
        arguments = (str(os.getpid()), str(self._settings.folder), str(self._settings.scratch))
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tidelane.agent.guard", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            # It must outlive what ends this process.
            start_new_session=True,
        )


def _end_with_parent() -> None:
    # Even if this process is killed without a word, the agent drains its engines and ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
