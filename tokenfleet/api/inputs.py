"""The nouns that the library takes: a request trace, an engine's profile, a fleet by its workers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import ArrayLike

from controlplane.errors import BadInput
from controlplane.figures import duration_text
from controlplane.perfmodel.profile import Profile
from controlplane.worker_type import WorkerGroup
from controlplane.workload import Workload
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.inputs import chosen_profiles, priced
from tokenfleet.planning.request import PlanRequest
from tokenfleet.profiles.library import find_profiles, read_profile, write_profile
from tokenfleet.service.forms import in_field_names
from tokenfleet.traces import Trace, read_traces
from tokenfleet.traces.check import Checkup, check, verdict
from tokenfleet.traces.prometheus import SINCE, MetricsRange
from tokenfleet.traces.usage import BUSIEST, Usage, trace_of_usage
from tokenfleet.traces.writers import write_trace


@dataclass(frozen=True, repr=False)
class RequestTrace:
    """Requests with their arrival times (seconds) and lengths (tokens), as read from files or arrays.

    >>> import tokenfleet as tf
    >>> trace = tf.Trace.of([0.0, 0.5, 2.0], [900, 40, 300], [20, 80, 10])
    >>> trace.requests, trace.rate_rps
    (3, 1.0)
    >>> trace.to_polars().columns
    ['arrival_s', 'prompt_tokens', 'output_tokens']
    """

    recorded: Trace

    @classmethod
    def read(cls, *paths: str | Path) -> RequestTrace:
        """The requests of one or more files, whose formats are found by their contents.

        Files on one clock are merged by it. Raises BadInput naming file, row and column.
        """
        return cls(read_traces(paths))

    @classmethod
    def of(
        cls, arrival_s: ArrayLike, prompt_tokens: ArrayLike, output_tokens: ArrayLike, name: str = "trace"
    ) -> RequestTrace:
        """A trace from columns of shape [requests]; arrivals in seconds, in any order.

        Raises BadInput for a negative time, a length below 1 token or columns of different lengths.
        """
        arrivals = np.asarray(arrival_s, np.float64)
        lengths = [np.asarray(column, np.int64) for column in (prompt_tokens, output_tokens)]
        if any(column.shape != arrivals.shape for column in lengths) or arrivals.ndim != 1:
            shapes = ", ".join(str(column.shape) for column in (arrivals, *lengths))
            raise BadInput(f"{name}: expected three columns of one length, got shapes {shapes}")
        order = np.argsort(arrivals, kind="stable")
        prompts, outputs = (column[order] for column in lengths)
        return cls(Trace(name, "arrays", Workload(arrivals[order], prompts, outputs)))

    @classmethod
    def from_users(
        cls,
        users: int | None = None,
        shape: str = "chat",
        *,
        requests_per_day: float | None = None,
        request_rate: float | None = None,
        growth: float = 0.0,
        peak: float = BUSIEST,
        prompt_tokens: float | None = None,
        output_tokens: float | None = None,
        seed: int = 0,
    ) -> RequestTrace:
        """The busiest hour of a service, drawn from its users and a published shape of use.

        `shape`: `chat`, `long-chat`, `code`, `rag`, `agents`. `requests_per_day`, or `request_rate` (per
        second in the busiest hour), replaces `users`. `growth`: 0.3 adds 30 %. `peak`: requests of the
        busiest hour over the day's mean. `prompt_tokens`, `output_tokens`: means over requests, as a bill
        has them; None: the shape's. Raises BadInput.

        >>> import tokenfleet as tf
        >>> tf.Trace.from_users(2_000).name
        'chat, 2,000 users'
        """
        try:
            usage = Usage(
                users, requests_per_day, shape, growth, peak, prompt_tokens, output_tokens, request_rate
            )
            return cls(trace_of_usage(usage, seed))
        except BadInput as refusal:
            raise BadInput(in_field_names(str(refusal))) from None

    @classmethod
    def from_prometheus(
        cls, url: str, selector: str = "{}", since: str = SINCE, seed: int = 0
    ) -> RequestTrace:
        """Requests drawn from the rates and lengths that vLLM's metrics at a Prometheus server count.

        `selector`: the servers, as `{job="vllm"}`. `since`: the last `24h`, `7d`. Raises BadInput.
        """
        return cls(MetricsRange(url, selector, since).trace(time.time(), seed))

    @property
    def assumed(self) -> pl.DataFrame:
        """What a trace of `from_users` or `from_prometheus` rests on; no rows for a recording."""
        rows = self.recorded.assumed.rows if self.recorded.assumed else ()
        return pl.DataFrame(rows, dict.fromkeys(("assumed", "value", "source"), pl.String), orient="row")

    @property
    def name(self) -> str:
        """Its file, or what it was drawn from."""
        return self.recorded.name

    @property
    def requests(self) -> int:
        """How many there are."""
        return len(self.recorded)

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.recorded.workload.duration_s

    @property
    def rate_rps(self) -> float:
        """Mean requests per second."""
        return self.recorded.workload.rate_rps

    def check(self) -> TraceCheck:
        """Look for faults that would mislead a plan, such as wrong units or doubled rows."""
        return TraceCheck(check(self.recorded))

    def to_polars(self) -> pl.DataFrame:
        """One row per request: `arrival_s`, `prompt_tokens` and `output_tokens`."""
        load = self.recorded.workload
        columns = ("arrival_s", "prompt_tokens", "output_tokens")
        return pl.DataFrame({column: getattr(load, column) for column in columns})

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the trace as CSV, JSON lines or Parquet, by the path's suffix. Raises BadInput."""
        write_trace(self.recorded, Path(path), overwrite=overwrite)

    def __len__(self) -> int:
        return self.requests

    def __repr__(self) -> str:
        span = duration_text(self.duration_s)
        return f"<Trace {self.name}: {self.requests:,} requests in {span}, {self.rate_rps:.3g} req/s>"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self)[1:-1])}</p>"


@dataclass(frozen=True, repr=False)
class TraceCheck:
    """The findings about a trace; `ok` is false where one of them warns."""

    checkup: Checkup

    @property
    def ok(self) -> bool:
        """Whether no finding warns."""
        return self.checkup.warnings == 0

    @property
    def findings(self) -> pl.DataFrame:
        """One row per check: `check`, `warns` and `finding` in words."""
        rows = [(one.name, one.warns, one.words) for one in self.checkup.findings]
        return pl.DataFrame(rows, schema=["check", "warns", "finding"], orient="row")

    def __repr__(self) -> str:
        warns = (f"  {one.name}: {one.words}" for one in self.checkup.findings if one.warns)
        return "\n".join([verdict(self.checkup), *warns])

    def _repr_html_(self) -> str:
        return f"<p>{escape(verdict(self.checkup))}</p>{self.findings._repr_html_()}"


@dataclass(frozen=True, repr=False)
class StepProfile:
    """Step times, KV memory and engine limits of one worker type.

    >>> import tokenfleet as tf
    >>> profile = tf.Profile.find("llama-3.1-8b", "h100", 1)
    >>> profile.gpu, profile.tp, profile.kind
    ('h100-sxm', 1, 'composed')
    """

    fitted: Profile
    path: Path | None = field(default=None, compare=False)

    @classmethod
    def read(cls, path: str | Path) -> StepProfile:
        """The profile in a YAML file. Raises BadInput naming the field."""
        return cls(read_profile(path), Path(path))

    @classmethod
    def find(cls, model: str, gpu: str, tp: int) -> StepProfile:
        """The shipped profile of a model on `tp` GPUs of a type. Raises ProfileMissing."""
        return cls(find_profiles(model, [gpu], [tp])[0])

    @property
    def model(self) -> str:
        """The model in the library."""
        return self.fitted.model

    @property
    def gpu(self) -> str:
        """Such as `h100-sxm`."""
        return self.fitted.gpu

    @property
    def tp(self) -> int:
        """GPUs of one worker (tensor parallelism)."""
        return self.fitted.tp_degree

    @property
    def kind(self) -> str:
        """`measured`, `composed` (predicted from operation tables) or `published` (by others)."""
        return str(self.fitted.source.kind)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache of one worker holds."""
        return self.fitted.kv.capacity_tokens

    def save(self, path: str | Path) -> StepProfile:
        """Write the profile to a file, and return it as read from there: `plan(profiles=[…])` takes it."""
        write_profile(self.fitted, path)
        return replace(self, path=Path(path))

    def __repr__(self) -> str:
        return f"<Profile {self.model} on {self.gpu} TP{self.tp}: {self.kind}, KV {self.kv_tokens:,} tokens>"


@dataclass(frozen=True, repr=False)
class NamedFleet:
    """Workers that serve one stream of requests together, with their GPUs and price.

    >>> import tokenfleet as tf
    >>> fleet = tf.Fleet.parse("2x h100 TP1 + 1x h200 TP1", model="llama-3.1-8b")
    >>> fleet.workers, fleet.gpus
    (3, 3)
    """

    groups: Fleet

    @classmethod
    def parse(cls, text: str, model: str | None = None, **options: Any) -> NamedFleet:
        """The fleet in a text such as `3x h100 TP1 + 1x h200 TP2`; workers without `TP` have one GPU.

        `options` are those of a plan, such as `precision="fp8"`. Raises BadInput, ProfileMissing.
        """
        from tokenfleet.api.options import request_of

        request = request_of("ttft=1s,tpot=1s", model=model, **options)  # targets do not matter here
        return fleet_of(text, request)

    @property
    def workers(self) -> int:
        """Workers of all types."""
        return self.groups.workers

    @property
    def gpus(self) -> int:
        """GPUs of all workers."""
        return self.groups.gpus

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars an hour; None where a price is not known."""
        return self.groups.usd_per_hour

    def __str__(self) -> str:
        return self.groups.label

    def __repr__(self) -> str:
        price = "no price known" if self.usd_per_hour is None else f"${self.usd_per_hour:,.2f}/h"
        return f"<Fleet {self}: {self.gpus} GPUs, {price}>"


def fleet_of(text: str, request: PlanRequest) -> NamedFleet:
    """The fleet in a text, with the engine options of a request. Raises BadInput, ProfileMissing."""
    groups = []
    for part in text.split("+"):
        count, _, worker = part.strip().lower().partition("x ")
        *gpu, last = worker.split() or [""]
        degree = last.removeprefix("tp") if gpu and last.startswith("tp") else "1"
        name = " ".join(gpu) if degree != "1" or last == "tp1" else worker.strip()
        if not (count.isdigit() and int(count) > 0 and degree.isdigit() and name):
            raise BadInput(f"fleet: expected a text such as 3x h100 TP1, got {part.strip()!r}")
        wanted = replace(request, profiles=(), gpu=(name,), tp=(int(degree),))
        (worker_type, *_), _ = priced(chosen_profiles(wanted), wanted)
        if worker_type.is_split:
            raise BadInput("engine: a split fleet needs prefill workers; `tokenfleet simulate` takes them")
        groups.append(WorkerGroup(worker_type, int(count)))
    return NamedFleet(Fleet(tuple(groups)))


def trace_of(source: Any) -> Trace:
    """The trace that an argument stands for: a `Trace`, a path, or several. Raises BadInput."""
    if isinstance(source, RequestTrace):
        return source.recorded
    if isinstance(source, Trace):
        return source
    if isinstance(source, str | Path):
        return read_traces([source])
    try:
        paths = list(source)
    except TypeError:
        raise BadInput(f"trace: expected a Trace or paths of files, got {type(source).__name__}") from None
    return read_traces(paths)
