"""Certificates for tests of what speaks mutual TLS."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Authority:
    """Real, and for one test."""

    def __init__(self, name: str) -> None:
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.pem = self._sign(self._name, self._key.public_key(), ca=True)

    def issue(self, valid_s: float = 3600, password: bytes = b"") -> tuple[bytes, bytes]:
        """(key, certificate) for 127.0.0.1, as PEM. `valid_s` from now, below 0: it has been."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "peer")])
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption(),
        )
        return private, self._sign(subject, key.public_key(), ca=False, valid_s=valid_s)

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, ca: bool, valid_s: float = 3600) -> bytes:
        now = dt.datetime.now(dt.UTC)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=2))
            .not_valid_after(now + dt.timedelta(seconds=valid_s))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)


class Side:
    """The three files of one side."""

    def __init__(self, folder: Path, own: Authority, other: Authority, valid_s: float = 3600) -> None:
        folder.mkdir()
        self._own = own
        self.certificate, self.key, self.authority = (folder / name for name in ("tls.crt", "tls.key", "ca.crt"))
        self.authority.write_bytes(other.pem)
        self.renew(valid_s)

    def renew(self, valid_s: float = 3600) -> None:
        self.put(*self._own.issue(valid_s))

    def put(self, key: bytes, certificate: bytes) -> None:
        """One after the other, as whoever renews files does."""
        self.key.write_bytes(key)
        self.certificate.write_bytes(certificate)

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        return self.certificate, self.key, self.authority
