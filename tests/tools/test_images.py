"""An image archive, read back as its format says."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from tools.images.oci import Image, Layer, main, write

PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Archive:
    def __init__(self, path: Path) -> None:
        with tarfile.open(path) as archive:
            self.files = {each.name: archive.extractfile(each).read() for each in archive}  # type: ignore[union-attr]

    def blob(self, descriptor: dict[str, Any]) -> bytes:
        """Its content, which is as long and has the digest that the descriptor says."""
        content = self.files["blobs/" + descriptor["digest"].replace(":", "/")]
        assert len(content) == descriptor["size"]
        assert hashlib.sha256(content).hexdigest() == descriptor["digest"].partition(":")[2]
        return content


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    (made / "bin").mkdir(parents=True)
    (made / "proc").mkdir()
    (made / "proc" / "1").write_text("not ours")
    (made / "bin" / "tool").write_text("#!/bin/sh\n")
    (made / "bin" / "tool").chmod(0o755)
    (made / "bin" / "link").symlink_to("tool")
    os.mkfifo(made / "pipe")
    return made


def test_what_is_in_the_folders_is_in_the_layers(tmp_path: Path, folder: Path) -> None:
    layers = [Layer(folder, PurePosixPath("/")), Layer(folder / "bin", PurePosixPath("/opt/site"))]
    write(Image("tidelane/x:1.2", layers, ["tool", "-v"], ["A=b"], "65532"), tmp_path / "x.tar")
    archive = Archive(tmp_path / "x.tar")
    (listed,) = json.loads(archive.files["index.json"])["manifests"]
    assert listed["annotations"] == {
        "io.containerd.image.name": "docker.io/tidelane/x:1.2",
        "org.opencontainers.image.ref.name": "1.2",
    }
    manifest = json.loads(archive.blob(listed))
    config = json.loads(archive.blob(manifest["config"]))
    assert config["config"] == {"Entrypoint": ["tool", "-v"], "Env": [PATH, "A=b"], "User": "65532"}
    found: list[dict[str, tarfile.TarInfo]] = []
    for descriptor, diff_id in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True):
        raw = gzip.decompress(archive.blob(descriptor))
        assert f"sha256:{hashlib.sha256(raw).hexdigest()}" == diff_id
        with tarfile.open(fileobj=io.BytesIO(raw)) as layer:
            found.append({each.name: each for each in layer})
    assert set(found[0]) == {"bin", "bin/tool", "bin/link", "proc"}
    assert set(found[1]) == {"opt", "opt/site", "opt/site/tool", "opt/site/link"}
    assert (found[0]["bin/tool"].mode, found[0]["bin/tool"].uid) == (0o755, 0)
    assert found[0]["bin/link"].linkname == "tool"


def test_the_same_folders_give_the_same_bytes(tmp_path: Path, folder: Path) -> None:
    image = Image("registry.example/x:1", [Layer(folder, PurePosixPath("/"))], ["tool"])
    write(image, tmp_path / "first.tar")
    os.utime(folder / "bin" / "tool", (1, 1))
    write(image, tmp_path / "second.tar")
    assert (tmp_path / "first.tar").read_bytes() == (tmp_path / "second.tar").read_bytes()
    assert b'"io.containerd.image.name":"registry.example/x:1"' in Archive(tmp_path / "first.tar").files["index.json"]


@pytest.mark.parametrize(
    ("name", "layer", "said"),
    [("x", "{}=/", "say NAME:TAG"), ("x:1", "{}/none=/", "FOLDER=/PATH"), ("x:1", "{}=opt", "FOLDER=/PATH")],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, name: str, layer: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "x.tar"), "--name", name, "--layer", layer.format(tmp_path), "--entrypoint", "tool"])
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
