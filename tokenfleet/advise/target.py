"""The object whose `scale` follows the advice: a Deployment or a StatefulSet; and HOST:PORT in flags."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from controlplane.errors import BadInput

KINDS = {"deployment": "Deployment", "statefulset": "StatefulSet"}
NAME = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """A Deployment or StatefulSet by its name."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind.lower()}/{self.name}"


def scale_target(text: str, flag: str) -> ScaleTarget:
    """`deployment/NAME` or `statefulset/NAME`. Raises BadInput."""
    kind, _, name = text.partition("/")
    if kind not in KINDS or re.fullmatch(NAME, name) is None:
        raise BadInput(f"{flag}: expected deployment/NAME or statefulset/NAME, got {text!r}")
    return ScaleTarget(KINDS[kind], name)


def host_port(text: str, flag: str) -> tuple[str, int]:
    """HOST:PORT in two parts. Raises BadInput."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise BadInput(f"{flag}: expected HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)


def listening_at(text: str, flag: str) -> socket.socket:
    """A bound socket at HOST:PORT. Raises BadInput."""
    from dataplane.http.server import bind  # loads uvicorn

    return bind(*host_port(text, flag), flag)
