"""The types of worker of a fleet: one, or several at a time, and how many of each it starts with.

Requests go to workers of any type; KV moves between those of one type, since another lays it out differently,
and from prefill to decode workers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import EngineLimits
from controlplane.perfmodel.offload import no_offload
from controlplane.perfmodel.profile import Profile
from controlplane.types import Role
from controlplane.worker_type import WorkerGroup, WorkerType

# GPUs whose name Ray gives to nodes that have them; any other is asked for by number only.
RAY_NAMES = ("A100", "A10G", "B200", "GB200", "H100", "H200", "L4", "L40S", "RTX-PRO-6000", "V100")
CPU = "cpu"  # the GPU's name in a profile of an engine that computes on CPUs
AS_IS = "--as-is serves the plan's workers on what is here, without its step times"
LEAST_KV = 0.95  # of the KV memory that was planned with
ZONE, MARKET = "ray.io/availability-zone", "ray.io/market-type"  # labels of Ray's nodes
Market = Literal["on-demand", "spot"]
MARKETS: tuple[Market, ...] = get_args(Market)
Node = Mapping[str, Any]  # as Ray tells it


class Begun(NamedTuple):
    """Workers that a fleet begins with, the first `on_demand` of them on demand (None: all)."""

    group: WorkerGroup
    on_demand: float | None = None

    def bought(self, market: Market | None) -> WorkerGroup:
        """Those of them that are bought so; None: all."""
        if market is None:
            return self.group
        n = self.group.workers
        on_demand = n if self.on_demand is None else int(min(self.on_demand, n))
        return replace(self.group, workers=on_demand if market == "on-demand" else n - on_demand)


@dataclass(frozen=True, slots=True)
class Site:
    """The place where a fleet's workers may be, and the fleets that start there with it.

    `zone`: of the Ray nodes that they are on; None for any node. `beside`: the workers of other models of a
    portfolio that begin in the same zone. `is_first`: whether this fleet speaks for all of them there.
    `on_demand`: how many workers are on demand, with those beyond them on spot; None for either. That holds
    where any node has the label MARKET (spot or on demand); nodes without it are on demand.
    """

    zone: str | None = None
    beside: tuple[Begun, ...] = ()
    is_first: bool = True
    on_demand: float | None = None

    @property
    def name(self) -> str:
        """The beginning of refusals; empty if the fleet is alone and anywhere."""
        zone = f": zone {self.zone}" if self.zone else ""
        return f"--portfolio{zone}" if zone or self.beside or self.on_demand is not None else ""

    def nodes(self, nodes: Sequence[Node], market: Market | None = None) -> list[Node]:
        """Those of Ray's nodes that are alive, in the zone and bought so (None: either way)."""
        there = [n for n in nodes if n["Alive"] and self.zone in (None, n["Labels"].get(ZONE))]
        return [n for n in there if market in (None, market_of(n))]

    def markets(self, nodes: Sequence[Node]) -> tuple[Market | None, ...]:
        """The ways in which nodes are bought, where labels tell them apart: those of dead nodes, too."""
        is_told = self.on_demand is not None and any(MARKET in n["Labels"] for n in nodes)
        return MARKETS if is_told else (None,)

    def market(self, nodes: Sequence[Node], on_demand: int) -> Market | None:
        """The market of the next worker with `on_demand` workers on demand; None for any node of the zone."""
        if self.on_demand is None or self.markets(nodes) == (None,):
            return None
        return "on-demand" if on_demand < self.on_demand else "spot"

    def labels(self, market: Market | None) -> dict[str, str]:
        """The node labels that Ray must match."""
        bought = {None: {}, "spot": {MARKET: "spot"}, "on-demand": {MARKET: "!spot"}}[market]
        return ({ZONE: self.zone} if self.zone else {}) | bought

    def where(self, market: Market | None) -> str:
        """The nodes in words, to come after "node"."""
        zone = f" of zone {self.zone}" if self.zone else ""
        return zone + (f" {_BOUGHT[market]}" if market else "")

    def check(self, nodes: Sequence[Node], own: Sequence[WorkerGroup] = ()) -> None:
        """Raise BadInput where none of Ray's nodes is in the zone, or none there is bought as workers are."""
        if self.zone is not None and not self.nodes(nodes):
            there = sorted({str(n["Labels"][ZONE]) for n in nodes if n["Alive"] and ZONE in n["Labels"]})
            label = f"{ZONE}={self.zone}"
            has = f"there are {', '.join(there)}" if there else "none has a zone"
            raise BadInput(f"{self.name}: Ray has no node with the label {label}; {has}")
        for market in self.markets(nodes):
            workers = sum(begun.bought(market).workers for begun in self.begun(own))
            if market and workers and not self.nodes(nodes, market):
                node = "node there" if self.zone else "node"
                node += f" {'with' if market == 'spot' else 'without'} the label {MARKET}=spot"
                wanted = f"{workers} workers are planned {_BOUGHT[market]}"
                raise BadInput(f"{self.name}: Ray has no {node}; {wanted}")

    def begun(self, own: Sequence[WorkerGroup]) -> list[Begun]:
        """The fleet's own workers, and those of others that begin there."""
        return [*(Begun(group, self.on_demand) for group in own), *self.beside]


_BOUGHT = {"on-demand": "on demand", "spot": "on spot"}


def market_of(node: Node) -> Market:
    """The market of a node, if some nodes are labelled: on demand unless its label MARKET is spot."""
    return "spot" if node["Labels"].get(MARKET) == "spot" else "on-demand"


ANYWHERE = Site()


class FleetTypes:
    """A fleet's types by name, in the order given; in messages a type is a kind, as `--kind` has it.

    `planned`: by kind, the engine limits that a plan fixed; its workers must then be as they were planned.
    `prefix_cache`: whether a plan's engines cache prefixes; None where it does not say.
    `as_is`: an operator's flags go before those limits. Raises BadInput where two types have one name, or
    more workers are to start than can be had.
    """

    def __init__(
        self,
        groups: Sequence[WorkerGroup],
        planned: Mapping[str, EngineLimits] | None = None,
        as_is: bool = False,
        prefix_cache: bool | None = None,
    ) -> None:
        self.planned, self.as_is, self.prefix_cache = dict(planned or {}), as_is, prefix_cache
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
        self.check_roles(self.workers)

    def __iter__(self) -> Iterator[WorkerType]:
        return (group.worker_type for group in self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, name: str) -> WorkerType:
        return self._groups[name].worker_type

    @property
    def groups(self) -> tuple[WorkerGroup, ...]:
        """The types with how many of each to start with."""
        return tuple(self._groups.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._groups)

    def add(self, groups: Sequence[WorkerGroup], planned: Mapping[str, EngineLimits]) -> None:
        """Let there be workers of these types, too: none of them yet."""
        for group in groups:
            name = group.worker_type.name
            self._groups.setdefault(name, replace(group, workers=0))
            if name in planned:
                self.planned.setdefault(name, planned[name])

    def keep(self, names: Collection[str]) -> None:
        """Let there be no other types than these any more."""
        self._groups = {name: group for name, group in self._groups.items() if name in names}

    @property
    def by_gpu(self) -> bool:
        """Whether a worker must ask for its own type of GPU: one of several, or a plan's."""
        return bool(self.planned) or len({worker_type.gpu for worker_type in self}) > 1

    @property
    def workers(self) -> dict[str, int]:
        """The number of each type to start with."""
        return {name: group.workers for name, group in self._groups.items()}

    @property
    def gpus(self) -> int:
        """GPUs of all workers to start with."""
        return sum(group.gpus for group in self._groups.values())

    def only(self) -> str:
        """The name of the one type there is. Raises BadInput, naming them, where there are several."""
        if len(self) > 1:
            raise BadInput(f"kind: missing, expected one of this fleet's types: {', '.join(self.names)}")
        return self.names[0]

    def checked_name(self, name: str) -> str:
        """The name, where there is such a type; raises BadInput, naming those there are."""
        if name not in self._groups:
            raise BadInput(f"kind: expected one of {', '.join(self.names)}, got {name!r}")
        return name

    def in_role(self, name: str, role: Role) -> str:
        """The name of that type in another role. Raises BadInput where the fleet has no such type."""
        alike = {t.role: t.name for t in self if t.hardware == self[name].hardware}
        if role not in alike:
            raise BadInput(f"role: expected one of this fleet's: {', '.join(alike)}; got {role!r}")
        return alike[role]

    def check_roles(self, counts: Mapping[str, int]) -> None:
        """Raise BadInput where these `counts` of each type leave a phase that no worker does."""
        has = {t.role for t in self if counts[t.name] > 0}
        if "prefill" in has and "decode" not in has:
            raise BadInput("role: prefill workers need a decode worker to hand requests over to")
        if has == {"decode"}:
            raise BadInput("role: decode workers need a prefill worker, or one of any role, before them")

    def check_gpus(
        self, nodes: Sequence[Mapping[str, float]], site: Site = ANYWHERE, market: Market | None = None
    ) -> None:
        """Raise BadInput unless Ray nodes of these resources hold the workers that the fleet starts with.

        With a `market` those that are bought so, as the nodes are. All GPUs of a worker are on one node; so
        are those of other models' workers at the same `site`. Parts of GPUs come last: those of a portfolio
        are all alike, so that they fill GPUs that are left.
        """
        groups = [begun.bought(market) for begun in site.begun(self.groups)]
        groups = [group for group in groups if group.workers or market is None]
        where = site.name or ("--plan" if self.planned else "--workers")
        where += f": {_BOUGHT[market]}" if market else ""
        parts = ", ".join(f"{g.workers} workers of {g.worker_type.reserved_gpus:g} GPUs" for g in groups)
        needed = sum(group.workers * group.worker_type.reserved_gpus for group in groups)
        free = [float(int(node.get("GPU", 0))) for node in nodes]
        if sum(free) < needed:
            there = "Ray has" if site.zone is None and market is None else "Ray's nodes there have"
            raise BadInput(f"{where}: {parts} need {needed:g}, {there} {sum(free):g}")
        for group in sorted(groups, key=lambda group: -group.worker_type.reserved_gpus):
            self._take_gpus(group, nodes, free, where)

    def _take_gpus(
        self, group: WorkerGroup, nodes: Sequence[Mapping[str, float]], free: list[float], where: str
    ) -> None:
        """Take the GPUs of a group's workers off what is `free` of the nodes. Raises BadInput."""
        name = self._accelerator(group.worker_type, where)
        own = [i for i, at in enumerate(nodes) if name is None or f"accelerator_type:{name}" in at]
        if group.workers and not own:
            rest = f"; {AS_IS}" if self.planned else ""
            raise BadInput(f"{where}: {group.worker_type.name}: Ray has no node with {name} GPUs{rest}")
        if not _placed(group, own, free):
            has = ", ".join(str(int(node.get("GPU", 0))) for node in nodes)
            what = f"{group.worker_type.reserved_gpus:g} {name or ''} GPUs".replace("  ", " ")
            raise BadInput(
                f"{where}: {group.workers} workers of {what}, each on one node, do not fit on Ray's"
                f" nodes, which have {has}"
            )

    def _accelerator(self, worker_type: WorkerType, where: str) -> str | None:
        """A worker's Ray resource besides GPUs. Raises BadInput if a plan's has no name."""
        name = accelerator(worker_type) if self.by_gpu else None
        gpu = worker_type.gpu
        if self.planned and gpu is not None and name is None:
            raise BadInput(f"{where}: {worker_type.name}: Ray does not say which nodes have {gpu}; {AS_IS}")
        return name

    def check_cpus(self) -> None:
        """Raise BadInput where a plan's workers are on GPUs: engines compute on this host's CPUs."""
        for t in self if self.planned else ():
            if t.gpu not in (None, CPU):
                raise BadInput(f"--plan: planned for {t.name}, but this host has no GPU; {AS_IS}")

    def check_drafts(self, asked: Mapping[str, Any] | None) -> None:
        """Raise BadInput unless vLLM is asked for as many drafts as each kind's profile counts."""
        drafted = int((asked or {}).get("num_speculative_tokens") or 0)
        for t in self:
            if t.known_profile is None:
                continue
            planned = 0 if t.known_profile.speculation is None else t.known_profile.speculation.drafted
            if planned and drafted != planned:
                how = f'-- --speculative-config \'{{"method": …, "num_speculative_tokens": {planned}}}\''
                raise BadInput(f"{t.name}: its step times count {planned} drafted tokens: say {how}")
            if asked and not planned:
                raise BadInput(f"--speculative-config: the step times of {t.name} count no drafts; {AS_IS}")

    def host_bytes(self, kind: str) -> int:
        """The CPU memory for KV offload that a plan gives a worker; 0 for none."""
        profile = self[kind].known_profile
        has = kind in self.planned and not self.as_is
        return profile.host_bytes if has and profile is not None else 0

    def check_host_memory(self, arguments: Any) -> None:
        """Raise BadInput where KV offload would be combined with what was not tried with it."""
        asked: float | None = arguments.kv_offloading_size
        planned = {kind: self.host_bytes(kind) / (1 << 30) for kind in self.names}
        for kind, gib in planned.items() if self.planned and not self.as_is else ():
            if asked not in (None, gib):
                was = f"with {gib:g} GiB" if gib else "without"
                raise no_offload(f"{kind} was planned {was}, not with {asked:g} GiB; {AS_IS}")
        if asked is None and not any(planned.values()):
            return
        if any(t.role != "any" for t in self):
            raise no_offload("not with prefill and decode workers")
        if arguments.speculative_config:
            raise no_offload("not with --speculative-config")
        if arguments.enable_prefix_caching is False:
            raise no_offload("what leaves KV is found by prefixes, which are not cached")

    def check_flags(self, arguments: object) -> None:
        """Raise BadInput where an operator's vLLM flags contradict what a plan fixed."""
        for kind, limits in () if self.as_is else self.planned.items():
            fixed = {
                "max_num_seqs": limits.max_seqs,
                "max_num_batched_tokens": limits.max_batched_tokens,
                "tensor_parallel_size": self[kind].tp_degree,
                "enable_chunked_prefill": True,
            }
            if self.prefix_cache is not None:
                fixed["enable_prefix_caching"] = self.prefix_cache
            for name, planned in fixed.items():
                asked = getattr(arguments, name)
                if asked not in (None, planned) and (name, asked) != ("tensor_parallel_size", 1):
                    flag = f"--{name.replace('_', '-')}"
                    raise BadInput(f"{flag}: {kind} was planned with {planned}, not {asked}; {AS_IS}")

    def engine_settings(self, kind: str, asked: Mapping[str, object], on_cpus: bool) -> dict[str, object]:
        """vLLM's settings for a worker of a kind: what was asked, its TP degree, and what its plan fixed."""
        limits, profile = self.planned.get(kind), self[kind].known_profile
        fixed: dict[str, object] = {}
        memory: dict[str, object] = {}
        if limits is not None:
            fixed = {"max_num_seqs": limits.max_seqs, "max_num_batched_tokens": limits.max_batched_tokens}
            if self.prefix_cache is not None:
                fixed["enable_prefix_caching"] = self.prefix_cache
            if profile is not None and not self.as_is:
                memory = _memory(profile, on_cpus)
            if host_bytes := self.host_bytes(kind):
                fixed["kv_offloading_size"] = host_bytes / (1 << 30)
        settings = fixed | memory | dict(asked) | {"tensor_parallel_size": self[kind].tp_degree}
        # On a part of a GPU its neighbours have the rest.
        return settings if self[kind].workers_per_gpu == 1 else settings | memory

    def shortfall(self, kind: str, kv_tokens: int) -> str | None:
        """The shortfall of a started engine against its plan; None for none."""
        profile = self[kind].known_profile
        if kind not in self.planned or profile is None or self.as_is:
            return None
        if kv_tokens >= LEAST_KV * profile.kv.capacity_tokens:
            return None
        return (
            f"has room for {kv_tokens:,} tokens of KV, {kind} was planned with"
            f" {profile.kv.capacity_tokens:,}: give it more memory, or plan with what it has; {AS_IS}"
        )


def _placed(group: WorkerGroup, nodes: Sequence[int], free: list[float]) -> bool:
    """Take the GPUs of a group's workers off what is `free`, each worker's of one node; whether they fit."""
    gpus = group.worker_type.reserved_gpus
    for _ in range(group.workers):
        at = next((i for i in nodes if free[i] >= gpus), None)
        if at is None:
            return False
        free[at] -= gpus
    return True


def _memory(profile: Profile, on_cpus: bool) -> dict[str, object]:
    """The memory that a plan's engine takes; on GPUs it is held against the plan's KV once it has it.

    An engine that shares its GPU gets its KV size as a setting, too. vLLM would find it by the memory that is
    free before and after a first step. It counts the whole difference as its own, and so also what a
    neighbour takes or gives back just then.
    """
    kv, shared = profile.kv, profile.workers_per_gpu > 1
    settings: dict[str, object] = {}
    if (on_cpus or shared) and kv.bytes_per_token:
        settings["kv_cache_memory_bytes"] = kv.capacity_tokens * kv.bytes_per_token // profile.tp_degree
    if not on_cpus and kv.gpu_memory_utilization:
        settings["gpu_memory_utilization"] = kv.gpu_memory_utilization
    return settings


def accelerator(worker_type: WorkerType) -> str | None:
    """Ray's name of the type's GPU; None if it has none."""
    gpu = f"{worker_type.gpu or ''}-".upper()
    return next((name for name in RAY_NAMES if gpu.startswith(f"{name}-")), None)
