"""`tokenfleet plan`: the cheapest fleet for a trace; `portfolio`: of several models."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from controlplane.errors import BadInput
from dataplane.startup import loading
from tokenfleet.cli.flags import Format, NoCache, OutputFormat, Processes, flag, takes_flags
from tokenfleet.files import refuse_unwritable, write_files
from tokenfleet.planning.request import PlanRequest
from tokenfleet.report.tables import lines_table, plan_table

if TYPE_CHECKING:
    from tokenfleet.planning.inputs import Gathered
    from tokenfleet.planning.plan_file import PlanFile
    from tokenfleet.traces import Trace
    from tokenfleet.traces.prometheus import MetricsRange
    from tokenfleet.traces.usage import Usage

# Tables with the rows printed; None: all.
BRIEF = {"Assumptions": None, "Classes": None, "Alternatives": 3, "Traffic phases": 6}
MISSING = (
    "--trace: missing; name a trace, or give --request-rate 10, --users 2000, or --since 1h for what this"
    " fleet has served"
)


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Where the requests to plan for come from: files, what a fleet has served, or answers in their place."""

    trace: list[Path] | None = flag(None, "trace of requests in any known format; repeat to merge several")
    since: str | None = flag(None, "what the fleet served in the last 1h, 7d, … instead of a trace")
    data: Path | None = flag(None, "the fleet's folder, for --since and --bias-from ($TOKENFLEET_DATA)")
    users: int | None = flag(None, "without a trace: this many users, of a published shape")
    requests_per_day: float | None = flag(None, "without a trace: requests a day")
    request_rate: float | None = flag(None, "without a trace: requests per second of the busiest hour")
    shape: str | None = flag(None, "shape of use: chat, long-chat, code, rag or agents (default: chat)")
    growth: float | None = flag(None, "traffic to add: 0.3 plans for 30 % more")
    peak: float | None = flag(None, "requests of the busiest hour over the day's mean (default: 1.8)")
    prompt_tokens: float | None = flag(None, "mean tokens of a prompt, as billed")
    output_tokens: float | None = flag(None, "mean tokens of an answer, as billed")
    prometheus: str | None = flag(
        None, "instead of a trace: vLLM's metrics at this Prometheus server, of --since (default: 24h)"
    )
    selector: str | None = flag(None, 'with --prometheus: the servers, as {job="vllm"} (default: all)')


@takes_flags()
def plan_command(
    source: TraceSource,
    request: PlanRequest,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="simulations at the same time (default: one per core)")
    ] = None,
    output_dir: Annotated[Path | None, typer.Option(help="write plan.json and report.html there")] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="print every alternative, and what was ruled out")
    ] = False,
    output_format: Format = OutputFormat.TABLE,
) -> int:
    """Find the cheapest fleet that meets the targets, how sure that is, and why not one worker fewer.

    tokenfleet plan --trace day.csv --model llama-3.1-8b --slo ttft=400ms,tpot=30ms

    tokenfleet plan --trace day.csv --model llama-3.1-70b --gpu h100 --gpu a100 --tp 4 --tp 8
    --slo ttft=1.6s,tpot=75ms --attainment 0.999 --max-gpus 64 --output-dir out

    tokenfleet plan --request-rate 10 --prompt-tokens 1000 --output-tokens 200 --model llama-3.1-8b
    --slo ttft=400ms,tpot=30ms

    tokenfleet plan --prometheus http://prometheus:9090 --selector '{job="vllm"}' --since 7d
    --model llama-3.1-8b --slo ttft=400ms,tpot=30ms
    """
    request.consistent()
    instead = asked_instead(source)
    # Imported here: the flags are checked before the compiled simulator is loaded.
    with loading():
        from tokenfleet.cli.terminal import console, warn
        from tokenfleet.planning.inputs import gather

    refuse_unwritable_plan(output_dir)
    with console(stderr=True).status("reading"):
        trace, notes, _ = asked_trace(instead, source, request.seed, request.bias_from is not None)
        bias = None
        if request.bias_from is not None:
            from tokenfleet.service.scorecard import kept_bias  # loads the service's HTTP

            bias = kept_bias(source.data, request.bias_from)
        gathered = gather(trace, request, bias, date.today())
    # The answer's note has the ages of prices and profiles.
    warn([*notes, *(w for w in gathered.inputs.warnings if w not in gathered.inputs.ages)])
    return answer_plan(gathered, request, output_dir, output_format, jobs, show_all)


def refuse_unwritable_plan(output_dir: Path | None) -> None:
    """Raise BadInput where a plan's files could not be written."""
    refuse_unwritable([output_dir / name for name in ("plan.json", "report.html")] if output_dir else [])


def answer_plan(
    gathered: Gathered,
    request: PlanRequest,
    output_dir: Path | None,
    output_format: OutputFormat,
    jobs: int | None = None,
    show_all: bool = False,
) -> int:
    """Plan for what was gathered, with a bar; write and print the plan, and return the exit code."""
    with loading():
        from tokenfleet.api.plan import answered, plan_texts
        from tokenfleet.cli.terminal import answer, progress_bar

    with progress_bar() as bar:
        plan = answered(gathered, request, jobs, bar)
    texts = plan_texts(plan)
    if output_dir is not None:
        write_files({output_dir / name: text for name, text in texts.items()})
    answer(output_format, texts["plan.json"], lambda: plan_answer(plan, output_dir, show_all))
    return 0 if plan.feasible else 1


def asked_trace(
    instead: MetricsRange | Usage | None, source: TraceSource, seed: int, is_biased: bool
) -> tuple[Trace, tuple[str, ...], list[str]]:
    """The trace to plan for, read or drawn; what to warn of; the flags that name it. Raises BadInput.

    `instead`: what stands in for a trace. `is_biased`: `--data` is needed for a kept plan's errors.
    """
    from tokenfleet.service.forks import asked_traces
    from tokenfleet.traces import read_traces
    from tokenfleet.traces.prometheus import MetricsRange
    from tokenfleet.traces.usage import trace_of_usage

    if instead is None:
        paths, notes = asked_traces(source.trace, source.since, source.data, is_biased)
        return read_traces(paths), notes, [word for path in paths for word in ("--trace", str(path))]
    given = {name: value for name, value in asdict(source).items() if value is not None and name != "data"}
    words = [word for name, value in given.items() for word in (_flag(name), str(value))]
    if isinstance(instead, MetricsRange):
        return instead.trace(time.time(), seed), (), words
    return trace_of_usage(instead, seed), (), words


def asked_instead(source: TraceSource) -> MetricsRange | Usage | None:
    """The metrics, or the usage, to plan for; None where a trace or history is named.

    Asks in a terminal where nothing is named. Raises BadInput.
    """
    from tokenfleet.traces.prometheus import SINCE, MetricsRange
    from tokenfleet.traces.usage import Usage

    answers = given_answers(source)
    if source.prometheus is not None:
        return MetricsRange(source.prometheus, source.selector or "{}", source.since or SINCE)
    if source.selector is not None:
        raise BadInput("--selector: needs --prometheus too")
    if answers or source.trace or source.since is not None:
        return Usage(**answers) if answers else None
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise BadInput(MISSING)
    return answered_usage()


def given_answers(source: TraceSource) -> dict[str, Any]:
    """The flags of a usage that are given, by field. Raises BadInput where two name the traffic, or none."""
    from tokenfleet.traces.usage import AMOUNTS

    others = ("trace", "since", "data", "prometheus", "selector")
    answers = {k: v for k, v in asdict(source).items() if v is not None and k not in others}
    first, is_counted = _flag(next(iter(answers), "")), source.prometheus is not None
    ways = {
        "--trace": bool(source.trace),
        "--since": source.since is not None and not is_counted,
        first: bool(answers),
        "--prometheus": is_counted,
    }
    given = [flag for flag, is_given in ways.items() if is_given]
    if len(given) > 1:
        raise BadInput(f"{given[-1]}: contradicts {given[0]}; give one of them")
    if answers and answers.keys().isdisjoint(AMOUNTS):
        raise BadInput(f"{first}: needs --users, --requests-per-day or --request-rate too")
    return answers


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def answered_usage() -> Usage:
    """The usage that a person in a terminal gives answer by answer."""
    from tokenfleet.traces.usage import BUSIEST, SHAPES, Usage

    ask = partial(typer.prompt, err=True)
    typer.echo("No --trace given. Seven answers make one; Ctrl-C ends.", err=True)
    for name, shape in SHAPES.items():
        typer.echo(f"  {name:10} {shape.about}", err=True)
    shape_name = ask("Shape of use", default="chat")
    users = ask("Users a day", type=int)
    assumed = Usage(users, shape=shape_name).a_day  # refused before the next question
    a_day = ask("Requests a day", default=assumed)
    peak = ask("Busiest hour over the day's mean", default=BUSIEST)
    growth = ask("Growth to plan for (0.3: 30 % more)", default=0.0)
    prompt = ask("Mean tokens of a prompt (0: the shape's)", default=0.0)
    output = ask("Mean tokens of an answer (0: the shape's)", default=0.0)
    users, a_day = (users, None) if a_day == assumed else (None, a_day)
    return Usage(users, a_day, shape_name, growth, peak, prompt or None, output or None)


def plan_answer(plan: PlanFile, written: Path | None, show_all: bool) -> Iterator[RenderableType]:
    """The answer on a terminal: its lines, its tables, the files, and the next command."""
    from tokenfleet.report.answer import GUIDE, OPENS

    *lines, (_, note) = plan.says
    yield lines_table(lines, OPENS, "bold green" if plan.feasible else "bold red")
    for shown in plan.tables:
        if not show_all and shown.title not in BRIEF:
            continue
        most = len(shown.rows) if show_all else BRIEF[shown.title] or len(shown.rows)
        yield Text("")
        yield plan_table(shown, most)
        if (more := len(shown.rows) - most) > 0:
            where = "report.html" if written else "the JSON"
            yield Text(f"… {more} more in {where}; --all prints them", style="dim")
    yield Text(f"\nNote: {note}", style="dim")
    yield Text(f"Every line explained: {GUIDE}", style="dim")
    if written is None:
        yield Text("Next: --output-dir DIR keeps plan.json and a report")
        return
    yield Text(f"Report: {written / 'report.html'}")
    if plan.feasible and plan.unserved is None:
        yield Text(f"Next: tokenfleet serve --model DIR --plan {written / 'plan.json'}")
    if is_exported(plan):
        files = f"--plan {written / 'plan.json'} --output-dir {written / 'deploy'}"
        yield Text(f"On Kubernetes: tokenfleet export kuberay {files}")


def is_exported(plan: PlanFile) -> bool:
    """Whether `export` takes the plan without a flag more."""
    from tokenfleet.export.deployment import deployment

    try:
        return plan.feasible and deployment(plan).unserved is None
    except BadInput:
        return False


def portfolio_command(
    file: Annotated[
        Path, typer.Argument(help="models with their traces and targets, and shared limits (YAML)")
    ],
    jobs: Processes = None,
    no_cache: NoCache = False,
    output_dir: Annotated[
        Path | None, typer.Option(help="write portfolio.json, portfolio.html and NAME.plan.json there")
    ] = None,
    output_format: Format = OutputFormat.TABLE,
) -> int:
    """Choose the cheapest GPUs for several models that share limits.

    tokenfleet portfolio examples/portfolio.yaml

    tokenfleet portfolio models.yaml --output-dir out      # then: tokenfleet serve --plan out/chat.plan.json
    """
    # Imported here: the flags are checked before the compiled simulator is loaded.
    from tokenfleet.api.portfolio import chosen_fleets, portfolio_texts
    from tokenfleet.cli.terminal import answer, warn
    from tokenfleet.portfolios.request import read_portfolio
    from tokenfleet.portfolios.view import portfolio_tables

    portfolio = read_portfolio(file)
    names = ("portfolio.json", "portfolio.html", *(f"{m.name}.plan.json" for m in portfolio.models))
    files = [] if output_dir is None else [output_dir / name for name in names]
    refuse_unwritable(files)
    plan = chosen_fleets(portfolio, jobs or os.cpu_count() or 1, not no_cache)
    texts = portfolio_texts(plan)
    if output_dir is not None:
        write_files({output_dir / name: text for name, text in texts.items()})
    answer(output_format, texts["portfolio.json"], lambda: portfolio_tables(plan), files)
    warn(plan.warnings)
    return 0
