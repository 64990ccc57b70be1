"""Samples of long traces: they tell of the whole, say how well, and a replay of it has the last word."""

from dataclasses import replace

import numpy as np
import pytest
from planning_builders import SLO, planned, poisson, said_of, search_of, worker_type

from controlplane.workload import Workload
from tokenfleet.planning import planner, schedule
from tokenfleet.planning.estimate import Trial, look, verdict_on
from tokenfleet.planning.fleet import of_one_kind
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.threads import open_threads
from tokenfleet.planning.traffic.draws import next_like, units_of
from tokenfleet.planning.traffic.sample import Sample, Sampler
from tokenfleet.planning.verified import full_replay
from tokenfleet.report.plan_json import plan_json
from tokenfleet.report.tables import share_text

MAY_MISS = 0.05


def days(requests: int = 60_000, seed: int = 0) -> Workload:
    """Two made days in 16,200 seconds, busy around noon, with longer prompts in the first."""
    rng = np.random.default_rng(seed)
    at = np.sort(rng.random(2 * requests)) * 16_200
    busy = 0.5 + 0.5 * np.sin(2 * np.pi * at / 8_100) ** 3
    arrival_s = at[rng.random(len(at)) < busy]
    prompt = rng.integers(200, 600, len(arrival_s)) + np.where(arrival_s < 8_100, 100, 0)
    return Workload(arrival_s, prompt, rng.integers(2, 120, len(arrival_s)))


def sampler(workload: Workload, requests: int = 15_000, seed: int = 0) -> Sampler:
    return Sampler(workload, MAY_MISS, SLO.tpot_s, seed, requests)


def met_of(workload: Workload) -> np.ndarray:
    """A made outcome: what is long misses when much has come in half a minute, and a few do by chance."""
    before = np.searchsorted(workload.arrival_s, workload.arrival_s - 30.0)
    busy = np.arange(len(workload)) - before > 225
    return ~((busy & (workload.prompt_tokens > 350)) | (workload.prompt_tokens % 97 == 0))


@pytest.fixture
def short_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LONG", 10_000)
    monkeypatch.setattr(planner, "SAMPLED", 10_000)


@pytest.mark.parametrize("seed", range(5))
def test_a_replicate_in_pieces_is_the_one_that_is_drawn_row_by_row(seed: int) -> None:
    workload = days(3_000, seed)
    drawn = next_like(units_of(workload), np.random.default_rng([seed, 1, 1]))
    whole = sampler(workload, requests=10**9, seed=seed).sample(1).workload
    assert np.allclose(whole.arrival_s - whole.arrival_s[0], drawn.arrival_s - drawn.arrival_s[0], atol=1e-6)
    assert np.array_equal(whole.prompt_tokens, drawn.prompt_tokens)
    assert whole.weight == pytest.approx(1.0, abs=0.02)  # rounding moves a row over a window's edge


@pytest.mark.parametrize("replicate", [0, 3])
def test_a_samples_requests_tell_of_all_those_of_each_stratum(replicate: int) -> None:
    workload = days()
    taken = sampler(workload).sample(replicate)
    assert taken.workload.requests == pytest.approx(taken.held.sum())
    assert taken.held.sum() == pytest.approx(len(workload), rel=0.05 if replicate else 1e-12)
    counts = taken.window >= 0
    of = taken.stratum[taken.window[counts]]
    told = np.bincount(of, weights=taken.workload.weight[counts], minlength=len(taken.held))
    assert told == pytest.approx(taken.held)
    assert (taken.workload.weight[~counts] == 0.0).all()
    # What binds is there for certain, and each tells of itself.
    assert taken.workload.weight[counts][of == 0] == pytest.approx(1.0)
    assert taken.held[0] >= 3.0 * MAY_MISS * len(workload) * 0.9


def test_what_binds_are_the_busiest_windows() -> None:
    taken = sampler(days()).sample(0)
    load = taken.workload.prompt_tokens / taken.workload.prompt_tokens.mean()
    load = load + taken.workload.output_tokens / taken.workload.output_tokens.mean()
    counts = taken.window >= 0
    per_window = np.bincount(taken.window[counts], weights=load[counts], minlength=len(taken.stratum))
    assert per_window[taken.stratum == 0].min() >= 0.999 * per_window[taken.stratum > 0].max()


def test_samples_are_right_on_average_and_their_bound_holds_as_often_as_it_says() -> None:
    workload = days()
    truth = met_of(workload).mean()
    said, below = [], []
    for seed in range(60):
        one = sampler(workload, seed=seed).as_it_is
        met = met_of(one.workload)
        share = float(np.average(met, weights=one.workload.weight))
        said.append(share)
        below.append(truth >= share - one.reach(met, 0.95))
    assert np.mean(said) == pytest.approx(truth, abs=3 * np.std(said) / np.sqrt(len(said)))
    assert np.mean(below) >= 0.9
    assert np.std(said) < 0.005


def test_a_sample_of_everything_leaves_no_doubt() -> None:
    one = sampler(days(3_000), requests=10**9).as_it_is
    assert one.reach(met_of(one.workload), 0.95) == 0.0


def test_a_small_sample_has_fewer_strata_not_more_requests() -> None:
    workload = days()
    truth, said = met_of(workload).mean(), []
    for seed in range(60):
        one = sampler(workload, requests=2_000, seed=seed).as_it_is
        assert (one.window >= 0).sum() < 3_500  # of windows of 220 to 440
        assert one.workload.requests == pytest.approx(len(workload))
        said.append(float(np.average(met_of(one.workload), weights=one.workload.weight)))
    assert len(one.held) < len(sampler(workload).as_it_is.held)
    assert np.mean(said) == pytest.approx(truth, abs=3 * np.std(said) / np.sqrt(len(said)))


def test_a_part_of_the_time_is_sampled_alone() -> None:
    workload = days()
    part = workload.window(3_000.0, 6_000.0)
    one = sampler(workload, requests=500).sample(0, 3_000.0, 6_000.0)
    judged = one.workload.arrival_s[one.workload.weight > 0]
    assert one.workload.requests == pytest.approx(len(part))
    assert judged.min() >= 3_000.0
    assert judged.max() < 6_000.0


def test_the_full_replay_of_a_long_trace_is_that_of_a_run_of_all_its_requests() -> None:
    workload, fleet = days(), of_one_kind(worker_type(), 3)
    of = search_of(workload)
    found, known = full_replay(of, fleet), of.replay(fleet)
    assert found.attainment == pytest.approx(known.attainment, abs=1e-12)
    assert found.utilisation == pytest.approx(known.utilisation)
    assert np.allclose(np.sort(found.ttft_s), np.sort(known.ttft_s), rtol=1e-5)


def test_a_trial_by_samples_stops_once_lost_and_comes_to_the_verdict_of_one_that_goes_on() -> None:
    workload, request = days(), PlanRequest(SLO, attainment=0.95, confidence=0.9)
    verdicts = {}
    with open_threads(1) as threads:
        of = replace(search_of(workload, request), threads=threads)
        traffic = replace(of.traffic, sampler=sampler(workload, requests=10_000))
        of = replace(of, traffic=traffic)
        for workers in (1, 2, 3):
            fleet = of_one_kind(worker_type(), workers)
            trial = Trial(of, fleet)
            verdicts[workers] = trial.holds()
            whole = verdict_on(look(of, fleet, trial.numbers), request)
            assert verdicts[workers] == (whole.low >= request.attainment)
            one = of.replay(fleet, 1, most_missed=0.05)
            told = of.replay(fleet, 1)
            assert one.complete == (told.misses <= 0.05 * told.workload.requests)
            assert told.misses == pytest.approx((1.0 - told.attainment) * told.workload.requests)
    assert verdicts[1] is False
    assert verdicts[3] is True


@pytest.mark.usefixtures("short_is_long")
def test_a_long_trace_is_planned_by_samples_and_replayed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = days(40_000)
    monkeypatch.setattr(schedule, "OF_WINDOW", 500)
    plan = planned(workload, explained=True)
    assert plan.best is not None
    assert plan.sampled is not None
    whole = search_of(workload).replay(plan.best.fleet)
    assert plan.best.on_trace == pytest.approx(whole.attainment, abs=1e-12)
    assert plan.sampled.full_replay == round(whole.attainment, 6)
    assert plan.sampled.low <= whole.attainment
    assert plan.sampled.added_workers == 0
    assert plan.sampled.requests < len(workload) / 2
    assert plan.schedule is not None
    assert plan.schedule.saved_share > 0.1
    assert plan.schedule.low is not None
    assert 0.9 < plan.schedule.low < plan.schedule.attainment
    document = plan_json(plan)
    assert document["schedule_detail"]["low"] == round(plan.schedule.low, 6)
    said = said_of(plan)
    assert said["Scaling schedule"].endswith(f", lower bound {share_text(round(plan.schedule.low, 6))}")
    found = document["sampling"]
    assert found["full_replay"] == round(whole.attainment, 6)
    assert said["Sampling"].endswith(f"the whole trace reaches {share_text(round(whole.attainment, 6))}.")
    monkeypatch.setattr(planner, "LONG", 10**9)
    assert planned(workload).best.fleet == plan.best.fleet  # type: ignore[union-attr]


@pytest.mark.usefixtures("short_is_long")
def test_where_samples_say_too_much_the_full_replay_adds_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, honest = days(), Sampler.sample

    def easy(self: Sampler, *of: object) -> Sample:
        """A sample without two of every three requests."""
        one = honest(self, *of)  # type: ignore[arg-type]
        rows = np.arange(0, len(one.window), 3)
        return replace(one, workload=one.workload.take(rows), window=one.window[rows])

    monkeypatch.setattr(Sampler, "sample", easy)
    plan = planned(workload, explained=True)
    assert plan.best is not None
    assert plan.sampled is not None
    assert plan.sampled.added_workers > 0
    assert plan.best.on_trace >= 0.95
    assert plan.sampled.full_replay == round(plan.best.on_trace, 6)
    fewer = of_one_kind(worker_type(), plan.best.fleet.workers - 1)
    assert search_of(workload).replay(fewer).attainment < 0.95


@pytest.mark.usefixtures("short_is_long")
def test_where_no_worker_may_be_added_the_plan_says_what_the_full_replay_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = Sampler.sample

    def easy(self: Sampler, *of: object) -> Sample:
        one = honest(self, *of)  # type: ignore[arg-type]
        rows = np.arange(0, len(one.window), 3)
        return replace(one, workload=one.workload.take(rows), window=one.window[rows])

    monkeypatch.setattr(Sampler, "sample", easy)
    enough = planned(days()).best.fleet.workers  # type: ignore[union-attr]
    plan = planned(days(), explained=True, max_gpus=enough)
    assert plan.best is None
    assert "replayed whole" in plan.reason


def test_a_thinned_trace_keeps_its_means_and_tells_of_all() -> None:
    workload = poisson(requests=1001)
    thin = workload.thinned(100)
    assert len(thin) <= 100
    assert thin.requests == pytest.approx(1001)
    assert thin.prompt_tokens.mean() == pytest.approx(workload.prompt_tokens.mean(), rel=0.1)
    assert workload.thinned(1001) is workload
