"""The simulated cluster: nothing is lost whatever happens, the same seed gives the same bytes."""

from dataclasses import replace

import numpy as np
import pytest
from invariants import check
from made_profiles import made_profile

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.constraints import USE_B, USE_C, USE_D, USE_E
from controlplane.placement.lengths import LengthTable
from controlplane.placement.policies import PlacementSettings, Policy
from controlplane.prefixes import Prefixes
from controlplane.types import EngineMode, Slo
from controlplane.worker_type import KvLink
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance
from dataplane.simulated.simulate import WorkerSpec, prepare, simulate

SLO = Slo(0.6, 0.03)
GREEDY = [p for p in Policy if p != Policy.EXACT]


def profile(mode: EngineMode = EngineMode.PREFILL_FIRST, kv_tokens: int = 60_000, seqs: int = 256) -> Profile:
    return made_profile(
        StepModel(0.0187, 9e-5, 7e-5, 5e-7),
        KvModel(kv_tokens, 16),
        EngineLimits(mode=mode, max_batched_tokens=2048, max_seqs=seqs),
        PrefillModel(0.0115, 9e-5),
    )


def load(rate_rps: float, requests: int, seed: int = 0, urgent: float = 0.0, longest: int = 400) -> Workload:
    rng = np.random.default_rng(seed)
    return Workload(
        np.cumsum(rng.exponential(1 / rate_rps, requests)),
        rng.integers(1, longest, requests),
        rng.integers(1, longest, requests),
        priority=(rng.random(requests) < urgent).astype(np.int64),
    )


def begun(workload: Workload, workers: list[WorkerSpec], policy: Policy | str, **settings):
    usual = dict.fromkeys(("settings", "predictor", "predicted_tokens", "max_misses"))
    usual |= {"seed": 0, "patience": 4.0}
    return prepare(workload, workers, SLO, policy, **usual | settings)


def run_in_pieces(state, piece_s: float) -> None:
    """Advance to the end, a piece at a time, checking everything after each."""
    now_s, more = 0.0, True
    while more:
        now_s += piece_s
        more = advance(state.ledger, state.engines, state.cluster, state.rules, now_s)
        check(state, now_s)


def fleet_of(kind: str, one: Profile) -> list[WorkerSpec]:
    if kind == "split":
        return [WorkerSpec(one, "prefill")] * 2 + [WorkerSpec(one, "decode")] * 3
    if kind == "troubled":
        return [
            WorkerSpec(one, fails_s=((2.0, 3.0), (5.0, 9.0))),
            WorkerSpec(one, ready_s=1.0, drain_s=6.0),
            WorkerSpec(one, fails_s=((2.5, 2.6),)),
            WorkerSpec(one, drain_s=0.5),
            WorkerSpec(one),
        ]
    return [WorkerSpec(one)] * 4


@pytest.mark.parametrize("mode", [EngineMode.PREFILL_FIRST, EngineMode.CHUNKED])
@pytest.mark.parametrize("kind", ["plain", "troubled"])
@pytest.mark.parametrize("policy", GREEDY)
def test_nothing_is_lost_at_any_instant(mode, kind, policy):
    one = profile(mode, kv_tokens=3000)
    workload = load(18.0, 160, urgent=0.2)
    state = begun(workload, fleet_of(kind, one), policy)
    run_in_pieces(state, 0.21)
    outcome = state.outcome()
    assert outcome.complete
    assert (outcome.first_token_s >= workload.arrival_s).all()
    assert (outcome.finish_s >= outcome.first_token_s).all()


@pytest.mark.parametrize("policy", GREEDY)
def test_nothing_is_lost_between_the_pools_of_split_mode(policy):
    workers = [
        *fleet_of("split", profile(EngineMode.SPLIT, kv_tokens=3000)),
        WorkerSpec(
            profile(EngineMode.SPLIT, kv_tokens=3000),
            "prefill",
            fails_s=((1.0, 4.0),),
            link=KvLink(1e9, 0.05),
        ),
        WorkerSpec(profile(EngineMode.SPLIT, kv_tokens=3000), "decode", fails_s=((2.0, 3.0),)),
    ]
    state = begun(load(18.0, 160, urgent=0.2), workers, policy)
    run_in_pieces(state, 0.21)
    assert state.outcome().complete


@pytest.mark.parametrize("mode", [EngineMode.PREFILL_FIRST, EngineMode.CHUNKED])
@pytest.mark.parametrize("policy", [Policy.SPREAD, Policy.BEST_FIT, Policy.JSQ])
@pytest.mark.parametrize("kv_tokens", [3000, 60_000])
def test_pieces_and_one_go_give_the_same_bytes(mode, policy, kv_tokens):
    one = profile(mode, kv_tokens)
    whole = simulate(load(18.0, 160), fleet_of("troubled", one), SLO, policy)
    for is_known in (True, False):
        state = begun(load(18.0, 160), fleet_of("troubled", one), policy)
        now_s, more = 0.0, True
        while more:
            now_s += 0.03
            more = advance(state.ledger, state.engines, state.cluster, state.rules, now_s)
            if not is_known:  # who ends first: each request is looked at again
                state.engines.workers["first_end"] = state.engines.workers["soonest"] = 0
        assert state.outcome().finish_s.tobytes() == whole.finish_s.tobytes()
        assert state.outcome().first_token_s.tobytes() == whole.first_token_s.tobytes()


@pytest.mark.parametrize("policy", Policy)
def test_the_same_seed_gives_the_same_bytes(policy):
    first, again = (
        simulate(load(8.0, 60), [WorkerSpec(profile())] * 3, SLO, policy, seed=5) for _ in range(2)
    )
    assert first.finish_s.tobytes() == again.finish_s.tobytes()
    assert first.worker.tobytes() == again.worker.tobytes()


def test_another_seed_draws_other_pairs():
    one, other = (
        simulate(load(8.0, 60), [WorkerSpec(profile())] * 5, SLO, Policy.P2C, seed=seed) for seed in (1, 2)
    )
    assert (one.worker != other.worker).any()


def test_a_failed_worker_s_requests_are_prefilled_anew_and_keep_their_tokens():
    workload = Workload(np.array([0.0]), np.array([100]), np.array([200]))
    workers = [WorkerSpec(profile(), fails_s=((1.0, 50.0),)), WorkerSpec(profile(), ready_s=2.0)]
    outcome = simulate(workload, workers, SLO)
    alone = simulate(workload, [WorkerSpec(profile())], SLO)
    assert outcome.complete
    assert outcome.worker[0] == 1
    assert outcome.first_token_s == alone.first_token_s
    # Away from 1.0 to 2.0 at least, and one more prefill, but no token is made twice.
    assert 1.0 < outcome.finish_s[0] - alone.finish_s[0] < 1.2


def test_nothing_starts_at_a_worker_before_it_is_ready_or_after_it_drains():
    workload = load(5.0, 100)
    ready = simulate(workload, [WorkerSpec(profile()), WorkerSpec(profile(), ready_s=8.0)], SLO, "jsq")
    assert (ready.first_token_s[ready.worker == 1] > 8.0).all()
    assert (ready.worker == 1).any()
    drained = simulate(workload, [WorkerSpec(profile()), WorkerSpec(profile(), drain_s=8.0)], SLO, "jsq")
    assert drained.complete
    assert (workload.arrival_s[drained.worker == 1] <= 8.0).all()


@pytest.mark.parametrize("policy", ["spread", "jsq", "exact"])
def test_with_no_worker_left_a_request_stays_unfinished_and_is_not_met(policy):
    workload = Workload(np.array([0.0, 3.0]), np.array([10, 10]), np.array([5, 5]))
    outcome = simulate(workload, [WorkerSpec(profile(), drain_s=1.0)], SLO, policy)
    assert list(outcome.met) == [True, False]
    assert not outcome.complete


def test_a_lost_first_token_is_counted_before_the_request_ends():
    workload, workers = load(60.0, 120), [WorkerSpec(profile())]
    whole = simulate(workload, workers, SLO, patience=1e9)
    assert whole.misses == (~whole.met).sum()
    stopped = simulate(workload, workers, SLO, max_misses=10, patience=1e9)
    assert stopped.misses == 11
    # Those lost wait until the others have ended, long after the answer is known.
    assert stopped.end_s < whole.end_s / 2


def test_kv_waits_where_it_is_while_no_decode_worker_is_left():
    one = profile(EngineMode.SPLIT)
    workload = Workload(np.array([0.0]), np.array([100]), np.array([20]))
    outcome = simulate(workload, [WorkerSpec(one, "prefill"), WorkerSpec(one, "decode", ready_s=5.0)], SLO)
    assert outcome.first_token_s[0] < 0.1
    assert outcome.finish_s[0] > 5.0
    gone = simulate(workload, [WorkerSpec(one, "prefill"), WorkerSpec(one, "decode", drain_s=0.0)], SLO)
    assert not gone.complete


def test_a_run_stops_when_more_have_missed_than_allowed():
    workload, workers = load(50.0, 400), [WorkerSpec(profile())]
    whole = simulate(workload, workers, SLO, "jsq")
    assert (~whole.met).sum() > 20
    stopped = simulate(workload, workers, SLO, "jsq", max_misses=20)
    assert not stopped.complete
    assert stopped.misses > 20
    assert stopped.end_s < whole.end_s
    assert whole.misses == (~whole.met).sum()
    enough = simulate(workload, workers, SLO, "jsq", max_misses=int((~whole.met).sum()))
    assert enough.complete


@pytest.mark.parametrize("policy", ["spread", "jsq", "exact"])
def test_high_priority_is_served_before_normal(policy):
    workload = load(30.0, 200, urgent=0.2)
    outcome = simulate(workload, [WorkerSpec(profile(seqs=8))] * 2, SLO, policy)
    urgent = workload.priority == 1
    assert np.median(outcome.ttft_s[urgent]) < np.median(outcome.ttft_s[~urgent])


def test_who_waits_past_patience_is_placed_regardless():
    workload = load(40.0, 200)
    hurried, patient = (
        simulate(workload, [WorkerSpec(profile())] * 2, SLO, patience=patience) for patience in (1.0, 1e9)
    )
    assert hurried.complete
    assert patient.complete
    # Those who wait for harmlessness spare the others.
    assert patient.attainment > hurried.attainment


def test_spread_without_constraints_is_the_emptiest_worker():
    class Unconstrained(PlacementSettings):
        def row(self):
            row = super().row()
            row[[USE_B, USE_C, USE_D, USE_E]] = False
            return row

    workload = load(8.0, 100)
    outcome = simulate(workload, [WorkerSpec(profile())] * 4, SLO, "spread", settings=Unconstrained())
    assert np.bincount(outcome.worker, minlength=4).min() > 15


def test_the_exact_policy_serves_a_small_load_as_well_as_best_fit():
    workload = load(6.0, 80)
    exact, greedy = (simulate(workload, [WorkerSpec(profile())] * 3, SLO, p) for p in ("exact", "best-fit"))
    assert exact.complete
    assert exact.attainment >= greedy.attainment - 0.05


def test_a_transfer_delays_the_second_token_not_the_first():
    one = profile(EngineMode.SPLIT)
    one = replace(one, kv=replace(one.kv, bytes_per_token=1000))
    workload = Workload(np.array([0.0]), np.array([100]), np.array([20]))
    near, far = (
        simulate(workload, [WorkerSpec(one, "prefill", link=link), WorkerSpec(one, "decode")], SLO)
        for link in (None, KvLink(101 * 1000 / 0.3, 0.2))  # 101 tokens of 1,000 bytes in 0.3 s
    )
    assert far.first_token_s == near.first_token_s
    assert far.finish_s - near.finish_s == pytest.approx(0.5)


def test_a_better_predictor_is_not_asked_what_the_requests_will_do():
    workload = load(8.0, 60)
    constant = simulate(workload, [WorkerSpec(profile())] * 3, SLO, predictor=LengthTable.constant(200))
    same = simulate(
        workload,
        [WorkerSpec(profile())] * 3,
        SLO,
        predictor=LengthTable.constant(200),
        predicted_tokens=np.full(60, 200),
    )
    assert constant.finish_s.tobytes() == same.finish_s.tobytes()


def test_an_empty_workload_is_met_by_any_fleet():
    outcome = simulate(
        Workload(np.zeros(0), np.zeros(0, int), np.zeros(0, int)), [WorkerSpec(profile())], SLO
    )
    assert outcome.complete
    assert outcome.attainment == 1.0


def test_each_class_is_judged_by_its_own_targets():
    workload = replace(load(2.0, 40), slo_class=np.arange(40) % 2)
    outcome = simulate(workload, [WorkerSpec(profile())] * 4, [Slo(0.6, 0.05), Slo(1e-6, 0.05)])
    assert outcome.met[::2].all()
    assert not outcome.met[1::2].any()


@pytest.mark.parametrize(
    ("workers", "policy", "says"),
    [
        ([], "spread", "at least one"),
        ([WorkerSpec(profile())], "fastest", "policy: one of spread"),
        ([WorkerSpec(profile(), "prefill")], "spread", "both prefill and decode"),
        ([WorkerSpec(profile(EngineMode.SPLIT))], "spread", "split mode needs"),
        ([WorkerSpec(profile(), "prefill"), WorkerSpec(profile(), "decode")], "exact", "no split mode"),
        ([WorkerSpec(profile()), WorkerSpec(profile(seqs=8))], "exact", "one worker type"),
    ],
)
def test_a_fleet_that_cannot_run_is_refused(workers, policy, says):
    with pytest.raises(BadInput, match=says):
        simulate(load(1.0, 3), workers, SLO, policy)


def test_a_workload_with_more_classes_than_targets_is_refused():
    with pytest.raises(BadInput, match="has 2 classes"):
        simulate(replace(load(1.0, 2), slo_class=np.array([0, 1])), [WorkerSpec(profile())], SLO)


@pytest.mark.parametrize("caching", [False, True])
def test_a_worker_whose_layers_keep_a_window_holds_as_many_requests_as_their_windows_leave_room_for(caching):
    """4,000 tokens hold 19 requests of 200, or 9 that keep 200 more each, or 13 of windows half full.

    With a prefix cache each group of layers holds the blocks of a prompt that is computed at once. 13 blocks
    in three groups leave room for 6 requests in 250, and in two groups for 9.
    """
    n = 40
    prefixes = Prefixes(16, np.arange(n + 1) * 12, np.arange(n * 12)) if caching else None
    together = Workload(np.zeros(n), np.full(n, 190), np.full(n, 10), prefixes=prefixes)

    def most_at_once(kv: KvModel) -> int:
        one = replace(profile(EngineMode.CHUNKED), kv=kv)
        one = one.with_engine(max_batched_tokens=20_000)
        done = simulate(together, [WorkerSpec(one)], SLO, "jsq")
        assert done.complete
        return int((done.first_token_s == done.first_token_s.min()).sum())

    plain = KvModel(4000, 16)
    assert most_at_once(plain) == 20 if caching else 19
    full = most_at_once(replace(plain, request_tokens=200, window_tokens=100))
    assert full == 6 if caching else full in (9, 10)
    half = most_at_once(replace(plain, request_tokens=200, window_tokens=400))
    assert half in ((9, 10) if caching else (12, 13))
