"""A simulated fleet that grows and shrinks mid-run: everyone served, everything paid for, nothing stuck."""

from dataclasses import replace

import numpy as np
import pytest
from made_moves import check, profile

from controlplane.control import Settings, State
from controlplane.errors import BadInput
from controlplane.migration.balance import MoveSettings
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.ledger import OFF
from controlplane.scaler.mix import MixSettings
from controlplane.scaler.state import ScalingSettings
from controlplane.scaler.target import StabilizationWindow, TargetSettings
from controlplane.snapshot import Scale
from controlplane.types import Slo
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from dataplane.simulated.elastic import Elastic, ElasticSettings
from dataplane.simulated.elastic_run import ElasticPlane, simulate_elastic
from dataplane.simulated.simulate import ControlSettings, WorkerSpec

SLO = Slo(2.0, 0.1)


def traffic(seed=0, quiet=1.0, busy=12.0):
    """Two quiet minutes, three busy ones, four quiet ones."""
    rng = np.random.default_rng(seed)
    times = np.concatenate(
        [
            start + np.sort(rng.uniform(0, length, rng.poisson(rate * length)))
            for start, length, rate in ((0, 120, quiet), (120, 180, busy), (300, 240, quiet))
        ]
    )
    return Workload(times, rng.integers(20, 200, len(times)), rng.integers(10, 80, len(times)))


def scaling(**more):
    p: Profile = profile(capacity=4096)
    target = TargetSettings(None, None, **({"low": 1, "high": 12} | more))
    return ControlSettings(
        Settings(
            MoveSettings(),
            scaling=ScalingSettings(
                target, StabilizationWindow(0.0, 30.0), worker_types=(WorkerType.of(p),), bin_s=5.0
            ),
        ),
        beat_s=0.5,
    )


def run(workload, elastic, control=None, policy="spread+migrate", **more):
    slots = [WorkerSpec(profile(capacity=4096))] * 12
    return simulate_elastic(workload, slots, SLO, elastic, control or scaling(), policy, **more)


def most(record):
    return max(wanted for _, wanted, _ in record.changes)


def test_the_fleet_follows_a_burst_up_and_down_and_everyone_is_served():
    workload = traffic()
    outcome, record = run(workload, ElasticSettings(1, cold_start_s=10.0))
    assert np.isfinite(outcome.finish_s).all()
    assert 2 < most(record) <= 12
    assert record.changes[-1][1] < most(record)
    assert record.launches == record.drains + record.changes[-1][2] - 1
    assert all(why for _, why in record.reasons)
    always, _ = run(workload, ElasticSettings(12), decide=lambda state, seen: (state, []))
    assert outcome.attainment > 0.9
    assert record.worker_s < 0.5 * 12 * always.end_s


def test_a_fleet_at_zero_is_woken_by_the_first_request_and_goes_back():
    times = np.array([100.0, 100.1, 400.0])
    workload = Workload(times, np.full(3, 50), np.full(3, 20))
    outcome, record = run(workload, ElasticSettings(0, cold_start_s=10.0), scaling(low=0, to_zero=True))
    assert 10.0 <= outcome.ttft_s[0] < 12.0
    assert np.isfinite(outcome.finish_s).all()
    assert record.changes[0][1:] == (0, 0)
    assert record.drains == 1
    assert record.worker_s < 200.0


def test_a_worker_that_never_comes_up_is_given_up_and_replaced():
    class Stuck(ElasticSettings):
        def ready_after_s(self, launch):
            return np.inf if launch < 2 else self.cold_start_s

    stuck = Stuck(1, cold_start_s=5.0, start_limit_s=30.0)
    outcome, record = run(traffic(), stuck)
    assert np.isfinite(outcome.finish_s).all()
    fine, plain = run(traffic(), ElasticSettings(1, cold_start_s=5.0))
    assert record.launches >= plain.launches + 2
    assert fine.attainment > outcome.attainment > 0.5


def check_every_round(monkeypatch):
    """Every count is that of its list after every round."""
    act = ElasticPlane.report

    def checked(plane, outcomes):
        act(plane, outcomes)
        check(plane.run, plane.moves)

    monkeypatch.setattr(ElasticPlane, "report", checked)


def test_scaling_in_under_long_streams_fails_none_of_them(monkeypatch):
    n = 24
    workload = Workload(np.linspace(0.0, 5.0, n), np.full(n, 60), np.full(n, 400))

    def shrink(state, seen):
        return state, [Scale(1, "a test")] if 6.0 < seen.now_s < 7.0 else []

    seen = []
    follow = Elastic.follow

    def noted(self, now_s, busy):
        follow(self, now_s, busy)
        seen.append(sum(self._run.ledger.workers["status"] != OFF))

    monkeypatch.setattr(Elastic, "follow", noted)
    check_every_round(monkeypatch)
    outcome, record = run(workload, ElasticSettings(4), decide=shrink)
    assert np.isfinite(outcome.finish_s).all()
    assert record.drains == 3
    assert seen[-1] == 1
    assert outcome.preemptions.sum() == 0


class LastFirst(ElasticSettings):
    def drained(self, emptiest, serving):
        return max(serving)


@pytest.mark.parametrize(("settings", "slot"), [(ElasticSettings, 0), (LastFirst, 2)])
def test_the_emptiest_worker_is_drained_or_the_last_one_where_a_system_does_that(settings, slot):
    # One long request on every worker; then the first worker's ends.
    workload = Workload(np.array([0.0, 0.1, 0.2]), np.full(3, 60), np.array([20, 900, 900]))
    states = []

    def shrink(state, seen):
        states.append([w.state for w in seen.workers])
        return state, [Scale(2, "a test")] if 3.0 < seen.now_s < 3.6 else []

    run(workload, settings(3), decide=shrink, policy="jsq+migrate")
    drained = next((n for s in states for n, one in enumerate(s) if one == "draining"), 0)
    assert drained == slot


def test_the_same_inputs_give_the_same_fleet():
    first, second = (run(traffic(1), ElasticSettings(1, cold_start_s=10.0))[1] for _ in range(2))
    assert first == second


# --- several kinds ------------------------------------------------------------------------------------------

SMALL = profile(capacity=4096)
BIG = replace(
    profile(capacity=16384, seqs=64),
    gpu="big",
    step=StepModel(0.02, 3e-5, 2.5e-4, 2e-6),
    prefill=PrefillModel(0.01, 5e-5),
)
USD_PER_H = {"made TP1": 1.0, "big TP1": 2.5, "big TP4": 2.5}


def mixed(*profiles, **more):
    """Slots of a fleet of these types, twelve small or four big of each, and the settings of its `tick`."""
    types = tuple(replace(WorkerType.of(p, USD_PER_H[p.type_name]), **more) for p in profiles)
    scaling = ScalingSettings(
        TargetSettings(None, None), StabilizationWindow(0.0, 30.0), bin_s=5.0, worker_types=types
    )
    slots = [WorkerSpec(p) for p in profiles for _ in range(12 if p is SMALL else 4)]
    return slots, ControlSettings(Settings(MoveSettings(), scaling=scaling), beat_s=0.5)


def run_mixed(*profiles, start, decide=None):
    slots, control = mixed(*profiles)
    elastic = ElasticSettings(cold_start_s=10.0, start_kinds=start, usd_per_h=USD_PER_H)
    return simulate_elastic(
        traffic(2, busy=30.0), slots, SLO, elastic, control, "spread+migrate", decide=decide
    )


def test_a_mix_shifts_with_demand_loses_nothing_and_costs_less_than_either_kind_alone(monkeypatch):
    check_every_round(monkeypatch)
    outcome, record = run_mixed(SMALL, BIG, start={"made TP1": 1})
    assert np.isfinite(outcome.finish_s).all()
    busiest = max((kinds for at, kinds in record.kinds if 120 < at < 300), key=lambda k: k["big TP1"])
    assert busiest["big TP1"] > 0
    assert record.kinds[-1][1] == {"made TP1": 1, "big TP1": 0}
    assert record.worker_s == pytest.approx(sum(record.kind_s.values()))
    assert record.usd == pytest.approx(sum(USD_PER_H[k] * s / 3600 for k, s in record.kind_s.items()))
    assert record.gpu_s == record.worker_s
    small, small_record = run_mixed(SMALL, start={"made TP1": 1})
    big, big_record = run_mixed(BIG, start={"big TP1": 1})
    assert record.usd < min(small_record.usd, big_record.usd)
    assert outcome.attainment > min(small.attainment, big.attainment) - 0.01 > 0.9
    monkeypatch.undo()  # the same run needs no second look
    assert run_mixed(SMALL, BIG, start={"made TP1": 1})[1] == record


@pytest.mark.parametrize("gpus", [4, 5, 6])
def test_a_limit_counts_workers_that_start_and_those_that_drain(monkeypatch, gpus):
    held, follow = [], Elastic.follow

    def counted(fleet, now_s, busy):
        follow(fleet, now_s, busy)
        held.append(sum(4 if fleet.kinds[w] == "big TP4" else 1 for w in fleet.slots))

    monkeypatch.setattr(Elastic, "follow", counted)
    big = replace(BIG, tp_degree=4)
    slots, control = mixed(SMALL, big)
    assert control.tick is not None
    assert control.tick.scaling is not None
    limited = replace(control.tick.scaling, mix=MixSettings(max_gpus=gpus))
    control = replace(control, tick=replace(control.tick, scaling=limited))
    start = {"made TP1": 1} if gpus < 6 else {"big TP4": 1}
    elastic = ElasticSettings(cold_start_s=10.0, start_kinds=start, usd_per_h=USD_PER_H)
    outcome, record = simulate_elastic(traffic(2, busy=30.0), slots, SLO, elastic, control, "spread+migrate")
    assert np.isfinite(outcome.finish_s).all()
    assert max(held) == gpus
    assert all(kinds["made TP1"] + 4 * kinds["big TP4"] <= gpus for _, kinds in record.kinds)


def test_kinds_are_seen_and_a_number_of_each_is_followed_as_far_as_there_are_slots():
    seen = []

    def decide(state, snapshot):
        seen.append(snapshot)
        want = {"made TP1": 2, "big TP1": 9}
        return state, [Scale(11, "a test", kinds=want)] if 5.0 < snapshot.now_s < 5.6 else []

    _, record = run_mixed(SMALL, BIG, start={"made TP1": 4, "big TP1": 1}, decide=decide)
    assert seen[0].wanted_kinds == {"made TP1": 4, "big TP1": 1}
    assert [w.kind for w in seen[0].workers] == ["made TP1"] * 4 + ["big TP1"]
    assert seen[-1].wanted_kinds == {"made TP1": 2, "big TP1": 4}
    assert seen[-1].wanted == 6
    assert sorted(w.kind for w in seen[-1].workers) == ["big TP1"] * 4 + ["made TP1"] * 2
    assert (record.launches, record.drains) == (3, 2)


def test_more_of_a_kind_than_there_are_slots_are_refused():
    with pytest.raises(BadInput, match="start_kinds"):
        run_mixed(SMALL, start={"made TP1": 13})
    with pytest.raises(BadInput, match="start_kinds"):
        ElasticSettings(start_kinds={"made TP1": -1})


def test_a_brain_of_another_kind_can_be_compared():
    def never(state: State, seen):
        return state, []

    _, record = run(traffic(), ElasticSettings(3), decide=never)
    assert (record.launches, record.drains) == (0, 0)


@pytest.mark.parametrize("make", [lambda: ElasticSettings(-1), lambda: ElasticSettings(1, cold_start_s=-1.0)])
def test_fleets_that_cannot_be_are_refused(make):
    with pytest.raises(BadInput):
        make()


def test_more_workers_than_slots_are_refused():
    with pytest.raises(BadInput, match="start"):
        run(traffic(), ElasticSettings(13))


def test_prefill_and_decode_workers_are_sized_apart_by_one_demand():
    p = profile(capacity=4096)
    types = tuple(replace(WorkerType.of(p), role=role) for role in ("prefill", "decode"))
    control = ControlSettings(
        Settings(
            moves=None,
            shed=None,
            scaling=ScalingSettings(
                TargetSettings(None, None, low=2, high=12),
                StabilizationWindow(0.0, 30.0),
                worker_types=types,
                bin_s=5.0,
            ),
        ),
        beat_s=0.5,
    )
    slots = [WorkerSpec(p, "prefill")] * 6 + [WorkerSpec(p, "decode")] * 10
    start = {t.name: 1 for t in types}
    elastic = ElasticSettings(cold_start_s=10.0, start_kinds=start)
    outcome, record = simulate_elastic(traffic(), slots, SLO, elastic, control, "spread")
    assert outcome.complete
    assert outcome.attainment > 0.9
    prefill, decode = (t.name for t in types)
    assert max(kinds[decode] for _, kinds in record.kinds) >= 3
    assert max(kinds[prefill] for _, kinds in record.kinds) < max(kinds[decode] for _, kinds in record.kinds)
    assert all(sum(kinds.values()) <= 12 and min(kinds.values()) >= 1 for _, kinds in record.kinds)
    assert sum(record.kinds[-1][1].values()) <= 4  # after the busy minutes both have shrunk


def test_workers_change_roles_where_answers_give_way_to_prompts(monkeypatch):
    """Of six workers, the most that are allowed, four decode until prompts get long. None is started."""
    check_every_round(monkeypatch)
    rng, p = np.random.default_rng(5), profile(capacity=4096)
    times = np.sort(rng.uniform(0.0, 600.0, 9000))
    late = times > 300.0
    prompts = np.where(late, rng.integers(900, 1100, 9000), rng.integers(20, 60, 9000))
    workload = Workload(times, prompts, np.where(late, 4, rng.integers(60, 100, 9000)))
    types = tuple(
        replace(WorkerType.of(p), role=role, limit=n) for role, n in (("prefill", 2), ("decode", 4))
    )
    target, window = TargetSettings(None, None, low=6, high=6), StabilizationWindow(0.0, 120.0)
    rule = ScalingSettings(target, window, worker_types=types, bin_s=5.0)
    control = ControlSettings(Settings(moves=None, shed=None, scaling=rule), beat_s=0.5)
    slots = [WorkerSpec(p, t.role) for t in types for _ in range(t.limit or 0)]
    elastic = ElasticSettings(cold_start_s=300.0, start_kinds={t.name: t.limit or 0 for t in types})
    outcome, record = simulate_elastic(workload, slots, SLO, elastic, control, "spread")
    assert np.isfinite(outcome.finish_s).all()
    assert record.launches == record.drains == 0
    assert record.role_changes > 0
    assert record.worker_s == pytest.approx(6 * outcome.end_s, abs=6 * control.beat_s)
    fixed, _ = simulate_elastic(
        workload, slots, SLO, elastic, control, "spread", decide=lambda state, seen: (state, [])
    )
    assert outcome.met[late].mean() > fixed.met[late].mean() + 0.3
