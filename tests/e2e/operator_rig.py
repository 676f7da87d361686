"""Agents and an operator as real processes around a real API server; only the engines are fake."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agent.fake_engine import Switches
from agent.rig import end_engines
from cluster.harness import Cluster, KubectlError

LIMIT_S = 60.0
_LOOK_EVERY_S = 0.05
_ENGINE = Path(__file__).with_name("loopback_engine.py")
_TIDELANE = (sys.executable, "-m", "tidelane.cli.main")


def machine_address() -> str:
    """An address of this machine that Kubernetes takes in an EndpointSlice; loopback if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # Sends nothing: it only asks the routing table.
        probe.connect(("203.0.113.1", 9))
        address: str = probe.getsockname()[0]
        return address
    return "127.0.0.1"


def until(wanted: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """The first true answer; another process can only be looked at time and again."""
    deadline_s = time.monotonic() + limit_s
    while not (answer := wanted()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(_LOOK_EVERY_S)
    return answer


def stays(wanted: Callable[[], bool], for_s: float) -> bool:
    """Whether it is so all the time: what does not happen can only be waited for."""
    end_s = time.monotonic() + for_s
    while wanted():
        if time.monotonic() > end_s:
            return True
        time.sleep(_LOOK_EVERY_S)
    return False


class OperatorRig:
    """Processes start when asked for and end with the rig; their output is in `folder`."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.folder = folder
        self.address = machine_address()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for name in self._ports:
            end_engines(self.folder / name)
        # Shown by pytest below a failure, and only there.
        for log in self.folder.glob("*.log"):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}")

    def start_agent(self, name: str = "node-a", *arguments: str) -> None:
        port = self._ports.setdefault(name, free_port())
        self._journal.touch()
        self._start(
            name,
            *("agent", "--listen", f"127.0.0.1:{port}", "--node-name", name, "--state-dir", str(self.folder / name)),
            *(*self.engine_arguments(), *arguments),
        )

    def engine_arguments(self) -> tuple[str, ...]:
        """Flags of the agent: which engine it starts, and under which address."""
        engine = (sys.executable, str(_ENGINE), "--switches", str(self._switches), "--journal", str(self._journal))
        return ("--address", self.address, "--engine-command", shlex.join(engine))

    def start_operator(
        self, *arguments: str, everywhere: bool = False, agents_at: str = "127.0.0.1", name: str = "operator"
    ) -> None:
        agents = [word for port in self._ports.values() for word in ("--agents", f"{agents_at}:{port}")]
        scope = () if everywhere else ("--namespace", self.namespace)
        common = ("--kubeconfig", str(self.cluster.kubeconfig), "--log-level", "debug")
        self._start(name, "operator", *agents, *scope, *common, *arguments)

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(timeout=30)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl(*arguments, namespace=self.namespace, stdin=stdin)

    def apply(self, manifest: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def get(self, kind: str = "tlsvc", name: str = "chat") -> dict[str, Any] | None:
        """The object; None if there is none."""
        try:
            found: dict[str, Any] = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        except KubectlError as error:
            if "NotFound" in str(error):
                return None
            raise
        return found

    def condition(self, name: str, service: str = "chat") -> tuple[str, str]:
        """Status and reason; empty while there is none."""
        found = self.get(name=service) or {}
        for each in found.get("status", {}).get("conditions", ()):
            if each["type"] == name:
                return each["status"], each["reason"]
        return "", ""

    def until_condition(self, name: str, status: str, reason: str, service: str = "chat") -> None:
        try:
            until(lambda: self.condition(name, service) == (status, reason), f"{name}={status} {reason}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {self.condition(name, service)}") from None

    def until_serving(self, generation: int = 1, service: str = "chat") -> dict[str, Any]:
        """The service once it is ready at that generation."""

        def look() -> dict[str, Any] | None:
            found = self.get(name=service)
            fresh = found and found.get("status", {}).get("observedGeneration") == generation
            return found if fresh and self.condition("Ready", service)[0] == "True" else None

        found: dict[str, Any] = until(look, f"{service} serves generation {generation}")
        return found

    def until_gone(self, kind: str = "tlsvc", name: str = "chat") -> None:
        until(lambda: self.get(kind, name) is None, f"{kind} {name} is gone")

    def switch(self, **values: Any) -> None:
        """Misbehave as told, from now on."""
        Switches(**values).write(self._switches)

    def journal(self, event: str) -> list[dict[str, Any]]:
        """What happened to engines."""
        if not self._journal.exists():
            return []
        lines = [json.loads(line) for line in self._journal.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]

    def engines(self) -> list[int]:
        """Processes of engines that live."""
        return [each["pid"] for each in self.journal("started") if lives(each["pid"])]

    @property
    def _switches(self) -> Path:
        return self.folder / "switches"

    @property
    def _journal(self) -> Path:
        return self.folder / "journal"

    def _start(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
            self.processes[name] = subprocess.Popen([*_TIDELANE, *arguments], stdout=log, stderr=log, env=environment)


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
