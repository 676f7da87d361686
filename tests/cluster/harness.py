"""A Kubernetes control plane for tests: etcd, the API server and, on request, the controller manager.

A `Cluster` owns its processes, ports, keys and folder. They end with it, and the processes with the test
run, however that one ends. There is no node: nothing runs pods.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from cluster.configuration import (
    ADDRESS,
    AUDIT_EVERYTHING,
    AUDIT_WRITES,
    ETCD_FLAGS,
    api_server_flags,
    controller_manager_flags,
    kubeconfig,
)
from cluster.pki import Authority, service_account_keys
from cluster.processes import Programs

WRITES = ("create", "update", "patch", "delete", "deletecollection")
BUILD = Path(__file__).resolve().parents[2] / "tools" / "kube" / "build.py"


class MissingBinariesError(Exception):
    """The Kubernetes programs were neither found nor built; the reason went to stderr."""


class KubectlError(Exception):
    """kubectl was refused or failed; the message is what it wrote to stderr."""


@dataclass(frozen=True)
class Binaries:
    etcd: Path
    kube_apiserver: Path
    kube_controller_manager: Path
    kubectl: Path

    @classmethod
    def find(cls) -> Self:
        """Finds them, or builds them once, which takes minutes; progress goes to stderr."""
        with subprocess.Popen([sys.executable, BUILD], stdout=subprocess.PIPE, text=True) as process:
            try:
                folders, _ = process.communicate()
            except BaseException:
                # Not kill: the script ends the compilers that it started.
                process.terminate()
                raise
        if process.returncode != 0:
            raise MissingBinariesError(f"{BUILD.name} ended with {process.returncode}")

        def path(name: str) -> Path:
            found = shutil.which(name, path=folders.strip())
            if found is None:
                raise MissingBinariesError(f"no {name} in {folders.strip()}")
            return Path(found)

        return cls(path("etcd"), path("kube-apiserver"), path("kube-controller-manager"), path("kubectl"))


@dataclass(frozen=True)
class Request:
    """A request as it reached the API server, granted or not."""

    user_agent: str
    verb: str
    resource: str
    subresource: str
    namespace: str
    name: str


class Cluster:
    """One control plane, in a folder that it makes and, when stopped, removes.

    `audit_reads`: `requests` lists reads and watches too, at the price of a long log.
    """

    def __init__(self, folder: Path, binaries: Binaries, *, audit_reads: bool = False) -> None:
        self.kubeconfig = folder / "admin.kubeconfig"
        self._folder = folder
        self._binaries = binaries
        self._programs = Programs(folder)
        self._reservations = ExitStack()
        self._port = 0
        self._audit_policy = AUDIT_EVERYTHING if audit_reads else AUDIT_WRITES

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def server(self) -> str:
        return f"https://{ADDRESS}:{self._port}"

    @property
    def pids(self) -> dict[str, int]:
        """The process of each program that runs, by the program's name."""
        return self._programs.pids

    def start(self) -> None:
        """Returns once the API server is ready; leaves nothing behind if that fails."""
        self._folder.mkdir(mode=0o700)
        try:
            self._port = self._reserve_port()
            self._write_configuration()
            self._programs.start("etcd", self._binaries.etcd, ETCD_FLAGS)
            self._start_api_server()
        except BaseException:
            self.stop()
            raise

    def restart_api_server(self) -> None:
        """Ends the API server as a rollout does, and starts it at the same address with the same objects."""
        self._programs.end("kube-apiserver")
        self._start_api_server()

    def start_controller_manager(self) -> None:
        """For what controllers do: garbage collection, the end of namespaces, ReplicaSets and the like."""
        name = "kube-controller-manager"
        if name in self.pids:
            return
        port = self._reserve_port()
        flags = controller_manager_flags(port)
        self._programs.start(name, self._binaries.kube_controller_manager, flags)
        # It is healthy before its controllers run, and until then it ends if the API server does; its report
        # names one of them only once all have started.
        health = f"https://{ADDRESS}:{port}/healthz?verbose"
        self._programs.wait_until(lambda: b"garbage-collector" in self._body_if_ok(health), name)

    def stop(self, *, keep_logs: bool = False) -> None:
        """Ends every program and removes the folder, or all of it but the logs."""
        # Nothing is worth a graceful end: the data goes too.
        self._programs.kill_all()
        self._reservations.close()
        for path in self._folder.iterdir() if self._folder.exists() else ():
            if not (keep_logs and path == self._programs.logs):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not keep_logs:
            self._folder.rmdir()

    def kubectl(
        self, *arguments: str, namespace: str | None = None, stdin: str | None = None, timeout_s: float = 60
    ) -> str:
        """What the real kubectl prints, as the cluster's administrator."""
        scope = ["--namespace", namespace] if namespace else []
        result = subprocess.run(
            [self._binaries.kubectl, *scope, *arguments],
            check=False,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            # With nearly nothing in its environment it neither reads nor writes anything in the user's home; `diff` is
            # a program that it runs.
            env={
                "PATH": os.defpath,
                "KUBECONFIG": str(self.kubeconfig),
                "KUBECACHEDIR": str(self._folder / "kubectl"),
            },
        )
        if result.returncode != 0:
            raise KubectlError(result.stderr.strip())
        return result.stdout

    def get(self, path: str) -> Any:
        """The JSON that the API server answers to a GET of the path, as the cluster's administrator."""
        with self._open(self.server + path) as response:
            return json.load(response)

    def requests(self) -> list[Request]:
        """Every audited request since the cluster's start, oldest first."""
        audit = self._programs.logs / "audit.json"
        lines = audit.read_text().splitlines() if audit.exists() else []
        return [_request(json.loads(line)) for line in lines]

    def writes(self) -> list[Request]:
        """Every write since the cluster's start, oldest first."""
        return [each for each in self.requests() if each.verb in WRITES]

    def log_tails(self) -> dict[str, str]:
        """How each program's log ends, by the program's name."""
        return {name: self._programs.log_tail(name) for name in self.pids}

    def _reserve_port(self) -> int:
        """A free port that stays ours, also while the API server is down.

        Bound but not listening, with a sharing that only processes of this user can join.
        """
        holder = self._reservations.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((ADDRESS, 0))
        port: int = holder.getsockname()[1]
        return port

    def _write_configuration(self) -> None:
        authority = Authority()
        administrator = authority.client("administrator", group="system:masters")
        server = authority.server(ADDRESS)
        signing_key, verifying_key = service_account_keys()
        for name, content in {
            "ca.crt": authority.certificate,
            "server.crt": server.certificate,
            "server.key": server.key,
            "admin.crt": administrator.certificate,
            "admin.key": administrator.key,
            "accounts.key": signing_key,
            "accounts.pub": verifying_key,
            "audit-policy.yaml": self._audit_policy.encode(),
            self.kubeconfig.name: kubeconfig(self.server, authority.certificate, administrator),
        }.items():
            (self._folder / name).write_bytes(content)

    def _start_api_server(self) -> None:
        name = "kube-apiserver"
        self._programs.start(name, self._binaries.kube_apiserver, api_server_flags(self._port))
        self._programs.wait_until(lambda: self._body_if_ok(self.server + "/readyz") == b"ok", name)

    def _body_if_ok(self, url: str) -> bytes:
        try:
            with self._open(url) as response:
                body: bytes = response.read()
                return body
        except urllib.error.HTTPError as not_ok:
            not_ok.close()
        except (OSError, http.client.HTTPException):
            pass
        return b""

    def _open(self, url: str) -> Any:
        tls = ssl.create_default_context(cafile=str(self._folder / "ca.crt"))
        tls.load_cert_chain(self._folder / "admin.crt", self._folder / "admin.key")
        # No proxy: one that the environment names could not reach this loopback address.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))
        return opener.open(url, timeout=10)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Lets a SIGTERM end the test run as Ctrl-C does, with its fixtures torn down."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        # A second one must not interrupt the tear-down.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _request(event: dict[str, Any]) -> Request:
    target = event.get("objectRef", {})
    return Request(
        user_agent=event.get("userAgent", ""),
        verb=event["verb"],
        resource=target.get("resource", ""),
        subresource=target.get("subresource", ""),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
    )
