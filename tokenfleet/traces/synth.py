"""Synthetic traces from a short description: `poisson:5`, `azure-conv`.

    arrivals   poisson:RATE · gamma:RATE:CV · diurnal:LOW:HIGH:PERIOD_S[:CV]        (rates per second)
    lengths    a name (S, M, L, azure-conv, sharegpt), or one for prompts and one for outputs: S-L
               fixed:PROMPT:OUTPUT · or a side each of fixed:N, uniform:LOW:HIGH, lognormal:MEAN:CV

    turns, think times (seconds)   a side as above: fixed:N, uniform:LOW:HIGH, lognormal:MEAN:CV

With turns, arrivals are those of sessions, and the two lengths those of a turn's message and answer. A turn's
prompt is all that came before in its session and the message. Recorded times take 20 ms for each token of an
answer.

Prompts, outputs and gaps are drawn in this order from one legacy RandomState. Its stream never changes
between numpy versions. With the published seed `S-S`, `M-M`, `L-L` are Llumnix's workloads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.prefixes import Sessions
from controlplane.workload import Workload
from tokenfleet.traces import distributions as arrivals
from tokenfleet.traces.distributions import NAMED, PUBLISHED_SEED, LengthMix, Lognormal, Side, Uniform
from tokenfleet.traces.identity import SystemPrompts, follow_lengths

MOST_REQUESTS = 50_000_000
MOST_FIGURE = 100_000  # turns of a session, seconds to think
SYNTH_TOKEN_S = 0.02
SESSION_THINK = "lognormal:30:1.5"

Arrive = Callable[[int, arrivals.Randomness], NDArray[np.float64]]
ARRIVALS = {
    "poisson": ("RATE",),
    "gamma": ("RATE", "CV"),
    "diurnal": ("LOW", "HIGH", "PERIOD_S"),
}
SIDES = {"fixed": ("TOKENS",), "uniform": ("LOW", "HIGH"), "lognormal": ("MEAN", "CV")}


def synthesise(arrival_law: str, lengths: str, requests: int, seed: int = PUBLISHED_SEED) -> Workload:
    """A workload drawn from laws written as in the module's heading.

    Raises BadInput for a law that does not exist or has impossible figures.
    """
    if not 1 <= requests <= MOST_REQUESTS:
        raise BadInput(f"--requests: {requests}, expected 1 to {MOST_REQUESTS}")
    if not 0 <= seed < 2**32:
        raise BadInput(f"--seed: {seed}, expected 0 to {2**32 - 1}")
    arrive, mix = arrival_law_of(arrival_law), length_mix_of(lengths)
    rng = np.random.RandomState(seed)  # legacy: the published workloads' stream
    prompt_tokens, output_tokens = mix.draw(requests, rng)
    return Workload(arrive(requests, rng), prompt_tokens, output_tokens)


@dataclass(frozen=True, slots=True)
class SessionLaws:
    """Laws of sessions: their turns, and the seconds to think before each but the first. All share a system
    prompt of `system_tokens`. A session has no further turn beyond a context of `context_tokens`.
    """

    turns: str
    think: str = SESSION_THINK
    system_tokens: int = 0
    context_tokens: int = 131_072


def synthesise_sessions(
    arrival_law: str,
    lengths: str,
    requests: int,
    laws: SessionLaws,
    seed: int = PUBLISHED_SEED,
    rate_rps: float | None = None,
    within_s: tuple[float, float] = (0.0, math.inf),
) -> tuple[Workload, SystemPrompts | None]:
    """At most `requests` requests of sessions, and their system prompt. Raises BadInput as `synthesise`.

    `rate_rps`: the arrivals of sessions are stretched until their requests have this rate. Only requests
    `within_s` are kept; a session that began before goes on with its next one.
    """
    load = synthesise(arrival_law, lengths, requests, seed)
    rng = np.random.RandomState((seed + 1) % 2**32)
    turns = _side("--turns", laws.turns, 1.0).draw(requests, rng)
    think_s = _side("--think", laws.think, 1000.0).draw(requests, rng) / 1000.0
    sessions = int(np.searchsorted(np.cumsum(turns), requests)) + 1
    session = np.repeat(np.arange(sessions), turns[:sessions])[:requests]
    first = np.searchsorted(session, session)
    message, answer = load.prompt_tokens, load.output_tokens
    end = np.cumsum(message + answer)
    context = laws.system_tokens + end - (end - message - answer)[first]
    kept = context <= laws.context_tokens
    if not kept.any():
        raise BadInput(f"--context-tokens: {laws.context_tokens}, expected room for a turn of --lengths")
    follows = first < np.arange(requests)
    passed_s = np.cumsum(np.where(follows, think_s + SYNTH_TOKEN_S * np.append(0, answer[:-1]), 0.0))
    stretch = 1.0 if rate_rps is None else int(kept.sum()) / (int(session[-1]) + 1) / rate_rps
    arrival_s = stretch * load.arrival_s[session] + passed_s - passed_s[first]
    order = np.lexsort((np.arange(requests), arrival_s))
    order = order[(kept & (arrival_s >= within_s[0]) & (arrival_s < within_s[1]))[order]]
    place = np.full(requests, -1)
    place[order] = np.arange(len(order))
    before = np.where(follows, place[np.arange(requests) - 1], -1)[order]
    prompt, output = (context - answer)[order], answer[order]
    systems = None
    if laws.system_tokens:
        systems = SystemPrompts(("shared",), np.array([laws.system_tokens]), np.zeros(len(order), np.int64))
    waits = before >= 0
    return Workload(
        arrival_s[order],
        prompt,
        output,
        prefixes=follow_lengths(prompt, output, before, systems),
        sessions=Sessions(
            np.unique(session[order], return_inverse=True)[1],
            np.concatenate([[0], np.cumsum(waits)]),
            before[waits],
            np.where(waits, think_s[order], 0.0),
        ),
    ), systems


def _side(flag: str, text: str, unit: float) -> Side:
    """A law of whole numbers; the figures in `text` are in units of `unit`."""
    kind, *words = text.split(":")
    if kind not in SIDES:
        raise BadInput(f"{flag}: {text!r}, expected one of {_forms(SIDES)}")
    first, *rest = _figures(flag, text, words, SIDES[kind])
    try:
        if kind == "lognormal":
            return Lognormal(first * unit, rest[0], round(MOST_FIGURE * unit))
        return Uniform(round(first * unit), round((rest[0] if rest else first) * unit))
    except BadInput:
        bounds = f"at least {1 / unit:g}, at most {MOST_FIGURE}, LOW before HIGH, CV above 0 and at most 100"
        raise BadInput(f"{flag}: {text!r}, expected {bounds}") from None


def arrival_law_of(text: str) -> Arrive:
    """The arrival law of `--arrivals`: a function of a number of requests and a source of randomness."""
    kind, *words = text.split(":")
    if kind not in ARRIVALS:
        raise BadInput(f"--arrivals: {text!r}, expected one of {_forms(ARRIVALS)}")
    optional = ("CV",) if kind == "diurnal" and len(words) > len(ARRIVALS[kind]) else ()
    values = _figures("--arrivals", text, words, (*ARRIVALS[kind], *optional))
    if kind != "diurnal":
        law: Any = {"poisson": arrivals.poisson, "gamma": arrivals.gamma}[kind]
        return lambda requests, rng: law(*values, requests, rng)
    low, high, period_s, *cv = values
    return lambda requests, rng: arrivals.diurnal(low, high, period_s, requests, rng, *cv)


def length_mix_of(text: str) -> LengthMix:
    """The length mix of `--lengths`: one name for both sides, or PROMPT-OUTPUT."""
    kind, *words = text.split(":")
    if kind == "fixed" and len(words) == 2 and "-" not in text:
        figures = _figures("--lengths", text, words, ("PROMPT", "OUTPUT"))
        return LengthMix(*(_uniform(text, [tokens]) for tokens in figures))
    for cut in (n for n, letter in enumerate(text) if letter == "-"):
        prompts, outputs = _mix(text[:cut]), _mix(text[cut + 1 :])
        if prompts is not None and outputs is not None:
            return LengthMix(prompts.prompt, outputs.output)
    if (both := _mix(text)) is not None:
        return both
    raise BadInput(
        f"--lengths: {text!r}, expected one of {', '.join(NAMED)}, fixed:PROMPT:OUTPUT, {_forms(SIDES)},"
        " or two of them as PROMPT-OUTPUT"
    )


def _mix(text: str) -> LengthMix | None:
    """A single word of the language; None if it is not one."""
    if text in NAMED:
        return NAMED[text]
    kind, *words = text.split(":")
    if kind not in SIDES or len(words) != len(SIDES[kind]):
        return None
    figures = _figures("--lengths", text, words, SIDES[kind])
    side: Side = Lognormal(figures[0], figures[1]) if kind == "lognormal" else _uniform(text, figures)
    return LengthMix(side, side)


def _uniform(text: str, tokens: list[float]) -> Uniform:
    """From the first length to the last."""
    return Uniform(_whole(text, tokens[0]), _whole(text, tokens[-1]))


def _whole(text: str, tokens: float) -> int:
    if not tokens.is_integer():
        raise BadInput(f"--lengths: {text!r}: {tokens:g}, expected a whole number of tokens")
    return int(tokens)


def _figures(flag: str, text: str, words: list[str], names: tuple[str, ...]) -> list[float]:
    if len(words) != len(names):
        raise BadInput(f"{flag}: {text!r}, expected {':'.join((text.split(':')[0], *names))}")
    values = []
    for word, name in zip(words, names, strict=True):
        try:
            value = float(word)
        except ValueError:
            value = float("nan")
        if not np.isfinite(value):
            raise BadInput(f"{flag}: {text!r}: {name}: {word!r}, expected a number")
        values.append(value)
    return values


def _forms(laws: dict[str, tuple[str, ...]]) -> str:
    return ", ".join(":".join((kind, *names)) for kind, names in laws.items())
