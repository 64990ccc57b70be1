"""A worker's node: the address it is reached at there, its share of the cores, and its end with Ray's daemon.

Cores are claimed by abstract Unix sockets, whose names belong to a host and go with the process that holds
them: workers of one fleet share a host's cores out among themselves, however they came there, and a share is
free again when its worker has ended, however it ended.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import ray.util

TURNS = 64  # workers that may come to share one share of the cores


def node_address() -> str:
    """The address that other nodes of the Ray cluster reach this one by."""
    return str(ray.util.get_node_ip_address())


class Cores:
    """The cores of this node that a worker has claimed, for as long as its process lives."""

    def __init__(self, ranks: int, shares: int, fleet: str, cores: Sequence[int] | None = None) -> None:
        """Claim one of `shares` equal parts of the node's cores for each rank; `fleet` is its secret."""
        cores = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
        width = max(1, len(cores) // max(1, shares))
        cut = [cores[i : i + width] for i in range(0, len(cores) - width + 1, width)]
        self._claims: list[socket.socket] = []
        name = f"tokenfleet-cores-{hashlib.sha256(fleet.encode()).hexdigest()[:16]}"
        taken = [cut[self._claim(name, len(cut))] for _ in range(ranks)]
        self.binding = "|".join(",".join(map(str, share)) for share in taken)

    def release(self) -> None:
        """Let another worker have them."""
        for claim in self._claims:
            claim.close()
        self._claims.clear()

    def _claim(self, name: str, shares: int) -> int:
        """Take the first share that is free in the first turn: a worker launched late finds the gap."""
        for turn in range(TURNS):
            for share in range(shares):
                claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                try:
                    claim.bind(f"\0{name}-{share}-{turn}")
                except OSError:
                    claim.close()
                else:
                    self._claims.append(claim)
                    return share
        return 0


class RayDaemon:
    """The raylet that started this process. Without it nobody can reach the actor to end it."""

    def __init__(self, name: str = "raylet") -> None:
        parent = os.getppid()
        is_daemon = Path(f"/proc/{parent}/comm").read_text().strip() == name
        self._pid = parent if is_daemon else 0  # started by something else, its end is not ours to judge

    @property
    def is_gone(self) -> bool:
        return self._pid != 0 and os.getppid() != self._pid
