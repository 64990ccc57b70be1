"""KV offload to a worker's host memory: what is kept there, its text, and why it is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from controlplane.errors import BadInput
from controlplane.types import ABOVE_0

HOST_KV = re.compile(r"(\d+(?:\.\d+)?)(MiB|GiB|TiB)(?:@(\d+(?:\.\d+)?)GB/s)?")
BYTES = {"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True)
class HostKv:
    """Host memory of a worker that keeps KV which has left its GPUs, and what a GPU loads of it a second."""

    capacity_bytes: int = field(metadata=ABOVE_0)
    bytes_per_s: float = field(metadata=ABOVE_0)

    def __post_init__(self) -> None:
        if self.capacity_bytes < 1 or not 0 < self.bytes_per_s < float("inf"):
            raise BadInput(f"host_kv: capacity_bytes and bytes_per_s must be above 0, got {self}")


def parse_host_kv(text: str) -> tuple[int, float | None] | None:
    """Bytes of host memory, and those a second that a GPU loads from it: `64GiB@25GB/s`; None for `off`.

    The rate is None where none is given. Raises BadInput.
    """
    if text == "off":
        return None
    found = HOST_KV.fullmatch(text)
    size = float(found[1]) * BYTES[found[2]] if found else 0.0
    rate = float(found[3]) * 1e9 if found and found[3] else None
    if found is None or not 0 < size <= 1 << 50 or (rate is not None and not 0 < rate <= 1e15):
        raise no_offload(
            f"expected memory of a worker and what a GPU loads of it: 64GiB@25GB/s, got {text!r}"
        )
    return int(size), rate


def no_offload(why: str) -> BadInput:
    """The refusal of KV offload to host memory, by the name of its option."""
    return BadInput(f"--host-kv: {why}")
