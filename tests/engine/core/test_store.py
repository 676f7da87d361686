"""The model store: nothing half built stays, and what cannot be used says what to change."""

from __future__ import annotations

import fcntl
from pathlib import Path

import gguf
import pytest

from tidelane.engine.model.store import BadModel, StoreUnusable, resolve

from .models import save


def no_progress(_: str) -> None:
    return


@pytest.fixture
def whole_gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kept_bytes", [0, 3, 10, 30, 60])
def test_a_gguf_that_was_cut_off_is_refused_and_leaves_nothing(whole_gguf: Path, kept_bytes: int) -> None:
    cut = whole_gguf.with_name("cut.gguf")
    cut.write_bytes(whole_gguf.read_bytes()[:kept_bytes])
    store = whole_gguf.parent / "store"
    with pytest.raises(BadModel, match=r"cannot convert .*/cut\.gguf, is the file whole\? "):
        resolve(f"file://{cut}", store, no_progress)
    assert list((store / "converted").iterdir()) == []


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_builds_is_not(whole_gguf: Path) -> None:
    converted = whole_gguf.parent / "store" / "converted"
    for name in (".dead-1", ".alive-2", "whole"):
        (converted / name).mkdir(parents=True)
        (converted / name / "lock").touch()
    whole_gguf.write_bytes(b"GGUF")
    with (converted / ".alive-2" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BadModel):
            resolve(f"file://{whole_gguf}", whole_gguf.parent / "store", no_progress)
        assert sorted(path.name for path in converted.iterdir()) == [".alive-2", "whole"]


def test_a_store_that_cannot_be_written_says_so(whole_gguf: Path) -> None:
    store = whole_gguf.parent / "store"
    store.touch()
    with pytest.raises(StoreUnusable) as refusal:
        resolve(f"file://{whole_gguf}", store, no_progress)
    told = "Not a directory; make room and let it be written, or give another --model-store"
    assert str(refusal.value) == f"model store {store}/converted: {told}"


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%20b", "a b", "[a"])
def test_a_path_means_what_it_says(name: str, tmp_path: Path) -> None:
    folder = save("llama", tmp_path / name)
    assert resolve(f"file://{folder}", tmp_path / "store", no_progress) == folder


@pytest.mark.parametrize("source", ["file://models/chat", "file://[", "file://"])
def test_a_path_that_is_not_absolute_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="expected an absolute path, as in file:///"):
        resolve(source, tmp_path, no_progress)
