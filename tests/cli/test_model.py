"""`tidelane model pull`: what goes wrong is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidelane.cli import main
from tidelane.engine.model import store


def test_a_source_or_store_that_cannot_be_used_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0")
    (tmp_path / "file").touch()
    for models, why in (
        (tmp_path / "store", f"cannot convert {tmp_path}/cut.gguf, is the file whole? "),
        (tmp_path / "file", f"model store {tmp_path}/file/converted: Not a directory; "),
    ):
        assert main.main(["model", "pull", f"file://{tmp_path}/cut.gguf", "--model-store", str(models)]) == 1
        told = capsys.readouterr().err.splitlines()[-1]
        assert told.startswith(f"tidelane model pull: {why}")


def test_ctrl_c_ends_it_without_a_traceback_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        (folder / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "_convert", interrupted)
    (tmp_path / "chat.gguf").touch()
    models = tmp_path / "store"
    assert main.main(["model", "pull", f"file://{tmp_path}/chat.gguf", "--model-store", str(models)]) == 130
    assert capsys.readouterr().err == "Converting chat.gguf to safetensors, once\n"
    assert list((models / "converted").iterdir()) == []
