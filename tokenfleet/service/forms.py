"""The forms of the HTTP API: every field of a request or reply, in seconds, tokens and US dollars."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from controlplane.types import EngineMode
from tokenfleet.planning.plan_file import FleetPart, PlanBrief, PlanFile

State = Literal["queued", "running", "done", "failed", "cancelled"]
OVER: tuple[State, ...] = ("done", "failed", "cancelled")
Mode = Literal["chunked", "prefill-first", "split"]
assert set(Mode.__args__) == set(EngineMode)  # type: ignore[attr-defined]

Name = Annotated[str, Field(min_length=1, max_length=100)]
INLINE_CHARACTERS = 4_000_000


class _Form(BaseModel):
    """From outside: unknown fields are refused, and text is not taken for a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class UploadedTrace(_Form):
    """A trace sent before with `POST /v1/traces`, by its id."""

    upload: Annotated[str, Field(min_length=1, max_length=64)]


class InlineTrace(_Form):
    """A small trace itself: `arrival_s,prompt_tokens,output_tokens` or any other known format."""

    inline_csv: Annotated[str, Field(min_length=1, max_length=INLINE_CHARACTERS)]


class SampleTrace(_Form):
    """The trace that ships with Tokenfleet."""

    sample: Literal[True]


class HistoryTrace(_Form):
    """What this fleet has served of late, such as the last `1h` or `7d`."""

    since: Annotated[str, Field(min_length=1, max_length=20, examples=["1h", "7d"])]


class Targets(_Form):
    """Time to first token and time per output token, both in seconds."""

    ttft_s: Annotated[float, Field(gt=0, le=3600, examples=[1.6])]
    tpot_s: Annotated[float, Field(gt=0, le=3600, examples=[0.075])]


class PlanOrder(_Form):
    """What `tokenfleet plan` is asked, and how long it may take."""

    trace: UploadedTrace | InlineTrace | SampleTrace | HistoryTrace
    slo: Targets
    model: Annotated[Name | None, Field(examples=["llama-3.1-8b"])] = None
    attainment: Annotated[float, Field(gt=0, lt=1)] = 0.99
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    gpu: Annotated[list[Name], Field(max_length=32, description="only these; if empty, all known")] = []
    tp: Annotated[list[Annotated[int, Field(ge=1, le=1024)]], Field(max_length=32)] = []
    profiles: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=100_000)]],
        Field(max_length=32, description="your own profiles, each the text of a YAML file"),
    ] = []
    prices: Annotated[
        str | None, Field(max_length=100_000, description="your own price list, the text of a YAML file")
    ] = None
    spot: bool = False
    engine: Mode | None = None
    policy: Name = "spread"
    cold_start_s: Annotated[
        float | None, Field(gt=0, le=86_400, description="until an ordered worker serves")
    ] = None
    reclaims_per_h: Annotated[
        float | None, Field(gt=0, le=60, description="how often an hour a spot worker is taken away")
    ] = None
    rate_scale: Annotated[float, Field(gt=0, le=1000)] = 1.0
    prompt_scale: Annotated[float, Field(gt=0, le=1000)] = 1.0
    output_scale: Annotated[float, Field(gt=0, le=1000)] = 1.0
    price_scale: Annotated[float, Field(gt=0, le=1000)] = 1.0
    window: Annotated[str | None, Field(max_length=40, examples=["10m..20m"])] = None
    budget_usd_per_h: Annotated[float | None, Field(gt=0)] = None
    max_gpus: Annotated[int | None, Field(ge=1, le=1_000_000)] = None
    drop_too_long: bool = False
    bias_from: Annotated[
        str | None,
        Field(
            min_length=1, max_length=64, description="a kept plan (or `last`) whose scorecard's bias is taken"
        ),
    ] = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    timeout_s: Annotated[
        float | None, Field(gt=0, le=86_400, description="less than the service allows a job, if wished")
    ] = None


class TraceSummary(BaseModel):
    """A trace as the service has read it; `id` is what a plan order calls it."""

    id: str
    name: str
    format: str
    requests: int
    rate_rps: float
    duration_s: float
    bytes: int
    warnings: list[str] = []


class JobBrief(BaseModel):
    """A plan job. `says` is its present stage; `brief` stands once it is done."""

    id: str
    state: State
    progress: Annotated[float, Field(ge=0, le=1)]
    says: str
    simulations: int
    question: Annotated[dict[str, Any], Field(description="the order, defaults filled in")]
    trace: TraceSummary
    brief: PlanBrief | None
    error: str | None
    created_s: Annotated[float, Field(description="Unix time")]
    started_s: float | None
    finished_s: float | None
    attempts: Annotated[int, Field(description="how often it was begun; more than once after a crash")]


class Compared(BaseModel):
    """A figure as planned, as predicted for the traffic that came, as observed, and observed / predicted."""

    planned: float | None
    predicted: float | None
    observed: float | None
    ratio: float | None


class Serving(BaseModel):
    """When a fleet ran under the plan; Unix time."""

    started_s: float
    ended_s: float | None


class Scorecard(BaseModel):
    """What a kept plan predicted, and what came of it; the figures are null until enough was served."""

    schema_name: Annotated[Literal["tokenfleet.scorecard/1"], Field(alias="schema")]
    plan: str
    fleet: list[FleetPart]
    slo: dict[str, float]
    served: list[Serving]
    requests: int
    not_served: Annotated[int, Field(description="turned away or failed; they count as missed")]
    workers: dict[str, int]
    rate_rps: dict[str, float] | None
    ttft_s: dict[str, Compared] | None
    tpot_s: dict[str, Compared] | None
    attainment: dict[str, float | None] | None
    capacity: dict[str, float | None] | None
    bias: Annotated[
        dict[str, Any] | None, Field(description="how many times as long steps took as the profile says")
    ]
    says: list[str]


class Job(JobBrief):
    """A plan job with its answer."""

    plan: PlanFile | None


class JobList(BaseModel):
    """Jobs, newest first."""

    plans: list[JobBrief]


class Price(BaseModel):
    """US dollars for a GPU for an hour, and where that is from."""

    usd_per_gpu_h: float
    date: str
    source: str


class KnownGpu(BaseModel):
    name: str
    on_demand: Price | None
    spot: Price | None


class KnownKind(BaseModel):
    """A kind of worker there is a profile of."""

    gpu: str
    tp_degree: int
    measured: Annotated[str, Field(description="measured, composed or published")]
    date: str
    engine_mode: str
    kv_tokens: int


class KnownModel(BaseModel):
    name: str
    context_limit_tokens: int | None
    kinds: list[KnownKind]


class KnownHistory(BaseModel):
    """What this fleet has served, as far as it is kept; times are Unix seconds."""

    requests: int
    first_s: float | None
    last_s: float | None


class Limits(BaseModel):
    upload_bytes: int
    queued_jobs: int
    job_timeout_s: float


class Catalogue(BaseModel):
    """What a plan can be asked for here."""

    version: str
    models: list[KnownModel]
    gpus: list[KnownGpu]
    policies: list[str]
    engine_modes: list[str]
    sample: TraceSummary | None
    history: KnownHistory
    limits: Limits
