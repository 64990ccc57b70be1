"""`tokenfleet compare`: replays a trace on a running fleet, simulates it, and reports the difference."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.figures import counted, duration_text
from controlplane.perfmodel.profile import NORMAL_MEAN_ABS, Frontend, Profile
from controlplane.types import Slo
from dataplane.http.tls import client_context
from tokenfleet.cli.flags import ControlKey, EndpointKey, Format, OutputFormat, TlsCa, flag, takes_flags
from tokenfleet.cli.terminal import counted_bar, show, warn
from tokenfleet.files import write_files
from tokenfleet.planning.request import PlanRequest
from tokenfleet.profiles.library import read_profile
from tokenfleet.report.tables import share_text, table
from tokenfleet.texts import Parsed, parse_duration_s, parse_slo, parse_window_s

if TYPE_CHECKING:
    from controlplane.workload import Workload
    from tokenfleet.compare.replay import Replay

SCHEMA = "tokenfleet.comparison/1"
COUNTERS = ("preemptions", "migrations")
SIZES = ("kv_blocks", "block_tokens", "max_seqs")  # of a worker, in GET /v1/fleet
LONE_TOKENS = 8  # the prompt of replay.overheads_s
FEWEST_OVERHEADS = 10


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One compared figure; by `kind` its error is relative, or a difference of shares or counts."""

    name: str
    live: float
    simulated: float
    kind: str

    @property
    def error(self) -> float | None:
        """None where there is nothing to be relative to."""
        if self.kind != "relative":
            return self.simulated - self.live
        return self.simulated / self.live - 1 if self.live > 0 else None

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row of a table."""
        if self.kind == "relative":
            error = "-" if self.error is None else f"{100 * self.error:+.1f} %"
            return self.name, duration_text(self.live), duration_text(self.simulated), error
        if self.kind == "share":
            points = f"{100 * (self.simulated - self.live):+.2f} points"
            return "SLO attainment", share_text(self.live), share_text(self.simulated), points
        more = f"{self.simulated - self.live:+.0f}"
        return self.name, f"{self.live:.0f}", f"{self.simulated:.0f}", more


@dataclass(frozen=True, slots=True)
class CompareFlags:
    """What `tokenfleet compare` is asked."""

    trace: Annotated[list[Path], typer.Option(help="requests to replay, any known format")]
    endpoint: Annotated[str, typer.Option(help="the OpenAI endpoint, e.g. http://127.0.0.1:8000")]
    profile: Annotated[Path, typer.Option(help="fitted profile of the workers")]
    slo: Annotated[str, typer.Option(help="both targets with units: ttft=1.6s,tpot=75ms")]
    control: str | None = flag(None, "the fleet's control API: workers, moves")
    workers: int | None = flag(
        None, "workers behind the endpoint (default: as the control API reports)", min=1
    )
    policy: str = flag("spread", "placement policy of the fleet")
    api_key: EndpointKey = None
    control_key: ControlKey = None
    tls_ca: TlsCa = None
    rate_scale: float = flag(1.0, "multiply the request rate by this")
    window: str | None = flag(None, "only this part of the trace: 10m..20m")
    overhead: str | None = flag(
        None, "time HTTP adds to a first token (default: measured on single requests)"
    )
    steps: Path | None = flag(
        None, "the fleet's steps.csv (serve --data), to learn HTTP's time under this load"
    )
    per_request: Path | None = flag(None, "write each request's latencies, live and simulated, to this CSV")
    seed: int = flag(0, "random seed of prompts and of policies that choose at random", min=0)
    output_format: Format = OutputFormat.TABLE


@takes_flags()
def compare_command(flags: CompareFlags) -> int:
    """Replay a trace on a running fleet and in the simulator, and compare the two.

    tokenfleet compare --trace hour.csv --endpoint http://127.0.0.1:8000 --control http://127.0.0.1:8001
    --profile fitted.yaml --slo ttft=1.6s,tpot=75ms --steps $TOKENFLEET_DATA/steps.csv
    """
    request, fixed_s = _checked(flags)
    trust = client_context(flags.tls_ca)
    from tokenfleet.compare.replay import read_steps
    from tokenfleet.planning.inputs import trimmed
    from tokenfleet.traces import read_traces

    worker = replace(read_profile(flags.profile), frontend=Frontend())  # here it is measured
    if flags.steps is not None:
        read_steps(flags.steps)  # a file that cannot be read is refused before the replay
    read = read_traces([str(path) for path in flags.trace])
    workload = trimmed(read, request)
    if not len(workload):
        raise BadInput(f"{read.name}: no requests to replay")
    warn(read.warnings)
    run = asyncio.run(_replayed(workload, flags, trust, worker, fixed_s))
    count = flags.workers or run["workers"]
    from dataplane.simulated.simulate import WorkerSpec, simulate

    replayed: Replay = run["replayed"]
    if not replayed.finished.any():
        raise BadInput(f"--endpoint: no request finished; the first error: {replayed.errors[0]}")
    if replayed.errors:
        warn([f"{len(replayed.errors)} requests failed and are excluded: {replayed.errors[0]}"])
    overheads_s = run["overheads_s"]
    if flags.steps is not None:
        overheads_s = _learned_s(replayed, flags.steps, overheads_s)
    sizes = run["sizes"] or [{}]
    fleet = run["simulated"] = [as_served(worker, sizes[i % len(sizes)]) for i in range(count)]
    specs = [WorkerSpec(one) for one in fleet]
    log = replayed.log
    outcome = simulate(log.workload, specs, request.slo, flags.policy, seed=flags.seed)
    lots = np.random.default_rng(flags.seed)
    simulated = {
        "ttft_s": first_tokens_s(outcome.ttft_s, worker, overheads_s, lots),
        "tpot_s": outcome.tpot_s,
        "preemptions": int(outcome.preemptions.sum()),
        "migrations": int(outcome.migrations.sum()),
    }
    figures = compared(log.ttft_s, log.tpot_s, simulated, request.slo, run["counters"])
    if flags.per_request is not None:
        _write_requests(flags.per_request, replayed, simulated)
    run["overheads_s"] = overheads_s
    _say(figures, run, count, int(replayed.finished.sum()), flags.output_format)
    return 0


def _checked(flags: CompareFlags) -> tuple[PlanRequest, float | None]:
    """The request, and HTTP's share where it is given; raises BadInput for flags that do not go together."""
    if flags.control is None and flags.workers is None:
        raise BadInput("--workers: how many serve the endpoint? Give it, or --control")
    window = None if flags.window is None else Parsed(flags.window, parse_window_s(flags.window))
    request = PlanRequest(
        parse_slo(flags.slo), policy=flags.policy, rate_scale=flags.rate_scale, window=window
    )
    fixed_s = None if flags.overhead is None else parse_duration_s(flags.overhead, "--overhead")
    if fixed_s is not None and flags.steps is not None:
        raise BadInput("--steps: sets the same overhead as --overhead; give one of them")
    return request, fixed_s


def as_served(profile: Profile, sizes: dict[str, int]) -> Profile:
    """The profile of a worker with these SIZES, or the same profile without them.

    The KV memory stays where layers keep a window: fleets count blocks of all layers, profiles of some.
    """
    if not sizes:
        return profile
    served = profile.with_engine(max_seqs=sizes["max_seqs"])
    if profile.kv.request_tokens:
        return served
    return served.with_kv(None, sizes["kv_blocks"] * sizes["block_tokens"], sizes["block_tokens"])


def compared(
    ttft_s: NDArray[np.float64],
    tpot_s: NDArray[np.float64],
    simulated: dict[str, Any],
    slo: Slo,
    counters: dict[str, int],
) -> list[ComparedFigure]:
    """The figures, live and simulated; both columns of the same requests. `counters` of the live fleet."""
    theirs = simulated["ttft_s"], simulated["tpot_s"]
    figures = [ComparedFigure("attainment", met(ttft_s, tpot_s, slo), met(*theirs, slo), "share")]
    for name, live, other in (("TTFT", ttft_s, theirs[0]), ("TPOT", tpot_s, theirs[1])):
        figures.append(
            ComparedFigure(f"{name} mean", float(np.nanmean(live)), float(np.nanmean(other)), "relative")
        )
        for q in (0.5, 0.9, 0.99):
            here, there = (float(np.nanquantile(x, q)) for x in (live, other))
            figures.append(ComparedFigure(f"{name} p{q * 100:.0f}", here, there, "relative"))
    for name in COUNTERS:
        if name in counters:
            figures.append(ComparedFigure(name, float(counters[name]), float(simulated[name]), "count"))
    return figures


def first_tokens_s(
    ttft_s: NDArray[np.float64],
    worker: Profile,
    overheads_s: NDArray[np.float64],
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Simulated times to the first token as a client would see them, shape [requests].

    A profile has the mean time of a step. Each step takes longer or shorter by a scatter of its own, as large
    as the fit's residuals and here log-normal around that mean. A request waits for its first token
    through one step or a few, so its median and its tail are those of the scatter. Without it a noisy host's
    median would be simulated too slow and its 90th percentile too fast. (A TPOT is a mean over many steps.)
    The way there and back adds one of `overheads_s`.
    """
    spread = worker.residuals.mean_relative / NORMAL_MEAN_ABS
    scatter = np.exp(spread * rng.standard_normal(len(ttft_s)) - spread**2 / 2.0)
    return np.asarray(ttft_s * scatter + rng.choice(overheads_s, len(ttft_s)), float)


def _learned_s(replayed: Replay, steps: Path, lone_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """The way there and back as this replay took it, or as lone requests did where too little shows it."""
    from tokenfleet.compare.replay import learned_overheads_s, read_steps

    log = replayed.log
    overheads_s = learned_overheads_s(
        replayed.sent_unix_s, log.workload.prompt_tokens, log.ttft_s, read_steps(steps)
    )
    if len(overheads_s) >= FEWEST_OVERHEADS:
        return overheads_s
    warn(
        [
            f"--steps: {steps}: {len(overheads_s)} requests of this replay found an idle worker,"
            f" {FEWEST_OVERHEADS} are needed; the HTTP overhead of lone requests is used instead"
        ]
    )
    return lone_s


def _write_requests(path: Path, replayed: Replay, simulated: dict[str, Any]) -> None:
    """A row for each finished request, in the order they were sent; empty: a single token has no TPOT."""
    import polars as pl

    log = replayed.log
    columns = {
        "sent_unix_s": replayed.sent_unix_s,
        "prompt_tokens": log.workload.prompt_tokens,
        "output_tokens": log.workload.output_tokens,
        "ttft_s": log.ttft_s,
        "tpot_s": log.tpot_s,
        "simulated_ttft_s": simulated["ttft_s"],
        "simulated_tpot_s": simulated["tpot_s"],
    }
    write_files({path: pl.DataFrame(columns).fill_nan(None).write_csv()})


def met(ttft_s: NDArray[np.float64], tpot_s: NDArray[np.float64], slo: Slo) -> float:
    """Share of requests within both targets; one of a single token has no TPOT to miss."""
    return float(np.mean((ttft_s <= slo.ttft_s) & (np.isnan(tpot_s) | (tpot_s <= slo.tpot_s))))


async def _replayed(
    workload: Workload, flags: CompareFlags, trust: ssl.SSLContext, worker: Any, fixed_s: float | None
) -> dict[str, Any]:
    from tokenfleet.compare.replay import overheads_s, replay, served_model

    rng = np.random.default_rng(flags.seed)
    to = await served_model(flags.endpoint, flags.api_key, trust)
    alone_s = worker.alone_ttft_s(LONE_TOKENS)
    extra_s = await overheads_s(to, alone_s, rng) if fixed_s is None else np.array([fixed_s])
    before = await _counters(flags, trust)
    to = replace(to, is_emulated=before.get("engines") == {"emulated"})
    with counted_bar("replaying", len(workload)) as advance:
        replayed = await replay(workload, to, rng, advance)
    after = await _counters(flags, trust)
    counters = {name: after[name] - before[name] for name in COUNTERS if name in after}
    known = {"workers": after.get("workers", 0), "sizes": after.get("sizes")}
    return {"replayed": replayed, "overheads_s": extra_s, "counters": counters, **known}


def _sizes(worker: dict[str, Any]) -> dict[str, int]:
    """A worker's SIZES; empty for a fleet that has none of them. Raises ValueError for a wrong one."""
    sizes = {name: worker.get(name) for name in SIZES}
    for name, size in sizes.items() if any(sizes.values()) else ():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"worker {worker.get('worker')}: {name}: must be at least 1, got {size!r:.40}")
    return {name: size for name, size in sizes.items() if size is not None}


async def _counters(flags: CompareFlags, trust: ssl.SSLContext) -> dict[str, Any]:
    """Workers, their sizes, preemptions and moves of the fleet so far; nothing without a control API."""
    if flags.control is None:
        return {}
    import aiohttp

    from tokenfleet.compare.replay import Endpoint, refusal

    control = Endpoint(flags.control.rstrip("/"), "", flags.control_key, trust)
    try:
        async with control.session(30.0) as session:
            async with session.get(f"{control.url}/v1/fleet") as reply:
                fleet = await reply.json(content_type=None)
                if reply.status != 200 or "workers" not in fleet:
                    raise ValueError(f"HTTP {reply.status} to /v1/fleet")
            async with session.get(f"{control.url}/metrics") as reply:
                metrics = await reply.text()
        serving = [w for w in fleet.get("workers", []) if w.get("state") == "serving"]
        sizes = [size for w in serving if (size := _sizes(w))]
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
        raise refusal("--control", control.url, "does not answer as a fleet does", error) from None
    preemptions = sum((w.get("telemetry") or {}).get("preemptions", 0) for w in serving)
    moved = sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith('tokenfleet_migrations_total{outcome="done"')
    )
    counted = {"preemptions": preemptions, "migrations": int(moved)}
    return {"workers": len(serving), "engines": {w.get("engine") for w in serving}, "sizes": sizes, **counted}


def _simulated_text(fleet: list[Profile], is_known: bool) -> str:
    """The KV memory and seats that the simulated workers had, and their source."""
    kinds = dict.fromkeys(
        f"{one.kv.capacity_tokens:,} KV tokens and {one.engine.max_seqs:,} requests at once" for one in fleet
    )
    source = "as the fleet reports" if is_known else "as in the profile"
    return f"Simulated workers have {', or '.join(kinds)}, {source}."


def _say(
    figures: list[ComparedFigure],
    run: dict[str, Any],
    workers: int,
    requests: int,
    output_format: OutputFormat,
) -> None:
    if output_format == OutputFormat.JSON:
        rows = [
            {"name": f.name, "live": f.live, "simulated": f.simulated, "error": f.error, "kind": f.kind}
            for f in figures
        ]
        answer = {"schema": SCHEMA, "requests": requests, "workers": workers, "figures": rows}
        answer |= {
            "failed": len(run["replayed"].errors),
            "overhead_s": float(np.median(run["overheads_s"])),
        }
        answer["overheads_s"] = run["overheads_s"].tolist()
        answer["simulated_workers"] = [
            {"kv_tokens": one.kv.capacity_tokens, "max_seqs": one.engine.max_seqs} for one in run["simulated"]
        ]
        print(json.dumps(answer, indent=1))
        return
    columns = ("figure", "live", "simulated", "simulated vs live")
    relative = [(100 * abs(f.error), f.name) for f in figures if f.error is not None and f.kind == "relative"]
    largest = "; largest error {:.1f} %, in {}".format(*max(relative)) if relative else ""
    show(
        [
            f"Compared {requests:,} requests on {counted(workers, 'worker')}{largest}",
            table(columns, (f.cells for f in figures), left=("figure",)),
            f"Simulated TTFTs include {duration_text(float(np.median(run['overheads_s'])))} of HTTP overhead,"
            " and the profile's scatter of step times.",
            _simulated_text(run["simulated"], bool(run["sizes"])),
        ]
    )
