"""Files of mutual TLS while they are replaced."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tidelane.rpc.tls_files import TlsFiles

from .certificates import Authority, Side


@pytest.fixture
def side(tmp_path: Path) -> Side:
    return Side(tmp_path / "side", Authority("own"), Authority("other"))


def test_renewed_files_are_taken_up_once_they_fit(side: Side, caplog: pytest.LogCaptureFixture) -> None:
    files = TlsFiles(*side.paths)
    before = files.current()
    key, certificate = Authority("own").issue()
    side.key.write_bytes(key)
    assert files.current() == before
    side.certificate.write_bytes(certificate)
    renewed = files.current()
    assert (renewed.key, renewed.certificate, renewed.authority) == (key, certificate, before.authority)
    # Of the moment in between: the new key does not fit the old certificate.
    assert [each.levelno for each in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("key", b"", "certificate and key cannot be read, or do not fit"),
        ("certificate", b"-----BEGIN CERTIFICATE-----\nMIIB", "certificate and key cannot be read, or do not fit"),
        ("authority", b"", "the authority's certificate cannot be read"),
        ("authority", b"\xff", "the authority's certificate cannot be read"),
        ("key", None, "tls.key: No such file or directory"),
    ],
)
def test_broken_files_leave_the_earlier_ones_and_are_told_once(
    side: Side, caplog: pytest.LogCaptureFixture, name: str, data: bytes | None, said: str
) -> None:
    files = TlsFiles(*side.paths)
    before = files.current()
    path: Path = getattr(side, name)
    good = path.read_bytes()
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    assert [files.current() for _ in range(3)] == [before] * 3
    [line] = [each.getMessage() for each in caplog.records]
    assert said in line
    assert line.endswith("the earlier files stay in use")
    with pytest.raises(ValueError, match="TLS"):
        TlsFiles(*side.paths)
    path.write_bytes(good)
    assert files.current() == before
    assert len(caplog.records) == 1


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(side: Side) -> None:
    side.key.write_bytes(Authority("own").issue(password=b"secret")[0])
    with pytest.raises(ValueError, match="do not fit"):
        TlsFiles(*side.paths)


def test_one_that_has_expired_replaces_none_and_is_told(side: Side, caplog: pytest.LogCaptureFixture) -> None:
    files = TlsFiles(*side.paths)
    before = files.current()
    side.renew(valid_s=-60)
    assert files.current() == before
    assert "certificate has expired; the earlier files stay in use" in caplog.text


def test_one_that_expires_while_in_use_is_told(side: Side, caplog: pytest.LogCaptureFixture) -> None:
    side.renew(valid_s=-60)
    now_s = 0.0
    files = TlsFiles(*side.paths, clock=lambda: now_s)
    assert "certificate has expired: the other side will refuse it" in caplog.text
    # It may be renewed later, and then it is well.
    side.renew()
    assert files.current().certificate == side.certificate.read_bytes()
    assert len(caplog.records) == 1
