"""The metrics of a simulated fleet's servers, as vLLM counts them: what `advise` sees of a replayed day.

A server is there from the moment that it serves until it drains. One that starts or drains is in no list, as
pods that are not ready are in none. A slot that is used again is another server, with counters of its own.
TTFT and TPOT are both counted when a request ends; vLLM counts TTFT at the first token.
"""

from __future__ import annotations

import math

import numpy as np

from controlplane.snapshot import SERVING, Snapshot
from dataplane.simulated.elastic_run import ElasticPlane
from tokenfleet.advise.look import Page
from tokenfleet.profiles.engine_metrics import EngineCounts

# The edges of vLLM's histograms.
_SLOW_S = (0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
EDGES_S = {
    "ttft": (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, *_SLOW_S, 160.0, 640.0, 2560.0, math.inf),
    "tpot": (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *_SLOW_S, math.inf),
}
_SUMS = ("ended", "ended_prompt_tokens", "ended_output_tokens")


class FleetMeter:
    """The counters of a simulated fleet's servers."""

    def __init__(self, plane: ElasticPlane) -> None:
        self._plane = plane
        slots = len(plane.run.ledger.workers)
        types = list(dict.fromkeys(plane.fleet.kinds))  # in the order of the advice's settings
        self._kinds = [types.index(name) for name in plane.fleet.kinds]
        self._launched_s = np.full(slots, -1.0)
        self._sums = np.zeros((slots, len(_SUMS)))
        self._buckets = {name: np.zeros((slots, len(edges))) for name, edges in EDGES_S.items()}

    def pages(self, seen: Snapshot, at_s: float) -> dict[str, Page]:
        """What each server shows now."""
        self._renew()
        self._count()
        pages: dict[str, Page] = {}
        for worker in seen.workers:
            if worker.state != SERVING:
                continue
            slot, load = int(worker.worker), worker.counted()
            values = dict(zip(_SUMS, self._sums[slot].tolist(), strict=True))
            values |= {"running": float(load.running), "waiting": float(load.waiting)}
            buckets = {
                name: dict(zip(edges, np.cumsum(self._buckets[name][slot]).tolist(), strict=True))
                for name, edges in EDGES_S.items()
            }
            page = EngineCounts(at_s, values, buckets=buckets, kind=self._kinds[slot])
            pages[f"{slot} of {self._launched_s[slot]:g} s"] = page
        return pages

    def _renew(self) -> None:
        """Start from zero in slots that another server has now."""
        for slot, here in self._plane.fleet.slots.items():
            if here.launched_s != self._launched_s[slot]:
                self._launched_s[slot] = here.launched_s
                self._sums[slot] = 0.0
                for buckets in self._buckets.values():
                    buckets[slot] = 0.0

    def _count(self) -> None:
        """Count the requests that ended since the last look."""
        run, rows = self._plane.run, self._plane.ended.rows
        request, job = run.ledger.requests[rows], run.engines.requests[rows]
        served = np.isfinite(job["finish_s"])
        request, job = request[served], job[served]
        slot, gaps = request["worker"], job["output"] - 1
        first_s, last_s = request["first_s"], job["finish_s"]
        numbers = np.column_stack([np.ones(len(slot)), request["prompt"], job["output"]])
        np.add.at(self._sums, slot, numbers)
        times = {
            "ttft": first_s - request["arrival_s"],
            "tpot": np.where(gaps > 0, (last_s - first_s) / np.maximum(gaps, 1), 0.0),
        }
        for name, edges in EDGES_S.items():
            np.add.at(self._buckets[name], (slot, np.searchsorted(edges, times[name])), 1.0)
