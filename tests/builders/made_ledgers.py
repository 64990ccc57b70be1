"""Ledgers made up for the placement tests, together with the same facts in plain Python.

A `Held` is one request as a person would write it down; `ledger_of` puts a fleet of them into the records
that compiled code reads, by the ledger's own moves. Naive formulas read the `Held`s, never the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from made_profiles import made_profile

from controlplane.perfmodel.coefficients import coefficient_row
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.placement.batch import begin_decoding, enqueue
from controlplane.placement.ledger import (
    ANY_PHASE,
    DECODE_ONLY,
    DRAINING,
    OFF,
    PREFILL_ONLY,
    SERVING,
    new_ledger,
)
from controlplane.placement.lengths import LengthTable
from controlplane.types import EngineMode

TABLE = LengthTable.constant(40.0)
NOW_S = 100.0


@dataclass
class Held:
    """A request at a worker: waiting to be prefilled, or decoding with `tokens` output tokens."""

    prompt: int
    predicted: int
    tokens: int = 0
    decoding: bool = False
    first_s: float = float("nan")
    tpot_s: float = 0.05
    priority: int = 0
    steps_since: int = 0  # of `tokens`, those made after the ledger last thought about its end


@dataclass
class At:
    """A worker: its profile, what it holds, and the step in progress."""

    profile: Profile
    held: list[Held] = field(default_factory=list)
    boundary_s: float = NOW_S
    gains: int = 1
    status: int = SERVING
    role: int = ANY_PHASE
    begun_tokens: int = 0  # of the waiting prefill, how much the step in progress carries

    @property
    def decoding(self) -> list[Held]:
        return [h for h in self.held if h.decoding]

    @property
    def waiting(self) -> list[Held]:
        return [h for h in self.held if not h.decoding]


def ledger_of(fleet: list[At], asked: Held, arrival_s: float, ttft_s: float):
    """The fleet as a Ledger; the request asked for is the last row, and its number is returned too."""
    profiles = [at.profile for at in fleet]
    count = sum(len(at.held) for at in fleet) + 1
    led = new_ledger(
        np.stack([coefficient_row(p) for p in profiles]),
        np.arange(len(fleet)),
        count,
        max(len(at.held) for at in fleet) + 1,
        TABLE,
    )
    led.workers["status"] = [at.status for at in fleet]
    led.workers["role"] = [at.role for at in fleet]
    r = 0
    for w, at in enumerate(fleet):
        # In the order of age: those with most steps behind them began to decode first.
        began = sorted(at.decoding, key=lambda h: -h.steps_since)
        for position, h in enumerate(began):
            fill(led, r, h)
            # Let it begin `steps_since` steps ago, then move the worker on to the next one's beginning.
            led.requests["key"][r] = h.tokens - h.steps_since
            enqueue(led, w, r, False)
            _unlink(led, w)
            begin_decoding(led, w, r, h.tokens - h.steps_since)
            led.running[w, position] = r
            led.workers["running_n"][w] += 1
            later = began[position + 1].steps_since if position + 1 < len(began) else 0
            led.workers["step"][w] += h.steps_since - later
            led.workers["context"][w] += (h.steps_since - later) * (position + 1)
            r += 1
        led.workers["queued_tokens"][w] = 0
        for h in at.waiting:
            fill(led, r, h)
            led.requests["key"][r] = h.tokens
            enqueue(led, w, r, False)
            r += 1
        led.workers["queued_tokens"][w] -= at.begun_tokens
        led.workers["boundary_s"][w] = at.boundary_s
        led.workers["gains"][w] = at.gains
    fill(led, r, asked)
    led.requests["key"][r] = asked.tokens
    led.requests["arrival_s"][r] = arrival_s
    led.requests["ttft_s"][r] = ttft_s
    return led, r


def fill(led, r: int, h: Held) -> None:
    row = led.requests[r]
    row["prompt"], row["predicted"] = h.prompt, h.predicted
    row["tpot_s"], row["first_s"], row["priority"] = h.tpot_s, h.first_s, h.priority


def _unlink(led, w: int) -> None:
    led.queue_head[:, w] = led.queue_tail[:, w] = -1


def rest_of(h: Held) -> int:
    """Output tokens a request should still make, by its prediction or, once past that, the table's."""
    at_start = h.tokens - h.steps_since
    if not h.decoding:
        return max(h.predicted - h.tokens, 1)
    ends_in = _expected_rest(h.predicted, h, at_start) - h.steps_since
    return ends_in if ends_in > 0 else _expected_rest(_renewed(h, at_start), h, h.tokens)


def _renewed(h: Held, tokens: int) -> int:
    return h.predicted if h.predicted > tokens else int(TABLE.predict(h.prompt, tokens))


def _expected_rest(predicted: int, h: Held, tokens: int) -> int:
    total = predicted if predicted > tokens else float(TABLE.predict(h.prompt, tokens))
    return int(max(total - tokens, 1))


# --- hypothesis --------------------------------------------------------------------------------------------


EXPERTS = (Hinge("experts", 5.0, 2e-3),)


@st.composite
def profiles(draw, mode: EngineMode | None = None) -> Profile:
    seconds = st.floats(0, 1)
    mode = mode or draw(st.sampled_from([EngineMode.PREFILL_FIRST, EngineMode.CHUNKED]))
    seqs = draw(st.integers(1, 20))
    return made_profile(
        StepModel(
            0.001 + 0.02 * draw(seconds),
            2e-4 * draw(seconds),
            1e-3 * draw(seconds),
            draw(st.sampled_from([0.0, 1e-6, 2e-5])),
            draw(st.sampled_from([0.0, 1e-8])),
            (Hinge("sequences", 4, 1e-3 * draw(seconds)), *draw(st.sampled_from([(), EXPERTS]))),
            draw(st.sampled_from([0.0, 5e-3])),
        ),
        KvModel(16 * draw(st.integers(5, 200)), draw(st.sampled_from([1, 16]))),
        EngineLimits(mode=mode, max_batched_tokens=draw(st.integers(seqs, 400)), max_seqs=seqs),
        PrefillModel(0.02 * draw(seconds), 2e-4 * draw(seconds), draw(st.sampled_from([0.0, 1e-8]))),
    )


@st.composite
def requests(draw, decoding: bool | None = None) -> Held:
    decodes = draw(st.booleans()) if decoding is None else decoding
    tokens = draw(st.integers(1, 80)) if decodes else draw(st.sampled_from([0, 0, 5]))
    return Held(
        prompt=draw(st.integers(1, 300)),
        predicted=draw(st.integers(1, 120)),
        tokens=tokens,
        decoding=decodes,
        first_s=NOW_S - draw(st.floats(0, 5)) if decodes else float("nan"),
        tpot_s=draw(st.sampled_from([0.02, 0.05])),
        priority=draw(st.integers(0, 1)),
        steps_since=draw(st.integers(0, tokens - 1)) if decodes else 0,
    )


@st.composite
def workers(draw, roles=(ANY_PHASE,), statuses=(SERVING,), mode: EngineMode | None = None) -> At:
    held = draw(st.lists(requests(), max_size=6))
    waiting = sum(h.prompt + h.tokens for h in held if not h.decoding)
    return At(
        draw(profiles(mode)),
        held,
        NOW_S + draw(st.sampled_from([-1.0, 0.0, 0.015])),
        draw(st.integers(0, 1)),
        draw(st.sampled_from(statuses)),
        draw(st.sampled_from(roles)),
        draw(st.integers(0, waiting // 2)),
    )


ROLES = (ANY_PHASE, PREFILL_ONLY, DECODE_ONLY)
STATUSES = (SERVING, SERVING, SERVING, DRAINING, OFF)
