"""The goodness of fit of a profile to the log that it was calibrated on, and where it does not fit.

Three numbers can be made to meet six means though the cause is another: KV memory of another size, prefixes
that came from elsewhere, requests placed otherwise than assumed. Then parts of the log are off, some up and
others down. The log is cut in thirds by time, by prompt, by how busy the engines were, and its slowest tenth
is taken by itself. Of each part, with m its mean latency in the log and p in the simulation,

    misfit = max(|log(m / p)| - 2·se, 0)        se of m - p over m, requests paired; no part of below 10

and a latency's misfit is the quadratic mean over the parts. Past `BOUNDS` a profile is refused: no factor on
step times makes it right. Below, the misfit joins the profile's uncertainty, which widens every plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from dataplane.simulated.simulate import Outcome
from tokenfleet.profiles.measurements import RequestLog

BOUNDS = {"TTFT": 0.35, "TPOT": 0.15, "whole time": 0.15}
DOUBT = {"TTFT": BOUNDS["whole time"] / BOUNDS["TTFT"], "TPOT": 1.0, "whole time": 1.0}
CAUSES = {
    "time": "the load or the caches before the log began",
    "prompt": "prefix hits from elsewhere, or a step budget other than the engine's",
    "load": "KV memory or max_num_seqs other than the engine's",
    "tail": "requests placed otherwise than assumed, or too little KV memory",
}
FEWEST = 10
FLOOR_S = 1e-3

Floats = NDArray[np.float64]
Rows = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a log that is off: `ratio` is measured over predicted; `cause` is a key of CAUSES."""

    latency: str
    words: str
    cause: str
    ratio: float

    @property
    def text(self) -> str:
        """In words."""
        return f"{self.latency} of {self.words} is {self.ratio:.2f} times the predicted"


@dataclass(frozen=True, slots=True)
class Goodness:
    """The misfit of each latency, and the part that is furthest off; None where all are within noise."""

    misfit: dict[str, float]
    worst: Part | None

    @property
    def doubt(self) -> float:
        """The misfit's part in the relative uncertainty of step times; first tokens count least."""
        return max((DOUBT[name] * off for name, off in self.misfit.items()), default=0.0)

    @property
    def is_refused(self) -> bool:
        """Whether a latency is further off than step times explain."""
        return any(self.misfit[name] > bound for name, bound in BOUNDS.items() if name in self.misfit)

    @property
    def text(self) -> str:
        """What does not fit, and what may be the cause."""
        if self.worst is None:
            return "every part of the log fits within its noise"
        return f"{self.worst.text}; possible cause: {CAUSES[self.worst.cause]}"

    def refuse(self, where: str) -> None:
        """Raise BadInput where step times do not explain the log."""
        if self.is_refused:
            name = max(self.misfit, key=lambda one: self.misfit[one] / BOUNDS[one])
            raise BadInput(
                f"{where}: does not fit: {name} is {100 * self.misfit[name]:.0f} % off after calibration,"
                f" at most {100 * BOUNDS[name]:.0f} % is accepted: {self.text}"
            )


def goodness_of(log: RequestLog, outcome: Outcome, measured: Rows) -> Goodness:
    """How well a simulation of the log's requests meets it, of those that were measured."""
    e2e_s = outcome.finish_s - outcome.arrival_s
    pairs = {
        "TTFT": (log.ttft_s, outcome.ttft_s),
        "TPOT": (log.tpot_s, outcome.tpot_s),
        "whole time": (log.e2e_s, e2e_s),
    }
    misfit, worst, most = {}, None, 0.0
    for name, (seen, said) in pairs.items():
        excess = []
        known = measured & np.isfinite(seen) & np.isfinite(said)
        for cause, words, rows in _parts(log, known, seen):
            if rows.sum() < FEWEST:
                continue
            ratio, noise = _off(seen[rows], said[rows], cause == "tail")
            excess.append(max(abs(np.log(ratio)) - 2.0 * noise, 0.0))
            if excess[-1] / BOUNDS[name] > most:
                most, worst = excess[-1] / BOUNDS[name], Part(name, words, cause, ratio)
        if excess:
            misfit[name] = float(np.sqrt(np.mean(np.square(excess))))
    return Goodness(misfit, worst)


def _off(seen: Floats, said: Floats, is_tail: bool) -> tuple[float, float]:
    """Measured over predicted, and its relative standard error: of the slowest tenths, or of pairs' means."""
    if is_tail:
        tail = seen >= np.quantile(seen, 0.9)
        slow = np.sort(said)[-int(tail.sum()) :]
        ratio = (seen[tail].mean() + FLOOR_S) / (slow.mean() + FLOOR_S)
        return float(ratio), float(seen[tail].std() / seen[tail].mean() / np.sqrt(tail.sum()))
    mean_s = seen.mean() + FLOOR_S
    apart = seen - said
    return float(mean_s / (said.mean() + FLOOR_S)), float(apart.std() / mean_s / np.sqrt(len(seen)))


def _parts(log: RequestLog, known: Rows, seen: Floats) -> Iterator[tuple[str, str, Rows]]:
    """The parts of a log, each with its kind and in words."""
    yield "tail", "the slowest tenth of requests", known
    begin, end = log.workload.arrival_s, log.last_token_s
    ended = np.sort(end[np.isfinite(end)])
    busy = np.arange(len(begin)) - np.searchsorted(ended, begin)  # in flight as each arrives
    third = {"time": begin, "prompt": log.workload.prompt_tokens, "load": busy}
    names = {
        "time": ("the first third of the log", "the last third of the log"),
        "prompt": ("the shortest prompts", "the longest prompts"),
        "load": ("requests that came at the lowest load", "requests that came at the highest load"),
    }
    for kind, of in third.items():
        if not known.any():
            return
        low, high = np.quantile(of[known], (1 / 3, 2 / 3))
        if low < high:
            yield kind, names[kind][0], known & (of <= low)
            yield kind, names[kind][1], known & (of >= high)
