"""Certificates as tests need them: signed by themselves, of these names, and expired where that is asked."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)


def made_certificate(
    folder: Path,
    names: tuple[str, ...] = ("localhost",),
    begins_d: float = -1.0,
    ends_d: float = 1.0,
    password: bytes = b"",
) -> tuple[Path, Path]:
    """Files of a certificate for these names and 127.0.0.1; its two dates are in days from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"a test {secrets.token_hex(8)}")])
    now = datetime.now(UTC)
    alternatives = [*map(x509.DNSName, names), x509.IPAddress(ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=begins_d))
        .not_valid_after(now + timedelta(days=ends_d))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "tls.crt", folder / "tls.key"
    files[0].write_bytes(certificate.public_bytes(Encoding.PEM))
    sealed = BestAvailableEncryption(password) if password else NoEncryption()
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, sealed))
    return files
