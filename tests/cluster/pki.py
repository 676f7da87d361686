"""The keys of one test cluster: those of its authority, its servers, its users and its service accounts."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID_FOR = datetime.timedelta(days=7)


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Signs what the API server trusts. Its own key never leaves the process."""

    def __init__(self) -> None:
        self._key = _new_key()
        self._issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tidelane-test-ca")])
        certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = _pem(certificate)

    def server(self, *names_or_addresses: str) -> KeyPair:
        """For a server at these IP addresses and names."""
        names = x509.SubjectAlternativeName([_general_name(each) for each in names_or_addresses])
        return self._issue("kube-apiserver", None, ExtendedKeyUsageOID.SERVER_AUTH, names)

    def client(self, user: str, group: str | None = None) -> KeyPair:
        """For a Kubernetes user, who is in one group or in none."""
        return self._issue(user, group, ExtendedKeyUsageOID.CLIENT_AUTH, None)

    def _issue(
        self,
        common_name: str,
        organization: str | None,
        usage: x509.ObjectIdentifier,
        names: x509.SubjectAlternativeName | None,
    ) -> KeyPair:
        key = _new_key()
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if organization is not None:
            attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
        builder = _builder(x509.Name(attributes), self._name, key.public_key())
        builder = (
            builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(_usage(certificates=False), critical=True)
            # From Python 3.13 on clients refuse a certificate that does not name its issuer's key.
            .add_extension(self._issuer, critical=False)
        )
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        return KeyPair(_pem(builder.sign(self._key, hashes.SHA256())), _private_pem(key))


def service_account_keys() -> tuple[bytes, bytes]:
    """The private and the public key, PEM, with which the API server signs and checks tokens."""
    key = _new_key()
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return _private_pem(key), public


def _general_name(name_or_address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name_or_address))
    except ValueError:
        return x509.DNSName(name_or_address)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # An hour back, for a virtual machine whose clock steps.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _VALID_FOR)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )
