"""The files of each kind of export: their names and texts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import yaml

from controlplane.errors import BadInput
from tokenfleet.advise.advice import ScaleTarget
from tokenfleet.export.deployment import PLAN, Deployment, serve_words
from tokenfleet.export.keda import ADVISE_PORT, Followed, advise_words, asked_at, followed_plan, keda
from tokenfleet.export.kuberay import KEYS, kuberay
from tokenfleet.export.monitoring import dashboard_text, prometheus_rule_object, prometheus_rules, target_text
from tokenfleet.export.production_stack import production_stack
from tokenfleet.field_errors import nearest

UNIT = Path(__file__).with_name("tokenfleet.service")  # a template
SHUTDOWN_S = 60
NAME = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"  # of objects, to which KubeRay appends its own parts


@dataclass(frozen=True)
class ExportSettings:
    """Settings that a plan does not have.

    `prometheus`: the server that KEDA asks for the advice; `scaler`: HOST:PORT of `advise --scaler`, asked
    instead. `targets`: what KEDA scales, by the worker type ("" where there is one), in place of Deployments
    of production-stack.
    """

    name: str = "tokenfleet"
    image: str = "tokenfleet:latest"
    prometheus: str = "http://prometheus-operated:9090"
    scaler: str | None = None
    targets: Mapping[str, ScaleTarget] = field(default_factory=dict)


def _kuberay(fleet: Deployment, settings: ExportSettings) -> dict[str, str]:
    heading = (
        f"{_heading(fleet)}\n# Before: kubectl create secret generic {KEYS}"
        " --from-literal=api-key=... --from-literal=control-key=... --from-literal=auth_token=..."
        " [--from-literal=hf-token=...]"
    )
    return {"kuberay.yaml": _documents(heading, kuberay(fleet, settings.name, settings.image))}


def _production_stack(fleet: Deployment, settings: ExportSettings) -> dict[str, str]:
    heading = f"{_heading(fleet)}\n# helm install {settings.name} vllm/vllm-stack -f values.yaml"
    return {"values.yaml": _documents(heading, [production_stack(fleet)])}


def _keda(fleet: Deployment, settings: ExportSettings) -> dict[str, str]:
    followed = followed_plan(fleet, settings.name, settings.targets)
    port = f"Let Prometheus scrape its port {ADVISE_PORT}"
    asks = port if settings.scaler is None else f"KEDA asks it at {settings.scaler}"
    heading = (
        f"{_heading(fleet)}\n# KEDA sets the replicas that this command advises. {asks}:\n"
        f"#   {shlex.join(advise_words(fleet, settings.scaler is not None))}"
    )
    if not settings.targets:
        heading += (
            f"\n# scaleTargetRef names a Deployment of the production-stack release {settings.name}."
            " `export --target` names another."
        )
    return {"keda.yaml": _documents(heading, _scaled(followed, settings))}


def advice_files(followed: Sequence[Followed], settings: ExportSettings, folder: Path) -> dict[Path, str]:
    """The ScaledObject of each type of a fleet that is watched; nothing is written. Raises BadInput."""
    flags = shlex.join(asked_at(settings.scaler is not None))
    heading = "".join(
        f"# From an advice of Tokenfleet: {one.low} to {one.high} replicas of {one.model} at {one.target}.\n"
        for one in followed
    )
    heading += f"# Run the same `tokenfleet advise` with {flags}."
    return {folder / "keda" / "keda.yaml": _documents(heading, _scaled(followed, settings))}


def _scaled(followed: Sequence[Followed], settings: ExportSettings) -> list[dict[str, Any]]:
    return [keda(one, settings.prometheus, settings.scaler) for one in followed]


def _prometheus(fleet: Deployment, settings: ExportSettings) -> dict[str, str]:
    rule = prometheus_rule_object(*fleet.promise, f"{settings.name}-slo")
    return {
        "tokenfleet.rules.yaml": prometheus_rules(*fleet.promise),
        "prometheusrule.yaml": _documents(_heading(fleet), [rule]),
    }


def _grafana(fleet: Deployment, settings: ExportSettings) -> dict[str, str]:
    return {"tokenfleet.json": dashboard_text(*fleet.promise)}


def _systemd(fleet: Deployment, settings: ExportSettings) -> dict[str, str]:
    return {"tokenfleet.service": systemd_unit(fleet), PLAN: fleet.document}


def systemd_unit(fleet: Deployment, program: str = "/opt/tokenfleet/bin/tokenfleet") -> str:
    """A systemd unit for `tokenfleet serve --plan` on one GPU machine, without Kubernetes.

    Keys and certificate are in /etc/tokenfleet. Raises BadInput for several GPU types.
    """
    if len({group.worker_type.gpu for group in fleet.groups}) > 1:
        raise BadInput("systemd: one machine has one type of GPU, this fleet has several: plan with --gpu")
    # A machine of its own has no proxy in front of it that would encrypt.
    own = ["--tls-cert", "/etc/tokenfleet/tls.crt", "--tls-key", "/etc/tokenfleet/tls.key"]
    own += ["--data", "/var/lib/tokenfleet", "--shutdown-wait", f"{SHUTDOWN_S}s"]
    words = [program, *serve_words(fleet, f"/etc/tokenfleet/{PLAN}", own)[1:]]
    # systemd expands % and $ in ExecStart; neither has a meaning in our flags.
    command = shlex.join(words).replace("%", "%%").replace("$", "$$")
    types = [(group.workers, group.worker_type) for group in fleet.groups]
    parts = ", ".join(f"{workers} worker(s) of {t.gpus}x {t.gpu}" for workers, t in types)
    gpus = sum(group.gpus for group in fleet.groups)
    return Template(UNIT.read_text(encoding="utf-8")).substitute(
        parts=parts,
        gpus=gpus,
        description=f"{fleet.weights}, {target_text(*fleet.promise)}",
        command=command,
        stop_s=SHUTDOWN_S + 60,
    )


KINDS: Mapping[str, Callable[[Deployment, ExportSettings], dict[str, str]]] = {
    "kuberay": _kuberay,
    "production-stack": _production_stack,
    "keda": _keda,
    "prometheus": _prometheus,
    "grafana": _grafana,
    "systemd": _systemd,
}

USES: Mapping[str, str] = {
    "kuberay": "create the secret that line 2 of the file names, then kubectl apply -f {folder}/kuberay.yaml",
    "production-stack": "helm install {name} vllm/vllm-stack -f {folder}/values.yaml",
    "keda": "kubectl apply -f {folder}/keda.yaml",
    "prometheus": "kubectl apply -f {folder}/prometheusrule.yaml",
    "grafana": "in Grafana, Dashboards, New, Import: {folder}/tokenfleet.json",
    "systemd": "put keys.env, tls.crt and tls.key into /etc/tokenfleet, then cp {folder}/plan.json"
    " /etc/tokenfleet; cp {folder}/tokenfleet.service /etc/systemd/system; systemctl enable --now tokenfleet",
}


def next_steps(kinds: Sequence[str], settings: ExportSettings, folder: Path) -> list[str]:
    """One line a kind: the command that uses its files."""
    return [f"Next: {USES[kind].format(name=settings.name, folder=folder / kind)}" for kind in kinds]


def known_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """`kinds`, each once. Raises BadInput for one there is not."""
    for kind in kinds:
        if kind not in KINDS:
            raise BadInput(f"export: {kind}: no such kind{nearest(kind, KINDS)}; one of {', '.join(KINDS)}")
    return tuple(dict.fromkeys(kinds))


def export_files(
    fleet: Deployment, kinds: Sequence[str], settings: ExportSettings, folder: Path
) -> dict[Path, str]:
    """Every file of the kinds, each kind in its own folder under `folder`; nothing is written. BadInput."""
    if re.fullmatch(NAME, settings.name) is None:
        raise BadInput(f"--name: expected up to 40 of a-z, 0-9 and -, a letter first, got {settings.name!r}")
    return {
        folder / kind / name: text
        for kind in known_kinds(kinds)
        for name, text in KINDS[kind](fleet, settings).items()
    }


def _heading(fleet: Deployment) -> str:
    """The first line of every file: what the plan was."""
    groups = " + ".join(f"{g.workers}x {g.worker_type.name}" for g in fleet.groups)
    return f"# From a plan of Tokenfleet: {groups}, {target_text(*fleet.promise)}."


def _documents(heading: str, objects: Sequence[dict[str, Any]]) -> str:
    return (
        heading + "\n" + yaml.dump_all(objects, Dumper=_Whole, sort_keys=False, width=110, allow_unicode=True)
    )


class _Whole(yaml.SafeDumper):
    """Writes equal parts out each time, and the plan line by line, as people who read them expect."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_scalar(self, tag: str, value: Any, style: str | None = None) -> yaml.ScalarNode:
        return super().represent_scalar(tag, value, "|" if "\n" in value else style)
