"""The agent that `tidelane up` starts: a child process that ends with it, started again if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

NODE_NAME: Final = "local"
_STOP_GRACE_S: Final = 15.0
_RESTART_DELAY_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.02
_LOG_TAIL: Final = 2000
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class LocalAgentSettings:
    """`socket` must be a short path; `folder` keeps state and log; `arguments` are passed on to `tidelane agent`."""

    socket: Path
    folder: Path
    drain_s: float
    arguments: tuple[str, ...]


class AgentEnded(Exception):
    """It could not start; the text says why."""


class LocalAgent:
    """One process after another, on one state folder: engines that outlive an agent are found by the next."""

    def __init__(self, settings: LocalAgentSettings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None

    @property
    def target(self) -> str:
        """Its address for gRPC."""
        return f"unix:{self._settings.socket}"

    @property
    def log_file(self) -> Path:
        return self._settings.folder / "agent.log"

    def _log_tail(self) -> str:
        return self.log_file.read_text(errors="replace")[-_LOG_TAIL:]

    async def run(self) -> None:
        """Until cancelled; whoever cancels calls `stop`."""
        while True:
            self._process = process = await self._started()
            code = await process.wait()
            log.error("the agent ended with code %s and is started again; its log: %s", code, self.log_file)
            await asyncio.sleep(_RESTART_DELAY_S)

    async def listening(self) -> None:
        """Waits until the agent answers at its address for the first time. Raises AgentEnded if it does not come up."""
        while not self._settings.socket.exists():
            if self._process and self._process.returncode is not None:
                raise AgentEnded(f"the agent ended with code {self._process.returncode}:\n{self._log_tail()}")
            await asyncio.sleep(_LOOK_EVERY_S)

    async def stop(self) -> None:
        """With its engines."""
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
        settings.folder.mkdir(parents=True, exist_ok=True)
        settings.socket.unlink(missing_ok=True)
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


def _end_with_parent() -> None:
    # Even if this process is killed without a word, neither agent nor engines stay behind.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
