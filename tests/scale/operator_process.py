"""The operator as a process, and what it costs: CPU time, memory, requests to the API server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from cluster.harness import Cluster, Request

_MIB: Final = 1 << 20
# The operator's own client, and kopf's, whose name nobody can choose.
_AGENTS: Final = ("tidelane-operator", "kopf/")


@dataclass(frozen=True)
class Usage:
    """Since the process began."""

    cpu_s: float
    peak_mib: float


class OperatorProcess:
    def __init__(self, cluster: Cluster, targets: Sequence[str], options: Sequence[str], log: Path) -> None:
        words = ["operator", "--kubeconfig", str(cluster.kubeconfig), "--agents", ",".join(targets), *options]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tidelane.cli.main", *words],
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        self._seen = psutil.Process(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def usage(self) -> Usage:
        times = self._seen.cpu_times()
        status = Path(f"/proc/{self.pid}/status").read_text()
        [peak_kib] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
        return Usage(times.user + times.system, peak_kib * 1024 / _MIB)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self._process.send_signal(number)
        self._process.wait(timeout=60)


@contextlib.contextmanager
def running(cluster: Cluster, targets: Sequence[str], options: Sequence[str], log: Path) -> Iterator[OperatorProcess]:
    started = OperatorProcess(cluster, targets, options, log)
    try:
        yield started
    finally:
        started.end()


def of_the_operator(requests: Iterable[Request]) -> Sequence[Request]:
    return [each for each in requests if each.user_agent.startswith(_AGENTS)]


def by_verb(requests: Iterable[Request]) -> Mapping[str, int]:
    """Of the operator's requests; what it asks for beside the verb, in one word: `patch inferenceservices/status`."""
    counts = Counter(
        f"{each.verb} {each.resource}{'/' if each.subresource else ''}{each.subresource}" for each in requests
    )
    return dict(sorted(counts.items()))
