"""A simulated run: its workers, how it is laid out, and everything that changes during it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.perfmodel.coefficients import coefficient_row
from controlplane.perfmodel.offload import no_offload
from controlplane.perfmodel.profile import Profile, rank_of
from controlplane.perfmodel.speculation import paces
from controlplane.placement import policies
from controlplane.placement.caches import Caches, new_caches
from controlplane.placement.constraints import kept_tpot_s, yields_to
from controlplane.placement.ledger import OFF, ROLES, SERVING, Ledger, new_ledger
from controlplane.placement.lengths import LengthTable
from controlplane.placement.policies import PlacementSettings, Policy
from controlplane.types import EngineMode, Role, Slo
from controlplane.worker_type import KvLink
from controlplane.workload import Workload
from dataplane.simulated import records
from dataplane.simulated.outcome import Outcome, outcome_of
from dataplane.simulated.records import Cluster, Engines, Rules
from dataplane.simulated.sending import first_times, new_sending

OFFER_EVERY_S = 0.01
ENDLESS = 1 << 60


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker of the fleet and the changes to it (seconds since the trace's start).

    One of several ranks is simulated as that many engines that step together; outcomes number those.

    `ready_s`: when its start-up is over. `fails_s`: pairs (fails at, is back at); what it held is prefilled
    again elsewhere. `drain_s`: from when it admits nothing more. `link`: what a prefill worker hands KV
    over by; None: that takes no time.
    """

    profile: Profile
    role: Role = "any"
    ready_s: float = 0.0
    fails_s: tuple[tuple[float, float], ...] = ()
    drain_s: float | None = None
    link: KvLink | None = None


@dataclass(frozen=True)
class RunState:
    """A run that can be advanced piece by piece."""

    workload: Workload
    ledger: Ledger
    engines: Engines
    cluster: Cluster
    rules: Rules
    profiles: tuple[Profile, ...]
    slos: tuple[Slo, ...]
    settings: PlacementSettings
    policy: Policy
    migrates: bool
    # [requests] how many times as many steps as on average each takes, where drafts are accepted by chance
    pace: NDArray[np.float64] | float = 1.0

    @property
    def arrived(self) -> NDArray[np.int64]:
        """The requests that have been sent, in that order."""
        return self.cluster.sending.order[: int(self.cluster.sending.counts["sent"][0])]

    def outcome(self) -> Outcome:
        """The outcome of the requests so far, as clients see it (`Frontend.late_s`)."""
        found = outcome_of(self.workload, self.ledger, self.engines, self.pace)
        mean_s = np.array([profile.frontend.late_s for profile in self.profiles])
        if not mean_s.any():
            return found
        mean_s = np.where(found.worker < 0, 0.0, mean_s[self.ledger.workers["variant"][found.worker]])
        late_s = -mean_s * np.log1p(-self.rules.draws[:, 1])
        return replace(found, first_token_s=found.first_token_s + late_s, finish_s=found.finish_s + late_s)


class RunOptions(TypedDict, total=False):
    """The options of a run, in addition to its load, workers, targets and policy.

    `predictor` guesses output lengths (by default: learned from the workload's own lengths, the planner's
    situation); `predicted_tokens` [requests] overrides its first guess, for experiments with misprediction.
    `patience`: a request the policy holds back is placed regardless after this many of its TTFT targets.
    `max_misses`: stop once more requests have missed (of a sample: of its whole), when only a yes or no is
    wanted. `prefix_caching`: whether engines keep what a workload says its requests share. `agents`: how many
    of the workload's sessions run at once (sending.py).
    """

    settings: PlacementSettings | None
    predictor: LengthTable | None
    predicted_tokens: NDArray[np.int64] | None
    seed: int
    patience: float
    max_misses: int | None
    prefix_caching: bool
    agents: int | None


def prepare(
    workload: Workload,
    workers: Sequence[WorkerSpec],
    slo: Slo | Sequence[Slo],
    policy: Policy | str,
    **options: Unpack[RunOptions],
) -> RunState:
    """Lay out a run that has not begun; raises BadInput on what cannot be run."""
    placement, migrates = policies.read_policy(policy)
    code = policies.POLICY_CODE[placement]
    is_more = code == policies.EXACT or migrates  # than placing each request by itself, once
    workers, first_rank, ranks = _ranks(workers, is_more)
    split = _is_split(workers)
    classes = _classes(slo, workload)
    profiles, variant = _variants(workers, split)
    _check_policy(code, migrates, split, profiles, classes)
    requests = len(workload)
    settings = options.get("settings") or PlacementSettings()
    lengths = options.get("predictor") or _own_lengths(workload)
    most_misses = options.get("max_misses")
    caches = _caches(workload, profiles, variant) if options.get("prefix_caching", True) else None
    tier, host = records.new_tier(caches, workload.prefixes, profiles, variant)
    if tier is not None and migrates:
        raise no_offload("not simulated with moves; plan with a policy without +migrate")
    ledger = new_ledger(
        np.stack([coefficient_row(p) for p in profiles]),
        variant,
        requests,
        max(p.engine.max_seqs for p in profiles),
        lengths,
        caches,
        host,
    )
    ledger.workers["role"] = [ROLES.index(spec.role) for spec in workers]
    ledger.workers["status"] = [SERVING if spec.ready_s <= 0 else OFF for spec in workers]
    _enter_requests(ledger, workload, classes, lengths, options.get("predicted_tokens"))
    transfer_s, token_transfer_s = _transfers(workers)
    rules = Rules(
        policy=code,
        settings=settings.row(),
        split=split,
        transfer_s=transfer_s,
        token_transfer_s=token_transfer_s,
        offer_every_s=OFFER_EVERY_S,
        patience=options.get("patience", policies.PATIENCE),
        max_misses=ENDLESS if most_misses is None else most_misses,
        draws=np.random.default_rng(options.get("seed", 0)).random((requests, 2)),
    )
    tpot_s = np.array([c.tpot_s for c in classes])[workload.slo_class]
    pace = _paces(profiles, workload, options.get("seed", 0))
    engines = records.new_engines(len(workers), workload.output_tokens, tpot_s / pace, workload.weight, tier)
    engines.workers["first_rank"], engines.workers["ranks"] = first_rank, ranks
    sending = new_sending(workload.arrival_s, workload.sessions, options.get("agents"))
    ledger.requests["arrival_s"] = first_times(sending, workload.arrival_s)
    cluster = records.new_cluster(requests, _timeline(workers), settings.queue, sending)
    return RunState(
        workload, ledger, engines, cluster, rules, profiles, classes, settings, placement, migrates, pace
    )


def _ranks(
    workers: Sequence[WorkerSpec], is_more: bool
) -> tuple[list[WorkerSpec], NDArray[np.int64], NDArray[np.int64]]:
    """The engines of the workers; of each the first that it steps together with, and how many do."""
    if not workers:
        raise BadInput("simulate: workers: at least one is needed")
    counts = np.array([1 if spec.profile.ranks is None else spec.profile.ranks.count for spec in workers])
    if is_more and counts.max() > 1:
        raise BadInput("policy: workers of several ranks are not placed together (exact), nor moved from")
    engines = [
        replace(spec, profile=rank_of(spec.profile))
        for spec, count in zip(workers, counts, strict=True)
        for _ in range(count)
    ]
    return engines, np.repeat(np.cumsum(counts) - counts, counts), np.repeat(counts, counts)


def _paces(profiles: Sequence[Profile], workload: Workload, seed: int) -> NDArray[np.float64] | float:
    """How chance spreads the requests' decode where workers speculate, as the first that does."""
    first = next((p.speculation for p in profiles if p.speculation is not None), None)
    return 1.0 if first is None else paces(first, workload.output_tokens, np.random.default_rng([seed, 1]))


def _classes(slo: Slo | Sequence[Slo], workload: Workload) -> tuple[Slo, ...]:
    """The targets of each SLO class; raises BadInput for a workload that has more classes."""
    classes = (slo,) if isinstance(slo, Slo) else tuple(slo)
    if len(workload) and int(workload.slo_class.max()) >= len(classes):
        raise BadInput(f"simulate: slo: the workload has {int(workload.slo_class.max()) + 1} classes")
    return classes


def _check_policy(
    code: int, migrates: bool, split: bool, profiles: Sequence[Profile], slos: Sequence[Slo]
) -> None:
    """Raise BadInput where a policy does not cover what is asked."""
    if code == policies.EXACT and split:
        raise BadInput("policy: exact: places whole requests; it has no split mode")
    if migrates and split:
        raise BadInput("policy: +migrate: moves requests between whole workers; it has no split mode")
    if code == policies.EXACT and (len(profiles) > 1 or len(slos) > 1):
        raise BadInput("policy: exact: covers one worker type and one SLO class; else use spread or best-fit")


def _is_split(workers: Sequence[WorkerSpec]) -> bool:
    """Whether prefill and decode have workers of their own; raises BadInput for half of a split fleet."""
    roles = {spec.role for spec in workers}
    if roles != {"any"} and roles != {"prefill", "decode"}:
        raise BadInput("simulate: workers: split mode needs both prefill and decode workers, and no others")
    return roles != {"any"}


def _transfers(workers: Sequence[WorkerSpec]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of each worker: a hand-over's latency, and the seconds of each token."""
    latency_s, token_s = np.zeros(len(workers)), np.zeros(len(workers))
    for w, spec in enumerate(workers):
        if spec.link is not None:
            latency_s[w], token_s[w] = spec.link.latency_s, spec.link.token_s(spec.profile)
    return latency_s, token_s


def _variants(workers: Sequence[WorkerSpec], split: bool) -> tuple[tuple[Profile, ...], NDArray[np.int64]]:
    """The profiles that differ, in their engine mode of this run, and each worker's place among them."""
    profiles: list[Profile] = []
    variant = np.zeros(len(workers), np.int64)
    for w, spec in enumerate(workers):
        profile = spec.profile
        if split and profile.engine.mode != EngineMode.SPLIT:
            profile = profile.with_engine(mode=EngineMode.SPLIT)
        elif not split and profile.engine.mode == EngineMode.SPLIT:
            raise BadInput("simulate: workers: split mode needs prefill and decode workers")
        if profile not in profiles:
            profiles.append(profile)
        variant[w] = profiles.index(profile)
    return tuple(profiles), variant


def _caches(workload: Workload, profiles: Sequence[Profile], variant: NDArray[np.int64]) -> Caches | None:
    """The workers' empty prefix caches; None for a workload that does not say what its requests share."""
    if workload.prefixes is None:
        return None
    tokens = workload.prefixes.block_tokens
    for profile in profiles:
        if tokens % profile.kv.block_tokens:
            raise BadInput(
                f"{profile.label}: prefixes: blocks of {tokens} tokens are no multiple"
                f" of the engine's {profile.kv.block_tokens}"
            )
    kv = [(p.kv.capacity_tokens // p.kv.block_tokens, p.kv.block_tokens) for p in profiles]
    blocks, block_tokens = np.array(kv)[variant].T
    return new_caches(
        workload.prefixes,
        blocks,
        block_tokens,
        workload.prompt_tokens.astype(np.int64) + workload.output_tokens,
    )


def _enter_requests(
    ledger: Ledger,
    workload: Workload,
    classes: Sequence[Slo],
    lengths: LengthTable,
    predicted_tokens: NDArray[np.int64] | None,
) -> None:
    ledger.requests["prompt"] = workload.prompt_tokens
    ledger.requests["priority"] = workload.priority
    ledger.requests["ttft_s"] = np.array([c.ttft_s for c in classes])[workload.slo_class]
    tpot_s = np.array([c.tpot_s for c in classes])[workload.slo_class]
    ledger.requests["tpot_s"] = kept_tpot_s(ledger.coefficients, workload.prompt_tokens, tpot_s)
    yields = np.array([yields_to(c, classes) for c in classes])[workload.slo_class]
    ledger.requests["yields_tpot_s"], ledger.requests["yields_most_tpot_s"] = yields.T
    if predicted_tokens is None:
        predicted_tokens = np.rint(lengths.predict(workload.prompt_tokens)).astype(np.int64)
    ledger.requests["guess"] = ledger.requests["predicted"] = np.maximum(predicted_tokens, 1)


def _timeline(workers: Sequence[WorkerSpec]) -> list[tuple[float, int, int]]:
    """When workers become ready, fail and are drained: (second, worker, change)."""
    timeline: list[tuple[float, int, int]] = []
    for w, spec in enumerate(workers):
        if spec.ready_s > 0:
            timeline.append((spec.ready_s, w, records.READY))
        for fails_s, back_s in spec.fails_s:
            timeline += [(fails_s, w, records.FAIL), (back_s, w, records.READY)]
        if spec.drain_s is not None:
            timeline.append((spec.drain_s, w, records.DRAIN))
    return timeline


def _own_lengths(workload: Workload) -> LengthTable:
    if len(workload) == 0:
        return LengthTable.constant(1.0)
    return LengthTable.from_history(workload.prompt_tokens, workload.output_tokens)
