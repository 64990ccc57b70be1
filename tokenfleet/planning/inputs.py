"""The planner's inputs, from files and options: one workload and the worker types on offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

import numpy as np

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile, with_times
from controlplane.perfmodel.speculation import pays_up_to
from controlplane.placement.policies import Policy
from controlplane.worker_type import HANDOVER_S, KvLink, WorkerType
from controlplane.workload import Workload
from tokenfleet.planning.classes import classed, in_shares, present, shares_asked
from tokenfleet.planning.request import PlanRequest, asked_of, refuse_unshared, value_of
from tokenfleet.planning.result import Inputs
from tokenfleet.planning.traffic.draws import busier, in_sessions, time_scale
from tokenfleet.planning.traffic.sample import LONG
from tokenfleet.profiles.library import (
    age_warning,
    canonical_model,
    find_profiles,
    network_gb_per_s,
    read_profile,
)
from tokenfleet.profiles.prices import kind_of, read_prices
from tokenfleet.traces import Trace
from tokenfleet.traces.check import LATEST_DATE_S, doctor_warnings

RATE_POINTS = 120


@dataclass(frozen=True)
class Gathered:
    """The workload as it will be planned for, the types of worker, and the record of both."""

    workload: Workload
    worker_types: tuple[WorkerType, ...]
    inputs: Inputs


@dataclass(frozen=True, slots=True)
class Bias:
    """The ratio of observed step times to those of the profiles; `source` says where from."""

    decode: float
    prefill: float
    source: str

    def __post_init__(self) -> None:
        for name in ("decode", "prefill"):
            if not 0.05 <= getattr(self, name) <= 20.0:
                raise BadInput(f"bias: {name}: must be between 0.05 and 20, got {getattr(self, name):g}")

    @property
    def says(self) -> str:
        return (
            f"step times of every kind of worker: decode x {self.decode:.3g}, prefill x {self.prefill:.3g}"
            f" ({self.source})"
        )


def gather(
    trace: Trace, request: PlanRequest, bias: Bias | None = None, today: date | None = None
) -> Gathered:
    """Everything a plan needs, for a trace as read. Raises BadInput or ProfileMissing, one line each.

    `today` ages the prices; without it none is called old. `bias` lengthens the step times of every worker
    type. The warnings include the bias and the trace doctor's findings.
    """
    request.consistent()
    refuse_without_sessions(trace.workload, request)
    trace = classed(trace, request)
    profiles = chosen_profiles(request)
    if bias is not None:
        profiles = [with_times(profile, bias.decode, bias.prefill) for profile in profiles]
    worker_types, price_warnings = priced(profiles, request)
    trimmed_trace = replace(trace, workload=in_shares(trimmed(trace, request), request, trace.name))
    doctored = doctor_warnings(trimmed_trace)
    workload = in_sessions(trimmed_trace.workload)  # found by lengths that fit what is shared
    workload = workload.longer(request.prompt_scale, request.output_scale)
    if request.no_prefix_cache:
        workload = replace(workload, prefixes=None)
    refuse_unshared(request, workload)
    workload, length_warnings = within_context(workload, profiles, request.drop_too_long, trace.name)
    workload, classes = present(workload, request, trace.name)
    usable, kv_warnings = within_kv(workload, worker_types, trace.name)
    slow = []
    if len(workload) > LONG and (workload.prefixes is not None or workload.sessions is not None):
        slow = [
            f"{len(workload):,} requests that share prefixes or wait for others are replayed whole a hundred"
            " times and more; --window plans a part sooner"
        ]
    slow += [*without_work(workload, request), *ignored(workload, request)]
    ages = [*old_prices(profiles, request, today), *old_profiles([t.profile for t in usable], today)]
    biased = [bias.says] if bias is not None else []
    biased += [*shares_asked(request), *what_drafts_do(workload, request)]
    if request.precision not in (None, "bf16"):
        biased.append(f"what {request.precision} weights do to the model's answers is not judged here")
    warnings = (
        *biased, *trace.warnings, *doctored, *length_warnings, *price_warnings, *kv_warnings, *slow, *ages,
    )  # fmt: skip
    inputs = described(trace.name, workload)
    faster = time_scale(trace.workload, request.rate_scale)
    inputs = replace(
        inputs,
        clock_start_s=_clock_start_s(trace, request),
        rate_scale=faster,
        classes=classes,
        warnings=warnings,
        ages=tuple(ages),
        assumed=trace.assumed,
    )
    return Gathered(workload, usable, inputs)


def _clock_start_s(trace: Trace, request: PlanRequest) -> float | None:
    """When the planned window begins, in seconds since the epoch; None where the trace has no dates."""
    clock_s = trace.clock_start_s
    if clock_s is None or clock_s > LATEST_DATE_S:
        return None  # milliseconds read as seconds: the trace's findings say so
    return clock_s + request.window.value[0] if request.window is not None else clock_s


def refuse_without_sessions(workload: Workload, request: PlanRequest, agents: str = "agents") -> None:
    """Raise BadInput where what is asked of sessions is asked of a workload without any.

    `agents`: the flag by which agents were asked for.
    """
    sessions = workload.sessions
    if sessions is not None and (sessions.session >= 0).any():
        return
    for flag, value in ((agents, request.agents), ("session-time", request.session_s)):
        if value is not None:
            raise BadInput(f"--{flag}: the trace has no sessions; a column `session` names them")


def without_work(workload: Workload, request: PlanRequest) -> list[str]:
    """What to say where fewer sessions are there than agents, who then never all run at once."""
    sessions = 0 if workload.sessions is None else int(workload.sessions.session.max(initial=-1)) + 1
    if request.agents is None or request.agents <= sessions:
        return []
    most = f"{sessions:,} at most run at once: the trace has no more sessions"
    return [f"--agents: {request.agents:,}; {most}"]


def ignored(workload: Workload, request: PlanRequest) -> list[str]:
    """What to say where the policy takes no account of the prefixes that requests share."""
    says = "--policy exact: ignores prefix caches, and counts every prompt in full"
    return [says] if workload.prefixes is not None and request.placement == Policy.EXACT else []


def chosen_profiles(request: PlanRequest) -> list[Profile]:
    """The profiles asked for, in the engine mode asked for. Raises BadInput, ProfileMissing."""
    model = request.model
    if request.profiles:
        profiles = [read_profile(path) for path in request.profiles]
        others = sorted({p.model for p in profiles})
        if len(others) > 1:
            raise BadInput(f"--profile: one model at a time, got {', '.join(others)}")
        if model is not None and canonical_model(model) != canonical_model(others[0]):
            raise BadInput(f"--profile: {request.profiles[0]} is of {others[0]}, --model says {model}")
    elif model is None:
        raise BadInput("--model: missing; name a model of the library, or give --profile files")
    else:
        mark = f"-{request.precision}" if request.precision not in (None, "bf16") else ""
        name = canonical_model(model).removesuffix(mark) + mark
        profiles = find_profiles(name, request.gpu, request.tp)
    if request.kv_tokens is not None and len(profiles) > 1:
        names = ", ".join(profile.type_name for profile in profiles)
        raise BadInput(f"--kv-tokens: is of one kind of worker, got {names}; choose with --gpu and --tp")
    return [asked_of(request, profile) for profile in profiles]


def what_drafts_do(workload: Workload, request: PlanRequest) -> list[str]:
    """For each kind of worker up to which batch speculation saves time; nothing where none is asked for."""
    if value_of(request.speculate) is None or len(workload) == 0:
        return []
    context = float((workload.prompt_tokens + workload.output_tokens / 2.0).mean())
    lines = []
    plain = chosen_profiles(replace(request, speculate=None))
    for without, with_drafts in zip(plain, chosen_profiles(request), strict=True):
        assert with_drafts.speculation is not None
        most = pays_up_to(without.step, with_drafts.step, without.engine.max_seqs, context)
        pays = f"saves time in batches of up to {most}" if most else "never saves time"
        if most == without.engine.max_seqs:
            pays = "saves time in every batch"
        made = with_drafts.speculation.tokens_per_step
        lines.append(f"{without.type_name}: speculation makes {made:.3g} tokens a step and {pays}")
    return lines


def priced(profiles: Sequence[Profile], request: PlanRequest) -> tuple[list[WorkerType], list[str]]:
    """Types of worker with their prices, and a warning for each that is missing: none is guessed.

    Raises BadInput where there is a budget and a price is not known.
    """
    prices, scale = read_prices(request.prices), request.price_scale
    worker_types, warnings, unpriced = [], [], set()
    for profile in profiles:
        kind = kind_of(request.spot, request.reserved)
        price = prices.usd_per_gpu_h(profile.gpu, kind, request.provider)
        if price is None:
            unpriced.add(profile.gpu)
            warnings.append(f"{profile.gpu}: no price known; fleets with it are ranked by GPUs")
            worker_types.append(WorkerType.of(profile))
            continue
        of = f" at {request.provider}" if request.provider else ""
        source = f"{prices.whose}{kind.replace('_', ' ')}{of}, {price.date}, {price.source}"
        usd_per_h = price.usd * profile.gpus * scale / profile.workers_per_gpu
        host_gib = profile.host_bytes / 2**30
        host_usd_per_h = host_gib * price.host_memory_gib * scale
        if host_usd_per_h:
            source += f", with {host_gib:.4g} GiB of host memory at ${price.host_memory_gib:g} each"
        source += f", times {scale:g}" if scale != 1.0 else ""
        priced_type = WorkerType.of(profile, usd_per_h + host_usd_per_h, source)
        worker_types.append(replace(priced_type, host_usd_per_h=host_usd_per_h))
    if request.budget_usd_per_h is not None and unpriced:
        raise BadInput(
            f"--budget-usd-per-h: no price known for {', '.join(sorted(unpriced))}; give one with --prices"
        )
    linked = [replace(t, kv_link=kv_link(t.profile.gpu, request)) if t.is_split else t for t in worker_types]
    return linked, sorted(set(warnings))


def kv_link(gpu: str, request: PlanRequest) -> KvLink:
    """What the workers of a split fleet hand KV over by."""
    latency_s = HANDOVER_S if request.kv_latency_s is None else request.kv_latency_s
    return KvLink((request.kv_gb_per_s or network_gb_per_s(gpu)) * 1e9, latency_s)


def old_prices(profiles: Sequence[Profile], request: PlanRequest, today: date | None) -> list[str]:
    """A warning for each type of GPU whose price is old."""
    prices, kind = read_prices(request.prices), kind_of(request.spot, request.reserved)
    of = {gpu: prices.usd_per_gpu_h(gpu, kind, request.provider) for gpu in sorted({p.gpu for p in profiles})}
    if today is None:
        return []
    return [f"{gpu}: {old}" for gpu, price in of.items() if price and (old := price.age_warning(today))]


def old_profiles(profiles: Sequence[Profile], today: date | None) -> list[str]:
    """One warning for all the profiles that are old, about the first of them."""
    if today is None:
        return []
    old = [warning for profile in profiles if (warning := age_warning(profile, today))]
    more = f" (and {len(old) - 1} more profiles)" if len(old) > 1 else ""
    return [old[0] + more] if old else []


def trimmed(trace: Trace, request: PlanRequest) -> Workload:
    """The part of a trace inside the window, `rate_scale` times as much traffic. Raises BadInput."""
    workload = trace.workload
    if request.window is not None:
        start_s, end_s = request.window.value
        workload = workload.window(start_s, end_s)
        if len(workload) == 0:
            raise BadInput(f"{trace.name}: no requests between {start_s:g} s and {end_s:g} s")
    return busier(workload, request.rate_scale) if request.rate_scale != 1.0 else workload


def within_context(
    workload: Workload, profiles: Sequence[Profile], drop: bool, name: str
) -> tuple[Workload, list[str]]:
    """The workload without requests longer than the model's context; BadInput unless `drop` allows it."""
    limits = [p.context_limit_tokens for p in profiles if p.context_limit_tokens]
    if not limits or len(workload) == 0:
        return workload, []
    limit = min(limits)
    tokens = workload.prompt_tokens + workload.output_tokens
    long = tokens > limit
    if not long.any():
        return workload, []
    warning = (
        f"{name}: {int(long.sum())} of {len(workload)} requests are longer than the model's context of"
        f" {limit} tokens; the longest has {int(tokens.max())}"
    )
    if not drop:
        raise BadInput(f"{warning}; --drop-too-long leaves them out")
    if long.all():
        raise BadInput(warning)
    return workload.take(~long), [f"{warning}; left out"]


def within_kv(
    workload: Workload, worker_types: Sequence[WorkerType], name: str
) -> tuple[tuple[WorkerType, ...], list[str]]:
    """The types whose KV memory holds the longest request. Raises BadInput when none does."""
    longest = int((workload.prompt_tokens + workload.output_tokens).max()) if len(workload) else 0
    usable = tuple(t for t in worker_types if t.profile.kv.capacity_tokens >= t.profile.kv.held(longest))
    if not usable:
        most = max(t.profile.kv.capacity_tokens for t in worker_types)
        raise BadInput(
            f"{name}: the longest request has {longest} tokens, the largest KV capacity on offer is {most}"
        )
    return usable, [
        f"{t.name}: its KV holds {t.profile.kv.capacity_tokens} tokens, the longest request has {longest};"
        " left out"
        for t in worker_types
        if t not in usable
    ]


def described(name: str, workload: Workload, warnings: Sequence[str] = ()) -> Inputs:
    """The record of a workload: its size, its rate, and its rate over time."""
    end_s = float(workload.arrival_s[-1]) if len(workload) else 0.0
    edges = np.linspace(0.0, max(end_s, 1e-9), RATE_POINTS + 1)
    counts, _ = np.histogram(workload.arrival_s, edges)
    width_s = float(edges[1] - edges[0])
    curve = tuple((float(t), float(n) / width_s) for t, n in zip(edges, counts, strict=False))
    shares = workload.prefixes is not None and len(workload)
    ideal = float(workload.ideal_hits.sum() / workload.prompt_tokens.sum()) if shares else None
    return Inputs(
        name,
        len(workload),
        workload.rate_rps,
        workload.duration_s,
        tuple(warnings),
        curve,
        ideal_hit_rate=ideal,
    )
