"""The scorecard: a plan against a fleet whose engines are known to differ from its profile by so much."""

import json
import re
import time

import numpy as np
import pytest
from made_history import written
from made_plans import PROFILE, SLO, plan_json

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import with_times
from controlplane.placement.lengths import LengthTable
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from tokenfleet.cli.main import main
from tokenfleet.service.data_folder import Database
from tokenfleet.service.jobs import Plans
from tokenfleet.service.scorecard import bias_of, scorecard_of


def served(
    data,
    decode=1.0,
    prefill=1.0,
    requests=1500,
    workers=2,
    plan=None,
    others=(),
    classes=(None,),
    waits_s=(0, 0, 0),
):
    """A folder of a fleet that served under a plan; `decode` and `prefill` scale its profile's times.

    `waits_s`: the mean wait in the gateway's queue, the wait of all in an engine, and the mean of waits there
    that differ, which no replay knows.
    """
    rng = np.random.default_rng(1)
    workload = Workload(
        np.cumsum(rng.exponential(1 / 10.0, requests)),
        rng.integers(200, 1500, requests),
        rng.integers(20, 300, requests),
    )
    specs = [WorkerSpec(with_times(PROFILE, decode, prefill))] * workers
    predictor = LengthTable.from_history(workload.prompt_tokens, workload.output_tokens)
    outcome = simulate(workload, specs, SLO, "spread", predictor=predictor)
    queued_s = outcome.ttft_s - outcome.engine_s + rng.exponential(waits_s[0], requests)
    database = Database(data / "tokenfleet.db")
    plans = Plans(database)
    name = plans.keep(plan or plan_json(workers), "served")
    number = plans.begin_serving(name)
    began_s = time.time() - 4000
    with database.transaction() as cursor:
        cursor.execute("UPDATE servings SET started_s = ?", (began_s - 1,))
    plans.end_serving(number)
    database.close()
    base = {
        "priority": "normal", "tenant": "t", "outcome": "finished", "ttft_target_s": SLO.ttft_s,
        "tpot_target_s": SLO.tpot_s, "moves": 0, "replays": 0, "model": "m",
    }  # fmt: skip
    rows = [
        base
        | {
            "arrival_s": began_s + workload.arrival_s[i],
            "prompt_tokens": int(workload.prompt_tokens[i]),
            "output_tokens": int(workload.output_tokens[i]),
            "queued_s": queued_s[i],
            "ttft_s": queued_s[i] + outcome.engine_s[i] + waits_s[1] + rng.exponential(waits_s[2]),
            "tpot_s": outcome.tpot_s[i],
            "worker": f"w{outcome.worker[i]}",
            "slo_class": classes[i % len(classes)],
        }
        for i in range(requests)
    ]
    written(data / "history", [*rows, *(rows[0] | other for other in others)])
    return name, outcome


def test_a_fleet_as_fast_as_its_profile_has_no_bias(tmp_path):
    name, outcome = served(tmp_path)
    card = scorecard_of(tmp_path, name)
    assert (card["bias"]["decode"], card["bias"]["prefill"]) == (1.0, 1.0)
    assert card["bias"]["left"] == pytest.approx({"tpot": 1.0, "ttft": 1.0}, abs=1e-5)
    for what in ("ttft_s", "tpot_s"):
        assert [row["ratio"] for row in card[what].values()] == pytest.approx([1.0] * 4, abs=1e-5)
    assert card["attainment"]["observed"] == pytest.approx(outcome.attainment, abs=1e-6)
    assert card["attainment"]["predicted"] == card["attainment"]["observed"]
    assert card["workers"] == {"planned": 2, "seen": 2}
    assert card["rate_rps"]["observed"] == pytest.approx(10.0, rel=0.1)


def test_each_class_is_judged_by_its_own_targets(tmp_path):
    plan = plan_json(2)
    loose = {
        "name": "loose",
        "ttft_s": 600.0,
        "tpot_s": 60.0,
        "attainment": {"target": 0.9, "expected": 0.95},
    }
    plan["classes"] = [loose, loose | {"name": "hasty", "ttft_s": 1e-4, "tpot_s": 1e-5}]
    name, outcome = served(tmp_path, plan=plan, classes=("loose", "hasty", None))
    card = scorecard_of(tmp_path, name)
    found = {one["name"]: (one["requests"], one["observed"]) for one in card["classes"]}
    plain = round(float(outcome.met[2::3].mean()), 6)
    assert found == {"loose": (500, 1.0), "hasty": (500, 0.0), "default": (500, plain)}
    assert [one["planned"] for one in card["classes"]] == [0.95, 0.95, None]
    assert "class hasty: 0 % of requests in SLO (target 90 %)" in card["says"]


@pytest.mark.parametrize(("decode", "prefill"), [(1.3, 1.3), (0.7, 0.8), (1.5, 1.0), (1.0, 1.8)])
def test_the_bias_of_an_engine_is_found_from_its_latencies_alone(tmp_path, decode, prefill):
    name, _ = served(tmp_path, decode, prefill)
    card = scorecard_of(tmp_path, name)
    assert card["bias"]["decode"] == pytest.approx(decode, rel=0.05)
    assert card["bias"]["prefill"] == pytest.approx(prefill, rel=0.1)
    assert max(abs(ratio - 1) for ratio in card["bias"]["left"].values()) < 0.1
    assert bias_of(card).decode == card["bias"]["decode"]


@pytest.mark.parametrize("waits_s", [(2.0, 0.0, 0.0), (0.0, 0.02, 0.0), (2.0, 0.02, 0.0)])
@pytest.mark.parametrize("prefill", [1.0, 1.6])
def test_time_in_a_queue_is_no_error_of_prefill(tmp_path, waits_s, prefill):
    name, _ = served(tmp_path, 1.0, prefill, waits_s=waits_s)
    card = scorecard_of(tmp_path, name)
    assert card["bias"]["decode"] == pytest.approx(1.0, rel=0.02)
    assert card["bias"]["prefill"] == pytest.approx(prefill, rel=0.1)
    assert card["bias"]["left"]["ttft"] > 1.1
    assert any("step times alone do not explain it" in said for said in card["says"])


def test_a_difference_within_the_scatter_of_waits_is_no_error_of_prefill(tmp_path):
    name, _ = served(tmp_path, waits_s=(2.0, 0.0, 0.1))
    bias = scorecard_of(tmp_path, name)["bias"]
    assert (bias["prefill"], bias["decode"]) == (1.0, pytest.approx(1.0, rel=0.02))


def test_requests_recorded_without_their_time_in_the_queue_tell_no_step_times(tmp_path):
    name, _ = served(tmp_path, requests=99, others=[{"queued_s": None}] * 99)
    card = scorecard_of(tmp_path, name)
    assert (card["bias"], card["attainment"]["observed"] > 0.9) == (None, True)
    assert "step times are not compared: an earlier version has recorded" in card["says"][-1]


def test_what_was_turned_away_counts_as_missed_and_who_left_does_not(tmp_path):
    away = {"outcome": "rejected", "output_tokens": 0, "ttft_s": None, "tpot_s": None, "worker": None}
    name, outcome = served(tmp_path, others=[away] * 100 + [away | {"outcome": "aborted"}] * 50)
    card = scorecard_of(tmp_path, name)
    assert (card["requests"], card["not_served"]) == (1500, 100)
    assert card["attainment"]["observed"] == pytest.approx(outcome.attainment * 1500 / 1600, abs=1e-6)


def test_capacity_is_shown_only_where_the_fleet_was_pressed(tmp_path):
    (tmp_path / "one").mkdir()
    name, _ = served(tmp_path / "one")
    assert scorecard_of(tmp_path / "one", name)["capacity"]["failed_rps"] is None
    (tmp_path / "two").mkdir()
    name, _ = served(tmp_path / "two", decode=4.0, prefill=4.0)
    pressed = scorecard_of(tmp_path / "two", name)
    assert pressed["capacity"]["failed_rps"] > 0
    assert pressed["says"][0].startswith("target missed")


def test_too_little_served_compares_nothing(tmp_path):
    name, _ = served(tmp_path, requests=99)
    card = scorecard_of(tmp_path, name)
    assert (card["bias"], card["attainment"], card["requests"]) == (None, None, 99)
    assert "100 are needed" in card["says"][0]
    with pytest.raises(BadInput, match=r"--bias-from: .* 100 are needed"):
        bias_of(card)


def test_a_plan_of_another_profile_is_compared_but_not_replayed(tmp_path):
    plan = plan_json()
    plan["inputs"]["profiles"][0]["date"] = "2020-01-01"
    name, _ = served(tmp_path, plan=plan)
    card = scorecard_of(tmp_path, name)
    assert card["ttft_s"]["p50"]["observed"] is not None
    assert (card["ttft_s"]["p50"]["predicted"], card["bias"]) == (None, None)
    assert any("cannot be replayed" in said for said in card["says"])


def test_the_verbs_show_the_scorecard_and_feed_its_bias_to_the_next_plan(tmp_path, capsys):
    name, _ = served(tmp_path, 1.5, 1.5)
    assert main(["scorecard", "--data", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    head, plan, *_ = shown.splitlines()
    assert re.match(r"Target (met|missed): [\d.]+ % of requests in SLO \(target [\d.]+ %\)$", head)
    assert plan.startswith(f"Plan {name}: ")
    assert "observed / predicted" in shown
    asked = [
        "plan", "--since", "2h", "--data", str(tmp_path), "--model", "llama-3.1-8b", "--gpu", "h100",
        "--tp", "1", "--slo", "ttft=2s,tpot=100ms", "--attainment", "0.9", "--confidence", "0.6",
        "--format", "json",
    ]  # fmt: skip
    assert main(asked) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*asked, "--bias-from", "last"]) == 0
    biased = capsys.readouterr()
    told = json.loads(biased.out)
    assert told["tpot_s"]["p50"] / told["workers"] > plain["tpot_s"]["p50"] / plain["workers"]
    assert any(f"under plan {name}" in warning for warning in told["inputs"]["warnings"])
    warned = re.search(r"decode x ([\d.]+)", biased.err)
    assert warned is not None
    assert float(warned[1]) == pytest.approx(1.5, rel=0.05)
    assert main(["scorecard", "none", "--data", str(tmp_path)]) == 2
    assert "no such plan is kept" in capsys.readouterr().err
