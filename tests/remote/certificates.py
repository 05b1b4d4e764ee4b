"""Certificates for a test's TLS server on the loopback."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificates:
    """Files in PEM."""

    ca: str
    cert: str
    key: str


def new_certificates(folder: Path) -> Certificates:
    """A certificate for 127.0.0.1 that an authority of its own has signed, valid for a day."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _name("authority")
    ca = _builder(authority, authority, authority_key.public_key(), is_ca=True).sign(authority_key, hashes.SHA256())
    loopback = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = _builder(_name("server"), authority, key.public_key(), is_ca=False).add_extension(
        loopback, critical=False
    )
    cert = builder.sign(authority_key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    files = {
        "ca.pem": ca.public_bytes(pem),
        "cert.pem": cert.public_bytes(pem),
        "key.pem": key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return Certificates(*(str(folder / name) for name in files))


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, is_ca: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=1))
    return builder.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
