#!/usr/bin/env python3
"""Fetches the Debian packages that a node needs, and unpacks them into the cache. Prints the folder.

Nothing is installed: packages of tools/kube/debian.txt, pinned by version and SHA-256, come from the machine's own
Debian 12 mirror by `apt-get download`, and programs run from where they are unpacked. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).resolve().parent / "debian.txt"
# Debian's alternatives, which are made at installation, decide what these names mean.
IPTABLES = tuple(f"{family}{action}" for family in ("iptables", "ip6tables") for action in ("", "-save", "-restore"))


class FetchError(Exception):
    """Says what the reader has to do."""


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    sha256: str

    @property
    def wanted(self) -> str:
        return f"{self.name}={self.version}"


def parse(text: str) -> list[Package]:
    """One package a line, as `name=version sha256`; lines with # are for readers."""
    packages = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            wanted, digest = line.split()
            name, _, version = wanted.partition("=")
            packages.append(Package(name, version, digest))
    return packages


def provide(packages: Sequence[Package], cache: Path) -> Path:
    """The folder that they are unpacked in; complete or not there."""
    named = "\n".join(f"{each.wanted} {each.sha256}" for each in packages)
    target = cache / f"debian-{hashlib.sha256(named.encode()).hexdigest()[:12]}"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        downloads, root = Path(folder, "downloads"), Path(folder, "root")
        downloads.mkdir()
        _download(packages, downloads)
        for archive in sorted(_checked(packages, downloads)):
            subprocess.run(["dpkg-deb", "-x", archive, root], check=True)
        for name in IPTABLES:
            (root / "usr" / "sbin" / name).symlink_to("xtables-nft-multi")
        root.chmod(0o755)
        if not target.exists():
            root.rename(target)
    return target


def _download(packages: Sequence[Package], folder: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise FetchError("a node needs apt-get and dpkg-deb, those of Debian 12")
    # As root apt drops to a user who may not write here, and warns of it.
    command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", *(each.wanted for each in packages)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FetchError(
            f"{done.stderr.strip()}\n\nRun `apt-get update` first. Where Debian has a newer version by now, "
            f"write it and its SHA-256 into {LIST.name}."
        )


def _checked(packages: Sequence[Package], folder: Path) -> list[Path]:
    """The archives, once each of the packages is there as pinned, and nothing else."""
    found = {hashlib.sha256(archive.read_bytes()).hexdigest(): archive for archive in folder.glob("*.deb")}
    for package in packages:
        if package.sha256 not in found:
            raise FetchError(f"{package.wanted} is not what {LIST.name} pins: its SHA-256 differs")
    return [found[package.sha256] for package in packages]


def main() -> int:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    try:
        print(provide(parse(LIST.read_text()), Path(home, "tidelane", "kube")))
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
