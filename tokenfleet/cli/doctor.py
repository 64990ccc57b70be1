"""`tokenfleet doctor`: says what on this host, or on the nodes of a Ray cluster, would stop a fleet."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from tokenfleet.cli.plan import OutputFormat


def doctor_command(
    model: Annotated[str, typer.Option(help="the model to serve: whether its weights are there")] = "",
    host: Annotated[str, typer.Option(help="address of the OpenAI endpoint")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    control_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    output_format: Annotated[OutputFormat, typer.Option("--format", help="on stdout")] = OutputFormat.TABLE,
) -> int:
    """Look at vLLM, Ray, GPUs, memory, ports and the model, before a fleet is started.

    Nothing is loaded and no GPU is touched. With RAY_ADDRESS set every node of that cluster is looked at.
    Exit code 1 where something would stop a fleet; `serve` looks at the same before it starts.

    tokenfleet doctor --model ./tiny

    RAY_ADDRESS=auto tokenfleet doctor --model /models/llama --format json
    """
    from dataplane.live.worker.host_checks import Finding, first_stop, hosts_of_cluster, look_at_host

    ports = (host, port), ("127.0.0.1", control_port)
    hosts, of_all = [look_at_host(model, ports)], tuple[Finding, ...]()
    if address := os.environ.get("RAY_ADDRESS"):
        first_stop(hosts[0].findings[:2])  # without vLLM or Ray there is no cluster to look at
        nodes, of_all = hosts_of_cluster(address, model)
        hosts += [node for node in nodes if node.host != hosts[0].host]
    found = [(host.host, finding) for host in hosts for finding in host.findings]
    found += [("all", finding) for finding in of_all]
    if output_format == OutputFormat.JSON:
        print(json.dumps([{"host": name} | asdict(finding) for name, finding in found], indent=1))
    else:
        from tokenfleet.cli.terminal import show

        show([_table(found)])
    return 1 if any(finding.state == "stops" for _, finding in found) else 0


def _table(found: list[tuple[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("host", "check", "", "found"):
        table.add_column(name, no_wrap=name != "found")
    for name, finding in found:
        table.add_row(name, finding.check, finding.state, finding.says)
    return table
