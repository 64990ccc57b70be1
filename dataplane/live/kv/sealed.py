"""TLS between hosts for KV: both ends make the same certificate out of a worker's secret and accept no other.

A reader is told a worker's secret over its encrypted link, together with what to fetch, so no certificate is
handed around or renewed: one lives as long as its worker. Ed25519 signs the same bytes the same way, so the
secret is the certificate. Session keys are fresh for each connection.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import ssl
from datetime import UTC, datetime
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

ALWAYS = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)  # clocks may be off


@lru_cache(maxsize=4096)
def contexts(secret: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of the end that serves and of the one that reads."""
    certificate, key = _identity(secret)
    serving, reading = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    serving.num_tickets = 0  # connections are kept, not resumed
    reading.check_hostname = False  # the certificate is of the worker, wherever it is
    file = os.memfd_create("tokenfleet-kv")  # OpenSSL reads keys from files, and this one is on no disk
    try:
        os.write(file, key + certificate)
        for context in (serving, reading):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(f"/proc/self/fd/{file}")
            context.load_verify_locations(cadata=certificate.decode())
    finally:
        os.close(file)
    return serving, reading


def sealed(connection: socket.socket, secret: str, accepted_within_s: float | None = None) -> socket.socket:
    """A connection within TLS, or as it is if it does not leave the host. Raises OSError, and closes it.

    `accepted_within_s`: it was accepted, and whoever dialled has so long to prove that it knows the secret.
    """
    if connection.family == socket.AF_UNIX:
        return connection
    serving, reading = contexts(secret)
    try:
        if accepted_within_s is None:
            return reading.wrap_socket(connection)
        connection.settimeout(accepted_within_s)
        accepted = serving.wrap_socket(connection, server_side=True)
        accepted.settimeout(None)
    except OSError:
        connection.close()
        raise
    return accepted


def _identity(secret: str) -> tuple[bytes, bytes]:
    """Certificate and key in PEM, the same ones for the same secret."""
    key = Ed25519PrivateKey.from_private_bytes(hmac.digest(secret.encode(), b"tokenfleet kv", hashlib.sha256))
    who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tokenfleet kv")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(ALWAYS[0])
        .not_valid_after(ALWAYS[1])
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM), private
