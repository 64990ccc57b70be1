"""A type of worker: what it runs on, what it can do, its price, limits and role, from plan to export."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile, with_times
from controlplane.perfmodel.ranks import Ranks
from controlplane.types import EngineMode, Role

HANDOVER_S = 0.01  # latency of a KV transfer without its bytes: the pause of a move (migration.move.Price)


@dataclass(frozen=True, slots=True)
class KvLink:
    """The network that carries KV from prefill to decode workers: a GPU's rate, and a transfer's latency."""

    bytes_per_s: float
    latency_s: float = HANDOVER_S

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.latency_s >= 0):
            raise BadInput(f"KV link: need bytes_per_s > 0 and latency_s >= 0, got {self}")

    def token_s(self, profile: Profile) -> float:
        """Seconds that a token of context adds to a hand-over; each GPU of a worker sends its own share."""
        return profile.kv.bytes_per_token / (self.bytes_per_s * profile.tp_degree)


@dataclass(frozen=True, slots=True)
class WorkerType:
    """One engine over `tp_degree` GPUs of the type `gpu`; None where any GPU will do.

    `known_profile`: its step times, KV memory and engine; None where nothing is known of them. `usd_per_h`:
    the price of a worker, None where it is not known. `host_usd_per_h`: the part of it that is for host
    memory with KV, 0 where that has no price of its own. `priced`: the price's date and source, for people.
    `low`: the workers that are always kept. `limit`: the most that can be had, None = no limit.
    `reclaims_per_h`: above 0 for spot workers, how often each is taken away. `role`: `prefill` makes first
    tokens and hands requests over to `decode`, `any` does both. `kv_link`: what it hands over by, None where
    that is not asked.
    """

    gpu: str | None
    tp_degree: int = 1
    known_profile: Profile | None = None
    usd_per_h: float | None = None
    priced: str = "no price known"
    low: int = 0
    limit: int | None = None
    reclaims_per_h: float = 0.0
    role: Role = "any"
    kv_link: KvLink | None = None
    host_usd_per_h: float = 0.0

    def __post_init__(self) -> None:
        where = f"worker type {self.name}"
        if self.tp_degree < 1:
            raise BadInput(f"{where}: TP degree: must be at least 1, got {self.tp_degree}")
        if self.usd_per_h is not None and not 0.0 <= self.usd_per_h < math.inf:
            raise BadInput(f"{where}: usd_per_h: must not be negative, got {self.usd_per_h:g}")
        if self.low < 0 or (self.limit is not None and self.limit < self.low):
            raise BadInput(f"{where}: need 0 <= low <= limit, got {self.low} and {self.limit}")
        if not 0.0 <= self.reclaims_per_h < math.inf:
            raise BadInput(f"{where}: reclaims_per_h: must not be negative, got {self.reclaims_per_h:g}")

    @classmethod
    def of(
        cls, profile: Profile, usd_per_h: float | None = None, priced: str = "no price known"
    ) -> WorkerType:
        """The type that a profile is of."""
        return cls(profile.gpu, profile.tp_degree, profile, usd_per_h, priced)

    @property
    def name(self) -> str:
        """The type's name within a fleet, as plans print it."""
        plain = f"{self.gpu} TP{self.tp_degree}" if self.gpu else f"TP{self.tp_degree}"
        if self.ranks is not None:
            plain += f" {self.ranks.name}"
        return name_in_role(plain, self.role)

    @property
    def ranks(self) -> Ranks | None:
        """Those of one worker, each over `tp_degree` GPUs; None where it is one engine."""
        return None if self.known_profile is None else self.known_profile.ranks

    @property
    def gpus(self) -> int:
        """GPUs of one worker, one that it shares with others among them."""
        return self.tp_degree * (1 if self.ranks is None else self.ranks.count)

    @property
    def hardware(self) -> tuple[str | None, int, Ranks | None]:
        """GPU type, TP degree and ranks. The types of a fleet that share it differ in their role alone."""
        return self.gpu, self.tp_degree, self.ranks

    @property
    def workers_per_gpu(self) -> int:
        """Workers on one of its GPUs, where they share it."""
        return 1 if self.known_profile is None else self.known_profile.workers_per_gpu

    @property
    def reserved_gpus(self) -> float:
        """GPUs that one worker keeps from others: a part of its one where it shares that."""
        return self.gpus if self.workers_per_gpu == 1 else self.gpus / self.workers_per_gpu

    def with_profile(self, profile: Profile) -> WorkerType:
        """The type as another profile has it, on the part of a GPU that it has. Raises BadInput."""
        n = self.workers_per_gpu
        return replace(self, known_profile=profile if n == 1 else profile.shared(n))

    def slowed(self, factor: float) -> WorkerType:
        """The type if its steps took `factor` times as long."""
        if self.known_profile is None:
            return self
        return replace(self, known_profile=with_times(self.known_profile, factor, factor))

    def shared(self, workers: int) -> WorkerType:
        """The type with `workers` workers on each GPU, each at its part of the price. Raises BadInput."""
        usd = None if self.usd_per_h is None else self.usd_per_h / workers
        priced = f"{self.priced}, 1/{workers} of a GPU"
        return replace(self, known_profile=self.profile.shared(workers), usd_per_h=usd, priced=priced)

    @property
    def usd_per_gpu_h(self) -> float | None:
        """The price of one GPU of a worker, or of its part of one."""
        return None if self.usd_per_h is None else self.usd_per_h / self.gpus

    @property
    def profile(self) -> Profile:
        """The profile, where nothing can be said without one. Raises BadInput."""
        if self.known_profile is None:
            raise BadInput(f"worker type {self.name}: no profile says what a worker can do")
        return self.known_profile

    @property
    def is_split(self) -> bool:
        return self.profile.engine.mode == EngineMode.SPLIT


def name_in_role(name: str, role: Role) -> str:
    """A type's name with its role, so that prefill and decode workers are counted apart."""
    return name if role == "any" else f"{name} {role}"


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """A number of workers of one type."""

    worker_type: WorkerType
    workers: int

    @property
    def role(self) -> Role:
        return self.worker_type.role

    @property
    def gpus(self) -> int:
        return self.workers * self.worker_type.gpus
