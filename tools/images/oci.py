"""Writes an image as an OCI archive from folders, without Docker, a registry or root.

    python tools/images/oci.py OUT.tar --name tidelane/operator:0.1.0 --layer BASE=/ --layer SITE=/opt/tidelane \\
        --env PYTHONPATH=/opt/tidelane --user 65532 --entrypoint python3 -m tidelane.cli.main

`ctr -n k8s.io images import OUT.tar`, `skopeo copy oci-archive:OUT.tar ...` and `podman load -i OUT.tar` read it. The
same folders give the same archive, byte for byte. The format: https://github.com/opencontainers/image-spec.
Standard library only.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import platform
import stat
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

_MEDIA = "application/vnd.oci.image"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
# Runtimes that take an image at its word, as `ctr run` does, find no program without one.
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Mounted over by whoever runs the image: the folders are there, and empty.
_EMPTY = ("dev", "proc", "sys")


@dataclass(frozen=True)
class Layer:
    """What lies in `folder` appears at `at` in the image."""

    folder: Path
    at: PurePosixPath


@dataclass(frozen=True)
class Image:
    name: str
    layers: Sequence[Layer]
    entrypoint: Sequence[str]
    environment: Sequence[str] = ()
    user: str = ""


class Blobs:
    """Named by their SHA-256, as the format wants them."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}

    def add(self, media_type: str, content: bytes) -> dict[str, Any]:
        """A descriptor of it."""
        digest = hashlib.sha256(content).hexdigest()
        self.contents[digest] = content
        return {"mediaType": f"{_MEDIA}.{media_type}", "digest": f"sha256:{digest}", "size": len(content)}


def write(image: Image, target: Path) -> None:
    """The archive is written whole or not at all."""
    blobs = Blobs()
    diff_ids, descriptors = [], []
    for layer in image.layers:
        raw = layer_tar(layer)
        diff_ids.append(f"sha256:{hashlib.sha256(raw).hexdigest()}")
        descriptors.append(blobs.add("layer.v1.tar+gzip", gzip.compress(raw, 6, mtime=0)))
    architecture = {"architecture": _MACHINES.get(platform.machine(), platform.machine()), "os": "linux"}
    environment = [
        *([] if any(each.startswith("PATH=") for each in image.environment) else [_PATH]),
        *image.environment,
    ]
    settings = {"Entrypoint": list(image.entrypoint), "Env": environment, "User": image.user}
    config = {**architecture, "config": settings, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_MEDIA}.manifest.v1+json",
        "config": blobs.add("config.v1+json", _json(config)),
        "layers": descriptors,
    }
    names = {
        "io.containerd.image.name": _full_name(image.name),
        "org.opencontainers.image.ref.name": image.name.rpartition(":")[2],
    }
    listed = {**blobs.add("manifest.v1+json", _json(manifest)), "annotations": names, "platform": architecture}
    partial = target.with_name(target.name + ".partial")
    with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as archive:
        _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(archive, "index.json", _json({"schemaVersion": 2, "manifests": [listed]}))
        for digest, content in blobs.contents.items():
            _add(archive, f"blobs/sha256/{digest}", content)
    partial.replace(target)


def layer_tar(layer: Layer) -> bytes:
    """Owners, times and order are made the same whoever builds it; modes stay."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive:
        parents = [*reversed(layer.at.relative_to("/").parents), layer.at.relative_to("/")]
        for parent in parents:
            if parent.name:
                entry = tarfile.TarInfo(str(parent))
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(entry)
        for path in _paths(layer.folder):
            name = str(layer.at.relative_to("/") / path.relative_to(layer.folder))
            top, _, below = name.partition("/")
            if below and top in _EMPTY:
                continue
            entry = archive.gettarinfo(path, name)
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = 0
            if entry.isreg():
                with path.open("rb") as content:
                    archive.addfile(entry, content)
            else:
                archive.addfile(entry)
    return output.getvalue()


def _paths(folder: Path) -> Iterator[Path]:
    """Everything below it that an image can hold, a folder before what is in it."""
    for found in sorted(os.scandir(folder), key=lambda each: each.name):
        path = Path(found.path)
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) or stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            yield path
        if stat.S_ISDIR(mode):
            yield from _paths(path)


def _full_name(name: str) -> str:
    """As containerd knows it: names without a registry are Docker Hub's."""
    first = name.partition("/")[0]
    return name if "/" in name and ("." in first or ":" in first) else f"docker.io/{name}"


def _json(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def _layer(text: str) -> Layer:
    folder, equals, at = text.rpartition("=")
    if not (equals and Path(folder).is_dir() and at.startswith("/")):
        raise argparse.ArgumentTypeError(f"{text}: say FOLDER=/PATH, with a folder that is there")
    return Layer(Path(folder), PurePosixPath(at))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Writes an image as an OCI archive from folders.")
    add = parser.add_argument
    add("archive", type=Path)
    add("--name", required=True, metavar="NAME:TAG")
    add("--layer", type=_layer, action="append", required=True, metavar="FOLDER=/PATH", help="repeatable, base first")
    add("--env", action="append", default=[], metavar="NAME=VALUE")
    add("--user", default="", metavar="UID")
    add("--entrypoint", nargs=argparse.REMAINDER, required=True)
    given = parser.parse_args(arguments)
    if ":" not in given.name.rpartition("/")[2]:
        parser.error(f"{given.name}: say NAME:TAG")
    write(Image(given.name, given.layer, given.entrypoint, given.env, given.user), given.archive)
    print(given.archive)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
