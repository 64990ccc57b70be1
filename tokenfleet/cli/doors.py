"""Keys and certificate of a server that others can reach, from the flags of `serve` and `api`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from controlplane.errors import BadInput
from dataplane.http.keys import ApiKey, read_keys
from dataplane.http.tls import ServerCertificate, is_loopback

TlsCert = Annotated[
    Path | None,
    typer.Option(help="PEM certificate (with its chain) to serve HTTPS with; read anew when it changes"),
]
TlsKey = Annotated[Path | None, typer.Option(help="and its private key")]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="serve others in the clear: a proxy or a private network keeps what is sent secret"
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(help="PEM file of who signed its certificate (default: the system's, or SSL_CERT_FILE)"),
]


def certificate_of(
    certificate: Path | None, key: Path | None, insecure: bool, hosts: Mapping[str, str]
) -> ServerCertificate | None:
    """What to serve HTTPS with; `hosts` by flag. Raises BadInput where others would be served without."""
    if (certificate is None) != (key is None):
        given, missing = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise BadInput(f"{given}: needs {missing} beside it")
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


def keys_of(given: Sequence[str], file: Path | None, host: str) -> tuple[ApiKey, ...]:
    """The keys of clients; raises BadInput for a door to others without one."""
    keys = [ApiKey(f"key-{i}", secret) for i, secret in enumerate(given)]
    keys += read_keys(file) if file is not None else []
    if not keys and (secret := os.environ.get("VLLM_API_KEY")):
        keys = [ApiKey("key-0", secret)]
    if not is_loopback(host) and not keys:
        raise BadInput(f"--host: {host} is reachable by others, so give --api-key or --api-keys")
    return tuple(keys)
