"""A Kubernetes node for tests: kubelet, containerd, kube-proxy and DNS beside a control plane, which run real pods.

A `Node` lives in namespaces of its own for mounts, network and processes. Their process 1 is ours: once it is gone the
kernel ends every process in them, pods included, and with the last of them goes what they mounted. What is left, a
folder and control groups, `stop` removes. It needs Linux and root.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from cluster.configuration import kubeconfig
from cluster.harness import BUILD, KubectlError
from cluster.pki import Authority, service_account_keys
from cluster.processes import Programs
from pods import node_configuration as configuration

DEBIAN = BUILD.with_name("debian.py")
PROGRAMS = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl"),
    *("helm", "cluster-dns", "pod-pause"),
)


@dataclass(frozen=True)
class NodePrograms:
    """Where they lie. `debian`: the folder in which Debian's packages are unpacked."""

    paths: dict[str, Path]
    debian: Path

    @classmethod
    def find(cls) -> Self:
        """Finds, fetches or builds them; the first time takes minutes. Progress goes to stderr."""

        def printed(*command: str | Path) -> str:
            return subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True).stdout

        folders = printed(BUILD, *PROGRAMS).strip()
        found = {name: shutil.which(name, path=folders) for name in PROGRAMS}
        return cls({name: Path(path) for name, path in found.items() if path}, Path(printed(DEBIAN).strip()))


class Node:
    """One node and its control plane, in a folder that it makes and, when stopped, removes."""

    def __init__(self, folder: Path, programs: NodePrograms) -> None:
        self.folder = folder
        self._found = programs
        self._programs = Programs(folder)
        self._cgroups = ControlGroups(f"tidelane-{secrets.token_hex(4)}")
        self._process_1: psutil.Process | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(keep_logs=error is not None)

    def start(self) -> None:
        """Returns once the control plane answers and containerd takes images; leaves nothing behind if that fails."""
        if os.geteuid() != 0:
            raise PermissionError("a node needs root: it mounts, and makes control groups and networks")
        self.folder.mkdir(mode=0o755)
        try:
            self._write_configuration()
            self._cgroups.make()
            self._enter_namespaces()
            self._start("etcd", configuration.ETCD_FLAGS)
            self._start("kube-apiserver", configuration.api_server_flags())
            self._start_at(self._found.debian / "usr/bin/containerd", ("--config", "containerd.toml"))
            self._wait(lambda: self._answers("kubectl", "get", "--raw", "/readyz"), "kube-apiserver")
            self._wait(lambda: self._answers("ctr", "version"), "containerd")
            self._start("kube-controller-manager", configuration.CONTROLLER_MANAGER_FLAGS)
            self._start("kube-scheduler", configuration.SCHEDULER_FLAGS)
            self._start("kube-proxy", configuration.PROXY_FLAGS)
            self._start("cluster-dns", ("-conf", "Corefile"))
        except BaseException:
            self.stop(keep_logs=True)
            raise

    def join(self) -> None:
        """Starts the kubelet, once the images are there; returns when the node is Ready."""
        self._start("kubelet", configuration.kubelet_flags())
        ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        self._wait(
            lambda: self._answers("kubectl", "get", "node", configuration.NAME, "-o", ready) == "True", "kubelet"
        )

    def import_image(self, archive: Path) -> None:
        self.run(["ctr", "--namespace", "k8s.io", "images", "import", str(archive)], timeout_s=300)

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        return self.run(["kubectl", *arguments], stdin=stdin, timeout_s=timeout_s)

    def run(self, command: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60) -> str:
        """What a program writes that runs beside the node's own, as the cluster's administrator."""
        done = subprocess.run(
            [*self._inside(), *self._resolved(command)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            raise KubectlError(f"{' '.join(command)}\n{done.stderr.strip()}\n{done.stdout.strip()}")
        return done.stdout

    def popen(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """The same for one that goes on for a while; the caller waits for it."""
        return subprocess.Popen([*self._inside(), *self._resolved(command)], stdout=subprocess.PIPE, text=True)

    def log_tails(self) -> dict[str, str]:
        return {name: self._programs.log_tail(name) for name in self._programs.pids}

    def stop(self, *, keep_logs: bool = False) -> None:
        """Ends whatever runs in the node, then removes the folder, or all of it but the logs."""
        if self._process_1 is not None:
            # Each of the node's processes has ended when it has, and with them their mounts.
            self._process_1.kill()
            self._process_1 = None
        self._programs.kill_all()
        self._cgroups.remove()
        for path in self.folder.iterdir() if self.folder.exists() else ():
            if not (keep_logs and path in (self._programs.logs, self.folder / "log")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not keep_logs and self.folder.exists():
            self.folder.rmdir()

    def _write_configuration(self) -> None:
        folder = self.folder
        for name in ("log", "lib", "lib-work", "cni", "certificates"):
            (folder / name).mkdir()
        authority = Authority()
        administrator = authority.client("administrator", group="system:masters")
        kubelet = authority.client(f"system:node:{configuration.NAME}", group="system:nodes")
        server = authority.server(configuration.ADDRESS, configuration.API_SERVICE, *configuration.API_NAMES)
        signing_key, verifying_key = service_account_keys()
        for name, content in {
            "ca.crt": authority.certificate,
            "server.crt": server.certificate,
            "server.key": server.key,
            "admin.crt": administrator.certificate,
            "admin.key": administrator.key,
            "accounts.key": signing_key,
            "accounts.pub": verifying_key,
            "admin.kubeconfig": kubeconfig(configuration.API_SERVER, authority.certificate, administrator),
            "kubelet.kubeconfig": kubeconfig(configuration.API_SERVER, authority.certificate, kubelet),
            "kubelet.yaml": configuration.kubelet(folder, self._cgroups.path).encode(),
            "containerd.toml": configuration.containerd(folder, self._found.debian).encode(),
            "cni/10-pods.conflist": configuration.pod_network(folder).encode(),
            "Corefile": configuration.dns().encode(),
            "resolv.conf": f"nameserver {configuration.ADDRESS}\n".encode(),
            "setup.sh": configuration.setup_script(folder, sys.executable).encode(),
        }.items():
            (folder / name).write_bytes(content)

    def _enter_namespaces(self) -> None:
        # Private, so that no mount reaches the machine; the child is killed when `unshare` is, and that with the tests.
        flags = ("--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
        self._programs.start("namespaces", _tool("unshare"), (*flags, "sh", "-x", str(self.folder / "setup.sh")))
        self._wait((self.folder / "ready").exists, "namespaces")
        (self._process_1,) = psutil.Process(self._programs.pids["namespaces"]).children()

    def _start(self, name: str, flags: Sequence[str]) -> None:
        self._start_at(self._found.paths[name], flags)

    def _start_at(self, path: Path, flags: Sequence[str]) -> None:
        nsenter, *inside = self._inside()
        self._programs.start(path.name, Path(nsenter), (*inside, str(path), *flags))

    def _inside(self) -> list[str]:
        """The beginning of a command that is to run in the node's namespaces, in its folder."""
        assert self._process_1 is not None, "the node has not started"
        settings = {
            **configuration.environment(self._found.debian),
            "KUBECONFIG": str(self.folder / "admin.kubeconfig"),
            "CONTAINERD_ADDRESS": str(self.folder / "containerd.sock"),
            # helm and kubectl keep their files below it.
            "HOME": str(self.folder),
        }
        entered = ["--target", str(self._process_1.pid), "--mount", "--net", "--pid", f"--wdns={self.folder}"]
        return [str(_tool("nsenter")), *entered, "env", "-i", *(f"{name}={value}" for name, value in settings.items())]

    def _resolved(self, command: Sequence[str]) -> list[str]:
        program, *arguments = command
        return [str(self._found.paths.get(program, program)), *arguments]

    def _answers(self, *command: str) -> str:
        """What it writes; nothing if it fails."""
        try:
            return self.run(command)
        except (KubectlError, subprocess.TimeoutExpired):
            return ""

    def _wait(self, ready: Callable[[], object], name: str) -> None:
        self._programs.wait_until(lambda: bool(ready()), name, deadline_s=180)


class ControlGroups:
    """One group of this name in each hierarchy, the first parent of all that a node's pods get."""

    def __init__(self, name: str) -> None:
        self.path = f"/{name}"
        self._folders = [
            Path(each.mountpoint, name) for each in psutil.disk_partitions(all=True) if "cgroup" in each.fstype
        ]

    def make(self) -> None:
        for folder in self._folders:
            folder.mkdir()
            # A new group of this kind has no processors and no memory, and takes no process, until it is told.
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (folder / file).exists() and (inherited := (folder.parent / file).read_text().strip()):
                    (folder / file).write_text(inherited)

    def remove(self, *, deadline_s: float = 10) -> None:
        """Waits while the kernel still takes the last processes for members."""
        given_up_at_s = time.monotonic() + deadline_s
        for top in self._folders:
            below = [Path(folder) for folder, _, _ in os.walk(top, topdown=False)]
            for folder in below:
                while folder.exists():
                    try:
                        folder.rmdir()
                    except OSError:
                        if time.monotonic() > given_up_at_s:
                            raise
                        time.sleep(0.05)


def _tool(name: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"a node needs {name}, of the package util-linux")
    return Path(found)
