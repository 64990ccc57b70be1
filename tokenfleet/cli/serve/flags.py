"""The flags of `tokenfleet serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from controlplane.errors import no_offload
from tokenfleet.cli.flags import ControlKey, ControlKeys, Insecure, TlsCert, TlsKey
from tokenfleet.texts import parse_host_kv

WORKERS = 2  # unless something says
OFFLOADED_GIB = "--kv-offloading-size"
# Of one fleet: a portfolio's plans, or its limits, say them for each model, or nothing does yet.
OF_ONE_FLEET = (
    "plan", "workers", "tp", "prefill", "decode", "kind", "slo", "max_workers", "budget_usd_per_h",
    "advisory", "host_kv", "fixed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """What `tokenfleet serve` is asked."""

    model: Annotated[
        list[str],
        typer.Option(
            help="a model folder or a Hugging Face name; with --portfolio NAME=MODEL, once for each model"
        ),
    ]
    workers: Annotated[
        int | None, typer.Option(min=1, help=f"workers to start with (default: {WORKERS})")
    ] = None
    tp: Annotated[int | None, typer.Option(min=1, help="GPUs of a worker (tensor parallel; default: 1)")] = (
        None
    )
    prefill: Annotated[
        int | None, typer.Option(min=1, help="prefill-only workers, with --decode, in place of --workers")
    ] = None
    decode: Annotated[
        int | None, typer.Option(min=1, help="decode-only workers, which receive KV from the prefill workers")
    ] = None
    host: Annotated[str, typer.Option(help="address of the OpenAI endpoint")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=1, max=65535, help="port of the OpenAI endpoint")] = 8000
    gateways: Annotated[
        int, typer.Option(min=1, max=32, help="gateway processes that answer on --port and share one router")
    ] = 1
    control_host: Annotated[str, typer.Option(help="address of the control API")] = "127.0.0.1"
    control_port: Annotated[int, typer.Option(min=1, max=65535, help="port of the control API")] = 8001
    api_key: Annotated[list[str] | None, typer.Option(help="a key clients must send; repeatable")] = None
    api_keys: Annotated[
        Path | None,
        typer.Option(help="YAML list of keys with bounds and limits, reloaded when it changes"),
    ] = None
    control_key: ControlKey = None
    control_keys: ControlKeys = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    insecure: Insecure = False
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="targets, and those of classes: chat:ttft=400ms,tpot=30ms (default: "
            "ttft=1.6s,tpot=75ms, or what the engine can meet). The header x-slo-class, the body's "
            "slo_class or the API key names a request's class"
        ),
    ] = None
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="gpu=…,tp=…,workers=…",
            help="a worker type, in place of --workers and --tp; repeat for a mixed fleet. Further "
            "fields: role=prefill or role=decode; max=N, the most available; usd=…, a worker's "
            "price per hour; reclaims=…, spot interruptions per worker and hour",
        ),
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option(
            help="run this plan.json: its workers, step times, targets, policy, engine limits, prices, "
            "and limits of GPUs and dollars"
        ),
    ] = None
    portfolio: Annotated[
        Path | None,
        typer.Option(
            help="run several models behind one endpoint, each with its own fleet, within the limits of "
            "portfolio.json (from `tokenfleet portfolio`)"
        ),
    ] = None
    as_is: Annotated[
        bool,
        typer.Option(
            "--as-is",
            help="ignore the plan's hardware: keep its workers, policy and targets on other GPUs, "
            "another model or other flags. Its step times are then left out",
        ),
    ] = False
    autoscale: Annotated[
        str | None,
        typer.Option(
            metavar="MIN..MAX",
            help="let the controller decide within MIN..MAX (default with --plan: the plan's fewest"
            " to its workers)",
        ),
    ] = None
    fixed: Annotated[
        bool, typer.Option("--fixed", help="keep the plan's number of workers, whatever the demand")
    ] = False
    scale_in_after: Annotated[
        str, typer.Option(help="drain workers only after fewer were enough for this long")
    ] = "80s"
    budget_usd_per_h: Annotated[
        float | None,
        typer.Option(min=0, help="autoscaling never costs more an hour (default: the plan's budget, if any)"),
    ] = None
    max_workers: Annotated[
        int | None, typer.Option(min=1, help="start at most this many workers (default: twice, at least 8)")
    ] = None
    advisory: Annotated[bool, typer.Option("--advisory", help="print decisions without acting on them")] = (
        False
    )
    engine: Annotated[str, typer.Option(help="vllm, or emulated (a profile's timing, made-up tokens)")] = (
        "vllm"
    )
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="step times for emulated engines and for placement, in place of a measurement at the "
            "start; repeat for each worker type"
        ),
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(help="folder for request history, step times and plans (default: $TOKENFLEET_DATA)"),
    ] = None
    history: Annotated[
        bool | None,
        typer.Option(
            "--history/--no-history",
            help="keep requests and step times on disk, in your data folder unless --data names one "
            "(default: kept if a folder is named, else until the fleet ends)",
        ),
    ] = None
    history_prefixes: Annotated[
        bool,
        typer.Option("--history-prefixes", help="record salted digests of shared prefixes, and X-Session-Id"),
    ] = False
    otlp: Annotated[
        str | None,
        typer.Option(help="send OpenTelemetry spans of requests by OTLP/HTTP, e.g. to http://collector:4318"),
    ] = None
    history_days: Annotated[float, typer.Option(min=0.01, help="days to keep requests")] = 30.0
    history_mb: Annotated[int, typer.Option(min=1, help="keep at most this many MB of requests")] = 1024
    replan_every: Annotated[
        str,
        typer.Option(
            metavar="1d or off",
            help="plan again from the history this often, and when the plan no longer holds; `fleet"
            " proposal` shows the result",
        ),
    ] = "1d"
    auto_apply: Annotated[
        str | None,
        typer.Option(
            metavar="max-workers=8,usd=20",
            help="apply what the fleet plans again without an operator, within these limits of workers and"
            " dollars an hour",
        ),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            help="placement policy; +migrate also moves running requests (default: the plan's, else "
            "spread+migrate); exact ignores caches, and takes one worker type"
        ),
    ] = None
    queue: Annotated[
        int,
        typer.Option(
            min=0,
            help="most requests waiting for a worker; work that yields to a tighter class does not count",
        ),
    ] = 256
    queue_wait: Annotated[str, typer.Option(help="longest wait before a 429")] = "30s"
    nodes_wait: Annotated[
        str, typer.Option(help="longest wait for the Ray cluster's nodes to have the GPUs")
    ] = "0s"
    shutdown_wait: Annotated[str, typer.Option(help="time for streams to finish after SIGTERM")] = "20s"
    move_bandwidth: Annotated[
        int | None,
        typer.Option(
            min=0, help="MB/s of KV that a worker's moves may copy; 0: no bound (default: 200 on CPUs)"
        ),
    ] = None
    move_share: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=1, help="share of a core's time that moves may take (default: 0.01 on CPUs)"
        ),
    ] = None
    host_kv: Annotated[
        str | None,
        typer.Option(
            metavar="64GiB",
            help="offload evicted KV to this much host memory per worker, and reload it from there "
            "(default: the plan's, else none)",
        ),
    ] = None
    kv_transport: Annotated[
        str,
        typer.Option(
            metavar="auto, nixl or sockets",
            help="KV transport between workers. auto uses NIXL between GPUs of one host if it is "
            "installed, else sockets; nixl does not encrypt between hosts",
        ),
    ] = "auto"
    reclaim_notice: Annotated[
        str | None,
        typer.Option(
            metavar="file:PATH or http://…",
            help="source of preemption notices: a file, or the metadata of AWS, Google or Azure. Workers"
            " of that machine are evacuated; those on Ray's draining nodes always are",
        ),
    ] = None
    strictness: Annotated[
        str | None,
        typer.Option(
            metavar="LEVEL",
            help="how strictly placement keeps targets: loose, normal, strict, or "
            "theta=1,gamma=0.9,tolerance=0 (default: the plan's, else normal)",
        ),
    ] = None
    priority_headroom: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.9,
            help="share of a worker's KV reserved while it runs a high-priority request (default: the "
            "plan's, else 0)",
        ),
    ] = None
    verbose: Annotated[bool, typer.Option("--verbose", help="also print the engines' logs")] = False
    engine_flags: Annotated[
        list[str] | None, typer.Argument(metavar="-- [VLLM FLAGS]", help="any vLLM engine flag, after --")
    ] = None

    @property
    def engine_flag_names(self) -> set[str]:
        """The names of vLLM's flags that were given."""
        return {word.partition("=")[0].replace("_", "-") for word in self.engine_flags or ()}

    def engine_words(self) -> list[str]:
        """vLLM's flags that were given, and that for host memory. Raises BadInput."""
        words = list(self.engine_flags or ())
        if self.host_kv is None or (asked := parse_host_kv(self.host_kv)) is None:
            return words
        if self.engine == "emulated":
            raise no_offload("emulated engines keep no KV in host memory")
        if asked[1] is not None:
            raise no_offload(
                f"how fast it is loaded is measured here; give its size alone, got {self.host_kv!r}"
            )
        if OFFLOADED_GIB in self.engine_flag_names:
            raise no_offload(f"is {OFFLOADED_GIB} of all workers; give either")
        return [OFFLOADED_GIB, repr(asked[0] / (1 << 30)), *words]
