"""What `tidelane up` refuses before it starts anything."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from control_plane.wrong_manifests import RIGHT
from tidelane.agent.file_lock import FileLock
from tidelane.cli import main

FOLDER = "it must be a folder to write to, with room left"


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    path = tmp_path / "chat.yaml"
    path.write_text(json.dumps(RIGHT))
    return str(path)


def test_a_state_folder_that_cannot_be_used(manifest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    full = tmp_path / "full"
    full.mkdir()
    (full / "up.lock").symlink_to("/dev/full")
    for folder, why in (
        (tmp_path / "file", "File exists"),
        (tmp_path / "file" / "below", "Not a directory"),
        (Path("/proc/nobody-makes-this"), "No such file or directory"),
        (full, "No space left on device"),
    ):
        assert main.main(["up", "-f", manifest, "--state-dir", str(folder)]) == 2
        assert capsys.readouterr().err == f"tidelane up: --state-dir {folder}: {why}; {FOLDER}\n"


def test_a_state_folder_that_another_run_has(manifest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileLock(tmp_path / "up.lock"):
        assert main.main(["up", "-f", manifest, "--state-dir", str(tmp_path)]) == 2
    told = f"process {os.getpid()} is using it; end that first, or give another --state-dir"
    assert capsys.readouterr().err == f"tidelane up: --state-dir {tmp_path}: {told}\n"


def test_a_status_file_that_cannot_be_written(
    manifest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "status.json"
    assert main.main(["up", "-f", manifest, "--status-file", str(path)]) == 2
    why = "No such file or directory; it must be a file to write, in a folder that is there"
    assert capsys.readouterr().err == f"tidelane up: --status-file {path}: {why}\n"


def test_a_state_folder_without_room(
    manifest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=20 << 10))
    assert main.main(["up", "-f", manifest, "--state-dir", str(tmp_path)]) == 2
    told = "20 KiB are free there and 1024 KiB are needed; make room, or give another --state-dir"
    assert capsys.readouterr().err == f"tidelane up: --state-dir {tmp_path}: {told}\n"
