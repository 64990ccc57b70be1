"""The worker types of a mixed fleet, as `advise --kind` names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from controlplane.errors import BadInput
from tokenfleet.advise.view import MOST

NAMES = ("gpu", "tp", "profile", "min", "max", "apply")
KIND_HINT = "gpu=h100,tp=2,min=1,max=8,servers=ADDRESSES (or labels of pods; min and tp default to 1)"


@dataclass(frozen=True, slots=True)
class KindAsked:
    """A worker type: its hardware or step times, bounds, what is scaled, and its servers.

    `servers`: addresses, or a selector of pods or of Prometheus.
    """

    gpu: str | None
    tp: int | None
    profile: Path | None
    low: int
    high: int | None
    apply: str | None
    servers: str

    @property
    def is_listed(self) -> bool:
        """Whether the servers are addresses: those have a port."""
        return ":" in self.servers and not self.servers.startswith("{")


def kinds_asked(texts: Sequence[str] | None, is_replay: bool = False) -> list[KindAsked]:
    """The worker types of these --kind; those of a replay have no servers. Raises BadInput."""
    kinds = [_kind(text, is_replay) for text in texts or ()]
    if len(kinds) == 1:
        raise BadInput("--kind: a mixed fleet has two types or more; of one, give --gpu and its servers")
    if is_replay and any(kind.servers or kind.apply for kind in kinds):
        raise BadInput("--replay: reads a trace and no servers; leave out servers= and apply= of --kind")
    if any(kind.apply and kind.high is None for kind in kinds):
        raise BadInput("--kind: apply: needs a ceiling; give max")
    return kinds


def _kind(text: str, is_replay: bool) -> KindAsked:
    head, _, servers = text.partition("servers=")
    values: dict[str, str] = {}
    for part in filter(None, head.split(",")):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in NAMES or name in values:
            raise BadInput(f"--kind: expected {KIND_HINT}, got {text!r}")
        values[name] = value.strip()
    has_servers = bool(servers) or is_replay
    if not has_servers or ("gpu" in values) == ("profile" in values):
        needs = "either gpu= or profile=" if has_servers else "servers= at its end"
        raise BadInput(f"--kind: needs {needs}, got {text!r}; expected {KIND_HINT}")
    low, high = _count(values, "min", 0), _count(values, "max", 1)
    low = 1 if low is None else low
    if high is not None and low > high:
        raise BadInput(f"--kind: min: must not be above max, got {low} and {high}")
    profile = Path(values["profile"]) if "profile" in values else None
    tp = _count(values, "tp", 1)
    return KindAsked(values.get("gpu"), tp, profile, low, high, values.get("apply"), servers)


def _count(values: dict[str, str], name: str, least: int) -> int | None:
    value = values.get(name)
    if value is not None and not (value.isdecimal() and least <= int(value) <= MOST):
        raise BadInput(f"--kind: {name}: expected a number from {least} on, got {value!r}")
    return None if value is None else int(value)
