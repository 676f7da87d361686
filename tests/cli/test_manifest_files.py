"""What the files declare, as they are edited, broken, deleted and replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from control_plane.wrong_manifests import edited
from tidelane.cli.manifest_files import ManifestFiles
from tidelane.operator.validation import Schemas


@pytest.fixture(scope="module")
def schemas() -> Schemas:
    return Schemas()


def names(files: ManifestFiles) -> list[str]:
    scan = files.scan()
    assert scan.errors == ()
    return sorted(ref.name for _, ref in scan.documents)


def write(path: Path, *made: dict[str, Any]) -> None:
    path.write_text("\n---\n".join(json.dumps(each) for each in made))


def test_a_folder(tmp_path: Path, schemas: Schemas) -> None:
    write(tmp_path / "a.yaml", edited("metadata.name", "a"), edited("metadata.name", "b"))
    write(tmp_path / "c.yml", edited("metadata.name", "c"))
    (tmp_path / "README.md").write_text("not a manifest")
    files = ManifestFiles(tmp_path, schemas)
    assert names(files) == ["a", "b", "c"]
    (tmp_path / "c.yml").unlink()
    write(tmp_path / "d.yaml", edited("metadata.name", "d"))
    # One scan of grace: an editor may be about to write more.
    assert names(files) == ["a", "b", "c"]
    assert names(files) == ["a", "b", "d"]


def test_a_file_that_is_replaced_by_way_of_nothing(tmp_path: Path, schemas: Schemas) -> None:
    path = tmp_path / "chat.yaml"
    write(path, edited("spec.replicas", 1))
    files = ManifestFiles(path, schemas)
    assert names(files) == ["chat"]
    path.unlink()
    assert names(files) == ["chat"]
    write(path, edited("spec.replicas", 2))
    assert names(files) == ["chat"]
    path.write_text("")
    assert names(files) == ["chat"]
    write(path, edited("spec.replicas", 2))
    assert names(files) == ["chat"]
    [document] = files.scan().documents.values()
    assert document.manifest["spec"]["replicas"] == 2
    path.unlink()
    names(files)
    assert names(files) == []
    write(path, edited("spec.replicas", 3))
    names(files)
    assert names(files) == ["chat"]


def test_a_broken_edit_is_told_once_and_the_old_one_stays(tmp_path: Path, schemas: Schemas) -> None:
    path = tmp_path / "chat.yaml"
    write(path, edited("spec.replicas", 1))
    files = ManifestFiles(path, schemas)
    names(files)
    write(path, edited("spec.slo.tpot", "0s"))
    files.scan()
    broken = files.scan()
    [error] = broken.errors
    assert f"{path}, document 1: spec.slo.tpot: Invalid value" in str(error)
    [document] = broken.documents.values()
    assert document.manifest["spec"]["slo"]["tpot"] == "50ms"
    assert files.scan().errors == ()
    write(path, edited("spec.slo.tpot", "40ms"))
    files.scan()
    [document] = files.scan().documents.values()
    assert document.manifest["spec"]["slo"]["tpot"] == "40ms"


def test_one_name_declared_twice(tmp_path: Path, schemas: Schemas) -> None:
    write(tmp_path / "a.yaml", edited("spec.replicas", 1))
    write(tmp_path / "b.yaml", edited("spec.replicas", 2))
    files = ManifestFiles(tmp_path, schemas)
    scan = files.scan()
    [error] = scan.errors
    assert "default/chat is declared in" in str(error)
    [document] = scan.documents.values()
    assert document.manifest["spec"]["replicas"] == 1


def test_not_text(tmp_path: Path, schemas: Schemas) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    [error] = ManifestFiles(tmp_path, schemas).scan().errors
    assert "a.yaml: not YAML" in str(error)


def test_nothing_there(tmp_path: Path, schemas: Schemas) -> None:
    assert names(ManifestFiles(tmp_path / "missing.yaml", schemas)) == []


@pytest.mark.parametrize("example", ["chat.yaml", "two-services", "slo-policy"])
def test_examples(schemas: Schemas, example: str) -> None:
    assert names(ManifestFiles(Path(__file__).parents[2] / "examples" / example, schemas))
