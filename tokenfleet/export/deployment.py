"""A plan as a deployment: its file for `serve --plan`, its weights, and worker counts over time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from controlplane.errors import BadInput
from controlplane.types import Slo
from controlplane.worker_type import WorkerGroup
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.profiles.library import canonical_model

PLAN = "plan.json"
PORT, CONTROL_PORT = 8000, 8001
_LABEL = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
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


@dataclass(frozen=True)
class Deployment:
    """A plan's fleet to be deployed. `weights`: what the engines load.

    `unserved`: the plan's part that no fleet runs. `products`: node labels, by GPU type. `home_claim`: the
    PersistentVolumeClaim of GPU pods' home; empty: their home ends with the pod.
    """

    plan: PlanFile
    groups: tuple[WorkerGroup, ...]
    weights: str
    unserved: str | None
    products: Mapping[str, str]
    home_claim: str = ""

    def product(self, group: WorkerGroup) -> str | None:
        """The label of nodes with the group's GPUs; None where it is not known."""
        return self.products.get(group.worker_type.gpu or "")

    @property
    def document(self) -> str:
        """The plan's own text, for `serve --plan`, which is the whole of the fleet."""
        return json.dumps(self.plan.document, indent=1) + "\n"

    @property
    def model(self) -> str:
        """The library's name of the model."""
        return self.plan.inputs.profiles[0].model

    @property
    def promise(self) -> tuple[Slo, float]:
        """The targets, and the share of requests to be within them."""
        return self.plan.targets, self.plan.attainment.target


def dns_name(text: str, most: int) -> str:
    """A text as a part of an object's name, cut to `most` characters."""
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")[:most]


def serve_words(fleet: Deployment, plan: str, own: Sequence[str]) -> list[str]:
    """`tokenfleet serve` of the plan in that file, open to other machines; keys come by the environment.

    `own`: flags of one way to deploy it. Raises BadInput for a plan that no fleet runs.
    """
    if fleet.unserved is not None:
        raise BadInput(f"export: {fleet.unserved}")
    words = ["tokenfleet", "serve", "--model", fleet.weights, "--plan", plan]
    words += ["--max-workers", str(fleet.plan.workers), "--host", "0.0.0.0", "--port", str(PORT)]
    words += ["--control-host", "0.0.0.0", "--control-port", str(CONTROL_PORT), *own]
    if canonical_model(fleet.weights) == fleet.model:
        return words
    # Weights of another name are served by the model's, too, which says that they are of it.
    names = dict.fromkeys((PurePosixPath(fleet.weights).name, fleet.weights, fleet.model))
    return [*words, "--", "--served-model-name", *names]


def deployment(plan: PlanFile, weights: str | None = None, products: Sequence[str] = ()) -> Deployment:
    """What to deploy for a plan; `products`: GPU=LABEL, in place of those known here.

    Raises BadInput where the name of its model's weights is not known, or nodes cannot be told apart.
    """
    model = plan.inputs.profiles[0].model
    loads = weights or _WEIGHTS.get(model)
    if (n := max(p.whole().workers_per_gpu for p in plan.inputs.profiles)) > 1:
        raise BadInput(f"export: its workers have 1/{n} of a GPU; only `tokenfleet serve` gives them that")
    if loads is None:
        raise BadInput(f"--weights: missing; {model} is no name the hub knows: give a hub name or a folder")
    groups = plan.groups
    return Deployment(plan, groups, loads, plan.unserved or _unwritten(groups), _labels_of(groups, products))


def _unwritten(groups: Sequence[WorkerGroup]) -> str | None:
    """Why a plan that `serve --plan` runs is not written: for what is not known here, or asks for more."""
    profiles = [group.worker_type.profile for group in groups]
    if any(profile.speculation is not None for profile in profiles):
        return (
            "speculate: what makes the drafts is not in the plan; `serve --plan` takes it as vLLM's own flag"
        )
    if any(profile.host_bytes for profile in profiles):
        return "host_kv: pods are given no memory for it here; `serve --plan` on their hosts keeps it"
    return None


def _labels_of(groups: Sequence[WorkerGroup], asked: Sequence[str]) -> dict[str, str]:
    gpus = {group.worker_type.gpu or "" for group in groups}
    labels = dict(_PRODUCTS)
    for pair in asked:
        gpu, is_pair, label = pair.partition("=")
        if not is_pair or re.fullmatch(_LABEL, label) is None:
            raise BadInput(f"--gpu-product: expected GPU=LABEL of nvidia.com/gpu.product, got {pair!r}")
        if gpu not in gpus:
            raise BadInput(f"--gpu-product: {gpu}: the plan has {' and '.join(sorted(gpus))}")
        labels[gpu] = label
    unknown = sorted(gpus - labels.keys())
    if unknown and len(gpus) > 1:
        raise BadInput(f"--gpu-product: {unknown[0]}: expected {unknown[0]}=LABEL of its nodes")
    return labels
