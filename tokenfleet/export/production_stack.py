"""A fleet as values of vLLM's production-stack chart (0.1.x), and its schedule as KEDA floors for them.

The values have one modelSpec for each group of workers. The floors are minimum replica counts in whole
minutes of a named time zone. A floor begins a cold start early. A trace of a day or less repeats daily, one
of a week and more by its weekdays, where its clock tells them; of others each minute of the day takes the
highest count of its days. Hours that the trace does not cover get the whole fleet. These are floors only: a
trigger that reacts to load may add replicas. The chart's router knows neither step times nor targets: only a
plan that was proven with round-robin placement is written.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from itertools import groupby
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from controlplane.errors import BadInput
from controlplane.placement.policies import Policy
from tokenfleet.export.deployment import Deployment, dns_name
from tokenfleet.export.kuberay import CORES_PER_GPU, MEMORY_PER_GPU_GI
from tokenfleet.planning.schedule import NEARLY, WEEK_S

IMAGE, TAG = "vllm/vllm-openai", "v0.32.0"
DAY = 1440  # minutes
WEEK = 7 * DAY
POLL_S, COOL_DOWN_S = 30, 300


def spec_name(fleet: Deployment, number: int) -> str:
    """The name of a group's modelSpec, and part of the name of its Deployment."""
    worker_type = fleet.groups[number].worker_type
    return f"{dns_name(worker_type.gpu or 'gpu', 30)}-tp{worker_type.tp_degree}"


def production_stack(fleet: Deployment) -> dict[str, Any]:
    """The chart's values. Raises BadInput for a fleet planned with another placement than its router's."""
    _check_policy(fleet, "production-stack")
    specs = []
    for number, group in enumerate(fleet.groups):
        config: dict[str, Any] = {"enableChunkedPrefill": True, "enablePrefixCaching": True}
        gpus, engine, label = group.worker_type.gpus, group.worker_type.profile.engine, fleet.product(group)
        config["tensorParallelSize"] = gpus
        config["maxNumSeqs"] = engine.max_seqs
        config["extraArgs"] = ["--max-num-batched-tokens", str(engine.max_batched_tokens)]
        if share := group.worker_type.profile.kv.gpu_memory_utilization:
            config["extraArgs"] += ["--gpu-memory-utilization", f"{share:g}"]
        spec: dict[str, Any] = {
            "name": spec_name(fleet, number),
            "repository": IMAGE,
            "tag": TAG,
            "modelURL": fleet.weights,
            "replicaCount": group.workers,
            "requestCPU": CORES_PER_GPU * gpus,
            "requestMemory": f"{MEMORY_PER_GPU_GI * gpus}Gi",
            "requestGPU": gpus,
            "vllmConfig": config,
        }
        if label is not None:
            spec["nodeSelectorTerms"] = [
                {"matchExpressions": [{"key": "nvidia.com/gpu.product", "operator": "In", "values": [label]}]}
            ]
        specs.append(spec)
    return {
        "servingEngineSpec": {"enableEngine": True, "modelSpec": specs},
        "routerSpec": {"enableRouter": True, "routingLogic": "roundrobin"},
    }


def _check_policy(fleet: Deployment, kind: str) -> None:
    if fleet.unserved is not None:
        raise BadInput(f"{kind}: {fleet.unserved}")
    if any(group.role != "any" for group in fleet.groups):
        raise BadInput(f"{kind}: prefill and decode workers need the chart's own KV transfer set-up")
    if fleet.policy != Policy.ROUND_ROBIN:
        raise BadInput(
            f"{kind}: its router places requests in turn, and the fleet was planned with {fleet.policy}: plan"
            f" with --policy {Policy.ROUND_ROBIN}, or export kuberay or systemd"
        )


def zone(name: str) -> ZoneInfo:
    """The time zone of an IANA name. Raises BadInput."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise BadInput(f"--timezone: expected an IANA name such as Europe/Berlin, got {name!r}") from None


def floors(fleet: Deployment, timezone: str, begins: str | None = None) -> list[int]:
    """Workers wanted in each minute of the day, local time; of the week from Monday on, where one is known.

    `begins`: the local time HH:MM of the trace's zero, for one that does not tell. Raises BadInput without
    either, and where a plan has no schedule.
    """
    if not fleet.schedule:
        raise BadInput("keda: the plan has no schedule; make one with `tokenfleet plan`")
    first = _first_minute(fleet, timezone, begins)
    lasts_s = fleet.schedule[-1].end_s - fleet.schedule[0].start_s
    period = WEEK if begins is None and lasts_s >= NEARLY * WEEK_S else DAY
    wanted: list[int | None] = [None] * period
    for span in fleet.schedule:
        start = math.floor((span.start_s - fleet.cold_start_s) / 60.0 + first)
        end = math.ceil(span.end_s / 60.0 + first)
        for minute in range(start, min(end, start + period)):
            count = wanted[minute % period]
            wanted[minute % period] = span.workers if count is None else max(count, span.workers)
    return [fleet.workers if n is None else max(n, 1) for n in wanted]


def _first_minute(fleet: Deployment, timezone: str, begins: str | None) -> float:
    """The minute of the local week, or of a day that is only said, at which the schedule's zero falls."""
    where = zone(timezone)
    if begins is not None:
        try:
            at = datetime.strptime(begins, "%H:%M")
        except ValueError:
            raise BadInput(f"--day-begins: expected HH:MM, got {begins!r}") from None
        return at.hour * 60.0 + at.minute
    if fleet.clock_start_s is None:
        raise BadInput("keda: the trace has no time of day; say when it begins with --day-begins HH:MM")
    local = datetime.fromtimestamp(fleet.clock_start_s, UTC).astimezone(where)
    return local.weekday() * DAY + local.hour * 60.0 + local.minute + local.second / 60.0


def windows(by_minute: list[int]) -> list[tuple[int, int, int]]:
    """(start, end, workers) of the stretches above the least; minutes of the day or week, end exclusive.

    A stretch may pass its end; then its end is before its start.
    """
    least, period = min(by_minute), len(by_minute)
    if all(n == least for n in by_minute):
        return []
    # Begin where the count changes, so that no stretch is cut in two by midnight.
    turn = next(m for m in range(period) if by_minute[m] != by_minute[m - 1])
    minutes = [(turn + i) % period for i in range(period)]
    spans = []
    for workers, group in groupby(minutes, key=lambda m: by_minute[m]):
        run = list(group)
        if workers > least:
            spans.append((run[0], (run[-1] + 1) % period, workers))
    return sorted(spans)


def keda(fleet: Deployment, release: str, timezone: str, begins: str | None = None) -> list[dict[str, Any]]:
    """A ScaledObject for each group's Deployment of the production-stack release `release`.

    A mix is apportioned by its groups' share of the workers, rounded up, so floors are never too low. Raises
    BadInput as `floors` does, and for a fleet that was planned with another placement than the router's.
    """
    _check_policy(fleet, "keda")
    by_minute = floors(fleet, timezone, begins)
    objects = []
    for number, group in enumerate(fleet.groups):
        share = [min(math.ceil(n * group.workers / fleet.workers), group.workers) for n in by_minute]
        name = f"{release}-{spec_name(fleet, number)}"
        spans = windows(share) or [(0, len(share) - 1, share[0])]  # KEDA wants a trigger, even for a constant
        triggers = [
            {
                "type": "cron",
                "metadata": {
                    "timezone": timezone,
                    "start": _cron(start, len(share)),
                    "end": _cron(end, len(share)),
                    "desiredReplicas": str(workers),
                },
            }
            for start, end, workers in spans
        ]
        objects.append(
            {
                "apiVersion": "keda.sh/v1alpha1",
                "kind": "ScaledObject",
                "metadata": {"name": f"{name}-floors"},
                "spec": {
                    "scaleTargetRef": {
                        "apiVersion": "apps/v1",
                        "kind": "Deployment",
                        "name": f"{name}-deployment-vllm",
                    },
                    "minReplicaCount": min(share),
                    "maxReplicaCount": group.workers,
                    "pollingInterval": POLL_S,
                    "cooldownPeriod": COOL_DOWN_S,
                    "triggers": triggers,
                },
            }
        )
    return objects


def _cron(minute: int, period: int) -> str:
    weekday = "*" if period == DAY else (minute // DAY + 1) % 7  # cron's weeks begin on Sunday
    return f"{minute % 60} {minute // 60 % 24} * * {weekday}"
