"""The excess over the hindsight optimum: by brute force, its parts add up, each says what was done wrong."""

import asyncio
import itertools
import json
import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_fleet_log import DAY, KIND, NOON_S, fleet, logged, look
from made_history import written
from made_plans import PROFILE, SLO, plan_json
from prometheus_client import CollectorRegistry, generate_latest

from controlplane.errors import BadInput
from controlplane.placement.lengths import LengthTable
from controlplane.scaler.bounds import ScheduleInterval
from controlplane.scaler.line import Line
from controlplane.types import Slo, SloClass
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from dataplane.history.files import read_history
from dataplane.history.fleet_log import DAY_S, Ruled, day_begin_s, read_fleet_log
from dataplane.simulated.simulate import WorkerSpec, simulate
from tokenfleet.cli.main import main
from tokenfleet.planning.schedule import paid
from tokenfleet.planning.sizing import fewest
from tokenfleet.profiles.library import find_profiles
from tokenfleet.service.app import fleet_extension
from tokenfleet.service.data_folder import Database
from tokenfleet.service.gap import (
    asked,
    gap_line,
    gap_of,
    gaps,
    kept_gap,
    last_kept_gap,
    last_whole_day,
    made_gap,
)
from tokenfleet.service.jobs import Plans
from tokenfleet.service.routes import GapCollector
from tokenfleet.service.score_process import LastGap

LINE = Line(0.25, 0.5)
RULE = Ruled(2, LINE.workers_per_rps, LINE.intercept, LINE.workers_per_rps, 1, 8)
NEXT_DAY_S = day_begin_s(DAY) + DAY_S + 3600.0


def requests(rates, seconds=300.0, seed=1, **more):
    """Rows of history of Poisson arrivals from noon on, with one rate for each stretch of `seconds`."""
    rng = np.random.default_rng(seed)
    times = [
        NOON_S + seconds * n + np.sort(rng.uniform(0.0, seconds, rng.poisson(rate * seconds)))
        for n, rate in enumerate(rates)
    ]
    base = {
        "priority": "normal", "tenant": "t", "outcome": "finished", "ttft_s": 0.1, "tpot_s": 0.01,
        "ttft_target_s": SLO.ttft_s, "tpot_target_s": SLO.tpot_s, "slo_class": None, "worker": "w0",
        "moves": 0, "replays": 0, "model": "m",
    }  # fmt: skip
    return [
        base
        | {"arrival_s": float(at_s), "prompt_tokens": int(p), "output_tokens": int(o)}
        | {k: v[i % len(v)] for k, v in more.items()}
        for i, at_s in enumerate(np.concatenate(times))
        for p, o in [(rng.integers(500, 4000), rng.integers(50, 400))]
    ]


def minutes(counts, rule=RULE, **more):
    """A look each half minute, a count of serving workers for each five minutes."""
    return [
        look(300.0 * n + 30.0 * k, serving=serving, rule=rule, **more)
        for n, serving in enumerate(counts)
        for k in range(10)
    ] + [look(300.0 * len(counts) - 1e-3, serving=counts[-1], rule=rule, **more)]


def found_in(tmp_path, rows, looks, made_of=None, **more):
    written(tmp_path / "history", rows)
    logged(tmp_path / "history", looks, made_of)
    (one,) = gaps(tmp_path, 0.0, NOON_S + 300.0 * math.ceil((looks[-1].at_s - NOON_S) / 300.0), **more)
    return one


def hours(amounts, unit="gpu_h"):
    return sum(amount[unit] for amount in amounts.values())


def check_adds_up(one):
    for unit in ("gpu_h", "usd"):
        assert hours(one["parts"], unit) == pytest.approx(one["paid"][unit] - one["least"][unit], abs=1e-4)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.sampled_from([0.0, 120.0, 300.0, 450.0, 900.0]),
)
def test_the_schedule_is_the_cheapest_of_all_that_are_never_below_the_need(need, cold_s):
    wanted = [ScheduleInterval(300.0 * n, 300.0 * (n + 1), workers) for n, workers in enumerate(need)]
    told = paid(wanted, cold_s).worker_hours * 3600.0

    def cost(counts):  # a start is paid from a cold start before, within the day
        starts = (
            max(after - before, 0) * min(cold_s, 300.0 * (n + 1))
            for n, (before, after) in enumerate(itertools.pairwise(counts))
        )
        return 300.0 * sum(counts) + sum(starts)

    every = itertools.product(*(range(n, max(need) + 1) for n in need))
    assert told == pytest.approx(min(cost(counts) for counts in every))


def test_the_fewest_workers_are_those_of_brute_force_in_every_window(tmp_path):
    rates = (3.0, 22.0, 9.0)
    rows = requests(rates)
    one = found_in(tmp_path, rows, minutes([6, 6, 6], cold_start_s=0.0))
    arrival_s = np.array([row["arrival_s"] for row in rows]) - NOON_S
    prompt, output = (np.array([row[f"{name}_tokens"] for row in rows]) for name in ("prompt", "output"))
    table = LengthTable.from_history(prompt, output)
    need = []
    for n in range(3):
        lead_s = 30.0 if n else 0.0
        part = Workload(arrival_s, prompt, output).window(300.0 * n - lead_s, 300.0 * (n + 1))
        for workers in range(1, 12):
            seen = simulate(part, [WorkerSpec(PROFILE)] * workers, SLO, predictor=table)
            if seen.met[part.arrival_s >= lead_s].mean() >= 0.9:
                break
        need.append(workers)
    assert len(set(need)) > 1
    assert one["least"]["gpu_h"] == pytest.approx(sum(need) * 300.0 / 3600.0, rel=1e-4)
    assert one["requests"] == len(rows)
    check_adds_up(one)


def test_every_part_says_what_was_done_wrong(tmp_path):
    rate = 12.0
    rows, right = requests([rate] * 4), asked(RULE, RULE.slope, rate)
    ruled = Ruled(right, *RULE_LINE)
    looks = minutes([right] * 4, rule=ruled)
    plain = found_in(tmp_path / "plain", rows, looks)
    check_adds_up(plain)
    quarter = 300.0 / 3600.0

    def parts(name, looks):
        one = found_in(tmp_path / name, rows, looks)
        check_adds_up(one)
        assert one["least"] == plain["least"]
        moved = {}
        for part in one["parts"].keys() | plain["parts"].keys():
            was, now = (told["parts"].get(part, {"gpu_h": 0.0})["gpu_h"] for told in (plain, one))
            if abs(now - was) > 1e-3:
                moved[part] = (now - was) / quarter
        return moved

    kept = minutes([right + 2] * 4, rule=ruled)
    assert parts("hold", kept) == pytest.approx({"hold": 8.0}, rel=1e-3)
    foreseen = minutes([right + 1] * 4, rule=Ruled(right + 1, *RULE_LINE))
    assert parts("forecast", foreseen) == pytest.approx({"forecast": 4.0}, rel=1e-3)
    drains = minutes([right] * 4, rule=ruled, starting=1, draining=2)
    assert parts("drains", drains) == pytest.approx({"starts and drains": 12.0}, rel=1e-3)
    behind = minutes([right - 1] * 4, rule=ruled)
    assert parts("behind", behind) == pytest.approx({"not there yet": -4.0}, rel=1e-3)
    # For three windows the line was drawn twice too steep; in the last it is measured.
    high = Ruled(asked(RULE, 2 * RULE.slope, rate), 2 * RULE.slope, RULE.intercept, 2 * RULE.slope, 1, 16)
    low = Ruled(right, RULE.slope, RULE.intercept, 2 * RULE.slope, 1, 16)
    measured = [look(900.0 + 30.0 * k, serving=right, rule=low) for k in range(10)]
    moved = parts("model", [*minutes([high.workers] * 3, rule=high)[:-1], *measured])
    assert moved == pytest.approx({"model": 3.0 * (high.workers - right)}, rel=0.02)


RULE_LINE = (RULE.slope, RULE.intercept, RULE.given_slope, RULE.low, RULE.high)


@given(st.data())
def test_the_parts_of_any_log_add_up(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("any")
    states = st.integers(0, 3)
    at_s, looks = 0.0, []
    for _ in range(data.draw(st.integers(3, 12))):
        rule = Ruled(data.draw(states), data.draw(st.floats(0.0, 1.0)), 0.5, 0.3, data.draw(states), None)
        looks.append(
            look(
                at_s, *(data.draw(states) for _ in range(3)), fixed=data.draw(st.booleans()),
                rule=data.draw(st.sampled_from([rule, None])),
            )
        )  # fmt: skip
        at_s += data.draw(st.sampled_from([1.0, 40.0, 70.0, 200.0]))
    written(folder / "history", requests([0.5], seconds=600.0))
    logged(folder / "history", looks)
    for one in gaps(folder, 0.0, NOON_S + at_s):
        check_adds_up(one)


def test_a_number_that_nobody_scaled_is_told_as_fixed_and_a_load_rule_as_not_told(tmp_path):
    rows = requests([6.0] * 2)
    fixed = found_in(tmp_path / "a", rows, minutes([3, 3], rule=None, fixed=True))
    assert set(fixed["parts"]) == {"fixed"}
    check_adds_up(fixed)
    loaded = found_in(tmp_path / "b", rows, minutes([3, 3], rule=None))
    assert set(loaded["parts"]) == {"not told apart"}
    check_adds_up(loaded)


def test_of_several_types_the_cheapest_serves_and_the_reasons_are_not_told_apart(tmp_path):
    dear = WorkerType.of(find_profiles("llama-3.1-8b", ["h100"], [2])[0], 30.0)
    made_of = fleet(types=(dear, KIND))
    one = found_in(tmp_path, requests([6.0] * 2), minutes([2, 2], kind=dear.name, rule=None), made_of)
    assert one["type"] == KIND.name
    assert set(one["parts"]) == {"not told apart"}
    assert "mixes were not tried" in one["says"][0]
    check_adds_up(one)


def test_each_class_is_kept_in_time_by_its_own_targets(tmp_path):
    rows = requests([14.0] * 2, slo_class=["tight", None, None, None])
    loose = found_in(tmp_path / "a", rows, minutes([3, 3]))
    for row in rows[::4]:
        row["ttft_target_s"], row["tpot_target_s"] = 0.15, 0.012
    tight = SloClass("tight", Slo(0.15, 0.012), 0.99)
    bound = found_in(tmp_path / "b", rows, minutes([3, 3]), fleet(classes=(tight,)))
    assert bound["least"]["gpu_h"] > loose["least"]["gpu_h"]


def test_a_long_day_is_looked_at_in_parts_and_says_so(tmp_path):
    rows = requests([9.0] * 6)
    looks = minutes([4] * 6)
    whole = found_in(tmp_path / "a", rows, looks)
    folder, end_s = tmp_path / "a" / "history", NOON_S + 1800.0
    logs = read_fleet_log(folder, NOON_S, end_s)
    part = gap_of(*logs, read_history(folder, 0.0, end_s), NOON_S, end_s, (len(rows) + 1) // 2)
    assert part["says"] == ["3 of 6 windows were simulated, the others estimated by rate"]
    assert part["least"]["gpu_h"] == pytest.approx(whole["least"]["gpu_h"], rel=0.2)
    check_adds_up(part)


def test_a_day_that_is_over_is_made_once_and_its_gap_is_among_the_metrics(tmp_path):
    looks = minutes([3, 3])
    found_in(tmp_path, requests([6.0] * 2), looks)
    assert last_whole_day(tmp_path, NOON_S) is None
    assert kept_gap(tmp_path / "history", DAY) is None
    assert last_whole_day(tmp_path, NEXT_DAY_S) == DAY
    made = made_gap(tmp_path / "history", DAY, NEXT_DAY_S)
    assert kept_gap(tmp_path / "history", DAY) == made
    (again,) = gaps(tmp_path, 0.0, NEXT_DAY_S)
    assert again == made
    registry = CollectorRegistry()
    registry.register(GapCollector(partial(last_kept_gap, tmp_path / "history")))
    shown = generate_latest(registry).decode()
    assert f"tokenfleet_gap_ratio {made['ratio']}" in shown
    assert f'tokenfleet_gap_gpu_hours{{part="paid"}} {made["paid"]["gpu_h"]}' in shown
    assert 'tokenfleet_gap_usd{part="cheapest"}' in shown
    kept = tmp_path / "history" / f"gap-{DAY}.json"
    whole = kept.read_text()
    for spoiled in (whole[:-20], whole.replace('"paid":{', '"paid":{"gpu_h":"","b":{')):
        kept.write_text(spoiled)
        assert "\ntokenfleet_gap_ratio " not in generate_latest(registry).decode()
        assert gaps(tmp_path, 0.0, NEXT_DAY_S) == [made]  # it is made again


def test_the_verbs_say_the_gap_and_refuse_a_hostile_log_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("time.time", lambda: NEXT_DAY_S)
    assert main(["scorecard", "gap", "--data", str(tmp_path)]) == 1
    found_in(tmp_path, requests([6.0] * 2), minutes([3, 3]))
    database = Database(tmp_path / "tokenfleet.db")
    plans = Plans(database)
    number = plans.begin_serving(plans.keep(plan_json(3), "served"))
    with database.transaction() as cursor:
        cursor.execute("UPDATE servings SET started_s = ?", (NOON_S - 1.0,))
    plans.end_serving(number)
    with database.transaction() as cursor:
        cursor.execute("UPDATE servings SET ended_s = ?", (NOON_S + 600.0,))
    database.close()
    capsys.readouterr()
    assert main(["scorecard", "--data", str(tmp_path)]) == 0
    head, *table = capsys.readouterr().out.splitlines()
    assert head == "Target met: 100 % of requests in SLO (target 90 %)."
    assert any(line.startswith(f"{DAY} (UTC, ") and " the hindsight optimum of " in line for line in table)
    assert "paid / optimum" not in "".join(table)  # a single day is a line
    never = plan_json(4)
    database = Database(tmp_path / "tokenfleet.db")
    name = Plans(database).keep(never, "job")
    database.close()
    assert main(["scorecard", name, "--data", str(tmp_path)]) == 1  # it was never served: no days are its
    assert "hindsight" not in capsys.readouterr().out
    assert main(["scorecard", "gap", "--data", str(tmp_path), "--format", "json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["days"]
    assert told["paid"]["usd"] > told["least"]["usd"] > 0
    (tmp_path / "history" / f"gap-{DAY}.json").unlink()
    with (tmp_path / "history" / f"fleet-{DAY}.jsonl").open("a") as file:
        file.write('{"what": "look"}\n')
    assert main(["scorecard", "gap", "--data", str(tmp_path)]) == 2
    refused = capsys.readouterr().err
    assert f"fleet-{DAY}.jsonl: line" in refused
    assert refused.count("\n") == 1


def test_a_fleet_of_unknown_step_times_has_no_hindsight_optimum_and_says_so(tmp_path):
    made_of = fleet(types=(WorkerType("h100-sxm", 1),))
    one = found_in(tmp_path, requests([6.0] * 2), minutes([3, 3]), made_of)
    assert (one["least"], one["ratio"], one["parts"]) == (None, None, {})
    assert "the step times of h100-sxm TP1 are not known" in one["says"][0]
    assert gap_line(one) == (
        f"{DAY} (UTC, 10 min): cost 0.50 GPU-hours; no hindsight optimum: the step times of h100-sxm TP1"
        " are not known; not all prices are known"
    )


def test_a_line_says_what_was_paid_the_cheapest_and_the_reasons_the_largest_first(tmp_path):
    rows = requests([6.0] * 2)
    waste = found_in(tmp_path / "a", rows, minutes([3, 3], rule=None, fixed=True, draining=1))
    says = gap_line(waste)
    paid, least = waste["paid"]["usd"], waste["least"]["usd"]
    assert says.startswith(
        f"{DAY} (UTC, 10 min): cost ${paid:.2f}, {100 * (waste['ratio'] - 1):.0f} % above the hindsight"
        f" optimum of ${least:.2f} ("
    )
    told = [part.rpartition(" ")[::2] for part in says.rpartition("(")[2].rstrip(")").split(", ")]
    assert [name for name, _ in told] == ["manual scaling", "starts and drains"]
    assert sum(float(amount.lstrip("$")) for _, amount in told) == pytest.approx(paid - least, abs=0.011)
    unpriced = fleet(types=(WorkerType.of(PROFILE),))
    one = found_in(tmp_path / "b", rows, minutes([3, 3], rule=None, fixed=True), unpriced)
    least = one["least"]["gpu_h"]
    assert f"0.50 GPU-hours, {100 * (one['ratio'] - 1):.0f} % above the hindsight" in gap_line(one)
    assert f"optimum of {least:.2f} GPU-hours (" in gap_line(one)
    assert gap_line(one).endswith(f"(manual scaling {0.5 - least:.2f} GPU-hours); not all prices are known")
    idle = found_in(tmp_path / "c", [], minutes([2, 2], rule=None, fixed=True))
    assert "above the hindsight optimum of $0.00" in gap_line(idle)
    behind = minutes([1, 1], rule=Ruled(3, *RULE_LINE))
    assert "scale-up lag -$" in gap_line(found_in(tmp_path / "d", rows, behind))


def test_what_a_fleet_tells_of_its_last_day_is_made_once_and_else_says_why_it_is_not_known(
    tmp_path, monkeypatch
):
    asked_for = []
    said = {}

    async def made(data):
        asked_for.append(data)
        assert last.view()["line"].endswith(f"{DAY} is being computed")  # told meanwhile
        return said or {"gap": made_gap(data / "history", DAY, NEXT_DAY_S)}

    monkeypatch.setattr("tokenfleet.service.score_process._said", made)

    def look(now_s=NEXT_DAY_S):
        asyncio.run(last.look(now_s))
        return last.view()

    last = LastGap(tmp_path)
    assert look() == {"line": "unknown; the first full day (UTC) has not ended", "day": None}
    logged(tmp_path / "history", minutes([3, 3]))
    written(tmp_path / "history", requests([6.0] * 2))
    assert look(NOON_S)["line"] == "unknown; the first full day (UTC) has not ended"
    assert asked_for == []
    said["error"] = "history: cannot be read"
    with pytest.raises(BadInput, match=rf"{DAY}: history: cannot be read"):
        look()
    assert look()["day"] is None
    last, said = LastGap(tmp_path), {}
    view = look()
    assert view["day"] == kept_gap(tmp_path / "history", DAY)
    assert view["line"] == gap_line(view["day"])
    assert (look(), len(asked_for)) == (view, 2)
    last = LastGap(tmp_path)  # of the next core
    assert (look(), len(asked_for)) == (view, 2)


def test_an_older_day_is_told_while_the_next_one_is_made_or_cannot_be(tmp_path, monkeypatch):
    found_in(tmp_path, requests([6.0] * 2), minutes([3, 3]))
    kept = made_gap(tmp_path / "history", DAY, NEXT_DAY_S)
    log = (tmp_path / "history" / f"fleet-{DAY}.jsonl").read_text()
    (tmp_path / "history" / "fleet-2026-06-02.jsonl").write_text(log.splitlines()[0] + "\n")
    said = [{"gap": None}, {"error": "fleet-2026-06-02.jsonl: line 1: is none"}]

    async def made(data):
        return said.pop(0)

    async def kept_by(last):
        task = asyncio.create_task(last.keep())
        while last.view()["day"] is None or last.view()["line"].endswith("computed"):
            await asyncio.sleep(0.01)
        task.cancel()
        return last.view()

    monkeypatch.setattr("tokenfleet.service.score_process._said", made)
    for why in (
        "2026-06-02: its log has no whole minute",
        "2026-06-02: fleet-2026-06-02.jsonl: line 1: is none",
    ):
        view = asyncio.run(kept_by(LastGap(tmp_path)))
        assert view == {"line": f"{gap_line(kept)}; {why}", "day": kept}


def test_a_fleet_without_a_history_or_a_folder_says_so(tmp_path):
    none = {"line": "unknown; this fleet keeps no history", "day": None}
    assert LastGap(tmp_path, has_history=False).view() == none
    assert fleet_extension(None, None, True).fleet["gap"]() == none


def test_where_no_number_keeps_to_the_target_the_fewest_that_do_as_well_are_taken():
    late = {1: 9, 2: 7, 3: 5, 4: 5, 5: 5}
    assert fewest(lambda n: late[n], 6, 1, 5) == 3
    assert fewest(lambda n: late[n], 2, 1, 5) == 3
    assert fewest(lambda n: np.array([late[n], 0]), np.array([7, 0]), 4, 5) == 2


def test_a_history_that_cannot_be_read_is_told(tmp_path):
    logged(tmp_path / "history", minutes([3]))
    (tmp_path / "history" / "requests-1.parquet").write_text("not one")
    with pytest.raises(BadInput, match="cannot be read"):
        gaps(tmp_path, 0.0, NEXT_DAY_S)
