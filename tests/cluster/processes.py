"""Programs that run beside a test, each with a log, and that cannot outlive the test run. Linux only."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# The kernel ends the program when the test run is gone, even if that was killed. This runs in a process of
# its own, not in a preexec_fn: Python code between fork and exec can deadlock once there are threads.
_TETHER = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
    sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
if os.getppid() != int(sys.argv[1]):
    sys.exit("the test run ended first")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ProgramError(Exception):
    """A program ended by itself or did not get ready in time; carries the end of its log."""


class Programs:
    """Starts programs in one folder, with `logs/<name>.log` for each, and ends them."""

    def __init__(self, folder: Path) -> None:
        self.logs = folder / "logs"
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        # For the kernel the parent is the thread that started a program, so it is always this one, which
        # lives as long as they may.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="starter")

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._running.items()}

    def start(self, name: str, executable: Path, flags: Sequence[str]) -> None:
        self.logs.mkdir(exist_ok=True)
        with self._log(name).open("ab") as log:
            self._running[name] = self._starter.submit(
                subprocess.Popen,
                [sys.executable, "-I", "-S", "-c", _TETHER, str(os.getpid()), str(executable), *flags],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            ).result()

    def wait_until(self, ready: Callable[[], bool], name: str, *, deadline_s: float = 120) -> None:
        """Returns once `ready()` holds; raises if any program ends before, or at the deadline."""
        given_up_at_s = time.monotonic() + deadline_s
        while not ready():
            for other, process in self._running.items():
                if process.poll() is not None:
                    raise self._error(other, f"ended with {process.returncode}")
            if time.monotonic() > given_up_at_s:
                raise self._error(name, f"is not ready after {deadline_s} s")
            time.sleep(0.05)

    def end(self, name: str, *, grace_s: float = 20) -> None:
        """Asks the program to end, and ends it if it has not done so after the grace."""
        process = self._running.pop(name)
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill_all(self) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
        self._running.clear()
        self._starter.shutdown()

    def log_tail(self, name: str, lines: int = 30) -> str:
        return "\n".join(self._log(name).read_text(errors="replace").splitlines()[-lines:])

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def _error(self, name: str, happened: str) -> ProgramError:
        return ProgramError(f"{name} {happened}; its log ends:\n{self.log_tail(name)}")
