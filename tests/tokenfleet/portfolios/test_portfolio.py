"""`tokenfleet portfolio`: models that share limits, by day and by night, and what is refused."""

import itertools
import json
from dataclasses import replace
from html import escape
from itertools import chain

import numpy as np
import pytest
from planning_builders import save, worker

import tokenfleet as tf
from controlplane.errors import BadInput
from controlplane.perfmodel.engine import KvModel
from controlplane.worker_type import WorkerGroup
from controlplane.workload import Workload
from tokenfleet.cli.main import main
from tokenfleet.planning.estimate import Trial
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.inputs import gather
from tokenfleet.planning.plan_file import read_plan
from tokenfleet.planning.search import Search
from tokenfleet.planning.threads import open_threads
from tokenfleet.portfolios.offers import _workers_on_demand, gpus_of, tasks_of
from tokenfleet.portfolios.plan import plan_portfolio
from tokenfleet.portfolios.request import read_portfolio
from tokenfleet.profiles.library import write_profile
from tokenfleet.traces import read_traces
from tokenfleet.whatifs.solve import Cache

PRICES = "schema: tokenfleet.prices/1\nprices:\n" + "".join(
    f'- {{gpu: {gpu}, on_demand: {usd}, {spot}date: 2026-01-01, source: "made"}}\n'
    for gpu, usd, spot in (("made-gpu", 2.5, "spot: 1.0, "), ("slow-gpu", 3.5, ""))
)
FILE = """\
schema: tokenfleet.portfolio/1
limits: {limits}
defaults:
  {{slo: {{ttft: 500ms, tpot: 30ms}}, prices: prices.yaml, attainment: 0.95, profile: [fast.yaml, slow.yaml]}}
models:
- {{name: early, trace: early.csv}}
- {{name: late, trace: late.csv}}
"""


def busy(early):
    """A load that is twenty times as large in one half of two minutes as in the other."""
    rng = np.random.default_rng(3)
    loud, quiet = (0.0, 60.0) if early else (60.0, 0.0)
    arrival = np.sort(
        np.concatenate([rng.uniform(loud, loud + 60, 2000), rng.uniform(quiet, quiet + 60, 100)])
    )
    lengths = rng.integers(200, 600, len(arrival)), rng.integers(2, 120, len(arrival))
    return Workload(arrival, *lengths)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("portfolio")
    for early in (True, False):
        save(busy(early), folder / ("early.csv" if early else "late.csv"))
    write_profile(worker(gpu="made-gpu"), folder / "fast.yaml")
    write_profile(worker(gpu="slow-gpu", slower=1.1), folder / "slow.yaml")
    (folder / "prices.yaml").write_text(PRICES)
    return folder


@pytest.fixture
def asked(folder, capsys, monkeypatch):
    """A function that plans the portfolio with these limits: the exit code, stdout and stderr."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))  # each model is planned once for all tests

    def ask(limits, *words, defaults="prices: prices.yaml", file=FILE):
        path = folder / "portfolio.yaml"
        path.write_text(file.format(limits=limits).replace("prices: prices.yaml", defaults))
        code = main(["portfolio", str(path), *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return ask


@pytest.fixture
def planned(asked):
    def plan(limits, **fields):
        code, out, _ = asked(limits, "--format", "json", **fields)
        assert code == 0
        return json.loads(out)

    return plan


def peaks(plan, gpu):
    return [window[gpu] for window in plan["gpus"]]


def test_without_limits_each_model_has_the_gpus_it_would_have_alone(planned):
    plan = planned("{}")
    assert [model["gpu"] for model in plan["models"]] == ["made-gpu", "made-gpu"]
    assert plan["usd_per_hour"] == pytest.approx(plan["unlimited_usd_per_hour"])
    for model in plan["models"]:
        (other,) = model["others"]
        assert (other["gpu"], other["usd_per_hour"] > model["usd_per_hour"]) == ("slow-gpu", True)


def test_the_library_gives_the_answer_of_the_command_line_as_an_object(planned, folder, tmp_path):
    told = planned("{}")
    answer = tf.portfolio(folder / "portfolio.yaml")
    assert answer.document == told
    assert answer.usd_per_hour == told["usd_per_hour"] == pytest.approx(answer.models["usd_per_hour"].sum())
    assert answer.models["model"].to_list() == ["early", "late"]
    assert all(" made-gpu TP1" in fleet for fleet in answer.models["fleet"])
    assert answer.models["bought"].to_list() == ["made-gpu"] * 2
    assert all(part in answer._repr_html_() for part in ("early", "late", "made-gpu"))
    saved = answer.save(tmp_path / "out")
    names = ["early.plan.json", "late.plan.json", "portfolio.html", "portfolio.json"]
    assert sorted(path.name for path in saved.iterdir()) == names
    assert json.loads((saved / "portfolio.json").read_text()) == told
    assert read_plan(saved / "early.plan.json").workers == told["models"][0]["plan"]["workers"]


def test_the_library_says_what_limits_allow_no_fleet_and_names_a_faulty_file(asked, folder, tmp_path):
    asked("{gpus: {made-gpu: 1, slow-gpu: 0}}")
    with pytest.raises(tf.Infeasible, match="made-gpu"):
        tf.portfolio(folder / "portfolio.yaml")
    (tmp_path / "none.yaml").write_text("schema: tokenfleet.portfolio/1\nmodels: []\n")
    with pytest.raises(tf.BadInput, match=r"none\.yaml: models"):
        tf.portfolio(tmp_path / "none.yaml")


def test_one_models_night_is_anothers_day(planned):
    alone = planned("{}")
    whole = sum(model["plan"]["gpus"] for model in alone["models"])
    at_once = max(peaks(alone, "made-gpu"))
    assert at_once < whole  # they are not busy together, so that fewer GPUs do
    plan = planned(f"{{gpus: {{made-gpu: {at_once}}}}}")
    assert plan["usd_per_hour"] == pytest.approx(alone["usd_per_hour"])
    assert plan["constant_usd_per_hour"] > sum(model["constant_usd_per_hour"] for model in alone["models"])


def test_a_scarce_gpu_is_mixed_with_another_and_its_price_is_told(planned):
    free = planned("{}")
    scarce = max(peaks(free, "made-gpu")) - 1
    plan = planned(f"{{gpus: {{made-gpu: {scarce}}}}}")
    assert sorted(model["gpu"] for model in plan["models"]) == ["made-gpu", "made-gpu + slow-gpu"]
    (mixed,) = (model for model in plan["models"] if "+" in model["gpu"])
    assert {part["gpu"] for part in mixed["plan"]["fleet"]} == {"made-gpu", "slow-gpu"}
    other = {one["gpu"]: one["usd_per_hour"] for one in mixed["others"]}
    assert mixed["usd_per_hour"] < other["slow-gpu"]
    assert all(count <= scarce for count in peaks(plan, "made-gpu"))
    (limit,) = plan["limits"]
    assert (limit["name"], limit["more"]) == ("gpus.made-gpu", 1)
    assert limit["saves_usd_per_hour"] == pytest.approx(plan["usd_per_hour"] - free["usd_per_hour"])


STEADY = """\
schema: tokenfleet.portfolio/1
limits: {limits}
defaults: {{slo: {{ttft: 300ms, tpot: 20ms}}, attainment: 0.9, policy: spread, profile: [{profiles}],
  prices: {prices}}}
models: [{{name: one, trace: {one}}}, {{name: two, trace: {two}}}]
"""


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """A folder with the traces of two steady models, and which fleets are known to hold each of them."""
    folder, rng = tmp_path_factory.mktemp("steady"), np.random.default_rng(7)
    for name, rate in (("one", 10.0), ("two", 14.0)):
        arrival = np.sort(rng.uniform(0.0, 40.0, int(40 * rate)))
        lengths = rng.integers(200, 600, len(arrival)), rng.integers(2, 120, len(arrival))
        save(Workload(arrival, *lengths), folder / f"{name}.csv")
    return folder, {}


@pytest.mark.parametrize(
    ("limits", "slow_usd", "gpu", "most"),
    [
        ("gpus: {made-gpu: 2}", "3.5", "made-gpu", 2),
        ("gpus: {made-gpu: 3}", "3.5", "made-gpu", 3),
        ("max-gpus: 9", "0.9", "", 9),  # the slow one is cheaper by what it serves, and takes more GPUs
    ],
)
def test_no_other_choice_of_mixes_within_the_limits_is_cheaper(
    folder, steady, tmp_path, limits, slow_usd, gpu, most
):
    traces, known = steady
    profiles = ", ".join(str(folder / name) for name in ("fast.yaml", "slow.yaml"))
    prices = tmp_path / "prices.yaml"
    prices.write_text(PRICES.replace("on_demand: 3.5", f"on_demand: {slow_usd}"))
    text = STEADY.format(
        limits=f"{{{limits}}}", profiles=profiles, prices=prices,
        one=traces / "one.csv", two=traces / "two.csv",
    )  # fmt: skip
    (tmp_path / "portfolio.yaml").write_text(text)
    portfolio = read_portfolio(tmp_path / "portfolio.yaml")
    plan = plan_portfolio(portfolio, tasks_of(portfolio), 1, Cache(None))
    usd = plan.constant_usd_per_h
    with open_threads(1) as threads:
        holding = [holding_below(model, usd, threads, known) for model in portfolio.models]
    gpus = {pair: gpus_of(pair[0]) + gpus_of(pair[1]) for pair in itertools.product(*holding)}
    taken = {pair: n[gpu] if gpu else n.total() for pair, n in gpus.items()}
    choices = [one.cost[0] + two.cost[0] for (one, two), n in taken.items() if n <= most]
    assert min(choices) == pytest.approx(usd)


def holding_below(model, usd, threads, known):
    """All fleets of a model up to a price that meet its target, mixes among them, as the planner judges.

    `known` keeps the verdicts, which no price changes.
    """
    (request,) = model.asked
    found = gather(read_traces(model.traces), request)
    search = Search.of(request, found.workload, found.worker_types, threads)
    fast, slow = found.worker_types
    counts = [pair for pair in itertools.product(range(8), repeat=2) if any(pair)]
    fleets = {
        (model.name, i, j): Fleet(tuple(WorkerGroup(t, n) for t, n in ((fast, i), (slow, j)) if n))
        for i, j in counts
    }
    cheap = {key: fleet for key, fleet in fleets.items() if fleet.cost[0] <= usd + 1e-9}
    for key, fleet in cheap.items():
        if key not in known:
            met = search.meets(search.replay(fleet, most_missed=search.may_miss))
            known[key] = met and Trial(search, fleet).holds()
    return [fleet for key, fleet in cheap.items() if known[key]]


def test_limits_that_leave_no_choice_say_what_to_raise(asked):
    code, _, err = asked("{gpus: {made-gpu: 1, slow-gpu: 1}, max-gpus: 30}")
    assert code == 1
    assert "no choice of fleets is within the limits" in err
    assert "; the cheapest way out: raise gpus.made-gpu from 1 to " in err
    assert ". By one limit alone: gpus.made-gpu from 1 to " in err
    assert "; gpus.slow-gpu from 1 to " in err
    assert "; max-gpus: no rise is enough" in err


def test_a_model_is_in_one_zone_and_zones_that_hold_one_model_each_part_them(planned):
    free = planned("{}")
    assert {model["zone"] for model in free["models"]} == {None}
    few = max(peaks(free, "made-gpu")) - 1
    plan = planned(f"{{zones: {{east: {{made-gpu: {few}}}, west: {{made-gpu: {few}, slow-gpu: 40}}}}}}")
    assert {(model["gpu"], model["zone"]) for model in plan["models"]} == {
        ("made-gpu", "east"),
        ("made-gpu", "west"),
    }
    assert plan["usd_per_hour"] == pytest.approx(free["usd_per_hour"])
    most = {limit["name"]: (limit["most"], limit["peak"]) for limit in plan["limits"]}
    assert set(most) == {f"zones.{name}" for name in ("east.made-gpu", "east.slow-gpu", "west.made-gpu")} | {
        "zones.west.slow-gpu"
    }
    assert all(peak <= limit for limit, peak in most.values())


def test_zones_too_small_for_a_model_say_what_to_raise(asked):
    code, _, err = asked("{zones: {east: {made-gpu: 1}, west: {made-gpu: 1}}}")
    assert code == 1
    assert "zones.east.made-gpu from 1 to " in err


SPOT = "prices: prices.yaml, spot: [no, yes], reclaims-per-h: 0.01, cold-start: 1s"


def test_the_share_on_spot_is_held_at_every_time(planned):
    plans = {share: planned(f"{{spot-share: {share}}}", defaults=SPOT) for share in (0, 0.5, 1)}
    assert [sum(model["spot"] for model in plan["models"]) for plan in plans.values()] == [0, 2, 2]
    on_demand = planned("{}", defaults="prices: prices.yaml, cold-start: 1s")
    assert plans[0]["usd_per_hour"] == pytest.approx(on_demand["usd_per_hour"])
    assert plans[1]["usd_per_hour"] < plans[0.5]["usd_per_hour"] < plans[0]["usd_per_hour"]
    (limit,) = plans[0]["limits"]
    raised = planned(f"{{spot-share: {limit['more'] + 1e-6}}}", defaults=SPOT)
    assert raised["usd_per_hour"] == pytest.approx(plans[0]["usd_per_hour"] - limit["saves_usd_per_hour"])
    assert raised["limits"][0]["peak"] == pytest.approx(limit["more"])
    # One worker of all is on spot. Models are in the order of the file, however their fleets are bought.
    assert sum(m["plan"]["workers"] - m["on_demand_workers"] for m in raised["models"]) == 1
    assert [model["name"] for model in raised["models"]] == ["early", "late"]


@pytest.mark.parametrize(("reclaims", "spares"), [(0.01, 0), (1, 1)])
def test_a_model_alone_is_on_demand_as_far_as_its_share_on_spot_asks_at_every_time(
    asked, planned, folder, reclaims, spares
):
    file = FILE.replace("- {{name: late, trace: late.csv}}\n", "")
    defaults = SPOT.replace("0.01", str(reclaims)).replace("1s", "20s")

    def within(limits):
        return planned(limits, defaults=defaults, file=file)

    most = 0.54
    plan, free = within(f"{{spot-share: {most}}}"), within("{}")
    assert free["models"][0]["plan"]["spares"]["workers"] == spares
    bought = np.array(peaks(free, "made-gpu"))  # workers of one GPU each, all on spot
    hours = np.array([window["end_s"] - window["start_s"] for window in free["gpus"]])

    def on_demand(stay):
        return np.minimum(stay, bought - spares)

    def on_spot(stay):  # no spares where none serves on spot
        return np.where(bought - spares > stay, bought - on_demand(stay), 0)

    def usd_per_h(stay):
        return ((2.5 * on_demand(stay) + 1.0 * on_spot(stay)) * hours).sum() / hours.sum()

    def holds(stay):
        return (on_spot(stay) <= most * (on_demand(stay) + on_spot(stay))).all()

    fewest = next(n for n in range(bought.max() + 1) if holds(n))
    (model,) = plan["models"]
    assert (model["spot"], model["on_demand_workers"]) == (True, fewest)
    assert plan["usd_per_hour"] == model["usd_per_hour"] == pytest.approx(usd_per_h(fewest))
    taken = on_spot(fewest) + on_demand(fewest)
    assert peaks(plan, "made-gpu") == taken.tolist()
    assert plan["limits"][0]["peak"] == pytest.approx((on_spot(fewest) / taken).max())
    whole = model["plan"]["workers"]
    assert model["constant_usd_per_hour"] == pytest.approx(2.5 * fewest + 1.0 * (whole - fewest))
    if not spares:  # one fewer would do for the mean of all times, and not for the busiest
        assert (on_spot(fewest - 1) * hours).sum() <= most * (bought * hours).sum()
    # All on demand costs more, and what is partly on spot is not among the others.
    others = {(one["gpu"], one["spot"]): one["usd_per_hour"] for one in model["others"]}
    assert others.keys() == {("made-gpu", False), ("made-gpu", True), ("slow-gpu", False)}
    assert others["made-gpu", True] < plan["usd_per_hour"] < others["made-gpu", False]
    words = "--output-dir", str(folder / "partly")
    asked(f"{{spot-share: {most}}}", *words, defaults=defaults, file=file)
    said = (folder / "partly" / "portfolio.html").read_text()
    assert f"{whole}x made-gpu TP1, {fewest} on demand, {whole - fewest} on spot" in said
    # Less than one worker's share, and no limit, leave it whole.
    few = within(f"{{spot-share: {0.9 / whole}}}")["models"][0]
    assert (few["spot"], few["on_demand_workers"]) == (False, few["plan"]["workers"])
    assert (free["models"][0]["spot"], free["models"][0]["on_demand_workers"]) == (True, 0)


def test_of_a_large_fleet_few_numbers_on_demand_are_looked_at_and_the_least_that_holds_is_one():
    assert [_workers_on_demand(n, 0, 0.5) for n in (1, 2, 5)] == [[], [1], [1, 2, 3, 4]]
    assert [_workers_on_demand(n, 1, 0.5) for n in (2, 3, 5)] == [[], [1], [1, 2, 3]]
    many = _workers_on_demand(1000, 20, 0.25)
    assert 750 in many
    assert (many[0], many[-1], len(many)) == (1, 979, 9)
    assert max(b - a for a, b in itertools.pairwise(many)) < 1000 / 6


SMALL = """\
schema: tokenfleet.portfolio/1
limits: {limits}
defaults:
  {{slo: {slo}, prices: prices.yaml, attainment: 0.95, profile: roomy.yaml}}
models: [{models}]
"""


@pytest.fixture
def small(folder, capsys, monkeypatch):
    """A function that plans `models` models of little load, and `more`: the answer's JSON, or stderr."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    rng = np.random.default_rng(5)
    save(
        Workload(np.arange(60) * 2.0, rng.integers(100, 200, 60), rng.integers(20, 60, 60)),
        folder / "few.csv",
    )
    kv = KvModel(500_000, 16, 131_072, 80 * 10**9, 0.9)
    write_profile(replace(worker(gpu="made-gpu"), kv=kv), folder / "roomy.yaml")

    def plan(limits, models, *more, slo="{ttft: 2s, tpot: 150ms}"):
        named = [f"{{name: m{i}, trace: few.csv}}" for i in range(models)] + list(more)
        file = folder / "small.yaml"
        file.write_text(SMALL.format(limits=limits, slo=slo, models=", ".join(named)))
        code = main(["portfolio", str(file), "--format", "json"])
        said = capsys.readouterr()
        return json.loads(said.out) if code == 0 else said.err

    return plan


def parts(plan):
    return [model["workers_per_gpu"] for model in plan["models"]]


def test_small_models_share_gpus_which_are_bought_whole(small):
    alone, halves, quarters = (small(f"{{models-per-gpu: {n}}}", 4) for n in (1, 2, 4))
    assert [parts(plan) for plan in (alone, halves, quarters)] == [[1] * 4, [2] * 4, [4] * 4]
    assert [peaks(plan, "made-gpu") for plan in (alone, halves, quarters)] == [[4], [2], [1]]
    assert [plan["usd_per_hour"] for plan in (alone, halves, quarters)] == [10.0, 5.0, 2.5]
    first = halves["models"][0]
    assert first["may_share_with"] == ["m1", "m2", "m3"]
    assert first["others"] == [
        {"gpu": "made-gpu", "spot": False, "workers_per_gpu": 1, "usd_per_hour": 2.5, "reason": None}
    ]
    assert {one["workers_per_gpu"] for one in quarters["models"][0]["others"]} == {1, 2}
    # Four times 10 ms are too many.
    tight = small("{models-per-gpu: 4}", 4, slo="{ttft: 2s, tpot: 35ms}")
    assert (tight["usd_per_hour"], parts(tight)) == (5.0, [2] * 4)
    # What was replayed: steps of twice the time, in the KV that half of the memory leaves.
    (planned,) = first["plan"]["inputs"]["profiles"]
    assert planned["profile"]["workers_per_gpu"] == 2
    assert planned["profile"]["step"]["base_s"] == pytest.approx(0.020)
    assert planned["profile"]["kv"]["gpu_memory_utilization"] == 0.45
    assert "2 times as long" in " ".join(first["plan"]["inputs"]["warnings"])
    tpot = [plan["models"][0]["plan"]["tpot_s"]["p50"] for plan in (alone, halves, quarters)]
    assert tpot[1] > 1.9 * tpot[0]
    assert tpot[2] > 3.8 * tpot[0]


def test_a_half_that_stays_free_is_paid_for_and_counts_as_a_gpu(small):
    plan = small("{models-per-gpu: 4, gpus: {made-gpu: 2}}", 3)
    assert (plan["usd_per_hour"], plan["free_parts_usd_per_hour"]) == (2.5, pytest.approx(0.625))
    plan = small("{models-per-gpu: 2, gpus: {made-gpu: 2}}", 3)
    assert (plan["usd_per_hour"], sorted(parts(plan))) == (5.0, [1, 2, 2])  # no neighbour where none pays
    assert [model["name"] for model in plan["models"]] == ["m0", "m1", "m2"]
    assert plan["free_parts_usd_per_hour"] == pytest.approx(0.0)
    five = small("{models-per-gpu: 4, gpus: {made-gpu: 2}}", 7)
    assert (five["usd_per_hour"], parts(five)) == (5.0, [4] * 7)
    assert five["free_parts_usd_per_hour"] == pytest.approx(0.625)
    assert five["limits"][0]["peak"] == 2
    said = small("{models-per-gpu: 4, gpus: {made-gpu: 1}}", 5)
    assert said.rstrip().endswith("the cheapest way out: raise gpus.made-gpu from 1 to 2")


def test_only_models_that_one_worker_serves_share_and_others_say_why_not(small, folder):
    plan = small("{models-per-gpu: 2}", 1, "{name: busy, trace: early.csv}")
    small_one, busy_one = plan["models"]
    assert (busy_one["plan"]["workers"] > 1, busy_one["others"]) == (True, [])
    assert [one["workers_per_gpu"] for one in small_one["others"]] == [2]
    write_profile(worker(gpu="made-gpu"), folder / "roomy.yaml")  # which does not say what memory it has
    (other,) = small("{models-per-gpu: 2}", 2)["models"][0]["others"]
    assert other["usd_per_hour"] is None
    assert "does not say what memory" in other["reason"]


def test_a_models_zones_are_the_only_ones_it_may_be_in(folder):
    file = folder / "zones.yaml"
    text = FILE.format(limits="{zones: {east: {made-gpu: 40}, west: {made-gpu: 40}}}")
    file.write_text(text.replace("late.csv", "late.csv, zones: [west]"))
    early, late = read_portfolio(file).models
    assert (early.zones, late.zones) == (None, ("west",))
    file.write_text(text.replace("late.csv", "late.csv, zones: [north]"))
    with pytest.raises(BadInput, match=r"late: zones: north: not among limits\.zones"):
        read_portfolio(file)


def test_each_models_plan_is_one_that_serve_reads(asked, folder):
    code, out, _ = asked("{max-gpus: 40}", "--output-dir", str(folder / "out"))
    assert code == 0
    assert "early.plan.json" in out
    whole = json.loads((folder / "out" / "portfolio.json").read_text())
    for model in whole["models"]:
        assert read_plan(folder / "out" / f"{model['name']}.plan.json").document == model["plan"]
    page = (folder / "out" / "portfolio.html").read_text()
    assert "GPUs over time" in page
    lines = whole["says"]
    assert [topic for topic, _ in lines] == ["Recommended fleets", "Without limits", "Constant size", "Note"]
    cells = [cell for shown in whole["tables"] for row in shown["rows"] for cell in row]
    assert [shown["title"] for shown in whole["tables"]] == ["Models", "Limits"]
    assert "early" in cells
    printed = " ".join(out.split())
    for text in (": ".join(lines[0]).replace("   ", ", "), *chain(*lines[1:]), *cells):
        assert escape(text) in page
    assert [text for text in chain(*lines) if " ".join(text.split()) not in printed] == []


def test_a_models_classes_are_those_of_plan(folder):
    file = folder / "classes.yaml"
    slo = '["chat:ttft=400ms,tpot=30ms", "batch:ttft=9s,tpot=90ms,attainment=0.9"]'
    file.write_text(FILE.format(limits="{}").replace("{ttft: 500ms, tpot: 30ms}", slo))
    for model in read_portfolio(file).models:
        assert [one.name for one in model.asked[0].slo_classes] == ["chat", "batch"]


def test_an_adapters_requests_are_its_models_and_what_they_add_is_told(asked, folder):
    save(busy(early=True), folder / "support.csv")
    adapter = "models:\n- {{name: support, adapter-of: early, trace: [support.csv]}}\n"
    adapted = FILE.replace("models:\n", adapter)
    code, out, _ = asked("{}", "--format", "json", file=adapted)
    assert code == 0
    whole = json.loads(out)
    early, late = whole["models"]
    assert early["adapters"] == [{"name": "support", "share": 0.5}]
    assert early["plan"]["inputs"]["requests"] == 2 * late["plan"]["inputs"]["requests"]
    assert (late["adapters"], late["adapters_usd_per_hour"]) == ([], None)
    (bare, _) = json.loads(asked("{}", "--format", "json")[1])["models"]
    added = early["constant_usd_per_hour"] - bare["constant_usd_per_hour"]
    assert early["adapters_usd_per_hour"] == pytest.approx(added)
    assert added > 0
    said = " ".join(asked("{}", file=adapted)[1].split())
    assert f"Adapters share of the requests of early: support 50.00 %; they add ${added:.2f}/h" in said


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("portfolio/1", "portfolio/2", "schema"),
        ("name: late", "name: early", "models: early is given twice"),
        ("early.csv", "none.csv", "early"),
        ("ttft: 500ms", "ttft: 500", "defaults: slo"),
        ("attainment: 0.95", "attainmint: 0.95", "did you mean attainment?"),
        ("attainment: 0.95", "attainment: 2", "defaults: attainment: must be above 0 and below 1, got 2"),
        ("slo: {ttft: 500ms, tpot: 30ms}, ", "", "models: early: slo: missing"),
        ("limits: {}", "limits: {gpus: {h300: 4}}", "limits.gpus: h300: no model may have it"),
        ("limits: {}", "limits: {gpus: {h100: 4, h100-sxm: 4}}", "h100-sxm is given twice"),
        ("limits: {}", "limits: {max_gpus: -1}", "limits"),
        ("limits: {}", "limits: {models-per-gpu: 3}", "limits.models-per-gpu: input should be 1, 2 or 4"),
        ("limits: {}", "limits: {budget-usd-per-h: 0}", "budget-usd-per-h"),
        ("limits: {}", "limits: {spot-share: 1.5}", "spot-share"),
        ("limits: {}", "limits: {zones: {east: {made-gpu: -1}}}", "limits.zones.east"),
        ("limits: {}", "limits: {zones: {east: {h300: 4}}}", "limits.zones.east: h300: no model may have it"),
        ("attainment: 0.95", "spot: [no, maybe]", "defaults: spot"),
        ("attainment: 0.95", "spot: yes", "no price known for slow-gpu"),
        (
            "{name: late, trace",
            "{name: late, adapter-of: chat, trace",
            "adapter-of: chat: no such model here",
        ),
        ("name: late, trace: late.csv", "name: late, adapter-of: late, trace: late.csv", "adapter-of: late"),
        (
            "{name: late, trace",
            "{name: late, adapter-of: early, slo: x, trace",
            "slo: an adapter is served",
        ),
        ("{name: late, trace: late", "{name: late, adapter-of: early, trace: none", "late: "),
        ("models:\n", "models: []\nrest:\n", "models"),
        ("prices: prices.yaml, ", "", "no price known for made-gpu"),
        ("schema", "{", "not YAML"),
    ],
)
def test_what_is_no_portfolio_is_refused_in_one_line(folder, capsys, old, new, says):
    text = FILE.format(limits="{}")
    assert old in text
    file = folder / "faulty.yaml"
    file.write_text(text.replace(old, new))
    assert main(["portfolio", str(file), "--output-dir", str(folder / "none")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert not (folder / "none").exists()
