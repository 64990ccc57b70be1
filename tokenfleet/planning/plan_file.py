"""`tokenfleet.plan/1` as a typed tree: what terminal, report, console and fleets read of a plan.

plan_json.py fills it. Fields that an older plan lacks are None or empty here. What is no plan is refused in
one line. The tree is pydantic's, since the HTTP API publishes it as its schema.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from controlplane.types import EngineMode, Slo, SloClass
from controlplane.worker_type import KvLink, WorkerGroup, WorkerType
from tokenfleet.field_errors import fault_line, read_text
from tokenfleet.profiles.form import parse_profile
from tokenfleet.texts import parse_strictness

SCHEMA = "tokenfleet.plan/1"
MAX_FILE_BYTES = 50_000_000

Count = Annotated[int, Field(ge=1, le=100_000)]
Whole = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Pair = Annotated[list[Number], Field(min_length=2, max_length=2)]
Said = Annotated[list[str], Field(min_length=2, max_length=2)]  # a topic, and what there is to read about it
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Ranked = Annotated[str, Field(pattern=r"^((DP|PP)[0-9]{1,4})?$")]
Mode = Annotated[EngineMode, Field(strict=False)]


class _Part(BaseModel):
    """Fields that are here and not named are for people and programs that know them."""

    model_config = ConfigDict(strict=True, frozen=True)


class FleetPart(_Part):
    """Workers of one type; `ranks`: DP8 or PP2 for a worker of 8 or 2 engines that step together."""

    gpu: Name
    tp_degree: Count
    ranks: Ranked = ""
    workers: Count
    gpus: Annotated[int, Field(ge=1)]
    usd_per_hour: Dollars | None = None
    role: Literal["any", "prefill", "decode"] = "any"


class LatencyTargets(_Part):
    """Time to first token and time per output token, both in seconds."""

    ttft_s: Positive
    tpot_s: Positive


class Attainment(_Part):
    """The share of requests within both targets: asked for, expected, and its bounds.

    `worlds`: the resampled traces that it was judged by.
    """

    target: Annotated[float, Field(gt=0, lt=1)]
    expected: Number | None = None
    low: Number | None = None
    high: Number | None = None
    confidence: Number | None = None
    worlds: Whole = 0
    on_trace: Number | None = None


class FleetCost(_Part):
    """A fleet's groups and totals."""

    fleet: list[FleetPart]
    workers: Whole
    gpus: Whole
    usd_per_hour: Dollars | None = None


class RunsOn(_Part):
    """The share of a class's requests that a worker type serves."""

    worker: str
    share: Number


class PlannedClass(LatencyTargets):
    """A class of requests with targets of its own; `deadline_s`: what its targets keep.

    `without`: the cheapest fleet for all others; `alone`: for this class; `binds`: whether it misses first.
    """

    name: Name
    deadline_s: Positive | None = None
    attainment: Attainment
    requests: Whole | None = None
    binds: bool = False
    without: FleetCost | None = None
    alone: FleetCost | None = None
    marginal_usd_per_hour: Number | None = None
    runs_on: list[RunsOn] = []

    def whole(self) -> SloClass:
        return SloClass(self.name, Slo(self.ttft_s, self.tpot_s), self.attainment.target, self.deadline_s)


class Quantiles(_Part):
    """A latency over the requests, seconds."""

    p50: Number | None
    p90: Number | None
    p99: Number | None
    mean: Number | None


class _AnyLine(_Part):
    """A line through (rate or sessions, workers)."""

    intercept: Number
    r2: Number | None = None
    points: list[Pair] = []
    mean_prompt_tokens: Positive | None = None
    mean_output_tokens: Positive | None = None


class ScalingRule(_AnyLine):
    """Workers at a rate: `workers_per_rps` x rate + `intercept`, at these mean lengths."""

    workers_per_rps: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class AgentsLine(_AnyLine):
    """Workers at a number of concurrent sessions: `workers_per_agent` x sessions + `intercept`."""

    workers_per_agent: Number


class PlannedPhase(_Part):
    """Time with one request rate, between two change points; tokens are means."""

    start_s: Seconds
    end_s: Seconds
    requests: Whole
    rate_rps: Number
    prompt_tokens: Number
    output_tokens: Number


class Stretch(_Part):
    """The workers from `start_s` to `end_s` of the planned workload, and which they are."""

    start_s: Seconds
    end_s: Seconds
    workers: Whole
    gpus: Whole | None = None
    fleet: str | None = None


class Paid(_Part):
    """The schedule with its cold starts; dollars an hour on average."""

    cold_start_s: Seconds
    usd_per_hour: Dollars | None = None
    worker_hours: Number | None = None


class ScheduleDetail(_Part):
    """The cost of following the schedule; `paid` where a cold start was given; `week`: workers by weekday."""

    paid: Paid | None = None
    attainment: Number | None = None
    low: Number | None = None
    saved_share: Number | None = None
    week: dict[str, list[int]] = {}


class ExpectedLoop(_Part):
    """The autoscaled fleet that `serve --plan` runs: its bounds, and its expected cost over the trace.

    `mean_workers`, `usd_per_hour`: on average, by the schedule; `cold_starts`: whether they are included.
    `saved_share`: of the fixed fleet's worker-hours. `floor_by`: how the schedule follows the clock (UTC);
    null where the trace has no dates.
    """

    fewest_workers: Whole
    most_workers: Whole
    mean_workers: Number
    usd_per_hour: Dollars | None = None
    saved_share: Number
    cold_starts: bool
    floor_by: str | None = None


class Spares(_Part):
    """Workers beyond those that serve, for reclaimed ones."""

    workers: Whole
    reclaims_per_h: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    availability: Number | None = None


class Considered(FleetCost):
    """A fleet that was considered, and how it does."""

    attainment: Attainment
    ttft_s: Quantiles | None = None
    tpot_s: Quantiles | None = None
    note: str | None = None


class PassedOver(_Part):
    """A worker type that is not feasible, and why."""

    gpu: Name
    tp_degree: Count
    ranks: Ranked = ""
    reason: str


class OneFewer(_Part):
    """One worker less than the answer, and how it fails."""

    workers: Whole
    attainment: Number | None = None
    low: Number | None = None
    on_trace: Number | None = None


class BindingDetail(_Part):
    """The trial that shows the bottleneck: its workers, its traffic, and what each relaxed limit gains."""

    workers: Whole
    rate_scale: Number
    slo_class: str | None = None
    relief: dict[str, Number]


class Headroom(_Part):
    """The most traffic that the fleet meets its target at, and the least at which it misses it.

    Both are times the trace's, in as many resampled traces as the confidence asks for; None: not found.
    """

    meets: Number | None = None
    misses: Number | None = None


class AloneShares(_Part):
    """Of both targets a share of requests, or seconds."""

    ttft: Number | None = None
    tpot: Number | None = None


class Plateau(_Part):
    """The worker counts between which attainment hardly differs, and what is missed there."""

    workers: Annotated[list[int], Field(min_length=1)]
    span: Number
    missed: Number
    alone: AloneShares
    alone_needs_s: AloneShares


class MixesReplayed(_Part):
    """The search for a cheaper mix: the mixes that it replayed, and the replays that this took.

    `may_save`: the share of the cost by which a mix that was not replayed may be cheaper; 0: none can be.
    """

    replayed: Whole
    replays: Whole
    may_save: Number | None = None


class TraceSample(_Part):
    """The sample that a long trace was judged by."""

    requests: Whole
    windows: Whole
    binding_windows: Whole
    of_windows: Whole
    attainment: Number
    low: Number
    full_replay: Number | None = None
    added_workers: Whole = 0


class Uncertainty(_Part):
    """The scatter of attainment from each source alone, its shares of the variance, and the rate's drift."""

    arrivals: Number
    drift: Number
    coefficients: Number
    traffic: str = "steady"
    of_rate: Number = 0.0
    shares: dict[str, Number] = {}


class Nearest(_Part):
    """The nearest target that can be met, or only what the trace can show at most."""

    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    session_s: Positive | None = None
    fleet: list[FleetPart] = []
    gpus: Whole = 0
    usd_per_hour: Dollars | None = None
    attainment: Number | None = None
    low: Number | None = None
    looser: Number | None = None


class Affinity(_Part):
    """The best policy that looks at no caches, and what the plan's saves against it on the recorded trace."""

    policy: str
    workers: Whole
    saved_workers: int
    saved_usd_per_hour: Number | None = None
    prefix_hit_rate: Number | None = None


class Grown(_Part):
    """The fleet under `scale` times the sessions."""

    scale: Number
    hit_rate: Number
    attainment: Number


class Cliff(_Part):
    """The growths of sessions that were tried, and those at which hits and target are lost."""

    tried: Annotated[list[Grown], Field(min_length=1)]
    hits_lost: Number | None = None
    target_lost: Number | None = None


class SessionCost(_Part):
    """The sessions of the trace on the fleet."""

    sessions: Whole
    at_once: Whole
    mean_s: Number
    usd: Number | None = None
    within: Number | None = None


class Reuse(_Part):
    """The reuse of prefixes on the fleet."""

    hit_rate: Number
    low: Number
    high: Number
    ideal: Number
    working_set_tokens: Whole
    kv_tokens: Whole
    cliff: Cliff
    sessions: SessionCost | None = None


class KvOffload(_Part):
    """What KV offload to CPU memory is worth on the recorded trace."""

    gib: Number
    gb_per_s: Number
    prefix_hit_rate: Number
    loaded: Number
    prefix_hit_rate_without: Number
    workers: Whole
    workers_without: Whole | None = None
    host_usd_per_hour: Number
    saved_usd_per_hour: Number | None = None
    tried_up_to: Whole


class Counted(_Part):
    """Attainment at a worker count."""

    workers: Whole
    on_trace: Number | None = None
    expected: Number | None = None
    low: Number | None = None
    high: Number | None = None


class Costed(_Part):
    """The fleet for targets `scale` times what was asked, and by which traces; none: not possible."""

    scale: Number
    on: str = "recorded trace"
    ttft_s: Number
    tpot_s: Number
    workers: Whole | None = None
    gpus: Whole | None = None
    usd_per_hour: Number | None = None


class Curves(_Part):
    """The data of the plots."""

    rate_rps: list[Pair] = []
    attainment_by_workers: list[Counted] = []
    ttft_cdf: list[Pair] = []
    tpot_cdf: list[Pair] = []
    cost_by_slo: list[Costed] = []


class PlannedLink(_Part):
    """What a split fleet's workers hand KV over by; each GPU of a worker sends its own share."""

    gb_per_s: Positive
    latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    def whole(self) -> KvLink:
        return KvLink(self.gb_per_s * 1e9, self.latency_s)


class PlannedProfile(_Part):
    """A profile that was planned with, all of it: `kind` and `date` say how and when it was measured."""

    model: str
    gpu: str
    tp_degree: Count
    ranks: Ranked = ""
    kind: str
    date: str
    kv_link: PlannedLink | None = None
    usd_per_gpu_h: Dollars | None = None
    price: str | None = None
    engine: str | None = None
    mean_relative_error: Number | None = None
    profile: dict[str, Any]

    def whole(self, where: str = "inputs.profiles") -> Profile:
        """The profile itself. Raises BadInput for no profile, or for one of another worker than named."""
        profile = parse_profile(json.dumps(self.profile), f"{where}: profile")
        said = f"{self.model} on {self.gpu} TP{self.tp_degree} {self.ranks}".strip()
        if (found := f"{profile.model} on {profile.type_name}") != said:
            raise BadInput(f"{where}: profile: expected one of {said}, got {found}")
        return profile


def kind_of_worker(part: FleetPart | PlannedProfile) -> str:
    """GPU, TP degree and ranks, as a plan names its types of worker."""
    return f"{part.gpu} TP{part.tp_degree} {part.ranks}".strip()


class Shown(_Part):
    """A table as terminal, report and console show it."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class PlanInputs(_Part):
    """The inputs of a plan."""

    trace: str = "trace"
    requests: Whole = 0
    duration_s: Number = 0.0
    rate_rps: Number | None
    phases: list[PlannedPhase] = []
    profiles: list[PlannedProfile]
    warnings: list[str] = []
    ages: list[str] = []  # those of them that the answer's note stands for
    assumed: list[list[str]] = []  # (name, value, where from) of a trace that was drawn
    confidence: Number | None = None
    seed: int | None = None
    clock_start_unix_s: Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)] | None = None
    rate_scale: Positive = 1.0
    max_gpus: Count | None = None
    budget_usd_per_h: Positive | None = None


class ReplayedFleet(_Part):
    """The plan's fleet on the recorded trace, and its expected attainment over resampled traces.

    `late`: requests outside their targets.
    """

    late: int
    preemptions: int
    migrations: int
    expected: Annotated[float, Field(ge=0, le=1)]


def _strictness(text: str) -> str:
    """`text`, if placement knows such a strictness; else the ValueError that pydantic reports."""
    try:
        parse_strictness(text)
    except BadInput as error:
        raise ValueError(str(error).removeprefix("--strictness: ")) from None
    return text


class PlannedMoves(_Part):
    """What moving running requests between workers saves.

    `kept`: whether the plan moves requests. `workers_without`: the workers that the target takes without
    moves. `with_moves` and `without_moves`: the plan's fleet replayed; null where moves are not simulated,
    and `why_not` has the reason.
    """

    kept: bool
    workers_without: int
    usd_per_hour_without: Dollars | None = None
    with_moves: ReplayedFleet | None = None
    without_moves: ReplayedFleet | None = None
    why_not: str | None = None


class PlanBrief(_Part):
    """A plan in a line."""

    feasible: bool
    reason: str | None = None
    fleet: list[FleetPart]
    workers: int
    gpus: int
    usd_per_hour: Dollars | None = None


class PlanFile(PlanBrief):
    """`tokenfleet.plan/1`, as `tokenfleet plan --format json` prints it."""

    form: Literal["tokenfleet.plan/1"] = Field(alias="schema")
    policy: str
    priority_headroom: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    strictness: Annotated[str, AfterValidator(_strictness)] | None = None
    prefix_cache: bool | None = None
    engine_mode: Mode | None
    slo: LatencyTargets
    classes: list[PlannedClass] = []
    separate_usd_per_hour: Dollars | None = None
    session_s: Annotated[float, Field(gt=0)] | None = None
    agents: Annotated[int, Field(ge=1)] | None = None
    attainment: Attainment
    ttft_s: Quantiles | None
    tpot_s: Quantiles | None
    says: list[Said] = []
    tables: list[Shown] = []
    binding: str | None = None
    binding_window_s: Pair | None = None
    binding_detail: BindingDetail | None = None
    moves: PlannedMoves | None = None
    headroom: Headroom | None = None
    plateau: Plateau | None = None
    sampling: TraceSample | None = None
    mixes: MixesReplayed | None = None
    workers_range: list[Count] | None = None  # of a trace that was drawn: nine times in ten
    one_fewer: OneFewer | None = None
    doubt: Uncertainty | None = None
    nearest_feasible: Nearest | None = None
    demand_line: ScalingRule | None = None
    agents_line: AgentsLine | None = None
    schedule: list[Stretch] = []
    schedule_detail: ScheduleDetail | None = None
    loop: ExpectedLoop | None = None
    spares: Spares | None = None
    alternatives: list[Considered] = []
    passed_over: list[PassedOver] = []
    affinity: Affinity | None = None
    reuse: Reuse | None = None
    host_kv: KvOffload | None = None
    curves: Curves = Curves()
    inputs: PlanInputs

    _document: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def document(self) -> dict[str, Any]:
        """The plan whole, as it was written."""
        return self._document

    @property
    def targets(self) -> Slo:
        """The targets that were planned for."""
        return Slo(self.slo.ttft_s, self.slo.tpot_s)

    @property
    def slo_classes(self) -> tuple[SloClass, ...]:
        """The classes that were planned for; none where the targets are plain."""
        return tuple(one.whole() for one in self.classes)

    @property
    def slo_text(self) -> str:
        """The targets as `--slo` takes them."""
        return f"ttft={self.slo.ttft_s!r}s,tpot={self.slo.tpot_s!r}s"

    @property
    def groups(self) -> tuple[WorkerGroup, ...]:
        """The fleet's workers with their type's profile, price, limit and reclaims as they were planned."""
        return tuple(self._group(part) for part in self.fleet)

    @property
    def unserved(self) -> str | None:
        """What of this plan no fleet runs, and the way round it; None where a fleet can run it whole."""
        from controlplane.placement.policies import policy_names

        if self.policy not in policy_names(served=True):
            names = ", ".join(policy_names(served=True))
            return f"policy: no fleet runs {self.policy!r}; plan again with one of {names}"
        roles = {part.role for part in self.fleet}
        if roles not in ({"any"}, {"prefill", "decode"}):
            return f"fleet: prefill and decode workers need each other, got {', '.join(sorted(roles))}"
        for part in self.fleet:
            profile = self.profile_of(part).whole()
            if (mode := profile.engine.mode) == EngineMode.PREFILL_FIRST:
                return f"engine_mode: no engine here forms its steps {mode}; plan with --engine chunked"
            if profile.ranks is not None:
                flags = f"vllm serve --tensor-parallel-size {profile.tp_degree} {profile.ranks.flag}"
                return f"ranks: no fleet here runs workers of {profile.ranks.name}; plain vLLM does: {flags}"
        return None

    @property
    def cold_start_s(self) -> float:
        """The cold start that was planned with; 0 where none was given."""
        paid = None if self.schedule_detail is None else self.schedule_detail.paid
        return 0.0 if paid is None else paid.cold_start_s

    def with_workers(self, workers: int) -> PlanFile:
        """The plan of a fleet of one type with another number of workers; its document stays what it was."""
        (part,) = self.fleet
        usd = None if part.usd_per_hour is None else part.usd_per_hour / part.workers * workers
        gpus = part.gpus // part.workers * workers
        changed = part.model_copy(update={"workers": workers, "gpus": gpus, "usd_per_hour": usd})
        return self.model_copy(
            update={"fleet": [changed], "workers": workers, "gpus": gpus, "usd_per_hour": usd}
        )

    def _group(self, part: FleetPart) -> WorkerGroup:
        planned, max_gpus = self.profile_of(part), self.inputs.max_gpus
        usd = None if part.usd_per_hour is None else part.usd_per_hour / part.workers
        if planned.usd_per_gpu_h is not None:
            usd = planned.usd_per_gpu_h * part.gpus / part.workers
        worker_type = WorkerType(
            part.gpu,
            part.tp_degree,
            planned.whole(),
            usd,
            limit=None if max_gpus is None else max_gpus * part.workers // part.gpus,
            reclaims_per_h=0.0 if self.spares is None else self.spares.reclaims_per_h,
            role=part.role,
            kv_link=None if planned.kv_link is None else planned.kv_link.whole(),
        )
        return WorkerGroup(worker_type, part.workers)

    def profile_of(self, part: FleetPart) -> PlannedProfile:
        """The profile that a part of the fleet was planned with."""
        return next(p for p in self.inputs.profiles if kind_of_worker(p) == kind_of_worker(part))


def parse_plan(document: Any, where: str) -> PlanFile:
    """A plan's JSON object as checked numbers. Raises BadInput: `where`, the field, what was expected."""
    # Checked first: in a file of another form or version no other fault matters.
    form = document.get("schema") if isinstance(document, dict) else SCHEMA
    if form != SCHEMA:
        raise BadInput(f"{where}: schema: input should be {SCHEMA!r}, got {str(form)[:40]!r}")
    try:
        plan = PlanFile.model_validate(document)
    except ValidationError as error:
        raise BadInput(fault_line(where, error)) from None
    if plan.feasible != bool(plan.fleet):
        expected = "workers" if plan.feasible else "none, as the plan is not feasible"
        raise BadInput(f"{where}: fleet: expected {expected}, got {len(plan.fleet)} groups")
    profiles = {kind_of_worker(p) for p in plan.inputs.profiles}
    for i, part in enumerate(plan.fleet):
        if kind_of_worker(part) not in profiles:
            raise BadInput(f"{where}: fleet.{i}: inputs.profiles has no {kind_of_worker(part)}")
    for i, planned in enumerate(plan.inputs.profiles):
        planned.whole(f"{where}: inputs.profiles.{i}")
    for name in ("workers", "gpus"):
        whole, stated = sum(getattr(part, name) for part in plan.fleet), getattr(plan, name)
        if whole != stated:
            raise BadInput(f"{where}: {name}: expected the fleet's {whole}, got {stated}")
    plan._document = document
    return plan


def read_plan(path: Path) -> PlanFile:
    """The plan in a file, which has a fleet. Raises BadInput naming the file and the field."""
    try:
        document = json.loads(read_text(path, MAX_FILE_BYTES))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: is not JSON: {error}") from None
    plan = parse_plan(document, str(path))
    if not plan.feasible:
        raise BadInput(f"{path}: feasible: this plan found no fleet, so there is none to run")
    return plan
