"""A schedule with cold starts, against a look at every second; standby workers, against every case."""

import json
import math
from dataclasses import replace
from itertools import pairwise, product
from math import comb
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_builders import plan, planned, poisson, save, search_of, worker, worker_type

from controlplane.errors import BadInput
from controlplane.scaler.bounds import ScheduleInterval
from controlplane.scaler.line import enough_stand, missing_share
from controlplane.types import Slo
from controlplane.worker_type import WorkerGroup
from controlplane.workload import Workload
from tokenfleet.planning.fleet import Fleet, spares_for
from tokenfleet.planning.plan_file import read_plan
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.schedule import (
    CELL_S,
    DAY_S,
    NO_CLOCK,
    WEEK_S,
    TraceClock,
    _Window,
    make_schedule,
    paid,
    window_edges,
)
from tokenfleet.planning.sizing import Sizing
from tokenfleet.planning.threads import open_threads
from tokenfleet.profiles.library import write_profile
from tokenfleet.report.plan_json import week_rows
from tokenfleet.traces.shape import phases_of


@st.composite
def schedules(draw: st.DrawFn) -> list[ScheduleInterval]:
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=7))
    edges = [0]
    for length in lengths:
        edges.append(edges[-1] + length)
    counts = [draw(st.integers(0, 5)) for _ in lengths]
    return [ScheduleInterval(a, b, n) for (a, b), n in zip(pairwise(edges), counts, strict=True)]


def wanted(schedule: list[ScheduleInterval], t: float) -> int:
    return next(s.workers for s in schedule if s.start_s <= t < s.end_s)


@given(schedules(), st.integers(0, 40))
def test_every_second_pays_for_what_the_cold_start_ahead_wants(
    schedule: list[ScheduleInterval], lead: int
) -> None:
    found = paid(schedule, lead)
    end = int(schedule[-1].end_s)
    for t in range(end):
        ahead = max(wanted(schedule, u) for u in range(t, min(t + lead, end - 1) + 1))
        assert wanted(list(found.stretches), t) == ahead
    assert found.worker_hours >= sum(s.workers * (s.end_s - s.start_s) for s in schedule) / 3600 - 1e-12


@given(schedules(), st.integers(0, 40))
def test_every_worker_that_serves_was_there_at_first_or_ordered_in_time(
    schedule: list[ScheduleInterval], lead: int
) -> None:
    """Walk through time with the paid workers only: they rise by orders alone, and by no more than needed."""
    found = paid(schedule, lead)
    assert all(order.ready_s - order.order_s == lead for order in found.orders)
    in_time = [order for order in found.orders if order.order_s > 0]
    rises = {s.start_s: s.workers - p.workers for p, s in pairwise(found.stretches) if s.workers > p.workers}
    assert {o.order_s: o.workers for o in in_time} == rises
    # What was ordered before the trace began is paid from its start on.
    before = sum(o.workers for o in found.orders if o.order_s <= 0)
    assert found.stretches[0].workers == schedule[0].workers + before


def test_no_cold_start_pays_what_is_wanted() -> None:
    schedule = [ScheduleInterval(0, 60, 2), ScheduleInterval(60, 120, 3), ScheduleInterval(120, 180, 1)]
    assert list(paid(schedule, 0.0).stretches) == schedule


@given(st.integers(1, 6), st.integers(0, 4), st.floats(0.0, 0.9))
def test_enough_stand_is_the_sum_over_every_case(needed: int, spares: int, missing: float) -> None:
    everyone = needed + spares
    by_hand = sum(
        comb(everyone, gone) * missing**gone * (1 - missing) ** (everyone - gone)
        for gone in range(spares + 1)
    )
    assert enough_stand(needed, spares, missing) == pytest.approx(by_hand, abs=1e-12)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=2),
    st.floats(0.001, 0.5),
    st.floats(1.0, 1200.0),
    st.floats(0.9905, 0.9999),
)
def test_the_spares_hold_the_target_and_one_fewer_of_any_group_does_not(
    counts: list[int], reclaims: float, cold_s: float, low: float
) -> None:
    fleet = Fleet(tuple(WorkerGroup(worker_type(worker(gpu=f"gpu{i}")), n) for i, n in enumerate(counts)))
    found = spares_for(fleet, low, 0.99, reclaims, cold_s, request_s=5.0)
    if found is None:
        return
    assert low * found.survives >= 0.99
    assert found.survives <= 1.0
    missing = missing_share(reclaims, cold_s)
    assert missing == pytest.approx(cold_s / (cold_s + 3600 / reclaims))
    extra = [b.workers - s.workers for b, s in zip(found.bought.groups, fleet.groups, strict=True)]
    if len(counts) == 1 and extra[0]:
        assert low * enough_stand(counts[0], extra[0] - 1, missing) * found.untouched < 0.99
    cheaper = [
        other
        for other in product(*(range(k + 1) for k in extra))
        if sum(other) < sum(extra) - len(counts)  # greedy may be one off in a mix, not more
        and low
        * found.untouched
        * enough_stand(counts[0], other[0], missing)
        * (enough_stand(counts[1], other[1], missing) if len(counts) > 1 else 1.0)
        >= 0.99
    ]
    assert not cheaper


def test_reclaims_that_hit_too_many_running_requests_are_past_mending() -> None:
    fleet = Fleet((WorkerGroup(worker_type(), 3),))
    assert spares_for(fleet, 0.9901, 0.99, reclaims_per_h=60.0, cold_start_s=60.0, request_s=60.0) is None


def test_a_spot_plan_buys_spares_and_says_what_they_leave() -> None:
    found = planned(reclaims_per_h=0.5, cold_start_s=600.0)
    plain = planned()
    assert found.best is not None
    assert plain.best is not None
    assert found.spares is not None
    assert found.spares.workers >= 1
    assert found.best.fleet.workers == found.spares.serving.workers + found.spares.workers
    assert found.best.estimate is not None
    assert found.best.estimate.low >= 0.95
    assert found.request.reclaims_per_h == 0.5


def test_where_reclaims_leave_no_fleet_the_plan_says_so() -> None:
    found = planned(reclaims_per_h=400.0, cold_start_s=600.0)
    assert not found.feasible
    assert "interrupted 400 times an hour" in found.reason


def test_replacements_take_time() -> None:
    with pytest.raises(BadInput, match="--cold-start"):
        PlanRequest(planned().slo, spot=True, reclaims_per_h=0.1).consistent()


def test_the_command_line_says_the_schedule_s_price_and_refuses_reclaims_without_spot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(poisson(requests=400), tmp_path / "trace.csv")
    write_profile(worker(), tmp_path / "worker.yaml")
    assert plan(tmp_path, "--cold-start", "10s", "--format", "json") == 0
    detail = json.loads(capsys.readouterr().out)["schedule_detail"]["paid"]
    assert detail["cold_start_s"] == 10.0
    assert detail["stretches"][0]["start_s"] == 0.0
    assert plan(tmp_path, "--output-dir", str(tmp_path / "out")) == 0
    assert "Traffic phase from" not in capsys.readouterr().out
    assert plan(tmp_path, "--reclaims-per-h", "0.1") == 2
    assert "--spot" in capsys.readouterr().err
    assert plan(tmp_path, "--output-scale", "0") == 2
    assert "--output-scale: must be above 0" in capsys.readouterr().err


def test_a_plan_shows_the_phases_of_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(two_rates((2.0, 8.0), 300.0), tmp_path / "trace.csv")
    write_profile(worker(), tmp_path / "worker.yaml")
    assert plan(tmp_path, "--output-dir", str(tmp_path / "out")) == 0
    assert "Traffic phase from" in capsys.readouterr().out
    made = read_plan(tmp_path / "out/plan.json")
    calm, busy = made.inputs.phases
    assert busy.start_s == pytest.approx(300.0, abs=15.0)
    assert calm.rate_rps == pytest.approx(2.0, rel=0.15)
    assert busy.rate_rps == pytest.approx(8.0, rel=0.15)
    assert {s.start_s for s in made.schedule} <= {0.0, busy.start_s}
    report = (tmp_path / "out/report.html").read_text()
    assert "Lines mark the change points between 2 traffic phases" in report
    assert "Traffic phase from" in report


MONDAY_S = 1_748_822_400.0  # 2025-06-02


def scheduled(monkeypatch: pytest.MonkeyPatch, days: float, start_s: float | None, faster: float = 1.0):
    """The schedule of days whose working hours, by a clock, need five workers and all other hours two."""
    workload = Workload(np.arange(0.0, days * DAY_S, 600.0) / faster, *np.full((2, round(days * 144)), 100))
    zero_s = ((start_s or MONDAY_S) - MONDAY_S) % WEEK_S

    def misses(window: _Window, workers: int, _: float = math.inf) -> int:
        begin_s, end_s = window.spans[0]
        at_s = (begin_s + end_s) / 2 * faster + zero_s
        works = 9 <= at_s % DAY_S / 3600 < 18 and at_s // DAY_S % 7 < 5
        return 0 if workers >= (5 if works else 2) else window.requests

    monkeypatch.setattr(_Window, "misses", misses)
    request = PlanRequest(Slo(1.0, 0.1), attainment=0.9)
    sizing = Sizing(worker_type(), workers=5, confirmed=5)
    with open_threads(1) as threads:
        return make_schedule(
            replace(search_of(workload, request), threads=threads),
            sizing,
            sizing.fleet(5),
            TraceClock.of(start_s, faster),
        )


def test_a_window_that_is_broken_off_fails_as_it_would_have() -> None:
    workload = poisson(rate_rps=12.0)
    search = search_of(workload)
    sizing, held = Sizing(worker_type(), workers=3), set()
    for workers in (1, 2, 3, 4):
        whole = _Window(search, sizing, [(10.0, 25.0), (30.0, 45.0)]).misses(workers)
        for allowed in (0.0, 2.5, 40.0, 200.0):
            quick = _Window(search, sizing, [(10.0, 25.0), (30.0, 45.0)]).misses(workers, allowed)
            assert (quick <= allowed) == (whole <= allowed)
            held.add(quick <= allowed)
    assert held == {True, False}


def two_rates(rates_rps: tuple[float, ...], each_s: float = 900.0) -> Workload:
    parts = [poisson(rate_rps=rps, requests=round(rps * each_s)) for rps in rates_rps]
    times_s = [np.minimum(part.arrival_s, each_s) + i * each_s for i, part in enumerate(parts)]
    columns = (np.concatenate([getattr(p, c) for p in parts]) for c in ("prompt_tokens", "output_tokens"))
    return Workload(np.concatenate(times_s), *columns)


def test_windows_begin_where_the_rate_changes() -> None:
    workload = two_rates((2.0, 12.0, 3.0))
    search, sizing = search_of(workload, PlanRequest(Slo(0.5, 0.03), attainment=0.95)), Sizing(worker_type())
    most = next(n for n in range(1, 20) if search.replay(sizing.fleet(n)).attainment >= 0.95)
    sizing = replace(sizing, workers=most, confirmed=most)
    with open_threads(1) as threads:
        found = make_schedule(replace(search, threads=threads), sizing, sizing.fleet(most))
    assert found is not None
    assert found.attainment >= 0.95
    counts = [s.workers for s in found.stretches]
    assert counts[1] > counts[0]
    assert counts[1] > counts[2]
    assert [s.start_s for s in found.stretches] == [
        0.0,
        pytest.approx(900.0, abs=30.0),
        pytest.approx(1800.0, abs=30.0),
    ]
    assert found.stretches[-1].end_s >= workload.arrival_s[-1]


@given(
    st.floats(0.0, 1e6),
    st.lists(st.floats(0.0, 1.0), max_size=20),
    st.sampled_from([NO_CLOCK, TraceClock(5e4), TraceClock(1e3, 2.0)]),
)
def test_windows_cover_the_trace_and_do_not_overlap(end_s: float, at: list[float], clock: TraceClock) -> None:
    arrival_s = np.sort(np.array([0.0, *(end_s * share for share in at), end_s]))
    workload = Workload(arrival_s, *np.full((2, len(arrival_s)), 100))
    edges = window_edges(workload, sorted({share * end_s for share in at[:8]}), clock)
    assert edges[0] == 0.0
    assert edges[-1] > end_s
    assert (np.diff(edges) > 0).all()
    assert len(np.histogram(arrival_s, edges)[0]) == len(edges) - 1
    assert np.histogram(arrival_s, edges)[0].sum() == len(workload)


def test_a_steady_trace_has_equal_windows() -> None:
    workload = Workload(np.arange(0.0, 3600.0, 0.5), *np.full((2, 7200), 100))
    assert [p.requests for p in phases_of(workload)] == [7200]
    assert window_edges(workload).tolist()[:-1] == [600.0 * i for i in range(6)]


WORKING, FREE = [2, 2, 2, 5, 5, 5, 2, 2], [2] * 8


@pytest.mark.parametrize("days", [7, 14, 30])
@pytest.mark.parametrize("late_days", [0.0, 3.0, 5.3])
@pytest.mark.parametrize("faster", [1.0, 2.0])
def test_from_seven_days_on_a_schedule_is_a_week_that_repeats(
    monkeypatch: pytest.MonkeyPatch, days: float, late_days: float, faster: float
) -> None:
    found = scheduled(monkeypatch, days, MONDAY_S + late_days * DAY_S, faster)
    assert np.array_equal(np.reshape(found.week, (7, 8)), [WORKING] * 5 + [FREE] * 2)
    for stretch in found.stretches:
        for at_s in np.arange(stretch.start_s * faster + 1.0, stretch.end_s * faster, CELL_S / 2):
            assert stretch.workers == found.week[int((at_s + late_days * DAY_S) // CELL_S) % 56]
    rows = week_rows(found.week)
    assert rows["Monday"] == WORKING
    assert rows["Sunday"] == FREE


def test_less_than_a_week_shows_no_pattern_of_days(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scheduled(monkeypatch, 5.0, MONDAY_S).week == ()


def test_without_a_clock_the_week_begins_with_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(scheduled(monkeypatch, 7.0, None).week[:8]) == WORKING
