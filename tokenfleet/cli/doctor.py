"""`tokenfleet doctor`: says what on this host, or on the nodes of a Ray cluster, would stop a fleet."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tokenfleet.cli.plan import OutputFormat

if TYPE_CHECKING:
    from dataplane.live.worker.host_checks import Finding


def doctor_command(
    model: Annotated[str, typer.Option(help="the model to serve: whether its weights are there")] = "",
    host: Annotated[str, typer.Option(help="address of the OpenAI endpoint")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    control_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    cluster: Annotated[
        str, typer.Option(envvar="RAY_ADDRESS", help="a Ray cluster, each node of which is looked at")
    ] = "",
    nic: Annotated[str, typer.Option(help="the network interface that workers shall be reached by")] = "",
    engine: Annotated[
        bool,
        typer.Option("--engine", help="then start two engines and move a request between them"),
    ] = False,
    tp: Annotated[int, typer.Option(min=1, help="GPUs of each of those engines")] = 1,
    output_format: Annotated[OutputFormat, typer.Option("--format", help="on stdout")] = OutputFormat.TABLE,
    engine_flags: Annotated[
        list[str] | None, typer.Argument(metavar="-- [VLLM FLAGS]", help="of those engines, after --")
    ] = None,
) -> int:
    """Look at vLLM, Ray, GPUs, memory, network, ports and the model, before a fleet is started.

    Nothing is loaded and no GPU is touched, but with --engine: then two real engines serve (a tiny model
    without --model), a request is moved between them, and its tokens are compared with an unmoved run's.
    Exit code 1 where something would stop a fleet; `serve` looks at the same before it starts.

    tokenfleet doctor --model ./tiny

    tokenfleet doctor --cluster 10.0.0.1:6379 --nic eth1 --model /models/llama --format json

    tokenfleet doctor --engine --model /models/llama --tp 2 -- --max-model-len 8192
    """
    from dataplane.live.worker.host_checks import Finding, first_stop, hosts_of_cluster, look_at_host

    ports = (host, port), ("127.0.0.1", control_port)
    # On a cluster a NIC is looked for at each node, which has an address to be held against.
    hosts, of_all = [look_at_host(model, ports, "" if cluster else nic)], tuple[Finding, ...]()
    if cluster:
        first_stop(hosts[0].findings[:2])  # without vLLM or Ray there is no cluster to look at
        nodes, of_all = hosts_of_cluster(cluster, model, nic)
        own = {finding.check for node in nodes if node.host == hosts[0].host for finding in node.findings}
        rest = [finding for finding in hosts[0].findings if finding.check not in own]
        found = [(hosts[0].host, finding) for finding in rest]
        hosts = nodes
        os.environ["RAY_ADDRESS"] = cluster
    else:
        found = []
    found += [(each.host, finding) for each in hosts for finding in each.findings]
    found += [("all", finding) for finding in of_all]
    if engine and not any(finding.state == "stops" for _, finding in found):
        found += [("engines", finding) for finding in _tried(model, tp, engine_flags or [])]
    if output_format == OutputFormat.JSON:
        print(json.dumps([{"host": name} | asdict(finding) for name, finding in found], indent=1))
    else:
        from tokenfleet.cli.terminal import show

        show([_table(found)])
    return 1 if any(finding.state == "stops" for _, finding in found) else 0


def _tried(model: str, tp: int, flags: list[str]) -> list[Finding]:
    """What two engines of the model do, or of a tiny one that is made for it."""
    from tokenfleet.cli.trial import TINY_FLAGS, make_tiny_model, try_engines

    if model:
        return try_engines(model, tp, flags)
    with tempfile.TemporaryDirectory(prefix="tokenfleet-doctor-") as folder:
        return try_engines(make_tiny_model(Path(folder) / "tiny-llama"), tp, flags or list(TINY_FLAGS))


def _table(found: list[tuple[str, Finding]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("host", "check", "", "found"):
        table.add_column(name, no_wrap=name != "found")
    for name, finding in found:
        table.add_row(name, finding.check, finding.state, finding.says)
    return table
