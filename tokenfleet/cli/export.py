"""`tokenfleet export`: a plan, or an advice, as files for Kubernetes, systemd and monitoring."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from controlplane.errors import BadInput
from tokenfleet.cli.flags import flag, takes_flags
from tokenfleet.field_errors import read_text
from tokenfleet.files import write_files


@dataclass(frozen=True, slots=True)
class ExportFlags:
    """What `tokenfleet export` is asked."""

    kind: Annotated[
        list[str],
        typer.Argument(help="one or more of kuberay, production-stack, keda, prometheus, grafana, systemd"),
    ]
    output_dir: Annotated[Path, typer.Option(help="folder to write to; each target gets a folder in it")]
    plan: Path | None = flag(None, "a plan.json")
    advice: Path | None = flag(
        None, "keda without a plan: what `advise --format json` printed; needs --target"
    )
    target: list[str] | None = flag(
        None,
        "keda: what to scale, deployment/NAME or statefulset/NAME; TYPE=deployment/NAME for each worker"
        " type of a mixed fleet",
        metavar="KIND/NAME",
    )
    weights: str | None = flag(None, "weights that engines load: a Hugging Face name or a folder")
    gpu_product: list[str] | None = flag(
        None, "nvidia.com/gpu.product of the nodes with this GPU; repeatable", metavar="GPU=LABEL"
    )
    home_claim: str = flag(
        "", "kuberay: PersistentVolumeClaim for weights and compile caches", metavar="NAME"
    )
    name: str = flag("tokenfleet", "name of the objects and of the Helm release")
    image: str = flag("tokenfleet:latest", "container image, built from deploy/Containerfile")
    prometheus: str = flag(
        "http://prometheus-operated:9090", "Prometheus server that KEDA asks for the advice"
    )
    scaler: str | None = flag(
        None, "keda: ask `advise --scaler` there, without Prometheus", metavar="HOST:PORT"
    )


@takes_flags()
def export_command(flags: ExportFlags) -> None:
    """Write a plan as Kubernetes objects, Helm values, rules, a dashboard or a systemd unit.

    tokenfleet export keda --plan plan.json --prometheus http://prometheus.monitoring:9090 --output-dir deploy

    tokenfleet export keda --advice advice.json --target deployment/vllm --output-dir deploy

    tokenfleet export systemd prometheus grafana --plan plan.json --weights /models/mine --output-dir deploy
    """
    from tokenfleet.advise.advice import scale_target
    from tokenfleet.export.deployment import deployment, dns_name
    from tokenfleet.export.files import ExportSettings, advice_files, export_files, known_kinds, next_steps
    from tokenfleet.export.keda import followed_advice
    from tokenfleet.planning.plan_file import read_plan

    kinds = known_kinds(flags.kind)
    named = [text.rpartition("=") for text in flags.target or ()]
    targets = {name: scale_target(target, "--target") for name, _, target in named}
    settings = ExportSettings(flags.name, flags.image, flags.prometheus, flags.scaler, targets)
    if flags.plan is not None and flags.advice is not None:
        raise BadInput("--advice: contradicts --plan; give one of them")
    if flags.plan is not None:
        if flags.home_claim != dns_name(flags.home_claim, 253):
            raise BadInput(f"--home-claim: expected a PersistentVolumeClaim's name, got {flags.home_claim!r}")
        made = deployment(read_plan(flags.plan), flags.weights, flags.gpu_product or ())
        fleet = replace(made, home_claim=flags.home_claim)
        files = export_files(fleet, kinds, settings, flags.output_dir)
    elif flags.advice is not None:
        if kinds != ("keda",) or not targets:
            raise BadInput("--advice: for keda alone, with --target deployment/NAME; --plan gives the others")
        followed = followed_advice(read_text(flags.advice), str(flags.advice), targets)
        files = advice_files(followed, settings, flags.output_dir)
    else:
        raise BadInput("--plan: missing; name a plan.json, or for keda an advice with --advice")
    write_files(files)
    for path in files:
        print(path)
    for line in next_steps(kinds, settings, flags.output_dir):
        print(line, file=sys.stderr)
