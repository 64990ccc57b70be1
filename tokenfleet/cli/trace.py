"""`tokenfleet trace check | synth | convert`: inspects, generates and converts traces."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from controlplane.errors import BadInput
from tokenfleet.cli.flags import Format, OutputFormat, Verbose, flag, takes_flags
from tokenfleet.cli.terminal import answer, console, counted_bar, warn
from tokenfleet.files import refuse_to_replace
from tokenfleet.profiles.library import find_profiles
from tokenfleet.report.tables import PHASES, facts_table, phase_row, table
from tokenfleet.traces.check import Checkup, Finding, as_json, check, verdict
from tokenfleet.traces.distributions import PUBLISHED_SEED
from tokenfleet.traces.readers import read_trace
from tokenfleet.traces.reuse import KEEPS, TraceReuse
from tokenfleet.traces.shape import Phase
from tokenfleet.traces.synth import SESSION_THINK, SessionLaws, synthesise, synthesise_sessions
from tokenfleet.traces.trace import Trace
from tokenfleet.traces.writers import kind_for, write_trace

trace_app = typer.Typer(
    help="Check, generate and convert traces: the requests a fleet must serve.",
    add_completion=False,
    rich_markup_mode=None,
)

BARS = "▁▂▃▄▅▆▇█"
_READING = ("order", "empty outputs")  # these the reader of the file has told already
SHOWN_PHASES = 8


@trace_app.command(
    "check",
    epilog="Example: tokenfleet trace check examples/sample_trace.csv --model llama-3.1-8b --format json",
)
def check_command(
    file: Annotated[Path, typer.Argument(help="a trace in any known format", show_default=False)],
    output_format: Format = OutputFormat.TABLE,
    model: Annotated[
        str | None,
        typer.Option(help="print the prefix hit rate of this model's worker types", show_default=False),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Find what in a trace could mislead a plan.

    It checks order, duplicates, units, lengths, gaps, bursts and drift. It checks that the trace is long
    enough to judge a p99, and what share of it a prefix cache could serve. Exit code 0, with or without
    warnings; 2 if the file cannot be used.
    """
    kv_tokens = {p.type_name: p.kv.capacity_tokens for p in (find_profiles(model) if model else ())}
    checkup = check(_read(file))
    text = json.dumps(as_json(checkup, kv_tokens), ensure_ascii=False, indent=1)
    answer(output_format, text, lambda: as_tables(checkup, kv_tokens, verbose))


@dataclass(frozen=True, slots=True)
class MadeUp:
    """The flags of a trace that is made up."""

    arrivals: Annotated[
        str,
        typer.Option(
            help="poisson:RATE, gamma:RATE:CV or diurnal:LOW:HIGH:PERIOD_S[:CV]; rates per second",
            show_default=False,
        ),
    ]
    lengths: Annotated[
        str,
        typer.Option(
            help="NAME, or PROMPT-OUTPUT: S, M, L (Llumnix's power laws), azure-conv, sharegpt,"
            " fixed:PROMPT:OUTPUT, fixed:N, uniform:LOW:HIGH, lognormal:MEAN:CV",
            show_default=False,
        ),
    ]
    requests: Annotated[int, typer.Option(help="number of requests", show_default=False)]
    out: Annotated[Path, typer.Option("--output", help="FILE.csv, .jsonl or .parquet", show_default=False)]
    turns: str | None = flag(None, "turns of a session: fixed:N, uniform:LOW:HIGH or lognormal:MEAN:CV")
    think: str = flag(SESSION_THINK, "think time before each further turn, in seconds, by the same laws")
    system_tokens: int = flag(0, "a system prompt that all sessions share", min=0)
    context_tokens: int = flag(131_072, "sessions end before they are longer", min=2)
    seed: int = flag(
        PUBLISHED_SEED, "the same seed gives the same trace; default: that of the published workloads"
    )
    decimals: int = flag(6, "decimals of arrival times; -1 keeps all", min=-1, max=15)
    overwrite: bool = flag(False, "replace FILE if it exists", "--overwrite")


@trace_app.command(
    "synth",
    epilog="Example: tokenfleet trace synth --arrivals gamma:5:2 --lengths S-L --requests 999 --output t.csv",
)
@takes_flags()
def synth_command(asked: MadeUp) -> None:
    """Generate a trace from laws of arrivals and lengths.

    `--lengths S-S --requests 10000` (also M-M, L-L, S-L, …) makes the workloads of the Llumnix paper. With
    `--turns`, arrivals are arrivals of sessions, and lengths are of a turn's message and answer. Chats:
    `--turns lognormal:5:1 --lengths lognormal:200:1-lognormal:300:1 --system-tokens 1000`. Agents: `--turns
    lognormal:50:1 --think lognormal:5:1.5 --lengths lognormal:1500:2-lognormal:300:1 --system-tokens 20000`.
    """
    kind_for(asked.out, "plain")
    refuse_to_replace(asked.out, asked.overwrite)
    systems = None
    if asked.turns is None:
        if asked.think != SESSION_THINK or asked.system_tokens:
            raise BadInput("--think, --system-tokens: only with sessions; give --turns too")
        workload = synthesise(asked.arrivals, asked.lengths, asked.requests, asked.seed)
    else:
        laws = SessionLaws(asked.turns, asked.think, asked.system_tokens, asked.context_tokens)
        workload, systems = synthesise_sessions(
            asked.arrivals, asked.lengths, asked.requests, laws, asked.seed
        )
    if asked.decimals >= 0:
        workload = replace(workload, arrival_s=np.round(workload.arrival_s, asked.decimals))
    made = Trace(asked.out.name, "plain", workload, systems=systems, from_lengths=asked.turns is not None)
    _write(made, asked.out, "plain", asked.overwrite)


@trace_app.command(
    "convert",
    epilog="Example: tokenfleet trace convert AzureLLMInferenceTrace_conv.csv conv.parquet",
)
def convert_command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="a trace in any known format")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="FILE.csv, .jsonl or .parquet")],
    to: Annotated[Literal["plain", "mooncake", "azure"], typer.Option(help="format of OUT")] = "plain",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace OUT if it exists")] = False,
) -> None:
    """Rewrite a trace in another format.

    `plain` keeps every column. `mooncake` (.jsonl) keeps whole milliseconds and shared prefixes, in blocks of
    512 tokens. `azure` (.csv) keeps arrival dates and lengths.
    """
    kind_for(target, to)
    refuse_to_replace(target, overwrite)
    trace = _read(source)
    warn(trace.warnings)
    _write(trace, target, to, overwrite)


def _read(path: Path) -> Trace:
    with console(stderr=True).status(f"reading {path}"):
        return read_trace(path)


def _write(trace: Trace, path: Path, form: str, overwrite: bool) -> None:
    with counted_bar("writing", len(trace)) as advance:
        write_trace(trace, path, form, overwrite, advance)
    print(f"{path}: {len(trace):,} requests in {trace.workload.duration_s:.1f} s", file=sys.stderr)


def sparkline(values: NDArray[np.float64]) -> str:
    """Values as bars, from 0 to their maximum; a value of 0 is a space."""
    if not len(values) or values.max() <= 0:
        return ""
    levels = np.minimum((values / values.max() * len(BARS)).astype(int), len(BARS) - 1)
    return "".join(BARS[level] if value > 0 else " " for level, value in zip(levels, values, strict=True))


def as_tables(
    checkup: Checkup, kv_tokens: Mapping[str, int], verbose: bool = False
) -> Iterator[RenderableType]:
    """The checkup for a terminal: the verdict, rate, lengths, prefix reuse and warnings.

    `kv_tokens`: the KV memory of worker types, by their names. `verbose`: every finding, and reuse in full.
    """
    yield Text(verdict(checkup), style="bold yellow" if checkup.warnings else "bold green")
    yield facts_table(_facts(checkup))
    if len(checkup.phases) > 1:
        yield _phases_table(checkup.phases)
    if verbose:
        yield _findings_table(checkup.findings)
    if checkup.reuse is not None and (verbose or kv_tokens):
        yield from _reuse_tables(checkup.reuse, kv_tokens)


def _facts(checkup: Checkup) -> Iterator[tuple[str, RenderableType]]:
    """The rate, the lengths, the prefix reuse and the warnings, a line each."""
    shape = checkup.shape
    if len(shape.rates_rps):
        yield "Rate", f"{sparkline(shape.rates_rps)}  0 to {shape.rates_rps.max():.3g} req/s"
    for name, tail in (("Prompt tokens", shape.prompt), ("Output tokens", shape.output)):
        yield name, "   ".join(f"{figure} {value:,.0f}" for figure, value in asdict(tail).items())
    if checkup.reuse is not None:
        yield (
            "Prefix hit rate",
            f"{100 * checkup.reuse.ideal:.1f} % of prompt tokens, in a cache without limit",
        )
    for warning in checkup.trace.warnings:
        yield "Reading", Text(warning, style="yellow")
    for finding in checkup.findings:
        if finding.warns and finding.name not in _READING:
            yield "Warning", Text(finding.words, style="yellow")


def _phases_table(phases: Sequence[Phase]) -> Table:
    """The phases of a trace, the first ones where there are many."""
    shown = table(PHASES, map(phase_row, phases[:SHOWN_PHASES]))
    if (more := len(phases) - SHOWN_PHASES) > 0:
        shown.caption = f"… {more} more with --format json"
    return shown


def _findings_table(findings: Sequence[Finding]) -> Table:
    shown = Table(box=None, padding=(0, 2, 0, 0))
    shown.add_column("check", no_wrap=True)
    shown.add_column("")
    shown.add_column("finding", overflow="fold")
    for finding in findings:
        mark = Text("warning", style="yellow") if finding.warns else Text("ok", style="green")
        shown.add_row(finding.name, mark, Text(finding.words))
    return shown


def _reuse_tables(reuse: TraceReuse, kv_tokens: Mapping[str, int]) -> Iterator[RenderableType]:
    """What a prefix cache could serve, by where the prefix is from and by the size of the cache."""
    if reuse.within_tokens is not None:
        within = reuse.within_tokens / reuse.prompt_tokens
        yield Text(
            f"Prefix hits: {100 * within:.1f} % within sessions,"
            f" {100 * (reuse.ideal - within):.1f} % across sessions"
        )
    if not len(reuse.hits):
        return
    median, working_set = reuse.distance(0.5), reuse.distance(KEEPS)
    distance = f"Reuse distance: p50 {median:,.0f} unique tokens, p90 {working_set:,.0f} (the working set)"
    yield Text(f"{distance}; {reuse.unique_tokens:,} unique tokens in all")
    if kv_tokens:
        columns = ("worker type", "KV tokens", "hit rate of one worker", "workers for the working set")
        needed = {name: max(math.ceil(working_set / tokens), 1) for name, tokens in kv_tokens.items()}
        rows = (
            (name, f"{tokens:,}", f"{100 * reuse.kept(tokens):.1f} %", str(needed[name]))
            for name, tokens in kv_tokens.items()
        )
        yield table(columns, rows, left=("worker type",))
