"""The flags of `tokenfleet serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from controlplane.perfmodel.offload import no_offload, parse_host_kv
from tokenfleet.cli.flags import ControlKey, ControlKeys, EngineFlags, Insecure, TlsCert, TlsKey, flag

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
    workers: int | None = flag(None, f"workers to start with (default: {WORKERS})", min=1)
    tp: int | None = flag(None, "GPUs of a worker (tensor parallel; default: 1)", min=1)
    prefill: int | None = flag(None, "prefill-only workers, with --decode, in place of --workers", min=1)
    decode: int | None = flag(None, "decode-only workers, which receive KV from the prefill workers", min=1)
    host: str = flag("127.0.0.1", "address of the OpenAI endpoint")
    port: int = flag(8000, "port of the OpenAI endpoint", min=1, max=65535)
    gateways: int = flag(1, "gateway processes that answer on --port and share one router", min=1, max=32)
    control_host: str = flag("127.0.0.1", "address of the control API")
    control_port: int = flag(8001, "port of the control API", min=1, max=65535)
    api_key: list[str] | None = flag(None, "a key clients must send; repeatable")
    api_keys: Path | None = flag(None, "YAML list of keys with bounds and limits, reloaded when it changes")
    control_key: ControlKey = None
    control_keys: ControlKeys = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    insecure: Insecure = False
    slo: list[str] | None = flag(
        None,
        "targets, and those of classes: chat:ttft=400ms,tpot=30ms (default: ttft=1.6s,tpot=75ms, or"
        " what the engine can meet). The header x-slo-class, the body's slo_class or the API key names"
        " a request's class",
    )
    kind: list[str] | None = flag(
        None,
        "a worker type, in place of --workers and --tp; repeat for a mixed fleet. Further fields:"
        " role=prefill or role=decode; max=N, the most available; usd=…, a worker's price per hour;"
        " reclaims=…, spot interruptions per worker and hour",
        metavar="gpu=…,tp=…,workers=…",
    )
    plan: Path | None = flag(
        None,
        "run this plan.json: its workers, step times, targets, policy, engine limits, prices, and"
        " limits of GPUs and dollars",
    )
    portfolio: Path | None = flag(
        None,
        "run several models behind one endpoint, each with its own fleet, within the limits of"
        " portfolio.json (from `tokenfleet portfolio`)",
    )
    as_is: bool = flag(
        False,
        "ignore the plan's hardware: keep its workers, policy and targets on other GPUs, another model"
        " or other flags. Its step times are then left out",
        "--as-is",
    )
    autoscale: str | None = flag(
        None,
        "let the controller decide within MIN..MAX (default with --plan: the plan's fewest to its workers)",
        metavar="MIN..MAX",
    )
    fixed: bool = flag(False, "keep the plan's number of workers, whatever the demand", "--fixed")
    scale_in_after: str = flag("80s", "drain workers only after fewer were enough for this long")
    budget_usd_per_h: float | None = flag(
        None, "autoscaling never costs more an hour (default: the plan's budget, if any)", min=0
    )
    max_workers: int | None = flag(
        None, "start at most this many workers (default: twice, at least 8)", min=1
    )
    advisory: bool = flag(False, "print decisions without acting on them", "--advisory")
    engine: str = flag("vllm", "vllm, or emulated (a profile's timing, made-up tokens)")
    profile: list[Path] | None = flag(
        None,
        "step times for emulated engines and for placement, in place of a measurement at the start;"
        " repeat for each worker type",
    )
    data: Path | None = flag(
        None, "folder for request history, step times and plans (default: $TOKENFLEET_DATA)"
    )
    history: bool | None = flag(
        None,
        "keep requests and step times on disk, in your data folder unless --data names one (default:"
        " kept if a folder is named, else until the fleet ends)",
        "--history/--no-history",
    )
    history_prefixes: bool = flag(
        False, "record salted digests of shared prefixes, and X-Session-Id", "--history-prefixes"
    )
    otlp: str | None = flag(
        None, "send OpenTelemetry spans of requests by OTLP/HTTP, e.g. to http://collector:4318"
    )
    history_days: float = flag(30.0, "days to keep requests", min=0.01)
    history_mb: int = flag(1024, "keep at most this many MB of requests", min=1)
    replan_every: str = flag(
        "1d",
        "plan again from the history this often, and when the plan no longer holds; `fleet proposal`"
        " shows the result",
        metavar="1d or off",
    )
    auto_apply: str | None = flag(
        None,
        "apply what the fleet plans again without an operator, within these limits of workers and"
        " dollars an hour",
        metavar="max-workers=8,usd=20",
    )
    policy: str | None = flag(
        None,
        "placement policy; +migrate also moves running requests (default: the plan's, else"
        " spread+migrate); exact ignores caches, and takes one worker type",
    )
    queue: int = flag(
        256, "most requests waiting for a worker; work that yields to a tighter class does not count", min=0
    )
    queue_wait: str = flag("30s", "longest wait before a 429")
    nodes_wait: str = flag("0s", "longest wait for the Ray cluster's nodes to have the GPUs")
    shutdown_wait: str = flag("20s", "time for streams to finish after SIGTERM")
    move_bandwidth: int | None = flag(
        None, "MB/s of KV that a worker's moves may copy; 0: no bound (default: 200 on CPUs)", min=0
    )
    move_share: float | None = flag(
        None, "share of a core's time that moves may take (default: 0.01 on CPUs)", min=0.001, max=1
    )
    host_kv: str | None = flag(
        None,
        "offload evicted KV to this much host memory per worker, and reload it from there (default: the"
        " plan's, else none)",
        metavar="64GiB",
    )
    kv_transport: str = flag(
        "auto",
        "KV transport between workers. auto uses NIXL between GPUs of one host if it is installed, else"
        " sockets; nixl does not encrypt between hosts",
        metavar="auto, nixl or sockets",
    )
    reclaim_notice: str | None = flag(
        None,
        "source of preemption notices: a file, or the metadata of AWS, Google or Azure. Workers of that"
        " machine are evacuated; those on Ray's draining nodes always are",
        metavar="file:PATH or http://…",
    )
    strictness: str | None = flag(
        None,
        "how strictly placement keeps targets: loose, normal, strict, or theta=1,gamma=0.9,tolerance=0"
        " (default: the plan's, else normal)",
        metavar="LEVEL",
    )
    priority_headroom: float | None = flag(
        None,
        "share of a worker's KV reserved while it runs a high-priority request (default: the plan's, else 0)",
        min=0,
        max=0.9,
    )
    verbose: bool = flag(False, "also print the engines' logs", "--verbose")
    engine_flags: EngineFlags = None

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
