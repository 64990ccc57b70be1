"""Algorithm 2's errors in the simulated plane are those of the core's rules, request by request."""

import numpy as np
import pytest

from controlplane.perfmodel.profile import EngineLimits, KvModel, Profile, Residuals, Source
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.ledger import DECODING, DONE
from controlplane.placement.rebalance import Error, Surprises, error_at, finished, forget, outlived
from controlplane.types import EngineMode, Slo, WorkerId
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance, view_all
from dataplane.simulated.simulate import WorkerSpec, prepare
from dataplane.simulated.surprises import SurpriseBook

PROFILE = Profile(
    "made",
    "made",
    1,
    step=StepModel(0.02, 1e-4, 1e-3, 1e-5),
    prefill=PrefillModel(0.01, 2e-4),
    kv=KvModel(1_000_000, 16, 1),  # room for all: nobody is preempted
    engine=EngineLimits(mode=EngineMode.PREFILL_FIRST, max_batched_tokens=512, max_seqs=256),
    residuals=Residuals(0.0, 0.0, 0.0, 0),
    source=Source("composed", "made up", "none", "2026-01-01"),
)


class ByTheRules:
    """`SurpriseBook` again, one request at a time, by the functions that the live plane uses."""

    def __init__(self, led):
        self.led, self.first = led, led.requests["predicted"].copy()
        self.surprises = [Surprises() for _ in led.workers]
        self.ends = {}

    def look(self):
        requests, steps = self.led.requests, self.led.workers["step"].tolist()
        for r, row in enumerate(requests):
            w = int(row["worker"])
            if row["phase"] == DONE and r in self.ends:
                w, end = self.ends.pop(r)
                self.surprises[w] = finished(self.surprises[w], str(r), steps[w], end)
            elif row["phase"] == DECODING:
                made = int(row["key"]) + steps[w]
                self.ends.setdefault(r, (w, steps[w] + max(int(self.first[r]) - made, 1)))
                if made >= self.first[r]:
                    self.surprises[w] = outlived(self.surprises[w], str(r), int(row["ends"]))
        self.surprises = [forget(s, at) for s, at in zip(self.surprises, steps, strict=True)]
        return [error_at(s, at) for s, at in zip(self.surprises, steps, strict=True)]


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_book_of_columns_says_what_the_rules_say(seed, factor):
    rng = np.random.default_rng(seed)
    n = 80
    load = Workload(np.sort(rng.uniform(0, 8, n)), rng.integers(1, 300, n), rng.integers(2, 150, n))
    predicted = np.maximum(load.output_tokens * factor * rng.lognormal(0, 0.5, n), 1).astype(np.int64)
    run = prepare(
        load, [WorkerSpec(PROFILE)] * 3, Slo(1.0, 0.1), "jsq", settings=None, predictor=None,
        predicted_tokens=predicted, seed=seed, transfer_s=0.0, patience=4.0, max_misses=None,
    )  # fmt: skip
    book, rules = SurpriseBook(run.ledger), ByTheRules(run.ledger)
    seen = 0
    for now_s in np.arange(0.1, 14, 0.1):
        advance(run.ledger, run.engines, run.cluster, run.rules, now_s)
        view_all(run.ledger, run.engines, now_s)
        got, wanted = book.look(), rules.look()
        assert [got.get(WorkerId(str(w)), Error(0, 0)) for w in range(3)] == wanted
        seen += any(e.sequences for e in wanted)
    assert seen > 20
