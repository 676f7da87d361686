"""Simulated agents in a few processes: started, asked what they have, taken away and given back."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_TESTS: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Has:
    """One replica on one node; `launches` engines were started for it there."""

    node: str
    replica: str
    launches: int


class FleetProcess:
    def __init__(self, first: int, agents: int, devices: int, load_s: float, folder: Path) -> None:
        words = ("--first", first, "--agents", agents, "--devices", devices, "--load", load_s, "--folder", folder)
        with (folder / f"fleet-{first}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scale.fleet_process", *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": str(_TESTS)},
            )
        self.agents: Mapping[str, str] = {}

    def ready(self) -> None:
        """Returns once every agent listens; `agents` then has the address of each by node name."""
        self.agents = self._line()

    def report(self) -> Sequence[Has]:
        assert self._process.stdin is not None
        self._process.stdin.write("report\n")
        self._process.stdin.flush()
        return [Has(**each) for each in self._line()]

    def vanish(self) -> None:
        """Like a machine that is cut off: connections stay and say nothing more."""
        self._process.send_signal(signal.SIGSTOP)

    def come_back(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the fleet ended with {self._process.wait()}")
        return json.loads(line)


@dataclass(frozen=True)
class Fleet:
    """The processes; the first one is the part that vanishes."""

    processes: Sequence[FleetProcess]

    @property
    def targets(self) -> Sequence[str]:
        return [target for process in self.processes for target in process.agents.values()]

    def report(self, *, without_first: bool = False) -> Sequence[Has]:
        return [has for process in self.processes[int(without_first) :] for has in process.report()]


@contextlib.contextmanager
def fleet(agents: int, processes: int, devices: int, load_s: float, folder: Path) -> Iterator[Fleet]:
    """`agents` of them, spread over `processes`, on nodes of `devices` each."""
    started: list[FleetProcess] = []
    try:
        borders = [agents * index // processes for index in range(processes + 1)]
        for first, end in itertools.pairwise(borders):
            started.append(FleetProcess(first, end - first, devices, load_s, folder))
        for process in started:
            process.ready()
        yield Fleet(started)
    finally:
        for process in started:
            process.end()


def twice(report: Sequence[Has]) -> Sequence[str]:
    """Replicas that more than one node has."""
    counts = Counter(has.replica for has in report)
    return sorted(replica for replica, count in counts.items() if count > 1)
