"""`tokenfleet export`: writes a saved plan as files for other systems."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export_command(
    kind: Annotated[
        list[str],
        typer.Argument(help="kuberay, production-stack, keda, prometheus, grafana, systemd; several at once"),
    ],
    plan: Annotated[Path, typer.Option(help="a plan.json")],
    output_dir: Annotated[Path, typer.Option(help="each kind gets a folder in it")],
    weights: Annotated[
        str | None, typer.Option(help="what engines load: a Hugging Face name or a folder")
    ] = None,
    gpu_product: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GPU=LABEL", help="nvidia.com/gpu.product of the nodes with this GPU; repeatable"
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="of the objects, and of the Helm release")] = "tokenfleet",
    image: Annotated[str, typer.Option(help="built from deploy/Containerfile")] = "tokenfleet:latest",
    timezone: Annotated[str, typer.Option(help="of KEDA's cron floors, an IANA name")] = "UTC",
    day_begins: Annotated[
        str | None, typer.Option(help="HH:MM at which the trace begins, where it does not tell")
    ] = None,
) -> None:
    """Write a plan as Kubernetes objects, Helm values, rules, a dashboard or a systemd unit.

    tokenfleet export production-stack keda --plan plan.json --timezone Europe/Berlin --output-dir deploy

    tokenfleet export systemd prometheus grafana --plan plan.json --weights /models/mine --output-dir deploy
    """
    from tokenfleet.export.deployment import deployment
    from tokenfleet.export.files import ExportSettings, export_files, known_kinds
    from tokenfleet.files import write_files
    from tokenfleet.planning.plan_file import read_plan

    kinds = known_kinds(kind)
    fleet = deployment(read_plan(plan), weights, gpu_product or ())
    settings = ExportSettings(name, image, timezone, day_begins)
    files = export_files(fleet, kinds, settings, output_dir)
    write_files(files)
    for path in files:
        print(path)
