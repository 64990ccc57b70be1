"""One test each for what went wrong in other autoscalers: a story told to `tick`, or to the simulated fleet.

Each names the trouble. All use the whole scaler (demand, traffic phases, line, hold), not a part of it.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from made_moves import profile
from made_types import profile_of

from controlplane.control import Settings, State, tick
from controlplane.migration.balance import MoveSettings
from controlplane.perfmodel.step import StepModel
from controlplane.placement.policies import JSQ, SPREAD
from controlplane.scaler.state import ScalingSettings
from controlplane.scaler.target import StabilizationWindow, TargetSettings
from controlplane.snapshot import STARTING, RunningRequest, Scale, Snapshot, WorkerLoad
from controlplane.types import ClassArrivals, RequestId, Slo, WorkerId
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance
from dataplane.simulated.elastic import ElasticSettings
from dataplane.simulated.elastic_run import simulate_elastic
from dataplane.simulated.simulate import ControlSettings, WorkerSpec, prepare

SLO = Slo(1.0, 0.05)
STEP = StepModel(0.02, 1e-4, 1e-3, 0.0)
LINE = TargetSettings(0.5, 0.2, high=20)


def worker(name, running=0, state="serving"):
    held = tuple(RunningRequest(RequestId(f"{name}{i}"), 100, 0, 5, 50, 0.05) for i in range(running))
    return WorkerLoad(WorkerId(name), state, 10_000, held, (), STEP, 64)


class Story:
    """A fleet told second by second what arrives; launches and drains happen at once."""

    def __init__(self, wanted, target=LINE, profile=None, down_s=60.0):
        types = () if profile is None else (WorkerType.of(profile),)
        scaling = ScalingSettings(target, StabilizationWindow(0.0, down_s), worker_types=types)
        self.settings = Settings(moves=None, shed=None, scaling=scaling)
        self.state, self.now_s, self.wanted, self.reasons = State(), 0.0, wanted, []

    def tell(self, seconds, arrivals, **seen):
        """`arrivals` a second; everything else as the snapshot has it."""
        for n in range(round(seconds)):
            self.now_s += 1.0
            there = seen.pop("workers", None) or tuple(worker(f"w{i}") for i in range(self.wanted))
            whole = None if arrivals is None else int((n + 1) * arrivals) - int(n * arrivals)
            count = arrivals if arrivals is not None and np.isnan(arrivals) else whole
            by_class = (ClassArrivals(SLO, count, 100.0 * count, 50.0 * count),) if whole else ()
            snapshot = Snapshot(self.now_s, there, self.wanted, arrivals=count, by_class=by_class, **seen)
            self.state, actions = tick(self.settings, self.state, snapshot)
            for action in actions:
                assert isinstance(action, Scale)
                self.wanted = action.workers
                self.reasons.append(action.reason)
        return self.wanted


def test_zero_traffic_is_a_number_and_scales_down():
    story = Story(1)
    assert story.tell(120, 8.0) == 5
    assert story.tell(300, 0.0) == 1


def test_nan_metrics_are_no_traffic_figure():
    story = Story(1)
    story.tell(120, 8.0)
    before = story.wanted
    for _ in range(300):
        story.now_s += 1.0
        snapshot = Snapshot(story.now_s, (worker("w0"),), before, arrivals=float("nan"))
        story.state, actions = tick(story.settings, story.state, snapshot)
        assert actions == []


def test_overload_whose_completions_plateau_scales_up():
    # Every worker is full and finishes as many as it can: more of the same arrives.
    story = Story(2)
    story.tell(120, 3.0)
    full = tuple(worker(f"w{i}", 64) for i in range(2))
    assert story.tell(60, 12.0, workers=full, waiting_requests=200) > 6


def test_two_workers_become_one_and_stay_one():
    story = Story(2)
    seen = [story.tell(30, 0.6) for _ in range(20)]
    assert seen[-1] == 1
    assert sum(a != b for a, b in pairwise(seen)) == 1


def test_a_target_that_one_request_alone_breaks_inflates_no_fleet():
    strict = Slo(1.0, 0.001)  # a step of one request takes 21 ms
    profile = profile_of(STEP, 10_000, 64)
    sizes = []
    for slo in (SLO, strict):
        story = Story(1, TargetSettings(None, None, high=20), profile)
        for _ in range(120):
            story.now_s += 1.0
            arrived = (ClassArrivals(slo, 1, 100.0, 50.0),)
            there = tuple(worker(f"w{i}") for i in range(story.wanted))
            snapshot = Snapshot(story.now_s, there, story.wanted, arrivals=1, by_class=arrived)
            story.state, actions = tick(story.settings, story.state, snapshot)
            story.wanted = actions[0].workers if actions else story.wanted
        sizes.append(story.wanted)
    # As if each worker did one request at a time (1.06 s of work a second, with headroom and doubt), however
    # late they all are: a scaler that follows latency would be at its limit of 20.
    assert sizes[0] == 1
    assert sizes[1] <= 3


class NeverReady(ElasticSettings):
    def ready_after_s(self, launch):
        return np.inf


def test_a_worker_that_never_becomes_ready_is_given_up_when_the_demand_is_gone():
    p = profile(capacity=4096)
    times = np.concatenate([np.sort(np.random.default_rng(0).uniform(0, 60, 500)), [500.0]])
    workload = Workload(times, np.full(501, 60), np.full(501, 30))
    scaling = ScalingSettings(
        TargetSettings(None, None, high=6), StabilizationWindow(0.0, 30.0), bin_s=5.0,
        worker_types=(WorkerType.of(p),),
    )  # fmt: skip
    outcome, record = simulate_elastic(
        workload,
        [WorkerSpec(p)] * 6,
        Slo(2.0, 0.1),
        NeverReady(1, 20.0, start_limit_s=3600.0),
        ControlSettings(Settings(MoveSettings(), scaling=scaling), beat_s=1.0),
    )
    assert np.isfinite(outcome.finish_s).all()
    assert max(there for _, _, there in record.changes) > 1
    assert record.changes[-1][1:] == (1, 1)  # none of them is waited or paid for any more
    assert record.worker_s < 6 * 200.0 + outcome.end_s


def test_starting_workers_count_so_a_slow_start_is_not_launched_again():
    story = Story(1)
    story.tell(120, 8.0)
    starting = (worker("w0", 30), *(worker(f"s{i}", state=STARTING) for i in range(4)))
    assert story.tell(200, 8.0, workers=starting, cold_start_s=180.0) == 5


def test_a_metric_outage_keeps_the_fleet_whatever_it_was():
    story = Story(1)
    story.tell(120, 8.0)
    assert story.tell(900, None) == 5
    assert len(story.reasons) == 1


def test_an_operators_edit_is_gone_on_from_and_a_fixed_number_stands():
    story = Story(1)
    story.tell(120, 8.0)
    story.wanted = 9  # by hand, in auto
    assert story.tell(30, 8.0) == 9  # not fought: it is held down like any other fall
    assert story.tell(120, 8.0) == 5
    story.wanted = 3
    assert story.tell(600, 20.0, fixed=3) == 3


@pytest.mark.parametrize("policy", ["spread+migrate", "spread"])
def test_scale_down_under_long_streams_fails_no_request(policy):
    n = 30
    workload = Workload(np.linspace(0.0, 3.0, n), np.full(n, 50), np.full(n, 500))

    def shrink(state, seen):
        return state, [Scale(1, "a test")] if seen.now_s == 4.0 else []

    outcome, record = simulate_elastic(
        workload,
        [WorkerSpec(profile(capacity=8192, seqs=64))] * 4,
        Slo(5.0, 1.0),
        ElasticSettings(4),
        ControlSettings(Settings(MoveSettings()), beat_s=0.5),
        policy,
        decide=shrink,
    )
    assert record.drains == 3
    assert np.isfinite(outcome.finish_s).all()
    assert outcome.preemptions.sum() == 0
    assert outcome.met.all()


@pytest.mark.parametrize("policy", [SPREAD, JSQ])
def test_requests_of_one_instant_do_not_herd_on_what_looked_idle(policy):
    # All arrive between two looks at the workers; each placement is counted at once.
    n = 64
    workload = Workload(np.full(n, 1.0), np.full(n, 50), np.full(n, 50))
    given = dict.fromkeys(("settings", "predictor", "predicted_tokens", "max_misses"))
    name = "spread" if policy == SPREAD else "jsq"
    fleet = [WorkerSpec(profile(capacity=8192, seqs=64))] * 8
    run = prepare(workload, fleet, Slo(5.0, 1.0), name, **given, seed=0, patience=4.0)
    advance(run.ledger, run.engines, run.cluster, run.rules, 1.0)
    on_each = np.bincount(run.ledger.requests["worker"], minlength=8)
    assert on_each.max() - on_each.min() <= 1


def test_a_shape_without_a_profile_is_held_and_said_not_shrunk_to_the_minimum():
    story = Story(5, replace(LINE, workers_per_rps=None, intercept=None))
    assert story.tell(300, 1.0) == 5
    assert story.reasons == []
