"""States of a fleet as the control API sends them: made up, or of any ledger."""

import msgspec
import numpy as np
from made_types import profile_of

from controlplane.perfmodel.coefficients import coefficient_row
from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.placement.batch import begin_decoding, dequeue, enqueue
from controlplane.placement.ledger import DONE, SERVING, new_ledger
from controlplane.placement.lengths import LengthTable
from controlplane.snapshot import Pace
from controlplane.types import ClassArrivals, EngineMode, Slo
from dataplane.live.control.fleet_state import FleetState, RequestRow, WorkerRow, copied

STEP = StepModel(0.01, 1e-4, 1e-3, 1e-6, hinges=(Hinge("sequences", 8.0, 1e-4),))
PROFILE = profile_of(STEP, 16_000, 32, prefill=PrefillModel(0.01, 1e-4), mode=EngineMode.PREFILL_FIRST)


def worker(name, steps=100, state="serving", kind="a"):
    return name, steps, state, kind


def request(name, at="a", output=10, expected=100, prompt=50, cached=None):
    """It decodes, or where it has no output yet waits at its worker, or `at` None in line."""
    return name, at, output, expected, prompt, cached or {}


def counted(requests, ttft_s=1.0):
    return ClassArrivals(Slo(ttft_s, 0.1), requests, 50 * requests, 100 * requests)


def state_of(led, workers, requests, **told):
    """The state with this ledger and rows of `workers` and `requests`; `told` replaces other fields."""
    records, loads = copied(led)
    rest = {
        "moving": [],
        "wanted_kinds": {"a": 2},
        "auto": True,
        "cold_start_s": 30.0,
        "drain_s": 4.0,
        "arrivals": [],
        "outcomes": [],
        "held": [],
        "pace": Pace(),
        "paces": [],
        "profiles": {},
        "steps": {},
    }
    sent = FleetState(records, loads, list(workers), list(requests), **{**rest, **told})
    return msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=FleetState)


def state(*workers, requests=(), **told):
    """The state of a fleet of these workers and requests, a row each. Names give requests their numbers."""
    rows, n = {name: w for w, (name, *_) in enumerate(workers)}, max(len(requests), 1)
    coefficients = np.array([coefficient_row(PROFILE)] * max(len(workers), 1))
    led = new_ledger(coefficients, np.arange(len(coefficients)), n, n, LengthTable.constant(50))
    led.requests["phase"] = DONE
    for w, (_, steps, _, _) in enumerate(workers):
        led.workers[w]["step"], led.workers[w]["status"] = steps, SERVING
    for r, (_, at, output, expected, prompt, _) in enumerate(requests):
        led.requests[r]["phase"], led.requests[r]["prompt"], led.requests[r]["key"] = 0, prompt, output
        led.requests[r]["predicted"], led.requests[r]["tpot_s"] = expected, 0.1
        if at is None:
            continue
        w = rows[at]
        enqueue(led, w, r, False)
        if output:
            dequeue(led, w, r)
            led.running[w, led.workers[w]["running_n"]] = r
            led.workers[w]["running_n"] += 1
            begin_decoding(led, w, r, output)
    return state_of(
        led,
        [
            WorkerRow(name, kind, its, -1 if its == "starting" else rows[name], 1000)
            for name, _, its, kind in workers
        ],
        [RequestRow(name, r, False, cached) for r, (name, *_, cached) in enumerate(requests)],
        **told,
    )
