"""A trace without a recording: the busiest hour of a service, drawn from its users and a published shape.

What is asked: users or requests a day and the busiest hour over the mean, or that hour's rate; the shape of
use, and growth. A bill has mean tokens, too. What is drawn: requests at the rate of the busiest hour, with
lengths of the shape, scaled to means that are given.

Arrivals are Poisson at a rate that swings from minute to minute: its logarithm is an AR(1) with the standard
deviation `SWING` and the correlation `KEPT` of Azure's conversation hour. Sessions arrive as a Poisson
process, and the first hour, in which they gather, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.figures import duration_text
from controlplane.workload import Workload
from tokenfleet.field_errors import nearest
from tokenfleet.traces.synth import SessionLaws, length_mix_of, synthesise_sessions
from tokenfleet.traces.trace import Assumed, Trace

DAY_S, HOUR_S = 86_400.0, 3_600.0
DRAWN = "usage"  # the format of these traces
BUSIEST = 1.8  # hour over the day's mean: ServeGen's 29 days have 1.2 to 2.2, nine in ten at most 1.8
SWING, KEPT, MINUTE_S = 0.21, 0.82, 60.0
FEWEST = 2_000  # requests of a drawn trace
SHORTEST_S = 600.0
AMOUNTS = ("users", "requests_per_day", "request_rate")  # one of them is given
MOST = {
    "users": 1e10,
    "requests-per-day": 1e10,
    "request-rate": 1e5,
    "prompt-tokens": 1e7,
    "output-tokens": 1e7,
}
OF_RATE, OF_LENGTHS = 0.2, 0.1  # standard deviations of logarithms


@dataclass(frozen=True, slots=True)
class PublishedShape:
    """A published shape of use; `source` names where from.

    `lengths`: of requests, or of a session's turns, as `--lengths` of `trace synth` has them.
    `a_day`: requests of one user, which no source has and is assumed. `enough`: requests of a drawn trace;
    those with long histories need more memory. Nothing is drawn at a rate above `most_rps`.
    """

    about: str
    source: str
    a_day: float
    lengths: str
    sessions: SessionLaws | None = None
    enough: int = 36_000
    most_rps: float = 10_000.0


SHAPES = {
    "chat": PublishedShape(
        "questions with little history", "Azure's conversation hour, 2023 (CC-BY-4.0)", 10.0, "azure-conv"
    ),
    "long-chat": PublishedShape(
        "chats with all earlier turns in the prompt", "ShareGPT, by etalon (Apache-2.0)", 10.0, "sharegpt"
    ),
    "code": PublishedShape(
        "code completions",
        "means and medians of Azure's code hour, 2023 (CC-BY-4.0)",
        100.0,
        "lognormal:2048:0.93-lognormal:28:1.9",
    ),
    "rag": PublishedShape(
        "questions about long documents",
        "lengths and cache hits of Mooncake's synthetic trace (Apache-2.0)",
        10.0,
        "lognormal:5000:1.5-lognormal:150:1.3",
        SessionLaws("lognormal:3:0.8", "lognormal:30:1.5"),
        most_rps=120.0,
    ),
    "agents": PublishedShape(
        "coding agents that call tools",
        "turns, lengths and think times of Weka's sessions (Apache-2.0)",
        200.0,
        "lognormal:1800:2-lognormal:430:2",
        SessionLaws("lognormal:54:1", "lognormal:15:1.5", system_tokens=20_000),
        enough=9_000,
        most_rps=40.0,
    ),
}


@dataclass(frozen=True, slots=True)
class Usage:
    """The answers to the questionnaire. Raises BadInput, one line, for one that cannot be.

    `growth`: the traffic to add, as a share (0.3: 30 % more). `peak`: the busiest hour over the day's mean.
    `request_rate`: requests per second of the busiest hour, in place of a day's and `peak`.
    `prompt_tokens`, `output_tokens`: means over requests; None: the shape's.
    """

    users: int | None = None
    requests_per_day: float | None = None
    shape: str = "chat"
    growth: float = 0.0
    peak: float = BUSIEST
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    request_rate: float | None = None

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            known = ", ".join(SHAPES)
            raise BadInput(f"--shape: {self.shape}: expected {known}{nearest(self.shape, SHAPES)}")
        given = ["--" + name.replace("_", "-") for name in AMOUNTS if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise BadInput(f"--users: expected --users, --requests-per-day or --request-rate, got {got}")
        for flag, most in MOST.items():
            value = getattr(self, flag.replace("-", "_"))
            if value is not None and not 0 < value <= most:
                raise BadInput(f"--{flag}: {value:g}, expected more than 0, at most {most:g}")
        if not 0 <= self.growth <= 100:
            raise BadInput(f"--growth: {self.growth:g}, expected 0 to 100 (0.3: 30 % more traffic)")
        if self.request_rate is not None and self.peak != BUSIEST:
            raise BadInput("--peak: contradicts --request-rate, which is the busiest hour's; leave out one")
        if not 1 <= self.peak <= 100:
            raise BadInput(f"--peak: {self.peak:g}, expected 1 to 100, the busiest hour over the day's mean")
        if self.rate_rps > (most := SHAPES[self.shape].most_rps):
            rate = f"{self.rate_rps:.3g} requests per second in the busiest hour"
            raise BadInput(f"{given[0]}: {rate}, at most {most:g} of {self.shape} are drawn; plan for a part")

    @property
    def a_day(self) -> float:
        """Requests of a day of today, where users or a day's requests are given."""
        if self.requests_per_day is not None:
            return self.requests_per_day
        return (self.users or 0) * SHAPES[self.shape].a_day

    @property
    def rate_rps(self) -> float:
        """Requests per second of the busiest hour, growth included."""
        today = self.a_day / DAY_S * self.peak if self.request_rate is None else self.request_rate
        return today * (1.0 + self.growth)

    @property
    def name(self) -> str:
        """`chat, 2,000 users`."""
        if self.users is not None:
            return f"{self.shape}, {self.users:,} users"
        if self.request_rate is not None:
            return f"{self.shape}, {self.request_rate:g} req/s"
        return f"{self.shape}, {self.a_day:,.6g} requests a day"


def trace_of_usage(usage: Usage, seed: int = 0) -> Trace:
    """The busiest hour of a service as a trace; the same seed draws the same. Raises BadInput."""
    rate_rps, shape = usage.rate_rps, SHAPES[usage.shape]
    duration_s = max(min(HOUR_S, shape.enough / rate_rps), SHORTEST_S, FEWEST / rate_rps)
    if shape.sessions is None:
        rng = np.random.RandomState(seed)
        arrival_s = arrivals(rate_rps, duration_s, rng)
        workload = Workload(arrival_s, *length_mix_of(shape.lengths).draw(len(arrival_s), rng))
    else:
        workload = _in_sessions(shape.lengths, shape.sessions, rate_rps, duration_s, seed)
    prompts, outputs = float(workload.prompt_tokens.mean()), float(workload.output_tokens.mean())
    means = usage.prompt_tokens or prompts, usage.output_tokens or outputs
    workload = workload.longer(means[0] / prompts, means[1] / outputs)
    assumed = Assumed((OF_RATE, OF_LENGTHS, OF_LENGTHS), tuple(_rows(usage, workload)))
    return Trace(usage.name, DRAWN, workload, assumed=assumed)


def arrivals(rate_rps: float, duration_s: float, rng: np.random.RandomState) -> NDArray[np.float64]:
    """Arrival times, seconds from 0, of traffic whose rate swings from minute to minute about `rate_rps`."""
    minutes = math.ceil(duration_s / MINUTE_S)
    level = rng.standard_normal(minutes)
    for i in range(1, minutes):
        level[i] = KEPT * level[i - 1] + math.sqrt(1.0 - KEPT**2) * level[i]
    share = np.exp(SWING * level)
    counts = rng.poisson(share / share.sum() * rate_rps * duration_s)
    counts[0] = max(counts[0], 1)
    each_s = duration_s / minutes
    begins_s = np.repeat(np.arange(minutes) * each_s, counts)
    return np.sort(begins_s + rng.uniform(0.0, each_s, len(begins_s)))


def _in_sessions(lengths: str, laws: SessionLaws, rate_rps: float, duration_s: float, seed: int) -> Workload:
    """Requests of sessions that begin at one rate; those of the first hour, or more, are left out."""
    requests = math.ceil(rate_rps * (duration_s + 2 * HOUR_S) * 1.2)
    within_s = HOUR_S, HOUR_S + duration_s
    part, _ = synthesise_sessions("poisson:1", lengths, requests, laws, seed, rate_rps, within_s)
    if len(part) == 0:
        raise BadInput(f"--shape: {rate_rps:g} requests per second are too few to draw a trace from")
    return replace(part, arrival_s=part.arrival_s - part.arrival_s[0])


def _rows(usage: Usage, load: Workload) -> Iterator[tuple[str, str, str]]:
    """What a person should check: (name, value, where from)."""
    shape = SHAPES[usage.shape]
    if usage.request_rate is not None:
        yield "Busiest hour", f"{usage.request_rate:g} req/s", "given"
    elif usage.users is not None:
        value = f"{shape.a_day:g} a user, {usage.a_day:,.6g} in all"
        yield "Requests a day", value, "assumed; --requests-per-day replaces it"
    else:
        yield "Requests a day", f"{usage.a_day:,.6g}", "given"
    if usage.request_rate is None:
        source = "ServeGen's days have 1.2 to 2.2" if usage.peak == BUSIEST else "given"
        yield "Busiest hour", f"{usage.peak:g}x the day's mean", source
    if usage.growth:
        yield "Growth", f"{100 * usage.growth:.3g} % more traffic", "given"
    yield "Rate planned for", f"{load.rate_rps:.3g} req/s for {duration_text(load.duration_s)}", "drawn"
    value = f"{load.prompt_tokens.mean():,.0f} prompt, {load.output_tokens.mean():,.0f} output on average"
    means = {"prompt": usage.prompt_tokens, "output": usage.output_tokens}
    given = " and ".join(name for name, mean in means.items() if mean)
    yield "Tokens", value, f"mean {given} given; {shape.source}" if given else shape.source
    if shape.sessions is not None and load.sessions is not None:
        sessions = len(np.unique(load.sessions.session))
        yield "Sessions", f"{sessions:,}, {len(load) / sessions:.3g} requests each in that time", "as above"
    value = f"rate {100 * OF_RATE:.0f} %, lengths {100 * OF_LENGTHS:.0f} %"
    yield "Uncertainty", value, "assumed; a trace of your own narrows it"
