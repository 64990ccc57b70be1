"""The forms of the HTTP API: every field of a request or reply, in seconds, tokens and US dollars."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from controlplane.errors import BadInput, ControlPlaneError
from controlplane.types import EngineMode, Slo
from tokenfleet.field_errors import fault_line
from tokenfleet.planning.plan_file import FleetPart, PlanBrief, PlanFile, means
from tokenfleet.planning.request import Kind, Option, PlanRequest, command_line, options, read_targets
from tokenfleet.portfolios.request import Portfolio, sent_portfolio
from tokenfleet.traces.usage import BUSIEST, Usage

State = Literal["queued", "running", "done", "failed", "cancelled"]
OVER: tuple[State, ...] = ("done", "failed", "cancelled")

INLINE_CHARACTERS = 4_000_000


class _Form(BaseModel):
    """From outside: unknown fields are refused, and text is not taken for a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class UploadedTrace(_Form):
    """A trace sent before with `POST /v1/traces`, by its id."""

    upload: Annotated[str, Field(min_length=1, max_length=64, description="its id")]


class InlineTrace(_Form):
    """A small trace itself: `arrival_s,prompt_tokens,output_tokens` or any other known format."""

    inline_csv: Annotated[str, Field(min_length=1, max_length=INLINE_CHARACTERS, description="the text")]


class SampleTrace(_Form):
    """The trace that ships with Tokenfleet."""

    sample: Annotated[Literal[True], means("true")]


class HistoryTrace(_Form):
    """The requests that this fleet served recently, such as in the last `1h` or `7d`."""

    since: Annotated[
        str, Field(min_length=1, max_length=20, examples=["1h", "7d"], description="how long ago")
    ]


class UsageTrace(_Form):
    """No trace: the busiest hour is drawn from these answers, as `tokenfleet plan --users` draws it."""

    users: Annotated[int | None, means("a day; these, `requests_per_day` or `request_rate`")] = None
    requests_per_day: Annotated[float | None, means("of all users")] = None
    request_rate: Annotated[float | None, means("requests per second of the busiest hour")] = None
    shape: Annotated[str, means("chat, long-chat, code, rag or agents")] = "chat"
    growth: Annotated[float, means("traffic to add: 0.3 plans for 30 % more")] = 0.0
    peak: Annotated[float, means("requests of the busiest hour over the day's mean")] = BUSIEST
    prompt_tokens: Annotated[float | None, means("mean of a prompt; null: the shape's")] = None
    output_tokens: Annotated[float | None, means("mean of an answer; null: the shape's")] = None

    def usage(self) -> Usage:
        """The answers as `plan` takes them. Raises BadInput."""
        return Usage(**self.model_dump())


class Targets(_Form):
    """Time to first token and time per output token, both in seconds."""

    ttft_s: Annotated[float, Field(gt=0, le=3600, examples=[1.6], description="the limit of TTFT")]
    tpot_s: Annotated[float, Field(gt=0, le=3600, examples=[0.075], description="the limit of TPOT")]


FileText = Annotated[str, Field(min_length=1, max_length=100_000)]


def _option_field(option: Option) -> tuple[Any, Any]:
    """An option as a field over HTTP: lists for tuples, and for a file the text of it."""
    plain: dict[type, Any] = {Slo: Targets, Path: FileText, EngineMode: Annotated[EngineMode, _AS_TEXT]}
    of = option.codec.field if option.codec else plain.get(option.item, option.item)
    item: Any = Annotated[of, Field(), *option.item_constraints]
    annotation = list[item] if option.is_list else item | None if option.default is None else item
    description = f"{option.about.help}; {'each ' if option.is_list else ''}the text of a YAML file"
    field = Field(description=description if option.kind == "file" else option.about.help)
    default = ... if option.is_required else [] if option.is_list else option.default
    return Annotated[annotation, *option.constraints, field], default


_AS_TEXT = Field(strict=False)
_FIELDS: dict[str, Any] = {option.field: _option_field(option) for option in options()}
_Options = create_model("_Options", __base__=_Form, **_FIELDS)


Source = UploadedTrace | InlineTrace | SampleTrace | HistoryTrace


Timeout = Annotated[
    float | None, Field(gt=0, le=86_400, description="limit of this job, within the service's own")
]


class PlanOrder(_Options):  # type: ignore[misc, valid-type]
    """What `tokenfleet plan` is asked, and how long it may take."""

    slo: Annotated[Targets | None, means("of requests without a class; needed without `classes`")] = None
    trace: Annotated[Source | UsageTrace, means("the requests to plan for")]
    timeout_s: Timeout = None

    def request(self, folder: Path = Path()) -> PlanRequest:
        """The options as the planner takes them; texts of files are files of `folder`, by `files`."""
        values = {option.field: getattr(self, option.field) for option in options()}
        for name, paths in self._paths(folder).items():
            values[name] = tuple(paths) if isinstance(values[name], list) else paths[0]
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        if self.slo is None and not values["classes"]:
            raise BadInput("slo: missing; give targets, or classes with theirs")
        slo = Slo(self.slo.ttft_s, self.slo.tpot_s) if self.slo else read_targets(values["classes"])["slo"]
        return PlanRequest(**values | {"slo": slo})

    def files(self, folder: Path) -> dict[Path, str]:
        """The files of `folder` that `request` names, and their texts."""
        return {
            path: text
            for name, paths in self._paths(folder).items()
            for path, text in zip(paths, _listed(getattr(self, name)), strict=True)
        }

    def in_field_names(self, refusal: str, folder: Path) -> str:
        """A refusal with the fields that the texts were sent in, in place of the files of `folder`."""
        for name, paths in self._paths(folder).items():
            for i, path in enumerate(paths):
                field = f"{name}.{i}" if isinstance(getattr(self, name), list) else name
                refusal = refusal.replace(str(path), field)
        return refusal

    def _paths(self, folder: Path) -> dict[str, list[Path]]:
        return {
            option.field: [folder / f"{option.flag}-{i + 1}.yaml" for i in range(len(texts))]
            for option in options()
            if option.kind == "file" and (texts := _listed(getattr(self, option.field)))
        }


class PortfolioOrder(_Form):
    """A portfolio file, and the files that it names, each by its name in the portfolio."""

    portfolio: Annotated[str, Field(min_length=1, max_length=1_000_000, description="YAML or JSON")]
    traces: Annotated[
        dict[str, Source], Field(min_length=1, max_length=1000, description="by the names in it")
    ]
    files: Annotated[dict[str, FileText], Field(max_length=1000, description="profiles and prices")] = {}
    timeout_s: Timeout = None

    def read(self) -> Portfolio:
        """The portfolio, with the names of its files for their paths.

        Raises BadInput, also for a file that was not sent, and for one that the portfolio does not name.
        """
        sent, named = {*self.traces, *self.files}, set()
        for name in sent:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or str(path) != name or name == ".":
                raise BadInput(f"{name!r}: expected a path below the portfolio's folder, such as chat.csv")

        def find(name: str) -> Path:
            if name not in sent:
                raise BadInput(f"{name}: is among neither traces nor files of the order")
            named.add(name)
            return Path(name)

        portfolio = sent_portfolio(self.portfolio, find)
        if unnamed := sorted(sent - named):
            raise BadInput(f"{unnamed[0]}: was sent, and the portfolio does not name it")
        return portfolio


def _listed(value: list[str] | str | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else value


def read_order(question: dict[str, Any]) -> PlanOrder:
    """An order as it was kept, by this version or another. Raises BadInput naming the field."""
    try:
        order: PlanOrder = PlanOrder.model_validate(question)
    except ValidationError as error:
        raise BadInput(fault_line("the order as it was kept", error)) from None
    return order


def command_of(question: dict[str, Any], trace: str) -> str | None:
    """The command line that asks the same of a trace of that name; None for an order that cannot be read."""
    try:
        order = read_order(question)
        request = order.request()
    except ControlPlaneError:
        return None
    if isinstance(order.trace, HistoryTrace):
        return command_line(request, ["--since", order.trace.since])
    if isinstance(order.trace, UsageTrace):
        given = order.trace.model_dump(exclude_defaults=True)
        words = [word for name, value in given.items() for word in (_flag(name), str(value))]
        return command_line(request, words)
    name = "examples/sample_trace.csv" if isinstance(order.trace, SampleTrace) else trace
    return command_line(request, ["--trace", name])


def in_field_names(refusal: str) -> str:
    """A refusal with the names of fields in place of those of flags."""
    flags = {f"--{option.flag}": option.field for option in options()}
    flags |= {_flag(name): name for name in UsageTrace.model_fields}
    return re.sub(r"--[a-z-]+", lambda flag: flags.get(flag[0], flag[0]), refusal)


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


class TraceSummary(BaseModel):
    """A trace as the service has read it; `id` is what a plan order calls it."""

    id: Annotated[str, means("for `upload` in an order")]
    name: Annotated[str, means("of the file")]
    format: Annotated[str, means("as recognised, such as csv or mooncake")]
    requests: Annotated[int, means("how many")]
    rate_rps: Annotated[float, means("mean requests per second")]
    duration_s: Annotated[float, means("from the first arrival to the last")]
    bytes: Annotated[int, means("size of the file")]
    warnings: Annotated[list[str], means("what may be wrong with the trace, a sentence each")] = []


class _AnyJob(BaseModel):
    """What jobs of plans and of portfolios have in common. `says` is the present stage."""

    id: Annotated[str, means("for `GET /v1/…/{job}`")]
    state: Annotated[State, means("done, failed and cancelled are final")]
    progress: Annotated[float, Field(ge=0, le=1, description="0 to 1")]
    says: Annotated[str, means("the present stage")]
    question: Annotated[dict[str, Any], means("the order, defaults filled in")]
    error: Annotated[str | None, means("why it failed, in a line")]
    created_s: Annotated[float, means("Unix time")]
    started_s: Annotated[float | None, means("Unix time")]
    finished_s: Annotated[float | None, means("Unix time")]
    attempts: Annotated[int, means("how often it was begun; more than once after a crash")]


class PortfolioBrief(BaseModel):
    """The plan of a portfolio in a line: the names of its models, and what all of them cost."""

    models: Annotated[list[str], means("their names")] = []
    usd_per_hour: Annotated[float, means("of all fleets together")]


class PortfolioJobBrief(_AnyJob):
    """The job of a portfolio; `brief` is there once it is done."""

    brief: Annotated[PortfolioBrief | None, means("null until it is done")]


class PortfolioJob(PortfolioJobBrief):
    """The job of a portfolio with its answer, as `tokenfleet portfolio --format json` prints it."""

    portfolio: Annotated[dict[str, Any] | None, means("null until it is done")]


class PortfolioJobList(BaseModel):
    """Jobs of portfolios, newest first."""

    portfolios: Annotated[list[PortfolioJobBrief], means("newest first")]


class JobBrief(_AnyJob):
    """A plan job; `brief` is there once it is done."""

    simulations: Annotated[int, means("run so far")]
    trace: Annotated[TraceSummary, means("that is planned for")]
    command: Annotated[
        str | None,
        means("the same on a terminal; null for an order of another version"),
    ]
    brief: Annotated[PlanBrief | None, means("null until it is done")]


class Compared(BaseModel):
    """A figure as planned, as predicted for the traffic that came, as observed, and observed / predicted."""

    planned: Annotated[float | None, means("by the plan, for its trace")]
    predicted: Annotated[float | None, means("for the traffic that came")]
    observed: Annotated[float | None, means("of the served requests")]
    ratio: Annotated[float | None, means("observed / predicted")]


class ServedPeriod(BaseModel):
    """When a fleet ran under the plan; Unix time."""

    started_s: Annotated[float, means("Unix time")]
    ended_s: Annotated[float | None, means("Unix time; null while it runs")]


class Scorecard(BaseModel):
    """What a kept plan predicted, and what came of it; the figures are null until enough was served."""

    schema_name: Annotated[
        Literal["tokenfleet.scorecard/1"], Field(alias="schema", description="of this document")
    ]
    plan: Annotated[str, means("its id")]
    fleet: Annotated[list[FleetPart], means("as planned")]
    slo: Annotated[dict[str, float], means("targets in seconds")]
    served: Annotated[list[ServedPeriod], means("when a fleet ran under it")]
    requests: Annotated[int, means("that ended under it")]
    not_served: Annotated[int, means("turned away or failed; they count as missed")]
    workers: Annotated[dict[str, int], means("planned, and how many were seen")]
    rate_rps: Annotated[dict[str, float] | None, means("requests per second, planned and observed")]
    ttft_s: Annotated[dict[str, Compared] | None, means("its quantiles and mean")]
    tpot_s: Annotated[dict[str, Compared] | None, means("its quantiles and mean")]
    attainment: Annotated[
        dict[str, float | None] | None,
        means("share within both targets: target, planned, predicted, observed"),
    ]
    classes: Annotated[list[dict[str, Any]] | None, means("the same by SLO class")] = None
    capacity: Annotated[
        dict[str, float | None] | None,
        means("requests per second of the busiest minute in SLO, and of the least busy one out of it"),
    ]
    bias: Annotated[dict[str, Any] | None, means("how many times as long steps took as the profile says")]
    gap: Annotated[list[dict[str, Any]], means("by day: what was paid over the cheapest, and its parts")] = []
    says: Annotated[list[str], means("the answer in sentences")]


class Job(JobBrief):
    """A plan job with its answer."""

    plan: Annotated[PlanFile | None, means("null until it is done")]


class JobList(BaseModel):
    """Jobs, newest first."""

    plans: Annotated[list[JobBrief], means("newest first")]


class QuotedPrice(BaseModel):
    """US dollars for a GPU for an hour, where that is from, and whether a list of the user's own has it."""

    usd_per_gpu_h: Annotated[float, means("US dollars")]
    date: Annotated[str, means("of the quote, ISO")]
    source: Annotated[str, means("where it is from")]
    is_own: Annotated[bool, means("whether a list of yours has it")]


class KnownGpu(BaseModel):
    """A GPU and its prices here."""

    name: Annotated[str, means("as in `gpu`")]
    on_demand: Annotated[QuotedPrice | None, means("null: no price is known")]
    spot: Annotated[QuotedPrice | None, means("null: no price is known")]


class KnownKind(BaseModel):
    """A kind of worker there is a profile of."""

    gpu: Annotated[str, means("as in `gpu`")]
    tp_degree: Annotated[int, means("GPUs of a worker")]
    measured: Annotated[str, means("measured, composed or published")]
    date: Annotated[str, means("of the profile, ISO")]
    engine_mode: Annotated[str, means("how an engine schedules prefill and decode")]
    kv_tokens: Annotated[int, means("KV cache of a worker")]


class KnownModel(BaseModel):
    """A model of the library."""

    name: Annotated[str, means("as in `model`")]
    context_limit_tokens: Annotated[int | None, means("of its configuration; null: not known")]
    kinds: Annotated[list[KnownKind], means("of worker, with a profile")]


class KnownHistory(BaseModel):
    """The history that is kept of what this fleet served; times are Unix seconds."""

    requests: Annotated[int, means("kept")]
    first_s: Annotated[float | None, means("of the oldest; null without any")]
    last_s: Annotated[float | None, means("of the newest; null without any")]


class JobLimits(BaseModel):
    """What this service takes at most."""

    upload_bytes: Annotated[int, means("largest trace")]
    queued_jobs: Annotated[int, means("most jobs that may wait")]
    job_timeout_s: Annotated[float, means("longest run of a job")]


class KnownOption(BaseModel):
    """An option of a plan. `name` is its field in an order, `key` its name in what-ifs and addresses."""

    name: Annotated[str, means("field of an order")]
    flag: Annotated[str, means("of `tokenfleet plan`")]
    key: Annotated[str, means("in what-ifs and addresses")]
    label: Annotated[str, means("for a form")]
    help: Annotated[str, means("as on a terminal")]
    kind: Annotated[Kind, means("how its value reads")]
    is_list: Annotated[bool, means("whether it takes several values")]
    default: Annotated[Any, means("what holds without it")]
    choices: Annotated[list[str], means("allowed values; empty: any")]
    bounds: Annotated[dict[str, float], means("gt, ge, lt, le; of durations in seconds")]
    needs: Annotated[str, means("the option without which it has no meaning, if there is one")]


class Catalogue(BaseModel):
    """What a plan can be asked for here."""

    version: Annotated[str, means("of Tokenfleet")]
    models: Annotated[list[KnownModel], means("in the library")]
    gpus: Annotated[list[KnownGpu], means("with a profile or a price")]
    options: Annotated[list[KnownOption], means("of a plan")]
    policies: Annotated[list[str], means("of placement")]
    shapes: Annotated[dict[str, str], means("of use, for plans without a trace, each with what it is")]
    engine_modes: Annotated[list[str], means("of engines")]
    sample: Annotated[TraceSummary | None, means("the trace that ships; null: not installed")]
    history: Annotated[KnownHistory, means("of the fleet served here")]
    limits: Annotated[JobLimits, means("of orders")]
