"""The flags of `tokenfleet serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tokenfleet.cli.flags import ControlKey, ControlKeys, Insecure, TlsCert, TlsKey

WORKERS = 2  # unless something says


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """What `tokenfleet serve` is asked."""

    model: Annotated[
        list[str],
        typer.Option(help="a model folder, or a Hugging Face name; with --portfolio NAME=it, for each model"),
    ]
    workers: Annotated[
        int | None, typer.Option(min=1, help=f"how many to start with (default: {WORKERS})")
    ] = None
    tp: Annotated[
        int | None, typer.Option(min=1, help="GPUs a worker spans (tensor parallel; default: 1)")
    ] = None
    prefill: Annotated[
        int | None, typer.Option(min=1, help="in place of --workers: these only prefill, with --decode")
    ] = None
    decode: Annotated[int | None, typer.Option(min=1, help="and these only decode what those hand over")] = (
        None
    )
    host: Annotated[str, typer.Option(help="address of the OpenAI endpoint")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000
    gateways: Annotated[
        int, typer.Option(min=1, max=32, help="processes that answer on --port, in front of one placement")
    ] = 1
    control_host: Annotated[str, typer.Option(help="address of the control API")] = "127.0.0.1"
    control_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001
    api_key: Annotated[list[str] | None, typer.Option(help="a key clients must send; repeatable")] = None
    api_keys: Annotated[
        Path | None,
        typer.Option(help="YAML list of keys with bounds and limits, read anew when it changes"),
    ] = None
    control_key: ControlKey = None
    control_keys: ControlKeys = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    insecure: Insecure = False
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="default targets (without: ttft=1.6s,tpot=75ms, or what the engine can meet), and those of"
            " classes: chat:ttft=400ms,tpot=30ms; a request's class is in its header x-slo-class, its body's"
            " slo_class, or its key's"
        ),
    ] = None
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="gpu=…,tp=…,workers=…",
            help="workers of this kind, in place of --workers and --tp; repeatable, for a fleet of several"
            " (also role=prefill or role=decode, max=N, how many can be had, usd=…, a worker's price an hour,"
            " and reclaims=…, how often an hour a spot worker is taken away)",
        ),
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option(
            help="run a plan's JSON: its workers, step times, targets, policy, engine limits, prices and"
            " limits of GPUs and dollars"
        ),
    ] = None
    portfolio: Annotated[
        Path | None,
        typer.Option(
            help="run the plan of several models (portfolio.json, from `tokenfleet portfolio`) behind one"
            " endpoint, each with a fleet of its own, within its limits"
        ),
    ] = None
    as_is: Annotated[
        bool,
        typer.Option(
            "--as-is",
            help="run the plan's workers, policy and targets on other GPUs, another model or with other flags"
            " than it was made for; its step times are then left out",
        ),
    ] = False
    autoscale: Annotated[str | None, typer.Option(help="let the controller decide within MIN..MAX")] = None
    scale_in_after: Annotated[
        str, typer.Option(help="how long fewer workers must be enough before some are drained")
    ] = "80s"
    budget_usd_per_h: Annotated[
        float | None,
        typer.Option(min=0, help="--autoscale never costs more an hour (default: the plan's budget, if any)"),
    ] = None
    max_workers: Annotated[
        int | None, typer.Option(min=1, help="never more (default: twice, at least 8)")
    ] = None
    advisory: Annotated[bool, typer.Option("--advisory", help="say decisions, do not act on them")] = False
    engine: Annotated[str, typer.Option(help="vllm, or emulated (tokens are made up)")] = "vllm"
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="step times of emulated engines, and what placement expects instead of measuring workers as"
            " they start; repeatable, one for each kind"
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
            help="record requests and step times, in your data folder where none is named, or not at all"
            " (default: for as long as it runs; to stay where a folder is named)",
        ),
    ] = None
    history_prefixes: Annotated[
        bool,
        typer.Option(
            "--history-prefixes", help="with salted digests of what requests share, and X-Session-Id"
        ),
    ] = False
    history_days: Annotated[float, typer.Option(min=0.01, help="how long requests are kept there")] = 30.0
    history_mb: Annotated[int, typer.Option(min=1, help="and how much of them at most")] = 1024
    policy: Annotated[
        str | None,
        typer.Option(
            help="placement; with +migrate, running requests move, too (default: the plan's,"
            " else spread+migrate)"
        ),
    ] = None
    queue: Annotated[
        int,
        typer.Option(
            min=0,
            help="requests that may wait for a worker, not counting work that yields to a tighter class",
        ),
    ] = 256
    queue_wait: Annotated[str, typer.Option(help="how long one may wait before 429")] = "30s"
    nodes_wait: Annotated[
        str, typer.Option(help="how long nodes of a Ray cluster may take to bring the GPUs")
    ] = "0s"
    shutdown_wait: Annotated[str, typer.Option(help="how long streams may finish after SIGTERM")] = "20s"
    move_bandwidth: Annotated[
        int | None,
        typer.Option(min=0, help="MB/s of KV a worker's moves may copy, 0: no bound (default: 200 on CPUs)"),
    ] = None
    move_share: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=1, help="and share of a core's time they may take (default: 0.01 on CPUs)"
        ),
    ] = None
    host_kv: Annotated[
        str | None,
        typer.Option(
            metavar="64GiB",
            help="host memory of a worker, below its KV: what has left KV of prompts is loaded from there"
            " (default: the plan's, else none)",
        ),
    ] = None
    kv_transport: Annotated[
        str,
        typer.Option(
            metavar="auto, nixl or sockets",
            help="how KV moves between workers; auto takes NIXL between GPUs of one host, where it is"
            " installed, and sockets between hosts (nixl does not encrypt there)",
        ),
    ] = "auto"
    reclaim_notice: Annotated[
        str | None,
        typer.Option(
            metavar="file:PATH or http://…",
            help="where a machine reads that it goes away: a file, or AWS', Google's or Azure's metadata;"
            " its workers are then evacuated (Ray's draining nodes always are)",
        ),
    ] = None
    priority_headroom: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.9,
            help="share of a worker's KV kept free of others where a high-priority request runs (default: the"
            " plan's, else 0)",
        ),
    ] = None
    verbose: Annotated[bool, typer.Option("--verbose", help="log what the engines say, too")] = False
    engine_flags: Annotated[
        list[str] | None, typer.Argument(metavar="-- [VLLM FLAGS]", help="any vLLM engine flag, after --")
    ] = None
