"""`tokenfleet.plan/1` as a typed tree: the planner writes it; terminal, report, console and fleets read it.

plan_json.py fills it. A number is rounded as its type says, when it is written and when it is read. A part
is written with the fields that it was given, in their order here. Fields that an older plan lacks are None
or empty. What is no plan is refused in one line. The tree is pydantic's, since the HTTP API publishes it as
its schema.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from controlplane.types import EngineMode, Slo, SloClass
from controlplane.worker_type import KvLink, WorkerGroup, WorkerType
from tokenfleet.field_errors import fault_line, read_text
from tokenfleet.profiles.form import parse_profile
from tokenfleet.texts import parse_strictness

SCHEMA: Literal["tokenfleet.plan/1"] = "tokenfleet.plan/1"
MAX_FILE_BYTES = 50_000_000


def _strictness(text: str) -> str:
    """`text`, if placement knows such a strictness; else the ValueError that pydantic reports."""
    try:
        parse_strictness(text)
    except BadInput as error:
        raise ValueError(str(error).removeprefix("--strictness: ")) from None
    return text


Strictness = Annotated[str, AfterValidator(_strictness)]
Count = Annotated[int, Field(ge=1, le=100_000)]
Whole = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Said = Annotated[list[str], Field(min_length=2, max_length=2)]  # a topic, and what there is to read about it
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UnixTime = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Ranked = Annotated[str, Field(pattern=r"^((DP|PP)[0-9]{1,4})?$")]
Mode = Annotated[EngineMode, Field(strict=False)]


def to_figures(value: float) -> float:
    """Six significant figures."""
    return float(f"{value:.6g}")


def to_digits(digits: int) -> AfterValidator:
    """Rounding to a number of digits after the point."""
    return AfterValidator(lambda value: round(value, digits))


Figures = Annotated[Number, AfterValidator(to_figures)]
Share = Annotated[Number, to_digits(6)]
Usd = Annotated[Amount, to_digits(4)]
UsdChange = Annotated[Number, to_digits(4)]
Instant = Annotated[Number, to_digits(3)]
MeanTokens = Annotated[Positive, AfterValidator(to_figures)]
_TWO = Field(min_length=2, max_length=2)
Pair = Annotated[list[Figures], _TWO]
Span = Annotated[list[Instant], _TWO]
RatePoint = Annotated[list[Number], _TWO, AfterValidator(lambda at: [round(at[0], 3), to_figures(at[1])])]
SharePoint = Annotated[list[Number], _TWO, AfterValidator(lambda at: [to_figures(at[0]), round(at[1], 6)])]


def means(text: str) -> Any:
    """A field's meaning, for the reference and `/openapi.json`."""
    return Field(description=text)


class _Part(BaseModel):
    """Fields that are here and not named are for people and programs that know them."""

    model_config = ConfigDict(strict=True, frozen=True)

    @classmethod
    def like(cls, result: object) -> Self:
        """The part with those attributes of `result` that have the names of its fields."""
        return cls.model_validate(result, from_attributes=True, strict=False)


class FleetPart(_Part):
    """Workers of one type."""

    gpu: Annotated[Name, means("GPU type, as the profile names it")]
    tp_degree: Annotated[Count, means("GPUs that one engine spans")]
    ranks: Annotated[Ranked, means("DP8: 8 engines step together; PP2: a pipeline; empty: one engine")] = ""
    workers: Annotated[Count, means("of this type")]
    gpus: Annotated[int, Field(ge=1), means("of all these workers")]
    usd_per_hour: Annotated[Usd | None, means("US dollars; null: a price is not known")] = None
    role: Annotated[Literal["any", "prefill", "decode"], means("any: prefill and decode")] = "any"
    profile_kind: Annotated[str | None, means("measured, published, or composed (predicted)")] = None

    def of(self, workers: int) -> FleetPart:
        """The part with another number of workers."""
        usd = None if self.usd_per_hour is None else self.usd_per_hour / self.workers * workers
        gpus = self.gpus // self.workers * workers
        return self.model_copy(update={"workers": workers, "gpus": gpus, "usd_per_hour": usd})


class LatencyTargets(_Part):
    """Time to first token and time per output token, both in seconds."""

    ttft_s: Annotated[Positive, means("the limit of TTFT, seconds")]
    tpot_s: Annotated[Positive, means("the limit of TPOT, seconds")]


class Attainment(_Part):
    """The share of requests within both targets, 0 to 1."""

    target: Annotated[float, Field(gt=0, lt=1), means("share asked for")]
    expected: Annotated[Share | None, means("mean over the resampled traces")] = None
    low: Annotated[Share | None, means("its lower bound, at `confidence`")] = None
    high: Annotated[Share | None, means("its upper bound, at `confidence`")] = None
    confidence: Annotated[Number | None, means("probability of each bound")] = None
    worlds: Annotated[Whole, means("resampled traces it was judged by; 0: on the recorded trace alone")] = 0
    on_trace: Annotated[Share | None, means("on the recorded trace")] = None


class FleetCost(_Part):
    """A fleet's groups and totals."""

    fleet: Annotated[list[FleetPart], means("workers by type")]
    workers: Annotated[Whole, means("of all types")]
    gpus: Annotated[Whole, means("of all workers")]
    usd_per_hour: Annotated[Usd | None, means("US dollars; null: a price is not known")] = None


class RunsOn(_Part):
    """The share of a class's requests that a worker type serves."""

    worker: Annotated[str, means("worker type, such as h100 TP2")]
    share: Annotated[Number, to_digits(4), means("of the class's requests, 0 to 1")]


class _Named(_Part):
    name: Annotated[Name, means("as in `--slo NAME:…`")]


class PlannedClass(LatencyTargets, _Named):
    """A class of requests with targets of its own."""

    deadline_s: Annotated[Positive | None, means("of batch work; its targets keep it")] = None
    attainment: Annotated[Attainment, means("of this class")]
    requests: Annotated[Whole | None, means("of this class in the trace")] = None
    binds: Annotated[bool, means("whether this class misses first")] = False
    without: Annotated[FleetCost | None, means("the cheapest fleet for all other classes")] = None
    marginal_usd_per_hour: Annotated[UsdChange | None, means("US dollars that this class adds")] = None
    alone: Annotated[FleetCost | None, means("the cheapest fleet for this class alone")] = None
    runs_on: Annotated[list[RunsOn], means("the worker types that serve it")] = []

    def whole(self) -> SloClass:
        return SloClass(self.name, Slo(self.ttft_s, self.tpot_s), self.attainment.target, self.deadline_s)


class Quantiles(_Part):
    """A latency over the requests, seconds."""

    p50: Annotated[Figures | None, means("the median, seconds")]
    p90: Annotated[Figures | None, means("seconds")]
    p99: Annotated[Figures | None, means("seconds")]
    mean: Annotated[Figures | None, means("seconds")]


class _AnyLine(_Part):
    """A line through (rate or sessions, workers)."""

    intercept: Annotated[Figures, means("workers without any load")]
    r2: Annotated[Share | None, means("fit of the line, 1: exact")] = None
    points: Annotated[list[Pair], means("(busiest phase's requests per second, or sessions; workers)")] = []
    mean_prompt_tokens: Annotated[MeanTokens | None, means("of the requests it holds for")] = None
    mean_output_tokens: Annotated[MeanTokens | None, means("of the requests it holds for")] = None


class _RateSlope(_Part):
    workers_per_rps: Annotated[
        Amount, AfterValidator(to_figures), means("workers for one more request per second")
    ]


class ScalingRule(_AnyLine, _RateSlope):
    """Workers at a rate: `workers_per_rps` x rate + `intercept`."""


class _AgentsSlope(_Part):
    workers_per_agent: Annotated[Figures, means("workers for one more session")]


class AgentsLine(_AnyLine, _AgentsSlope):
    """Workers at a number of concurrent sessions: `workers_per_agent` x sessions + `intercept`."""


class PlannedPhase(_Part):
    """Time with one request rate, between two change points."""

    start_s: Annotated[Seconds, to_digits(3), means("seconds of the trace")]
    end_s: Annotated[Seconds, to_digits(3), means("seconds of the trace")]
    requests: Annotated[Whole, means("in this phase")]
    rate_rps: Annotated[Figures, means("mean requests per second")]
    prompt_tokens: Annotated[Number, to_digits(1), means("mean of a request")]
    output_tokens: Annotated[Number, to_digits(1), means("mean of a request")]


class Stretch(_Part):
    """An interval of the scaling schedule."""

    start_s: Annotated[Seconds, to_digits(3), means("seconds of the planned traffic")]
    end_s: Annotated[Seconds, to_digits(3), means("seconds of the planned traffic")]
    workers: Annotated[Whole, means("that serve then")]
    gpus: Annotated[Whole | None, means("of these workers")] = None
    fleet: Annotated[str | None, means("these workers in words")] = None


class PlannedOrder(_Part):
    """Workers to order at once, so that they serve in time."""

    order_s: Annotated[Instant, means("seconds of the planned traffic")]
    ready_s: Annotated[Instant, means("when they serve, seconds of the planned traffic")]
    workers: Annotated[Whole, means("to order")]


class Paid(_Part):
    """The schedule with its cold starts."""

    cold_start_s: Annotated[Seconds, means("from ordering a worker until it serves, seconds")]
    worker_hours: Annotated[Figures | None, means("paid over the trace")] = None
    saved_share: Annotated[Share | None, means("of the fixed fleet's worker-hours, 0 to 1")] = None
    usd_per_hour: Annotated[Usd | None, means("mean, US dollars")] = None
    stretches: Annotated[list[Stretch], means("workers paid for over time")] = []
    orders: Annotated[list[PlannedOrder], means("when workers must be ordered")] = []


class ScheduleDetail(_Part):
    """The cost of following the schedule."""

    attainment: Annotated[Share | None, means("of the schedule on the trace")] = None
    low: Annotated[Share | None, means("its lower bound, where it was judged by a sample")] = None
    saved_share: Annotated[Share | None, means("of the fixed fleet's worker-hours, 0 to 1")] = None
    each_window: Annotated[str | None, means("how an interval is simulated")] = None
    paid: Annotated[Paid | None, means("cost with cold starts; null: none was given")] = None
    week: Annotated[dict[str, list[int]], means("workers by weekday, for equal parts of the day (UTC)")] = {}


class ExpectedLoop(_Part):
    """The autoscaled fleet that `serve --plan` runs: its bounds, and its expected cost over the trace."""

    fewest_workers: Annotated[Whole, means("lower limit of the autoscaler")]
    most_workers: Annotated[Whole, means("its upper limit")]
    mean_workers: Annotated[Number, to_digits(4), means("expected over the trace")]
    usd_per_hour: Annotated[Usd | None, means("expected mean, US dollars")] = None
    saved_share: Annotated[Share, means("of the fixed fleet's worker-hours, 0 to 1")]
    cold_starts: Annotated[bool, means("whether cold starts are included")]
    floor_by: Annotated[str | None, means("time of day, or weekday and time of day; null: no dates")] = None


class Spares(_Part):
    """Workers above the need, against spot interruptions."""

    workers: Annotated[Whole, means("standby workers, included in `workers` of the plan")]
    serving: Annotated[FleetCost | None, means("the fleet without them")] = None
    reclaims_per_h: Annotated[Amount, means("spot interruptions per worker")] = 0.0
    cold_start_s: Annotated[Seconds | None, means("from ordering a worker until it serves, seconds")] = None
    availability: Annotated[Share | None, means("share of time with enough workers, 0 to 1")] = None
    untouched: Annotated[Share | None, means("share of requests that no interruption hits, 0 to 1")] = None
    covers: Annotated[str | None, means("the interruptions that they cover")] = None


class Considered(FleetCost):
    """A fleet that was considered, and how it does."""

    attainment: Annotated[Attainment, means("of this fleet")]
    ttft_s: Annotated[Quantiles | None, means("on the recorded trace, seconds")] = None
    tpot_s: Annotated[Quantiles | None, means("on the recorded trace, seconds")] = None
    utilisation: Annotated[Figures | None, means("share of time in which engines run steps")] = None
    prefix_hit_rate: Annotated[Share | None, means("share of prompt tokens; null: nothing is cached")] = None
    note: Annotated[str | None, means("a remark on how it was judged")] = None


class PassedOver(_Part):
    """A worker type that is not feasible, and why."""

    gpu: Annotated[Name, means("GPU type")]
    tp_degree: Annotated[Count, means("GPUs that one engine spans")]
    ranks: Annotated[Ranked, means("as in FleetPart")] = ""
    reason: Annotated[str, means("why it cannot serve")]


class OneFewer(_Part):
    """One worker less than the answer, and how it fails."""

    workers: Annotated[Whole, means("of the smaller fleet")]
    attainment: Annotated[Share | None, means("expected, else on the recorded trace")] = None
    low: Annotated[Share | None, means("its lower bound")] = None
    on_trace: Annotated[Share | None, means("attainment on the recorded trace")] = None
    fails: Annotated[str | None, means("how it fails")] = None
    fleet: Annotated[list[FleetPart], means("its workers by type")] = []


class BindingDetail(_Part):
    """The trial that shows the bottleneck."""

    workers: Annotated[Whole, means("of the fleet that fails")]
    fleet: Annotated[list[FleetPart], means("its workers by type")] = []
    rate_scale: Annotated[Number, means("times the recorded traffic")]
    slo_class: Annotated[str | None, means("class that misses first")] = None
    attainment: Annotated[Share | None, means("of that fleet")] = None
    window_attainment: Annotated[Share | None, means("in the worst minute")] = None
    relief: Annotated[dict[str, Share], means("attainment gained by relaxing each limit")]
    prefix_hit_rate: Annotated[Share | None, means("share of prompt tokens; null: nothing is cached")] = None
    prefix_hit_rate_more_kv: Annotated[Share | None, means("the same with 25 % more KV memory")] = None


class Headroom(_Part):
    """The traffic that the fleet bears, by the recorded trace and the hardest resampled ones."""

    meets: Annotated[Number | None, means("most traffic that meets the target, times the trace's")] = None
    misses: Annotated[Number | None, means("least traffic that misses it, times the trace's")] = None


class AloneShares(_Part):
    """A share of the requests for each target."""

    ttft: Annotated[Share | None, means("of TTFT")] = None
    tpot: Annotated[Share | None, means("of TPOT")] = None


class AloneNeeds(_Part):
    """A limit for each target, seconds."""

    ttft: Annotated[Figures | None, means("of TTFT")] = None
    tpot: Annotated[Figures | None, means("of TPOT")] = None


class Plateau(_Part):
    """Worker counts between which attainment hardly differs."""

    workers: Annotated[list[int], Field(min_length=1), means("the worker counts")]
    span: Annotated[Share, means("difference of attainment between them")]
    missed: Annotated[Share, means("share missed at the largest count")]
    alone: Annotated[AloneShares, means("share of requests that miss on an idle worker")]
    alone_needs_s: Annotated[AloneNeeds, means("targets that the slowest of these need, seconds")]


class MixesReplayed(_Part):
    """The search for a cheaper mix of worker types."""

    replayed: Annotated[Whole, means("mixes that were simulated")]
    replays: Annotated[Whole, means("simulations that this took")]
    may_save: Annotated[Share | None, means("share of the cost that an untried mix may save")] = None


class TraceSample(_Part):
    """The sample that a long trace was judged by."""

    requests: Annotated[Whole, means("in the sample")]
    windows: Annotated[Whole, means("in the sample")]
    binding_windows: Annotated[Whole, means("of these, the busiest")]
    of_windows: Annotated[Whole, means("windows of the whole trace")]
    attainment: Annotated[Share, means("in the sample")]
    low: Annotated[Share, means("lower bound for the whole trace")]
    full_replay: Annotated[Share | None, means("attainment over every request; null: unknown")] = None
    added_workers: Annotated[Whole, means("that the full replay needed beyond the sample's fleet")] = 0
    explained_by_requests: Annotated[Whole | None, means("in the sample that the reasons come from")] = None


class Uncertainty(_Part):
    """The scatter of attainment by its sources."""

    arrivals: Annotated[Figures, means("standard deviation of attainment by other arrivals alone")]
    drift: Annotated[Figures, means("by drifting traffic alone")]
    coefficients: Annotated[Figures, means("by uncertain step times alone")]
    traffic: Annotated[str, means("steady, changes, assumed, or too short to tell")] = "steady"
    of_rate: Annotated[Figures, means("drift allowed for: standard deviation of the rate's logarithm")] = 0.0
    mostly: Annotated[str | None, means("the largest source")] = None
    shares: Annotated[dict[str, Share], means("of the variance, by source")] = {}


class Nearest(_Part):
    """The nearest target that can be met, or only what the trace can show at most."""

    ttft_s: Annotated[Positive | None, means("TTFT target that can be met, seconds")] = None
    tpot_s: Annotated[Positive | None, means("TPOT target that can be met, seconds")] = None
    session_s: Annotated[Positive | None, means("session time that can be met, seconds")] = None
    fleet: Annotated[list[FleetPart], means("that meets them")] = []
    workers: Annotated[Whole, means("of this fleet")] = 0
    gpus: Annotated[Whole, means("of this fleet")] = 0
    usd_per_hour: Annotated[Usd | None, means("of this fleet, US dollars")] = None
    attainment: Annotated[Share | None, means("expected, or the most that the trace can show")] = None
    low: Annotated[Share | None, means("its lower bound")] = None
    looser: Annotated[Figures | None, means("times the targets asked for")] = None


class Affinity(_Part):
    """What the plan saves against the best policy that ignores caches, on the recorded trace."""

    policy: Annotated[str, means("the best policy that ignores caches")]
    workers: Annotated[Whole, means("that it needs")]
    saved_workers: Annotated[int, means("fewer than it needs")]
    saved_usd_per_hour: Annotated[UsdChange | None, means("less than its fleet, US dollars")] = None
    prefix_hit_rate: Annotated[Share | None, means("with that policy, share of prompt tokens")] = None


class OtherPolicy(_Part):
    """The fleet that another placement policy needs on the recorded trace."""

    policy: Annotated[str, means("the other policy")]
    workers: Annotated[Whole | None, means("that it needs; null: more than `tried_up_to`")] = None
    gpus: Annotated[Whole | None, means("of these workers")] = None
    usd_per_hour: Annotated[Usd | None, means("US dollars")] = None
    tried_up_to: Annotated[Whole | None, means("most workers tried")] = None
    prefix_hit_rate: Annotated[Share | None, means("share of prompt tokens; null: nothing is cached")] = None


class Grown(_Part):
    """The fleet under more sessions."""

    scale: Annotated[Figures, means("times the sessions")]
    hit_rate: Annotated[Figures, means("share of prompt tokens")]
    attainment: Annotated[Figures, means("share within the targets")]


class Cliff(_Part):
    """The growth of sessions that the fleet bears."""

    tried: Annotated[list[Grown], Field(min_length=1), means("in rising order")]
    hits_lost: Annotated[Figures | None, means("growth at which the hit rate falls; null: at none")] = None
    target_lost: Annotated[Figures | None, means("growth at which the target is missed; null: at none")] = (
        None
    )


class SessionCost(_Part):
    """The sessions of the trace on the fleet."""

    sessions: Annotated[Whole, means("in the trace")]
    at_once: Annotated[Whole, means("the most at the same time")]
    mean_s: Annotated[Figures, means("mean duration, seconds")]
    usd: Annotated[Figures | None, means("cost of one, US dollars")] = None
    within: Annotated[Figures | None, means("share within the session time asked for")] = None


class Reuse(_Part):
    """The reuse of prefixes on the fleet."""

    hit_rate: Annotated[Figures, means("share of prompt tokens found cached")]
    low: Annotated[Figures, means("its lower bound")]
    high: Annotated[Figures, means("its upper bound")]
    ideal: Annotated[Figures, means("hit rate of an unlimited cache shared by all workers")]
    working_set_tokens: Annotated[Whole, means("the most in use within ten minutes")]
    kv_tokens: Annotated[Whole, means("KV cache of all workers")]
    cliff: Annotated[Cliff, means("growth of sessions that it bears")]
    sessions: Annotated[SessionCost | None, means("cost and time of sessions")] = None


class KvOffload(_Part):
    """What KV offload to CPU memory is worth on the recorded trace."""

    gib: Annotated[Figures, means("host memory of a worker, GiB")]
    gb_per_s: Annotated[Figures, means("load rate of a GPU, GB/s")]
    prefix_hit_rate: Annotated[Share, means("with it, share of prompt tokens")]
    loaded: Annotated[Share, means("share of prompt tokens loaded from host memory")]
    prefix_hit_rate_without: Annotated[Share, means("without it")]
    workers: Annotated[Whole, means("fewest that meet the target with it")]
    usd_per_hour: Annotated[Usd | None, means("of that fleet, US dollars")] = None
    workers_without: Annotated[Whole | None, means("fewest without it; null: more than `tried_up_to`")] = None
    usd_per_hour_without: Annotated[Usd | None, means("of that fleet, US dollars")] = None
    host_usd_per_hour: Annotated[UsdChange, means("price of the memory, US dollars")]
    saved_usd_per_hour: Annotated[UsdChange | None, means("less than without it, US dollars")] = None
    tried_up_to: Annotated[Whole, means("most workers tried without it")]


class Counted(_Part):
    """Attainment at a worker count."""

    workers: Annotated[Whole, means("of this type")]
    on_trace: Annotated[Share | None, means("on the recorded trace")] = None
    expected: Annotated[Share | None, means("mean over resampled traces")] = None
    low: Annotated[Share | None, means("lower bound")] = None
    high: Annotated[Share | None, means("upper bound")] = None


class Costed(_Part):
    """The fleet for other targets."""

    scale: Annotated[Number, means("times both targets")]
    on: Annotated[str, means("recorded trace or hardest resampled traces")] = "recorded trace"
    ttft_s: Annotated[Figures, means("the limit of TTFT, seconds")]
    tpot_s: Annotated[Figures, means("the limit of TPOT, seconds")]
    workers: Annotated[Whole | None, means("needed; null: no number suffices")] = None
    gpus: Annotated[Whole | None, means("of these workers")] = None
    usd_per_hour: Annotated[UsdChange | None, means("US dollars")] = None


class Curves(_Part):
    """The data of the plots."""

    rate_rps: Annotated[list[RatePoint], means("(seconds of the trace, requests per second)")] = []
    attainment_by_workers: Annotated[list[Counted], means("share within the targets")] = []
    ttft_cdf: Annotated[list[SharePoint], means("(seconds, share of requests)")] = []
    tpot_cdf: Annotated[list[SharePoint], means("(seconds, share of requests)")] = []
    cost_by_slo: Annotated[list[Costed], means("cost of other targets")] = []


class PlannedLink(_Part):
    """The KV transfer of a split fleet; each GPU of a worker sends its own share."""

    gb_per_s: Annotated[Positive, AfterValidator(to_figures), means("of each GPU, GB/s")]
    latency_s: Annotated[Amount, means("added to each transfer, seconds")]

    def whole(self) -> KvLink:
        return KvLink(self.gb_per_s * 1e9, self.latency_s)


class PlannedProfile(_Part):
    """A profile that was planned with."""

    model: Annotated[str, means("as the library names it")]
    gpu: Annotated[str, means("GPU type")]
    tp_degree: Annotated[Count, means("GPUs that one engine spans")]
    ranks: Annotated[Ranked, means("as in FleetPart")] = ""
    kind: Annotated[str, means("measured, published, or composed (predicted)")]
    date: Annotated[str, means("of the measurement, ISO")]
    mean_relative_error: Annotated[Figures | None, means("of its step times, 0.05: 5 %")] = None
    unseen_relative_error: Annotated[Figures | None, means("the same on workers not measured")] = None
    engine: Annotated[str | None, means("name and version")] = None
    context_limit_tokens: Annotated[int | None, means("most tokens of a request")] = None
    kv_link: Annotated[PlannedLink | None, means("KV transfer of a split fleet")] = None
    usd_per_gpu_h: Annotated[Amount | None, means("US dollars")] = None
    price: Annotated[str | None, means("where the price is from")] = None
    profile: Annotated[dict[str, Any], means("the profile file itself")]

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

    title: Annotated[str, means("above the table")]
    columns: Annotated[list[str], means("their headings")]
    rows: Annotated[list[list[str]], means("cells as shown")]


class PlanInputs(_Part):
    """The inputs of a plan."""

    trace: Annotated[str, means("name of the file")] = "trace"
    requests: Annotated[Whole, means("in the trace")] = 0
    rate_rps: Annotated[Figures | None, means("mean requests per second")]
    duration_s: Annotated[Instant, means("from the first arrival to the last, seconds")] = 0.0
    clock_start_unix_s: Annotated[UnixTime | None, means("Unix time of second 0; null: no dates")] = None
    rate_scale: Annotated[Positive, means("times the trace's rate")] = 1.0
    ideal_hit_rate: Annotated[
        Share | None, means("of an unlimited prefix cache; null: nothing is cached")
    ] = None
    phases: Annotated[list[PlannedPhase], means("traffic phases")] = []
    profiles: Annotated[list[PlannedProfile], means("one for each worker type considered")]
    warnings: Annotated[list[str], means("possible faults of the inputs, a sentence each")] = []
    ages: Annotated[list[str], means("the warnings on old prices and profiles")] = []
    assumed: Annotated[list[list[str]], means("(name, value, source) of a trace that was drawn")] = []
    confidence: Annotated[Number | None, means("asked for")] = None
    max_gpus: Annotated[Count | None, means("limit asked for")] = None
    budget_usd_per_h: Annotated[Positive | None, means("limit asked for, US dollars")] = None
    seed: Annotated[int | None, means("of the random numbers")] = None


class ReplayedFleet(_Part):
    """The plan's fleet on the recorded trace, and its expected attainment over resampled traces."""

    late: Annotated[int, means("requests outside their targets")]
    preemptions: Annotated[int, means("for lack of KV")]
    migrations: Annotated[int, means("moves made")]
    expected: Annotated[
        float, Field(ge=0, le=1), AfterValidator(to_figures), means("mean attainment over resampled traces")
    ]


class PlannedMoves(_Part):
    """What moving running requests between workers saves."""

    kept: Annotated[bool, means("whether the plan moves requests")]
    workers_without: Annotated[int, means("that the target takes without moves")]
    usd_per_hour_without: Annotated[Usd | None, means("of that fleet, US dollars")] = None
    with_moves: Annotated[ReplayedFleet | None, means("the plan's fleet; null: not simulated")] = None
    without_moves: Annotated[ReplayedFleet | None, means("the same without moves")] = None
    why_not: Annotated[str | None, means("why moves are not simulated")] = None


class PlanBrief(_Part):
    """A plan in a line."""

    feasible: Annotated[bool, means("whether a fleet meets the targets within the limits")]
    reason: Annotated[str | None, means("why none does")] = None
    fleet: Annotated[list[FleetPart], means("workers by type; empty: none")]
    workers: Annotated[int, means("of all types")]
    gpus: Annotated[int, means("of all workers")]
    usd_per_hour: Annotated[Usd | None, means("US dollars; null: a price is not known")] = None


class PlanFile(PlanBrief):
    """`tokenfleet.plan/1`, as `tokenfleet plan --format json` prints it."""

    form: Literal["tokenfleet.plan/1"] = Field(alias="schema", description="name and version of this form")
    says: Annotated[list[Said], means("(topic, text) of each line of the answer")] = []
    tables: Annotated[list[Shown], means("of the answer")] = []
    figures: Annotated[list[dict[str, Any]], means("the plots: words, axes, series and numbers")] = []
    policy: Annotated[str, means("placement policy; +migrate: with moves")]
    priority_headroom: Annotated[float, Field(ge=0, le=0.9), means("share of KV that is reserved")] = 0.0
    strictness: Annotated[Strictness | None, means("of placement; null: normal")] = None
    engine_mode: Annotated[Mode | None, means("how engines form steps")]
    slo: Annotated[LatencyTargets, means("targets of requests without a class")]
    classes: Annotated[list[PlannedClass], means("targets by SLO class")] = []
    separate_usd_per_hour: Annotated[Amount | None, means("a fleet for each class, US dollars")] = None
    session_s: Annotated[Positive | None, means("target for a whole session, seconds")] = None
    agents: Annotated[Annotated[int, Field(ge=1)] | None, means("concurrent sessions")] = None
    attainment: Annotated[Attainment, means("share of requests within the targets")]
    ttft_s: Annotated[Quantiles | None, means("on the recorded trace, seconds")]
    tpot_s: Annotated[Quantiles | None, means("on the recorded trace, seconds")]
    utilisation: Annotated[Figures | None, means("share of time in which engines run steps")] = None
    binding: Annotated[str | None, means("bottleneck: ttft, tpot, kv, prefill or session")] = None
    binding_window_s: Annotated[Span | None, means("when it is worst, seconds of the trace")] = None
    binding_detail: Annotated[BindingDetail | None, means("how the bottleneck was found")] = None
    moves: Annotated[PlannedMoves | None, means("what live migration saves")] = None
    headroom: Annotated[Headroom | None, means("room for more traffic")] = None
    plateau: Annotated[Plateau | None, means("where more workers hardly help")] = None
    sampling: Annotated[TraceSample | None, means("how a long trace was judged")] = None
    workers_range: Annotated[list[Count] | None, means("for a drawn trace: workers, 9 times in 10")] = None
    mixes: Annotated[MixesReplayed | None, means("search for a cheaper mix")] = None
    one_fewer: Annotated[OneFewer | None, means("why not one worker fewer")] = None
    doubt: Annotated[Uncertainty | None, means("sources of uncertainty")] = None
    nearest_feasible: Annotated[Nearest | None, means("what can be met where the targets cannot")] = None
    demand_line: Annotated[ScalingRule | None, means("workers by request rate")] = None
    agents_line: Annotated[AgentsLine | None, means("workers by concurrent sessions")] = None
    schedule: Annotated[list[Stretch], means("workers over time")] = []
    schedule_detail: Annotated[ScheduleDetail | None, means("cost of the schedule")] = None
    spares: Annotated[Spares | None, means("standby workers for spot interruptions")] = None
    alternatives: Annotated[list[Considered], means("other fleets, cheapest first")] = []
    passed_over: Annotated[list[PassedOver], means("worker types that cannot serve")] = []
    baselines: Annotated[list[OtherPolicy], means("what other policies need")] = []
    affinity: Annotated[Affinity | None, means("what cache-aware placement saves")] = None
    prefix_cache: Annotated[bool | None, means("whether it is on; null: no prefix is known")] = None
    reuse: Annotated[Reuse | None, means("use of prefix caches")] = None
    host_kv: Annotated[KvOffload | None, means("what KV offload to host memory saves")] = None
    curves: Annotated[Curves, means("data of the plots")] = Curves()
    inputs: Annotated[PlanInputs, means("what was planned with")]
    loop: Annotated[ExpectedLoop | None, means("cost with autoscaling")] = None

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
        """The part of this plan that no fleet runs, and the way round it; None if a fleet can run all."""
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
    def paid(self) -> Paid | None:
        """The schedule with its cold starts; None where none were given."""
        return None if self.schedule_detail is None else self.schedule_detail.paid

    @property
    def cold_start_s(self) -> float:
        """The cold start that was planned with; 0 where none was given."""
        return 0.0 if self.paid is None else self.paid.cold_start_s

    def with_workers(self, counts: Sequence[int]) -> PlanFile:
        """The plan with another number of workers of each type; its document stays what it was."""
        parts = [part.of(n) for part, n in zip(self.fleet, counts, strict=True) if n]
        dollars = [part.usd_per_hour for part in parts]
        usd = None if None in dollars else sum(d for d in dollars if d is not None)
        totals = {"workers": sum(counts), "gpus": sum(part.gpus for part in parts), "usd_per_hour": usd}
        return self.model_copy(update={"fleet": parts} | totals)

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
