"""HTTP overhead: the time that the way to an engine and back adds to a first token, learned under load.

A lone request on an idle fleet finds a gateway that shares its processor with no engine, and takes less. So
the overhead is learned from replayed requests whose worker was idle when they arrived: they waited for no
step but their own, and the rest of their time to first token is the overhead. A request's own step is found
by its time and by the tokens that it prefilled; the clocks of client and engines have to agree to 20 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenfleet.profiles.measurements import numbers, read_table

CLOCKS_S = 0.02  # between a client's clock and an engine's steps
ORDER_S = 0.002  # a step that began so much earlier was before this one
NEEDED = ("at_s", "worker", "step_s", "prefill_tokens")

Columns = NDArray[np.float64]


@dataclass(frozen=True)
class FleetSteps:
    """Steps of a fleet in the order they ended; columns of shape [steps]."""

    end_s: Columns  # Unix time
    step_s: Columns
    prefill_tokens: Columns
    worker: NDArray[np.str_]


def read_steps(path: Path) -> FleetSteps:
    """The `steps.csv` of a fleet's `--data`, which may hold no steps yet. Raises BadInput naming the row."""
    _, rows = read_table(path, NEEDED)
    end_s, step_s, tokens = (numbers(path, rows, name) for name in ("at_s", "step_s", "prefill_tokens"))
    order = np.argsort(end_s, kind="stable")
    worker = np.array([row["worker"] for row in rows], str)
    return FleetSteps(end_s[order], step_s[order], tokens[order], worker[order])


def learned_overheads_s(
    sent_unix_s: Columns, prompt_tokens: NDArray[np.int64], ttft_s: Columns, steps: FleetSteps
) -> Columns:
    """TTFT without the step, of the requests that found their worker idle; shape [found], seconds.

    Only of requests whose step is told from all others by the tokens it prefilled.
    """
    overheads = []
    first = np.searchsorted(steps.end_s, sent_unix_s - CLOCKS_S, side="right")
    last = np.searchsorted(steps.end_s, sent_unix_s + ttft_s + CLOCKS_S, side="left")
    for i in range(len(sent_unix_s)):
        near = slice(first[i], last[i])
        end_s, lasted_s = steps.end_s[near], steps.step_s[near]
        own = np.flatnonzero(steps.prefill_tokens[near] == prompt_tokens[i])
        if len(own) != 1:
            continue
        begun_s = end_s[own[0]] - lasted_s[own[0]]
        beside = (steps.worker[near] == steps.worker[near][own[0]]) & (end_s > sent_unix_s[i])
        if not (beside & (end_s - lasted_s < begun_s - ORDER_S)).any():
            overheads.append(ttft_s[i] - lasted_s[own[0]])
    return np.maximum(np.array(overheads, np.float64), 0.0)
