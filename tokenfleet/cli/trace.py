"""`tokenfleet trace check | synth | convert`: inspects, generates and converts traces."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from controlplane.errors import BadInput
from tokenfleet.cli.flags import Format, OutputFormat, Verbose, takes
from tokenfleet.cli.terminal import answer, console, counted_bar, warn
from tokenfleet.files import refuse_to_replace
from tokenfleet.traces.check import as_json, as_tables, check
from tokenfleet.traces.distributions import PUBLISHED_SEED
from tokenfleet.traces.readers import read_trace
from tokenfleet.traces.synth import SESSION_THINK, SessionLaws, synthesise, synthesise_sessions
from tokenfleet.traces.trace import Trace
from tokenfleet.traces.writers import kind_for, write_trace

trace_app = typer.Typer(
    help="Check, generate and convert traces: the requests a fleet must serve.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


class Written(StrEnum):
    """The formats `convert` writes."""

    PLAIN = "plain"
    MOONCAKE = "mooncake"
    AZURE = "azure"


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
    kv_tokens = {} if model is None else _kv_tokens(model)
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
    turns: Annotated[
        str | None, typer.Option(help="turns of a session: fixed:N, uniform:LOW:HIGH or lognormal:MEAN:CV")
    ] = None
    think: Annotated[
        str, typer.Option(help="think time before each further turn, in seconds, by the same laws")
    ] = SESSION_THINK
    system_tokens: Annotated[int, typer.Option(help="a system prompt that all sessions share", min=0)] = 0
    context_tokens: Annotated[int, typer.Option(help="sessions end before they are longer", min=2)] = 131_072
    seed: Annotated[
        int, typer.Option(help="the same seed gives the same trace; default: that of the published workloads")
    ] = PUBLISHED_SEED
    decimals: Annotated[int, typer.Option(help="decimals of arrival times; -1 keeps all", min=-1, max=15)] = 6
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace FILE if it exists")] = False


@trace_app.command(
    "synth",
    epilog="Example: tokenfleet trace synth --arrivals gamma:5:2 --lengths S-L --requests 999 --output t.csv",
)
@takes(MadeUp)
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
    to: Annotated[Written, typer.Option(help="format of OUT")] = Written.PLAIN,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace OUT if it exists")] = False,
) -> None:
    """Rewrite a trace in another format.

    `plain` keeps every column. `mooncake` (.jsonl) keeps whole milliseconds and shared prefixes, in blocks of
    512 tokens. `azure` (.csv) keeps arrival dates and lengths.
    """
    kind_for(target, to.value)
    refuse_to_replace(target, overwrite)
    trace = _read(source)
    warn(trace.warnings)
    _write(trace, target, to.value, overwrite)


def _kv_tokens(model: str) -> dict[str, int]:
    """The KV memory of the model's types of worker. Raises ProfileMissing."""
    from tokenfleet.profiles.library import find_profiles

    return {p.type_name: p.kv.capacity_tokens for p in find_profiles(model)}


def _read(path: Path) -> Trace:
    with console(stderr=True).status(f"reading {path}"):
        return read_trace(path)


def _write(trace: Trace, path: Path, form: str, overwrite: bool) -> None:
    with counted_bar("writing", len(trace)) as advance:
        write_trace(trace, path, form, overwrite, advance)
    print(f"{path}: {len(trace):,} requests in {trace.workload.duration_s:.1f} s", file=sys.stderr)
