"""The kinds of worker that a fleet is made of: one kind, or a mix as a plan may have it.

Requests go to workers of any kind; KV moves between workers of one kind only, since another kind lays it out
differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile

# GPUs whose name Ray gives to nodes that have them; any other is asked for by number only.
RAY_NAMES = ("A100", "A10G", "B200", "GB200", "H100", "H200", "L4", "L40S", "V100")


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """One kind of worker: `workers` to start with, each over `tp_degree` GPUs of the type `gpu` (None: any).

    `profile`: what placement expects of it, and what an emulated one is like. `usd_per_h`: the price of a
    worker. `high`: how many can be had, None for as many as the fleet may have. `reclaims_per_h`: how often a
    spot worker is taken away, 0 for one that stays.
    """

    workers: int
    tp_degree: int = 1
    gpu: str | None = None
    profile: Profile | None = None
    usd_per_h: float | None = None
    high: int | None = None
    reclaims_per_h: float = 0.0

    def __post_init__(self) -> None:
        if self.workers < 0 or self.tp_degree < 1:
            raise BadInput(f"kind {self.name}: workers and TP degree: expected at least 0 and 1")
        if self.high is not None and self.high < max(self.workers, 1):
            raise BadInput(f"kind {self.name}: max: must be at least {max(self.workers, 1)}, got {self.high}")

    @property
    def name(self) -> str:
        """As plans print it."""
        return f"{self.gpu} TP{self.tp_degree}" if self.gpu else f"TP{self.tp_degree}"

    @property
    def accelerator(self) -> str | None:
        """What Ray calls its GPU."""
        name = (self.gpu or "").split("-")[0].upper()
        return name if name in RAY_NAMES else None


class Kinds:
    """The kinds of a fleet by name, in the order given. Raises BadInput where two have one name."""

    def __init__(self, kinds: Sequence[WorkerKind]) -> None:
        self._kinds = {kind.name: kind for kind in kinds}
        if not kinds or len(self._kinds) < len(kinds):
            names = ", ".join(kind.name for kind in kinds) or "none"
            raise BadInput(f"kinds: expected different ones, got {names}")

    def __iter__(self) -> Iterator[WorkerKind]:
        return iter(self._kinds.values())

    def __len__(self) -> int:
        return len(self._kinds)

    def __getitem__(self, name: str) -> WorkerKind:
        return self._kinds[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._kinds)

    @property
    def are_typed(self) -> bool:
        """Whether their GPUs differ, so that a worker must ask for its type."""
        return len({kind.gpu for kind in self}) > 1

    @property
    def workers(self) -> dict[str, int]:
        """How many of each to start with."""
        return {kind.name: kind.workers for kind in self}

    def only(self) -> str:
        """The name of the one kind there is. Raises BadInput, naming them, where there are several."""
        if len(self) > 1:
            raise BadInput(f"kind: this fleet has several, so say which: {', '.join(self.names)}")
        return self.names[0]

    def checked_name(self, name: str) -> str:
        """The name, where there is such a kind; raises BadInput, naming those there are."""
        if name not in self._kinds:
            raise BadInput(f"kind: expected one of {', '.join(self.names)}, got {name!r}")
        return name

    def check_gpus(self, resources: Mapping[str, float]) -> None:
        """Raise BadInput unless a Ray cluster of these resources has the GPUs that the fleet starts with."""
        needed = sum(kind.workers * kind.tp_degree for kind in self)
        gpus = int(resources.get("GPU", 0))
        if gpus < needed:
            parts = ", ".join(f"{kind.workers} workers of {kind.tp_degree} GPUs" for kind in self)
            raise BadInput(f"--workers: {parts} need {needed}, Ray has {gpus}")
        for kind in self if self.are_typed else ():
            if kind.workers and kind.accelerator and f"accelerator_type:{kind.accelerator}" not in resources:
                raise BadInput(f"--workers: {kind.name}: Ray has no node with {kind.accelerator} GPUs")
