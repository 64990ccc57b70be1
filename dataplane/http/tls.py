"""TLS of the HTTP servers: their certificate, checked when it is read, and read again when its files change.

Each connection takes the certificate that is in force when its handshake begins. So a new one is in force
whole or not at all, in every server that shares it. Connections that are open go on.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from controlplane.errors import BadInput

if TYPE_CHECKING:
    from cryptography.x509 import Certificate


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    return host in ("localhost", "::1") or host.startswith("127.")


class ServerCertificate:
    """A certificate and its key, from PEM files. `context` is what servers are given, once.

    Raises BadInput, as `reload` does, for files that cannot be served with: unreadable, expired, for none
    of the names among `hosts`, or a key that does not fit.
    """

    def __init__(self, certificate: Path, key: Path, hosts: Sequence[str] = ()) -> None:
        self.files = (certificate, key)
        self._hosts = hosts
        self.reload()
        self.context = self._current
        # OpenSSL calls it for every client, also for one that names no server.
        self.context.sni_callback = lambda connection, name, context: setattr(
            connection, "context", self._current
        )

    def reload(self) -> None:
        """Read the files; where they cannot be served with, what was in force stays."""
        self._current = _context(*self.files, self._hosts)


def certificate_of(
    certificate: Path | None, key: Path | None, insecure: bool, hosts: Mapping[str, str]
) -> ServerCertificate | None:
    """What to serve HTTPS with; `hosts` by flag. Raises BadInput where others would be served without."""
    if (certificate is None) != (key is None):
        given, missing = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise BadInput(f"{given}: needs {missing} too")
    if certificate is not None and key is not None:
        if insecure:
            raise BadInput("--insecure: serves in the clear; leave it out with --tls-cert")
        return ServerCertificate(certificate, key, tuple(hosts.values()))
    for flag, host in hosts.items():
        if not is_loopback(host) and not insecure:
            raise BadInput(
                f"{flag}: {host} is reachable by others, who could read keys and prompts on their way:"
                " give --tls-cert and --tls-key, or --insecure where a proxy or a private network keeps them"
            )
    return None


def client_context(authority: Path | None) -> ssl.SSLContext:
    """What a client trusts: the authorities in a PEM file, else the system's (or SSL_CERT_FILE's)."""
    if authority is None:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cafile=str(authority))
    except OSError as error:  # ssl's errors are, too
        why = "holds no certificate in PEM form" if isinstance(error, ssl.SSLError) else error.strerror
        raise BadInput(f"--tls-ca: {authority}: {why}") from None


def own_host_context() -> ssl.SSLContext:
    """For connections to a server of this fleet on this host: what is sent never leaves it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def distrust(error: object) -> str | None:
    """Why a server's certificate was not accepted, in words; None for any other failure."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message} (--tls-ca names who signed it)"
    return None


def _context(certificate: Path, key: Path, hosts: Sequence[str]) -> ssl.SSLContext:
    _check(certificate, _read(certificate, "--tls-cert"), hosts)
    _read(key, "--tls-key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password at hand OpenSSL would ask for one at the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        fits = "MISMATCH" not in str(getattr(error, "reason", ""))
        why = "holds no private key in PEM form without a password" if fits else f"does not fit {certificate}"
        raise BadInput(f"--tls-key: {key}: {why}") from None
    return context


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{flag}: {path}: cannot be read: {error.strerror}") from None


def _check(path: Path, text: bytes, hosts: Sequence[str]) -> None:
    """Raise BadInput for a certificate that every client would refuse."""
    from cryptography.x509 import load_pem_x509_certificate

    try:
        certificate = load_pem_x509_certificate(text)
    except ValueError:
        raise BadInput(f"--tls-cert: {path}: holds no certificate in PEM form") from None
    now = datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise BadInput(f"--tls-cert: {path}: expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    if now < certificate.not_valid_before_utc:
        raise BadInput(
            f"--tls-cert: {path}: not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        )
    names = _names(certificate)
    for host in filter(_is_name, hosts):
        if not any(_covers(name, host) for name in names):
            raise BadInput(f"--tls-cert: {path}: is for {', '.join(names) or 'no name'}, not for {host}")


def _names(certificate: Certificate) -> list[str]:
    from cryptography.x509 import DNSName, ExtensionNotFound, SubjectAlternativeName

    try:
        found = certificate.extensions.get_extension_for_class(SubjectAlternativeName).value
    except ExtensionNotFound:
        return []
    return list(found.get_values_for_type(DNSName))


def _is_name(host: str) -> bool:
    """Whether clients can only mean this host by this name; an address usually has another name as well."""
    with suppress(ValueError):
        ip_address(host)
        return False
    return bool(host)


def _covers(name: str, host: str) -> bool:
    if name.startswith("*."):
        return name[1:].lower() == host[host.find(".") :].lower()
    return name.lower() == host.lower()
