"""Where tools/kube/build.py finds programs, and what it says when it can neither find nor build them."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).resolve().parents[2] / "tools" / "kube" / "build.py"
NAMES = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")

pytestmark = pytest.mark.cluster


def programs(folder: Path, version: str, names: tuple[str, ...] = NAMES) -> Path:
    """A folder of scripts that say they are of this version, whatever they are asked."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(f"#!/bin/sh\necho {name} v{version}\n")
        (folder / name).chmod(0o755)
    return folder


def build(home: Path, *, assets: Path | None = None, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {"HOME": str(home), "PATH": f"{path}:/usr/bin:/bin", "PIP_NO_INDEX": "1"}
    if assets is not None:
        environment["KUBEBUILDER_ASSETS"] = str(assets)
    return subprocess.run([sys.executable, BUILD], check=False, capture_output=True, text=True, env=environment)


def cache_folder(home: Path, modules: Path | None = None) -> Path:
    where = runpy.run_path(str(BUILD))["cache_folder"]
    folder = where({"HOME": str(home)}, modules) if modules else where({"HOME": str(home)})
    assert isinstance(folder, Path)
    return folder


def test_assets_come_first_then_the_cache_then_path(tmp_path: Path) -> None:
    assets = programs(tmp_path / "assets", "1.0.0", ("etcd",))
    cache = programs(cache_folder(tmp_path), "1.0.0", ("etcd", "kube-apiserver"))
    on_path = programs(tmp_path / "path", "1.99.0", NAMES[1:])
    found = build(tmp_path, assets=assets, path=str(on_path))
    assert found.stderr == ""
    assert found.stdout.strip().split(os.pathsep) == [str(assets), str(cache), str(on_path)]


def test_a_program_on_path_must_be_new_enough(tmp_path: Path) -> None:
    old = programs(tmp_path / "old", "1.33.9")
    new = programs(tmp_path / "new", "1.34.0", NAMES[1:])
    etcd = programs(tmp_path / "new", "3.6.0", ("etcd",))
    found = build(tmp_path, path=f"{old}:{new}")
    assert found.stdout.strip() == str(new) == str(etcd)


def test_it_says_what_to_install_where_there_is_neither_go_nor_pip_can_fetch_it(tmp_path: Path) -> None:
    refused = build(tmp_path, path=str(programs(tmp_path / "old", "1.19.8", ("go",))))
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert "Go 1.24.0 or newer" in refused.stderr
    assert "KUBEBUILDER_ASSETS" in refused.stderr


@pytest.mark.parametrize("changed", ["etcd/go.mod", "kubernetes/go.sum"])
def test_the_cache_is_another_one_when_a_pin_changes(tmp_path: Path, changed: str) -> None:
    modules = tmp_path / "tools"
    shutil.copytree(BUILD.parents[2] / "tests" / "cluster" / "tools", modules)
    assert cache_folder(tmp_path, modules) == cache_folder(tmp_path)
    with (modules / changed).open("a") as file:
        file.write("// another\n")
    assert cache_folder(tmp_path, modules) != cache_folder(tmp_path)
    assert cache_folder(tmp_path).parent == tmp_path / ".cache" / "tidelane" / "kube"
