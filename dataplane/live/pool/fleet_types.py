"""The types of worker of a fleet: one, or several at a time, and how many of each it starts with.

Requests go to workers of any type; KV moves between those of one type, since another lays it out differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from controlplane.errors import BadInput
from controlplane.worker_type import WorkerGroup, WorkerType

# GPUs whose name Ray gives to nodes that have them; any other is asked for by number only.
RAY_NAMES = ("A100", "A10G", "B200", "GB200", "H100", "H200", "L4", "L40S", "V100")


class FleetTypes:
    """A fleet's types by name, in the order given; in messages a type is a kind, as `--kind` has it.

    Raises BadInput where two have one name, or more workers are to start than can be had.
    """

    def __init__(self, groups: Sequence[WorkerGroup]) -> None:
        self._groups = {group.worker_type.name: group for group in groups}
        if not groups or len(self._groups) < len(groups):
            names = ", ".join(group.worker_type.name for group in groups) or "none"
            raise BadInput(f"kinds: expected different ones, got {names}")
        for name, group in self._groups.items():
            limit, least = group.worker_type.limit, max(group.workers, 1)
            if group.workers < 0:
                raise BadInput(f"kind {name}: workers: must be at least 0, got {group.workers}")
            if limit is not None and limit < least:
                raise BadInput(f"kind {name}: max: must be at least {least}, got {limit}")

    def __iter__(self) -> Iterator[WorkerType]:
        return (group.worker_type for group in self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, name: str) -> WorkerType:
        return self._groups[name].worker_type

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._groups)

    @property
    def gpus_differ(self) -> bool:
        """Whether there are several types of GPU, so that a worker must ask for its own."""
        return len({worker_type.gpu for worker_type in self}) > 1

    @property
    def workers(self) -> dict[str, int]:
        """How many of each to start with."""
        return {name: group.workers for name, group in self._groups.items()}

    @property
    def gpus(self) -> int:
        """GPUs of all workers to start with."""
        return sum(group.gpus for group in self._groups.values())

    def only(self) -> str:
        """The name of the one type there is. Raises BadInput, naming them, where there are several."""
        if len(self) > 1:
            raise BadInput(f"kind: this fleet has several, so say which: {', '.join(self.names)}")
        return self.names[0]

    def checked_name(self, name: str) -> str:
        """The name, where there is such a type; raises BadInput, naming those there are."""
        if name not in self._groups:
            raise BadInput(f"kind: expected one of {', '.join(self.names)}, got {name!r}")
        return name

    def check_gpus(self, resources: Mapping[str, float]) -> None:
        """Raise BadInput unless a Ray cluster of these resources has the GPUs that the fleet starts with."""
        gpus = int(resources.get("GPU", 0))
        groups = self._groups.values()
        if gpus < self.gpus:
            parts = ", ".join(f"{group.workers} workers of {group.worker_type.gpus} GPUs" for group in groups)
            raise BadInput(f"--workers: {parts} need {self.gpus}, Ray has {gpus}")
        for group in groups if self.gpus_differ else ():
            name = accelerator(group.worker_type)
            if group.workers and name and f"accelerator_type:{name}" not in resources:
                raise BadInput(f"--workers: {group.worker_type.name}: Ray has no node with {name} GPUs")


def accelerator(worker_type: WorkerType) -> str | None:
    """What Ray calls the type's GPU; None where it has no name for it."""
    name = (worker_type.gpu or "").split("-")[0].upper()
    return name if name in RAY_NAMES else None
