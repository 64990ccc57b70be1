"""The request for a plan: every option once, with its type, default, help and bounds.

The flags of `plan` and `whatif`, `--config` files, what-if's axes and the commands it prints, the HTTP form
and the console's form are made from these fields. An option that is added here is in all of them.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Optional,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from controlplane.errors import BadInput
from controlplane.perfmodel.offload import HostKv, no_offload, parse_host_kv
from controlplane.types import EngineMode, Slo, SloClass
from tokenfleet.field_errors import first_fault
from tokenfleet.texts import (
    Parsed,
    parse_duration_s,
    parse_slo,
    parse_slo_class,
    parse_speculation,
    parse_strictness,
    parse_window_s,
)

if TYPE_CHECKING:
    from controlplane.perfmodel.profile import Profile
    from controlplane.placement.policies import PlacementSettings
    from controlplane.worker_type import WorkerType
    from controlplane.workload import Workload

T = TypeVar("T")
Kind = Literal["slo", "duration", "number", "count", "switch", "choice", "file", "word"]
# A promise is made to clients, a choice decides how it is kept, the user cannot choose the third.
Role = Literal["promise", "choice", "circumstance"]
DEFAULT_PLACEMENT = "spread"
POLICY_HELP = (
    "placement policy; +migrate also moves running requests (default: spread+migrate, and spread"
    " where moves are not simulated); exact ignores caches, and takes one worker type and one SLO class"
)


@dataclass(frozen=True, slots=True)
class About:
    """An option's texts for people. `name` begins its sentences, `help` is its line in the help.

    `flag`: where it is not the field's name. `key`: where what-ifs and addresses use a shorter name.
    `needs`: the option without which it has no meaning.
    """

    name: str
    help: str
    role: Role = "circumstance"
    flag: str = ""
    key: str = ""
    kind: Kind | None = None
    needs: str = ""


def known_policy(name: str | None) -> str | None:
    """`name`, if it is a placement policy, moves or no moves. Raises BadInput listing them all."""
    from controlplane.placement.policies import read_policy

    if name is None:
        return None
    try:
        read_policy(name)
    except BadInput as refusal:
        raise BadInput(f"--{refusal}") from None
    return name


@dataclass(frozen=True, slots=True)
class TextCodec:
    """The form of an option's text; `parse` raises BadInput. Over HTTP it is the text."""

    parse: Callable[[str], object]
    max_length: int
    examples: tuple[str, ...] = ()
    min_length: int = 0

    @property
    def field(self) -> Any:
        """The text's type, for pydantic."""
        bounds = Field(
            min_length=self.min_length, max_length=self.max_length, examples=list(self.examples) or None
        )
        return Annotated[str, bounds]

    def read(self, text: str) -> Parsed[Any]:
        return Parsed(text, self.parse(text))


def _slo_class(text: str) -> SloClass:
    """A class; attainment 0 where it names none of its own, and so has the request's."""
    return parse_slo_class(text, 0.0)


def _class_rule(rule: str) -> tuple[str, str, str]:
    """(class, column, value) of `NAME=tenant:WHO`. Raises BadInput."""
    name, _, condition = rule.partition("=")
    column, _, value = condition.partition(":")
    if not (name and column and value):
        raise BadInput(f"--class: expected NAME=tenant:WHO, key:WHO or priority:high, got {rule!r}")
    return name, column, value


Scale = Annotated[float, Field(gt=0, le=1e6)]
# 100 % is ill-defined: a two-token output behind one prefill misses any TPOT.
Share = Annotated[float, Field(gt=0, lt=1)]
Word = Annotated[str, Field(min_length=1, max_length=100)]


@dataclass(frozen=True)
class PlanRequest:
    """A target, the workers to hold it with, and how the trace is to be read.

    `attainment` of requests within `slo`, to be held with probability `confidence`. Raises BadInput for a
    value out of its bounds, with the flag's name.
    """

    slo: Annotated[
        Slo,
        About(
            "targets",
            "ttft=1.6s,tpot=75ms; of a class chat:ttft=…,tpot=…,attainment=…, or batch:deadline=6h",
            "promise",
        ),
    ]
    model: Annotated[
        Word | None,
        Field(examples=["llama-3.1-8b"]),
        About("model", "a model of the library, e.g. llama-3.1-8b"),
    ] = None
    classes: Annotated[
        tuple[Annotated[Parsed[SloClass], TextCodec(_slo_class, 200, min_length=3)], ...],
        Field(max_length=16),
        About(
            "classes",
            "targets of classes: chat:ttft=400ms,tpot=30ms,attainment=0.99",
            "promise",
            "slo",
            "classes",
        ),
    ] = ()
    class_of: Annotated[
        tuple[Annotated[Parsed[tuple[str, str, str]], TextCodec(_class_rule, 100, min_length=1)], ...],
        Field(max_length=100),
        About(
            "rules of classes",
            "assign requests to a class: batch=tenant:acme (or key:, priority:)",
            flag="class",
        ),
    ] = ()
    precision: Annotated[
        Word | None,
        Field(examples=["fp8"]),
        About("precision", "precision of the weights, as the library has it: fp8, … (bf16: plain)", "choice"),
    ] = None
    attainment: Annotated[Share, About("attainment", "share of requests within both targets", "promise")] = (
        0.99
    )
    confidence: Annotated[
        float,
        Field(ge=0.5, lt=1),
        About("confidence", "probability that the fleet reaches this attainment", "promise"),
    ] = 0.95
    gpu: Annotated[
        tuple[Word, ...],
        Field(max_length=32),
        About("GPU", "GPUs to consider (all that are known)", "choice"),
    ] = ()
    tp: Annotated[
        tuple[Annotated[int, Field(ge=1, le=1024)], ...],
        Field(max_length=32),
        About("TP degree", "TP degrees to consider (all that are known)", "choice"),
    ] = ()
    profiles: Annotated[
        tuple[Path, ...],
        Field(max_length=32),
        About("profile", "profile files instead of the library", "choice", flag="profile"),
    ] = ()
    prices: Annotated[Path | None, About("price list", "price list instead of the shipped one")] = None
    provider: Annotated[
        Word | None,
        Field(examples=["coreweave"]),
        About("provider", "take this provider's prices (default: the first in the list for a GPU)", "choice"),
    ] = None
    spot: Annotated[bool, About("spot", "spot prices instead of on demand", "choice")] = False
    reserved: Annotated[bool, About("reserved", "prices of a commitment instead of on demand", "choice")] = (
        False
    )
    reclaims_per_h: Annotated[
        float | None,
        Field(ge=0, le=3600),
        About(
            "interruptions of a spot worker an hour",
            "spot interruptions per worker and hour; adds standby workers",
            key="reclaims",
            needs="spot",
        ),
    ] = None
    cold_start_s: Annotated[
        float | None,
        Field(ge=0, le=86_400),
        About(
            "cold start",
            "time from ordering a worker until it serves, such as 2m; the plan orders and pays ahead",
            flag="cold-start",
            kind="duration",
        ),
    ] = None
    engine: Annotated[
        EngineMode | None, About("engine mode", "engine mode instead of the profile's", "choice")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Field(gt=0, le=1),
        About(
            "GPU memory an engine takes",
            "vLLM's setting: the share of GPU memory an engine takes (0.9 in the library's profiles)",
            "choice",
            key="memory",
        ),
    ] = None
    kv_tokens: Annotated[
        int | None,
        Field(ge=1, le=10**12),
        About(
            "tokens of KV a worker holds",
            "KV cache size of a worker in tokens, as the engine prints it at its start",
            key="kv",
        ),
    ] = None
    speculate: Annotated[
        Parsed[Any] | None,  # a Speculation, whose module loads numpy
        TextCodec(parse_speculation, 400, ("0.8/0.6/0.4@1ms+0.5ms",)),
        About(
            "speculative decoding",
            "speculative decoding: acceptance by position, time per draft, time per step: 0.8/0.6@1ms+0.5ms",
            "choice",
        ),
    ] = None
    host_kv: Annotated[
        Parsed[tuple[int, float | None] | None] | None,
        TextCodec(parse_host_kv, 60, ("64GiB@25GB/s",)),
        About(
            "host memory for KV",
            "offload evicted KV to host memory: size per worker and load rate per GPU, 64GiB@25GB/s",
            "choice",
        ),
    ] = None
    kv_gb_per_s: Annotated[
        float | None,
        Field(gt=0, le=1e6),
        About(
            "GB/s of KV a GPU",
            "rate of KV transfers to decode workers, GB/s per GPU (default: its servers' network)",
            key="kv-rate",
        ),
    ] = None
    kv_latency_s: Annotated[
        float | None,
        Field(ge=0, le=60),
        About(
            "latency of a KV transfer",
            "latency added to each KV transfer (default: 10ms)",
            flag="kv-latency",
            kind="duration",
        ),
    ] = None
    policy: Annotated[
        Word | None,
        AfterValidator(known_policy),
        About("policy", POLICY_HELP, "choice", kind="choice"),
    ] = None
    priority_headroom: Annotated[
        float,
        Field(ge=0, le=0.9),
        About(
            "headroom for high priority",
            "share of a worker's KV reserved while it runs a high-priority request",
            "choice",
            key="headroom",
        ),
    ] = 0.0
    strictness: Annotated[
        Parsed[Any] | None,  # a Strictness, whose package loads numpy
        TextCodec(parse_strictness, 100, ("strict", "theta=1,gamma=0.9"), min_length=1),
        About(
            "strictness",
            "how strictly placement keeps targets: loose, normal, strict, or theta=1,gamma=0.9,tolerance=0",
            "choice",
        ),
    ] = None
    session_s: Annotated[
        float | None,
        Field(gt=0, le=1e8),
        About(
            "time of a session",
            "finish a whole session within this, think time included: 10m",
            "promise",
            "session-time",
            kind="duration",
        ),
    ] = None
    agents: Annotated[
        int | None,
        Field(ge=1, le=1_000_000),
        About("agents", "concurrent sessions; when one ends, the next of the trace begins"),
    ] = None
    rate_scale: Annotated[Scale, About("traffic", "multiply the request rate by this", key="rate")] = 1.0
    prompt_scale: Annotated[
        Scale, About("prompt lengths", "multiply prompt lengths by this", key="lengths.prompt")
    ] = 1.0
    output_scale: Annotated[
        Scale, About("output lengths", "multiply output lengths by this", key="lengths.output")
    ] = 1.0
    price_scale: Annotated[Scale, About("prices", "multiply prices by this", key="price")] = 1.0
    window: Annotated[
        Parsed[tuple[float, float]] | None,
        TextCodec(parse_window_s, 40, ("10m..20m",)),
        About("part of the trace", "only this part of the trace: 10m..20m"),
    ] = None
    budget_usd_per_h: Annotated[
        float | None,
        Field(gt=0, le=1e9),
        About("dollars an hour at most", "spend at most this much per hour, in dollars", key="budget"),
    ] = None
    max_gpus: Annotated[
        int | None, Field(ge=1, le=1_000_000), About("GPUs at most", "use at most this many GPUs")
    ] = None
    drop_too_long: Annotated[
        bool,
        About("requests too long left out", "leave out requests beyond the model's context"),
    ] = False
    bias_from: Annotated[
        str | None,
        Field(min_length=1, max_length=64),
        About("bias", "correct step times by the scorecard of this kept plan (or of the last one)"),
    ] = None
    no_prefix_cache: Annotated[
        bool,
        About(
            "prefix caching off", "switch prefix caching off: engines compute every prompt in full", "choice"
        ),
    ] = False
    seed: Annotated[
        int,
        Field(ge=0, lt=2**31),
        About("seed", "random seed; the same seed gives the same answer"),
    ] = 0

    def __post_init__(self) -> None:
        for option in options_of(type(self)):  # type: ignore[arg-type]
            object.__setattr__(self, option.field, option.checked(getattr(self, option.field)))
        names = [one.name for one in self.slo_classes]
        if twice := [name for name in names if names.count(name) > 1]:
            raise BadInput(f"--slo: {twice[0]}: given twice")

    @property
    def slo_classes(self) -> tuple[SloClass, ...]:
        """The named classes, deadlines as they were given."""
        given = [one.value for one in self.classes]
        return tuple(replace(one, attainment=one.attainment or self.attainment) for one in given)

    @property
    def placement(self) -> str:
        """The placement policy by its name, without moves."""
        return (self.policy or DEFAULT_PLACEMENT).removesuffix("+migrate")

    @property
    def moves(self) -> bool:
        """Whether running requests are to be moved too."""
        return self.policy is None or self.policy != self.placement

    @property
    def has_only_classes(self) -> bool:
        """Whether no plain targets were given; then `slo` is those of the tightest class."""
        return bool(self.classes) and self.slo == tightest([one.value for one in self.classes])

    def consistent(self) -> PlanRequest:
        """Itself. Raises BadInput where one option has no meaning together with the others."""
        if self.profiles and (self.gpu or self.tp):
            raise BadInput("--profile: says which workers to plan with; leave out --gpu and --tp")
        if self.profiles and self.precision:
            raise BadInput("--profile: says what precision it is of; leave out --precision")
        for flag, value in (("--kv-gb-per-s", self.kv_gb_per_s), ("--kv-latency", self.kv_latency_s)):
            if value is not None and not self.profiles and self.engine != EngineMode.SPLIT:
                raise BadInput(f"{flag}: only a split fleet hands KV over; give --engine split too")
        if value_of(self.host_kv) is not None and self.no_prefix_cache:
            raise no_offload("contradicts --no-prefix-cache: nothing would be kept there")
        self._check_spot()
        return self

    def _check_spot(self) -> None:
        if self.reserved and self.spot:
            raise BadInput("--reserved: contradicts --spot; a worker is the one or the other")
        if self.reclaims_per_h is not None:
            if not self.spot:
                raise BadInput("--reclaims-per-h: only spot workers are interrupted; give --spot too")
            if self.cold_start_s is None:
                raise BadInput("--reclaims-per-h: needs --cold-start, how long a replacement takes")

    def most_workers(self, worker_type: WorkerType) -> int | None:
        """The most workers of one type that the limits allow; None without a limit."""
        return min(_caps(self, worker_type).values(), default=None)

    def limit_text(self, worker_type: WorkerType) -> str:
        """The limit that allows the fewest workers of a type, as the flag that sets it."""
        caps = _caps(self, worker_type)
        return min(caps, key=lambda flag: caps[flag])


class Option:
    """A field of a request, as faces need it: its names, its kind, its bounds, and text both ways."""

    def __init__(self, field: str, annotation: Any, default: Any) -> None:
        self.field, self.default = field, default
        self.type, *self.metadata = get_args(annotation)
        self.about: About = next(m for m in self.metadata if isinstance(m, About))
        self.flag = self.about.flag or field.replace("_", "-")
        self.key = self.about.key or self.flag
        self.is_required = default is MISSING
        self.is_list = get_origin(self.type) is tuple
        one = get_args(self.type)[0] if self.is_list or NoneType in get_args(self.type) else self.type
        self.item, self._item_metadata = _plain(one)
        self.codec = next(
            (m for m in (*self.metadata, *self._item_metadata) if isinstance(m, TextCodec)), None
        )
        self._adapter: TypeAdapter[Any] = TypeAdapter(self._of_texts() if self.codec else annotation)

    def _of_texts(self) -> Any:
        """The annotation of an option with a codec, with texts for its nouns."""
        assert self.codec is not None
        of: Any = tuple if self.is_list else Optional
        text = of[self.codec.field, ...] if self.is_list else of[self.codec.field]
        return Annotated[text, Field(), *self.constraints]

    @property
    def kind(self) -> Kind:
        """The form of its values."""
        if self.about.kind:
            return self.about.kind
        kinds: dict[type, Kind] = {
            Slo: "slo", bool: "switch", int: "count", EngineMode: "choice", Path: "file", float: "number",
        }  # fmt: skip
        return kinds.get(self.item, "word")

    @property
    def bounds(self) -> dict[str, float]:
        """`gt`, `ge`, `lt` and `le` of one value."""
        bounds = {}
        for part in (*self._item_metadata, *self.metadata):
            for bound in getattr(part, "metadata", ()):
                for name in ("gt", "ge", "lt", "le"):
                    if (limit := getattr(bound, name, None)) is not None:
                        bounds[name] = limit
        return bounds

    @property
    def constraints(self) -> list[Any]:
        """The checks of the whole value that pydantic can do, without those that the planner does itself."""
        return [m for m in self.metadata if isinstance(m, FieldInfo)]

    @property
    def item_constraints(self) -> list[Any]:
        """The checks that it can do of one item of a list, or of a value that may be left out."""
        return [m for m in self._item_metadata if not isinstance(m, TextCodec)]

    @property
    def choices(self) -> list[str]:
        """Its allowed values, if they are a list."""
        if self.item is EngineMode:
            return [str(mode) for mode in EngineMode]
        if self.kind == "choice":
            from controlplane.placement.policies import policy_names

            return policy_names()
        return []

    def checked(self, value: Any, where: str = "") -> Any:
        """`value`, if it is one of the option's, of a text its noun. Raises BadInput."""
        if self.codec is not None:
            return self._nouns(value, where)
        return self._valid(value, where)

    def _nouns(self, value: Any, where: str) -> Any:
        assert self.codec is not None
        texts = tuple(map(str, value)) if self.is_list else None if value is None else str(value)
        valid = self._valid(texts, where)
        if valid is None or isinstance(value, Parsed):
            return value
        if not self.is_list:
            return self.codec.read(valid)
        return tuple(one if isinstance(one, Parsed) else self.codec.read(one) for one in value)

    def _valid(self, value: Any, where: str) -> Any:
        try:
            return self._adapter.validate_python(value, strict=True)
        except ValidationError as error:
            fault = first_fault(error)[1]
            if isinstance(value, int | float) and self.bounds:
                fault = f"{_within(self.bounds)}, got {value:g}"
            raise BadInput(f"{where or f'--{self.flag}'}: {fault}") from None

    def read(self, text: str, where: str = "") -> Any:
        """The value that a text stands for; of a list, its parts joined by `+`. Raises BadInput."""
        where = where or f"--{self.flag}"
        if self.is_list:
            return self.checked(tuple(self._read(part, where) for part in text.split("+")), where)
        return self.checked(self._read(text, where), where)

    def _read(self, text: str, where: str) -> Any:
        if self.kind == "slo":
            return parse_slo(text)
        if self.kind == "duration":
            return 0.0 if text == "0" else parse_duration_s(text, where)
        if self.kind == "switch":
            if text.lower() not in ("yes", "no"):
                raise BadInput(f"{where}: expected yes or no, got {text!r}")
            return text.lower() == "yes"
        if self.item is EngineMode and text not in list(EngineMode):
            raise BadInput(f"{where}: one of {', '.join(EngineMode)}, got {text!r}")
        if self.item in (int, float):
            return self._number(text, where)
        return text if self.codec is not None else self.item(text)

    def _number(self, text: str, where: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise BadInput(f"{where}: expected a number, got {text!r}") from None
        if self.item is float or not math.isfinite(number):
            return number
        if number != int(number):
            raise BadInput(f"{where}: must be a whole number, got {text}")
        return int(number)

    def words(self, value: Any) -> list[str]:
        """The flag with a value, for a command line; nothing for the default."""
        if value == self.default:
            return []
        words = []
        for one in value if self.is_list else (value,):
            words += [f"--{self.flag}"] if one is True else [f"--{self.flag}", self._text(one)]
        return words

    def _text(self, value: Any) -> str:
        if isinstance(value, Slo):
            return f"ttft={_seconds(value.ttft_s)},tpot={_seconds(value.tpot_s)}"
        if self.kind == "duration":
            return _seconds(value)
        # repr, so that the very same number is read back
        return repr(value) if isinstance(value, float) else str(value)


@lru_cache
def options_of(request: type) -> tuple[Option, ...]:
    """The options of a request, in the order of its fields."""
    hints = get_type_hints(request, include_extras=True)
    return tuple(Option(field.name, hints[field.name], field.default) for field in fields(request))


def options() -> tuple[Option, ...]:
    """The options of a plan."""
    return options_of(PlanRequest)


def read_targets(texts: Sequence[str]) -> dict[str, Any]:
    """The fields of a request that `--slo`, given once or several times, stands for. Raises BadInput."""
    plain = [text for text in texts if ":" not in text]
    classes = tuple(text for text in texts if ":" in text)
    slos = [parse_slo(text) for text in plain]
    if len(slos) > 1:
        raise BadInput(f"--slo: several targets need names: NAME:{plain[0]}, NAME:{plain[1]}")
    return {"slo": slos[0] if slos else tightest([_slo_class(text) for text in classes]), "classes": classes}


def tightest(classes: Sequence[SloClass]) -> Slo:
    """The targets of the class whose TTFT target is the least."""
    return min((one.slo for one in classes), key=lambda slo: slo.ttft_s)


def _caps(request: PlanRequest, worker_type: WorkerType) -> dict[str, int]:
    """The most workers of a type that each limit allows, by the flag that sets it."""
    caps = {}
    if request.max_gpus is not None:
        caps[f"--max-gpus {request.max_gpus}"] = request.max_gpus // worker_type.gpus
    if request.budget_usd_per_h is not None and worker_type.usd_per_h:
        # A hair of tolerance: 3 x 1.2 is 3.5999999999999996.
        most = int(request.budget_usd_per_h / worker_type.usd_per_h + 1e-9)
        caps[f"--budget-usd-per-h {request.budget_usd_per_h:g}"] = most
    if worker_type.limit is not None:
        caps[f"at most {worker_type.limit * worker_type.gpus} {worker_type.gpu}"] = worker_type.limit
    return caps


def placement_settings(request: PlanRequest) -> PlacementSettings:
    """The strictness of placement and its headroom."""
    from controlplane.placement.policies import PlacementSettings
    from controlplane.placement.strictness import NORMAL

    return PlacementSettings.of(value_of(request.strictness) or NORMAL, request.priority_headroom)


def refuse_unshared(request: PlanRequest, workload: Workload) -> None:
    """Raise BadInput where host memory is to keep KV of a workload that never needs it again."""
    shared = workload.prefixes is not None and workload.ideal_hits.any()
    if value_of(request.host_kv) is not None and not shared:
        raise no_offload("requests share no prefixes, so nothing would be loaded back")


def asked_of(request: PlanRequest, profile: Profile) -> Profile:
    """The profile with the engine's memory, mode and drafts that are asked for."""
    from controlplane.perfmodel.profile import speculating  # loads numpy
    from tokenfleet.profiles.library import host_gb_per_s

    profile = profile.with_kv(request.gpu_memory_utilization, request.kv_tokens)
    profile = profile if request.engine is None else profile.with_engine(mode=request.engine)
    if (host := value_of(request.host_kv)) is not None:
        size, bytes_per_s = host
        rate = host_gb_per_s(profile.gpu) * 1e9 if bytes_per_s is None else bytes_per_s
        profile = replace(profile, host_kv=HostKv(size, rate))
    drafts = value_of(request.speculate)
    return profile if drafts is None else speculating(profile, drafts)


def value_of(parsed: Parsed[T] | None) -> T | None:
    """The value of what was given, if anything was."""
    return None if parsed is None else parsed.value


def command_line(request: PlanRequest, source: Sequence[str]) -> str:
    """The `tokenfleet plan` of a request, ready for a shell; `source` is where its trace comes from."""
    taken = [o for o in options() if o.field != "slo" or not request.has_only_classes]
    words = [word for option in taken for word in option.words(getattr(request, option.field))]
    return shlex.join(["tokenfleet", "plan", *source, *words])


def _plain(annotation: Any) -> tuple[type, list[Any]]:
    """A type without its metadata, and that."""
    if get_origin(annotation) is Annotated:
        plain, *metadata = get_args(annotation)
        return plain, metadata
    return annotation, []


def _within(bounds: dict[str, float]) -> str:
    """`must be above 0 and below 1`."""
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    return "must be " + " and ".join(f"{words[name]} {limit:.10g}" for name, limit in bounds.items())


def _seconds(seconds: float) -> str:
    """A duration that reads back as the very same number."""
    millis = round(seconds * 1e3, 6)
    if seconds < 1.0 and math.isclose(millis, round(millis)) and float(f"{millis:g}") * 1e-3 == seconds:
        return f"{millis:g}ms"
    return f"{seconds!r}s".replace(".0s", "s")
