"""The scorecard: a plan against a fleet whose engines are known to differ from its profile by so much."""

import json
import re
import time
from dataclasses import replace

import numpy as np
import pytest
from made_history import written
from made_plans import PROFILE, SLO, plan_json

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import with_times
from controlplane.placement.lengths import LengthTable
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from dataplane.live.gateway.history import STEP_COLUMNS
from dataplane.simulated.simulate import WorkerSpec, simulate
from tokenfleet.cli.main import main
from tokenfleet.service.data_folder import Database
from tokenfleet.service.jobs import Plans, Serving
from tokenfleet.service.plan_replay import recorded_steps, step_ratios
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
    outside_s=(0.0, 0.0),
    steps=None,
):
    """A folder of a fleet that served under a plan; `decode` and `prefill` scale its profile's times.

    `outside_s`: what the host adds to the mean TTFT and to each token, outside the engines. `steps`: the text
    of its steps.csv.
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
            "ttft_s": outcome.ttft_s[i] + rng.exponential(outside_s[0]),
            "tpot_s": outcome.tpot_s[i] + outside_s[1],
            "worker": f"w{outcome.worker[i]}",
            "slo_class": classes[i % len(classes)],
        }
        for i in range(requests)
    ]
    written(data / "history", [*rows, *(rows[0] | other for other in others)])
    made = steps_of(with_times(PROFILE, decode, prefill), began_s) if steps is None else steps
    (data / "steps.csv").write_text(f"{','.join(STEP_COLUMNS)}\n{made}")
    return name, outcome


def steps_of(profile, at_s, number=400, kind="", tokens=1000):
    """Rows of steps.csv that such an engine makes, within 20 % scatter: every second carries prefill."""
    rng = np.random.default_rng(2)
    rows = []
    for i in range(number):
        prefill, sequences = int(rng.integers(1, tokens)) * (i % 2), int(rng.integers(1, 50))
        step_s = float(profile.step.step_s(prefill, sequences, 500 * sequences, prefill**2))
        step_s *= rng.uniform(0.8, 1.2)
        rows.append(
            f"{prefill},{sequences},{500 * sequences},{step_s:.7f},{prefill**2},w0,{at_s + i},9,{kind}\n"
        )
    return "".join(rows)


def test_a_fleet_as_fast_as_its_profile_has_no_bias(tmp_path):
    name, outcome = served(tmp_path)
    card = scorecard_of(tmp_path, name)
    assert (card["bias"]["decode"], card["bias"]["prefill"]) == pytest.approx((1.0, 1.0), abs=0.05)
    assert card["bias"]["left"] == pytest.approx({"tpot": 1.0, "ttft": 1.0}, abs=0.05)
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
    assert "Class hasty: 0 % of requests in SLO (target 90 %)." in card["says"]
    (table,) = card["tables"]
    assert ["SLO attainment, class hasty", "95.00 %", "0 %", "0 %", "–"] in table["rows"]


@pytest.mark.parametrize(("decode", "prefill"), [(1.3, 1.3), (0.7, 0.8), (1.5, 1.0), (1.0, 1.8)])
def test_the_bias_of_an_engine_is_found_from_its_steps(tmp_path, decode, prefill):
    name, _ = served(tmp_path, decode, prefill)
    card = scorecard_of(tmp_path, name)
    assert card["bias"]["decode"] == pytest.approx(decode, rel=0.03)
    assert card["bias"]["prefill"] == pytest.approx(prefill, rel=0.1)
    assert max(abs(ratio - 1) for ratio in card["bias"]["left"].values()) < 0.1
    assert bias_of(card).decode == card["bias"]["decode"]


def test_time_outside_the_engines_is_no_error_of_the_profile(tmp_path):
    name, _ = served(tmp_path, outside_s=(0.5, 0.02))
    card = scorecard_of(tmp_path, name)
    assert (card["bias"]["decode"], card["bias"]["prefill"]) == pytest.approx((1.0, 1.0), abs=0.05)
    assert min(card["bias"]["left"].values()) > 1.2
    assert any("step times alone do not explain it" in said for said in card["says"])


def test_steps_of_several_types_are_held_against_their_own_profiles(tmp_path):
    fast, at_s = with_times(PROFILE, 0.5, 0.5), time.time() - 4000
    fast = replace(fast, gpu="fast")
    kinds = {WorkerType.of(PROFILE).name: PROFILE, "fast TP1": fast}
    made = [
        steps_of(with_times(p, 1.4, 1.2), at_s, number, kind)
        for (kind, p), number in zip(kinds.items(), (200, 800), strict=True)
    ]
    (tmp_path / "steps.csv").write_text(f"{','.join(STEP_COLUMNS)}\n{''.join(made)}")
    steps = recorded_steps(tmp_path, [Serving(at_s - 1, None)])
    assert step_ratios(kinds, steps) == pytest.approx((1.4, 1.2), rel=0.05)
    wrong = step_ratios(dict(zip(kinds, reversed(kinds.values()), strict=True)), steps)
    assert abs(wrong[0] - 1.4) > 0.1


def test_prefill_that_steps_hardly_carry_follows_decode(tmp_path):
    at_s = time.time() - 4000
    light = replace(PROFILE, step=replace(PROFILE.step, per_prefill_sequence_s=0.0, per_prefill_step_s=0.0))
    (tmp_path / "steps.csv").write_text(
        f"{','.join(STEP_COLUMNS)}\n{steps_of(with_times(light, 1.3, 1.0), at_s, tokens=3)}"
    )
    decode, prefill = step_ratios({"any": light}, recorded_steps(tmp_path, [Serving(at_s - 1, None)]))
    assert decode == prefill == pytest.approx(1.3, rel=0.03)


def test_steps_are_those_of_the_serving_and_half_a_row_is_none(tmp_path):
    at_s = time.time() - 4000
    (tmp_path / "steps.csv").write_text(f"{','.join(STEP_COLUMNS)}\n{steps_of(PROFILE, at_s)}0,4,400,0.01")
    earlier = ",".join(STEP_COLUMNS[:-2])
    (tmp_path / "steps.1.csv").write_text(
        f"{earlier}\n0,4,400,0.01,0,w0,{at_s - 50}\n0,4,400,0.01,0,w0,{at_s}\n"
    )
    steps = recorded_steps(tmp_path, [Serving(at_s - 1, at_s + 99.5)])
    assert (len(steps), steps["kind"].null_count()) == (101, 101)
    (tmp_path / "steps.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match=r"steps\.csv: has no column prefill_tokens"):
        recorded_steps(tmp_path, [Serving(at_s - 1, None)])


def test_a_fleet_that_recorded_no_steps_is_compared_by_latencies(tmp_path):
    name, _ = served(tmp_path, steps="")
    card = scorecard_of(tmp_path, name)
    assert (card["bias"], card["attainment"]["observed"] > 0.9) == (None, True)
    assert card["ttft_s"]["p50"]["predicted"] > 0
    assert "Step times are not compared: the fleet has recorded 0 steps of decode" in card["says"][-1]
    with pytest.raises(BadInput, match=r"--bias-from: .* 100 are needed"):
        bias_of(card)


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
    assert pressed["says"][0].startswith("Target missed")


def test_the_last_minute_s_rate_is_that_of_the_seconds_it_has(tmp_path):
    name, _ = served(tmp_path, requests=450)
    card = scorecard_of(tmp_path, name)
    assert card["capacity"]["carried_rps"] == pytest.approx(card["rate_rps"]["observed"], rel=0.05)


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
    assert re.match(r"Target (met|missed): [\d.]+ % of requests in SLO \(target [\d.]+ %\)\.$", head)
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
