"""Only what is pinned is unpacked, and the folder is another one when a pin changes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from tools.kube.debian import LIST, FetchError, Package, parse, provide

CONTENT = b"not really an archive"
PINNED = Package("runc", "1.1.5+ds1-1", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An apt-get that gives `archive` for whatever is asked, and a dpkg-deb that unpacks it as a program."""
    programs = tmp_path / "bin"
    programs.mkdir()
    archive = tmp_path / "archive"
    for name, script in {
        "apt-get": f"cp {archive} runc_1.1.5_amd64.deb",
        "dpkg-deb": 'mkdir -p "$3/usr/sbin" && cp "$2" "$3/usr/sbin/runc"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return archive


def test_the_list_pins_name_version_and_hash() -> None:
    packages = parse(LIST.read_text())
    assert {"containerd", "runc", "containernetworking-plugins", "iptables"} <= {each.name for each in packages}
    assert all(len(each.sha256) == 64 and each.version for each in packages)
    assert parse("# a\n\nruncx=1:2=3~ abc\n") == [Package("runcx", "1:2=3~", "abc")]


def test_what_is_pinned_is_unpacked_once(mirror: Path, tmp_path: Path) -> None:
    mirror.write_bytes(CONTENT)
    folder = provide([PINNED], tmp_path / "cache")
    assert (folder / "usr/sbin/runc").read_bytes() == CONTENT
    assert (folder / "usr/sbin/iptables-save").readlink() == Path("xtables-nft-multi")
    mirror.unlink()
    assert provide([PINNED], tmp_path / "cache") == folder


def test_another_archive_under_the_same_name_is_refused_and_leaves_nothing(mirror: Path, tmp_path: Path) -> None:
    mirror.write_bytes(CONTENT + b"!")
    with pytest.raises(FetchError, match=r"runc=1\.1\.5\+ds1-1 is not what debian.txt pins"):
        provide([PINNED], tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_version_that_is_gone_from_the_mirror_says_what_to_change(mirror: Path, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"write it and its SHA-256 into debian\.txt"):
        provide([PINNED], tmp_path / "cache")
