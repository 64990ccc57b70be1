"""A plan as a deployment: worker groups, engine limits, targets, and worker counts over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.errors import BadInput
from controlplane.types import Slo
from controlplane.worker_type import WorkerGroup
from tokenfleet.planning.plan_file import EngineLimits, PlanFile

# The library's names as the hub's; a name that is not here must be given.
_WEIGHTS = {
    "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-chat-hf",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "qwen3-32b": "Qwen/Qwen3-32B",
}
# The library's GPUs as NVIDIA's feature discovery labels their nodes (nvidia.com/gpu.product).
_PRODUCTS = {
    "a100-sxm": "NVIDIA-A100-SXM4-80GB",
    "a100-80gb": "NVIDIA-A100-SXM4-80GB",
    "h100-sxm": "NVIDIA-H100-80GB-HBM3",
    "h100-80gb": "NVIDIA-H100-80GB-HBM3",
    "h200-sxm": "NVIDIA-H200",
    "rtx-pro-6000": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
}


def product(group: WorkerGroup) -> str | None:
    """The label of nodes with the group's GPUs; None where it is not known."""
    return _PRODUCTS.get(group.worker_type.gpu or "")


@dataclass(frozen=True, slots=True)
class Span:
    """So many workers from second `start_s` to `end_s` of the trace's own time."""

    start_s: float
    end_s: float
    workers: int


@dataclass(frozen=True)
class Deployment:
    """A fleet to be deployed. `weights`: what the engines load. `clock_start_s`: the schedule's zero.

    `engines`: by the name of a type, what the plan assumed of its engine.
    """

    groups: tuple[WorkerGroup, ...]
    weights: str
    slo: Slo
    attainment: float
    schedule: tuple[Span, ...]
    clock_start_s: float | None
    cold_start_s: float
    engines: Mapping[str, EngineLimits]

    @property
    def workers(self) -> int:
        return sum(group.workers for group in self.groups)

    def engine_of(self, group: WorkerGroup) -> EngineLimits | None:
        """What the plan assumed of the group's engine; None where an older plan does not say."""
        return self.engines.get(group.worker_type.name)

    @property
    def slo_text(self) -> str:
        """The targets as `--slo` takes them."""
        return f"ttft={self.slo.ttft_s:g}s,tpot={self.slo.tpot_s:g}s"


def deployment(plan: PlanFile, weights: str | None = None) -> Deployment:
    """What to deploy for a plan. Raises BadInput where the name of its model's weights is not known."""
    model = plan.inputs.profiles[0].model
    loads = weights or _WEIGHTS.get(model)
    if loads is None:
        raise BadInput(f"--weights: missing; {model} is no name the hub knows: give a hub name or a folder")
    paid = plan.schedule_detail.paid if plan.schedule_detail else None
    scale = plan.inputs.rate_scale
    return Deployment(
        plan.groups,
        loads,
        plan.targets,
        plan.attainment.target,
        tuple(Span(s.start_s * scale, s.end_s * scale, s.workers) for s in plan.schedule),
        plan.inputs.clock_start_unix_s,
        paid.cold_start_s if paid else 0.0,
        {f"{p.gpu} TP{p.tp_degree}": p.engine_limits for p in plan.inputs.profiles if p.engine_limits},
    )
