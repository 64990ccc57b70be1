"""The replay of a recorded day: what each rule costs, next to a schedule that was known beforehand."""

import json
from dataclasses import replace

import numpy as np
import pytest

from controlplane.errors import BadInput
from controlplane.scaler.bounds import Autoscale
from controlplane.scaler.hpa import HpaRule
from controlplane.snapshot import SERVING, Snapshot
from controlplane.types import Slo
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from tokenfleet.advise.advice import AdviceSettings
from tokenfleet.advise.decide import looked_at
from tokenfleet.advise.followers import (
    BASELINES,
    EDGES_S,
    LOOK_S,
    RAY_SERVE,
    Autoscalers,
    FleetMeter,
    advised,
)
from tokenfleet.advise.replay import ADVICE, EACH, HINDSIGHT, PLACED, TOLERANT, ReplayedDay, best
from tokenfleet.cli.main import main
from tokenfleet.profiles.library import find_profiles

SLO = Slo(2.5, 0.075)
PROFILE = find_profiles("llama-3.1-70b", ["h100"], [2])[0]
A100 = find_profiles("llama-3.1-70b", ["a100"], [4])[0]
NAME = PROFILE.type_name


def day(minutes=30, quiet=2.0, busy=10.0, seed=0):
    """A quiet third, a busy one, a quiet one."""
    rng, part = np.random.default_rng(seed), minutes * 20.0
    times = np.concatenate(
        [
            n * part + rng.uniform(0, part, rng.poisson(rate * part))
            for n, rate in enumerate((quiet, busy, quiet))
        ]
    )
    load = Workload(np.sort(times), rng.integers(200, 2000, len(times)), rng.integers(50, 400, len(times)))
    worker_type = WorkerType.of(PROFILE, 5.38)
    scaling = Autoscale(1, 1000).settings((worker_type,))
    return ReplayedDay(load, AdviceSettings(SLO, 0.99, scaling, 30.0))


@pytest.fixture(scope="module")
def rows():
    return list(day(18).rows((BASELINES[0], RAY_SERVE)))


def test_every_rule_serves_the_day_and_the_optimum_meets_the_target_for_least(rows):
    chosen = [best(tried, 0.99) for tried in rows]
    assert [row.rule for row in chosen[:4]] == [HINDSIGHT, ADVICE, TOLERANT, PLACED]
    assert len({row.requests for row in chosen}) == 1
    optimum = chosen[0]
    assert optimum.attainment >= 0.99
    for tried in (*rows[1:3], *rows[4:]):  # those that place alike
        for row in tried:
            assert row.attainment < 0.99 or row.worker_s > 0.9 * optimum.worker_s
    assert chosen[1].changes > 1
    assert chosen[-1].changes == 0
    assert chosen[-1].worker_s > chosen[1].worker_s


def test_the_advice_costs_less_than_utilisation_which_is_high_at_any_load(rows):
    advice, utilisation = rows[1][0], best(rows[4], 0.99)
    assert advice.worker_s < 0.7 * utilisation.worker_s


def test_of_a_baselines_targets_the_cheapest_that_meets_is_shown_else_the_best(rows):
    tried = rows[4]
    assert len({row.target for row in tried}) == 3
    cheapest = best(tried, 0.0)
    assert cheapest.worker_s == min(row.worker_s for row in tried)
    assert best(tried, 1.1).attainment == max(row.attainment for row in tried)


def test_a_replay_gives_the_same_numbers_again():
    load = day(9)
    assert list(load.rows(())) == list(load.rows(()))


def test_the_meter_counts_every_request_once_and_only_servers_that_serve():
    seen, told = [], day(9)
    ended = 0.0

    def brain(plane):
        meter = FleetMeter(plane)
        decide = advised([looked_at(told.settings, LOOK_S)], {NAME: (1, 12)}, 0.0)(plane)

        def look(state, snapshot):
            nonlocal ended
            pages = meter.pages(snapshot, snapshot.now_s)
            assert len(pages) == sum(w.state == SERVING for w in snapshot.workers)
            ended = sum(page.values["ended"] for page in pages.values())
            for page in pages.values():
                for name in EDGES_S:
                    assert page.buckets[name][np.inf] == page.values["ended"]
            seen.append(frozenset(pages))
            return decide(state, snapshot)

        return look

    outcome, record = told.run({NAME: 12}, {NAME: 12}, brain)
    assert len(set(seen)) > 1  # the fleet shrank
    assert 0 < ended <= len(outcome.workload)
    assert record.drains > 0


def trace(tmp_path, rows="0,300,80\n1,300,80\n700,300,80\n"):
    path = tmp_path / "day.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    return path


def asked(*words):
    return ["advise", "--slo", "ttft=2.5s,tpot=75ms", *map(str, words)]


def test_the_command_prints_a_row_for_each_rule_and_the_same_as_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = asked("--replay", trace(tmp_path), "--model", "llama-3.1-70b", "--gpu", "h100", "--tp", 2)
    assert main([*words, "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "tokenfleet.advice-replay/1"
    assert [row["rule"] for row in told["rules"][:2]] == [HINDSIGHT, ADVICE]
    assert all(row["of_hindsight"] >= 0.99 and row["attainment"] == 1.0 for row in told["rules"])
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "On this trace the advice meets the target" in out
    assert "HPA on queue length" in out


def test_the_command_replays_a_mix_and_names_its_types(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    kinds = ["--kind=gpu=h100,tp=2,max=2", "--kind=gpu=a100,tp=4,min=0,max=2"]
    assert main(asked("--replay", trace(tmp_path), "--model", "llama-3.1-70b", *kinds)) == 0
    out = capsys.readouterr().out
    assert f"{HINDSIGHT} of {NAME} alone" in out
    assert f"Replica-hours of {NAME} + {A100.type_name}; HPA scales each by itself." in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("vllm-0:8000",), "--replay: reads a trace and no servers; leave out an address"),
        (("--once",), "--replay: reads a trace and no servers; leave out --once"),
        ((), "--replay: which model? give --model and --gpu, or --profile"),
    ],
)
def test_what_a_replay_cannot_use_is_refused_in_a_line(tmp_path, capsys, words, line):
    assert main(asked("--replay", trace(tmp_path), *words)) == 2
    assert line in capsys.readouterr().err


def test_a_trace_that_is_none_is_refused_in_a_line(tmp_path, capsys):
    path = tmp_path / "none.csv"
    path.write_text("hello\n")
    words = asked("--replay", path, "--model", "llama-3.1-70b", "--gpu", "h100", "--tp", 2)
    assert main(words) == 2
    err = capsys.readouterr().err.strip()
    assert "none.csv" in err
    assert len(err.splitlines()) == 1


def mixed_day():
    """At most one H100 replica, and as many A100s as the traffic needs."""
    h100 = replace(WorkerType.of(PROFILE, 5.38), low=1, limit=1)
    a100 = replace(WorkerType.of(A100, 5.56), low=0, limit=12)
    alone = day(9)
    return replace(alone, settings=replace(alone.settings, scaling=Autoscale(1, 100).settings((h100, a100))))


def test_a_mix_is_replayed_within_the_bounds_of_each_type_beside_an_hpa_for_each():
    asked = mixed_day()
    chosen = [best(tried, 0.99) for tried in asked.rows(BASELINES[:1])]
    optima, (advice, *_, utilisation) = chosen[:2], chosen[2:]
    assert {row.rule for row in optima} == {f"{HINDSIGHT} of {p.type_name} alone" for p in (PROFILE, A100)}
    assert optima[0].usd <= optima[1].usd
    assert [row.rule for row in chosen[2:6]] == [ADVICE, EACH, TOLERANT, PLACED]
    for row in (advice, chosen[3], utilisation):
        h100, a100 = row.hours[NAME], row.hours[A100.type_name]
        assert row.worker_s == pytest.approx((h100 + a100) * 3600.0)
        assert row.usd == pytest.approx(h100 * 5.38 + a100 * 5.56)
        assert h100 <= 9.2 / 60.0  # one, all the time
        assert a100 > 0.0
    assert advice.changes > 1
    assert advice.usd < utilisation.usd


def test_a_mix_with_a_type_of_no_price_is_refused():
    asked = mixed_day()
    types = tuple(replace(one, usd_per_h=None) for one in asked.settings.types)
    settings = replace(asked.settings, scaling=replace(asked.settings.scaling, worker_types=types))
    with pytest.raises(BadInput, match=f"--replay: {NAME} has no price"):
        replace(asked, settings=settings)


def test_an_autoscaler_remembers_what_it_starts_with_and_falls_after_its_window():
    autoscalers = Autoscalers(HpaRule(1.0, 0, 0), {NAME: (1, 20)})
    has, falls = 8, []
    for now_s in np.arange(0.0, 400.0, LOOK_S):
        seen = Snapshot(float(now_s), (), wanted=has, wanted_kinds={NAME: has})
        for change in autoscalers.follow(seen, lambda rule, name: 3):
            has = change.kinds[NAME]
            falls.append((now_s, has))
    assert falls == [(300.0, 3)]
