"""`tokenfleet serve --portfolio`: what it runs of a portfolio's plan, and what it refuses in one line."""

import asyncio
import json
import math
import sys
from types import SimpleNamespace

import pytest
from made_plans import on_parts, plan_json, plan_of_fleet, portfolio_json

from controlplane.errors import BadInput
from dataplane.live.pool.fleet_types import MARKET, Begun, Site
from tokenfleet.cli.main import main
from tokenfleet.cli.serve.command import _checked, _site
from tokenfleet.cli.serve.flags import ServeFlags
from tokenfleet.cli.serve.members import members_of
from tokenfleet.cli.serve.processes import _run_core
from tokenfleet.cli.serve.workers import planned_types


@pytest.fixture
def file(tmp_path):
    def write(document):
        path = tmp_path / "portfolio.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    return write


def asked(path, **flags):
    return members_of(ServeFlags(**({"model": ["m"], "engine": "emulated", "portfolio": path} | flags)))


def test_each_model_is_served_by_its_plan_within_what_the_limits_leave_it(file):
    found = asked(file(portfolio_json({"chat": 3, "code": 1}, 8)))
    assert {name: one.plan.workers for name, one in found.members.items()} == {"chat": 3, "code": 1}
    flags = {name: one.flags for name, one in found.members.items()}
    assert [one.autoscale for one in flags.values()] == ["1..7", "1..7"]
    assert flags["chat"].engine_flags == ["--served-model-name", "chat"]
    assert {one.host for one in flags.values()} == {"127.0.0.1"}


def test_a_portfolio_whose_answer_is_sentences_without_topics_is_still_served(file):
    older = portfolio_json({"chat": 3, "code": 1}, 8, says=["2 models can meet their targets: $9.00/h"])
    assert asked(file(older)).members.keys() == {"chat", "code"}


def test_plans_that_peak_at_different_times_begin_with_fair_parts_of_the_limits(file):
    found = asked(file(portfolio_json({"chat": 6, "code": 2}, 4)))
    shares = {
        name: (one.plan.workers, one.tenants[0].right, one.tenants[0].share)
        for name, one in found.members.items()
    }
    assert shares == {"chat": (3, 3, 3), "code": (1, 1, 1)}


def test_each_model_may_be_elsewhere(file):
    path = file(portfolio_json({"chat": 1, "code": 1}, 4))
    found = asked(path, model=["code=./b", "chat=org/a"])
    assert {name: one.flags.model for name, one in found.members.items()} == {
        "chat": ["org/a"],
        "code": ["./b"],
    }


def with_adapters(names, of="chat"):
    document = portfolio_json({"chat": 1, "code": 1}, 4)
    (model,) = (one for one in document["models"] if one["name"] == of)
    model["adapters"] = [{"name": name} for name in names]
    return document


def test_adapters_are_served_by_their_models_engines(file):
    path = file(with_adapters(["support", "sales"]))
    models = ["chat=./a", "code=./b", "support=./s", "sales=./t"]
    found = asked(path, model=models, engine_flags=["--max-loras", "1"]).members
    assert list(found) == ["chat", "code"]
    assert found["chat"].flags.engine_flags == [
        "--enable-lora", "--max-loras", "3", "--lora-modules", "support=./s", "sales=./t",
        "--max-loras", "1", "--served-model-name", "chat",
    ]  # fmt: skip
    assert found["code"].flags.engine_flags == ["--max-loras", "1", "--served-model-name", "code"]
    with pytest.raises(BadInput, match=r"--model: \./s: no such folder"):
        asked(path, model=models, engine="vllm")
    with pytest.raises(BadInput, match="where is sales"):
        asked(path, model=models[:3])
    with pytest.raises(BadInput, match="code is given twice"):
        asked(file(with_adapters(["code"])))


def in_zones(zone_of, most, **fields):
    """A plan of models, one worker each, in zones `zone_of`; `most` has the GPUs of each zone."""
    document = portfolio_json(dict.fromkeys(zone_of, 1), 9, **fields)
    for model in document["models"]:
        model["zone"] = zone_of[model["name"]]
    document["limits"] += [{"name": f"zones.{zone}.h100-sxm", "most": n} for zone, n in most.items()]
    return document


def test_models_that_share_gpus_have_parts_of_what_the_limits_leave(file):
    found = asked(file(portfolio_json(dict.fromkeys(("chat", "code", "mail"), 1), 2, workers_per_gpu=2)))
    tenants = [one.tenants[0] for one in found.members.values()]
    assert [(p.gpus, p.usd_per_h, p.right) for p in tenants] == [(0.5, 2.5, 1)] * 3
    assert {one.flags.autoscale for one in found.members.values()} == {"1..2"}
    types = planned_types(found.members["chat"].plan, (), as_is=False)
    beside = [Begun(group) for _ in range(2) for group in types.groups]
    types.check_gpus([{"GPU": 2.0, "accelerator_type:H100": 1.0}], Site(beside=tuple(beside)))
    with pytest.raises(BadInput, match=r"--portfolio: .* 1 workers of 0.5 GPUs need 1.5, Ray has 1"):
        types.check_gpus([{"GPU": 1.0, "accelerator_type:H100": 1.0}], Site(beside=tuple(beside)))
    as_is = {"as_is": True, "engine": "vllm", "model": ["chat=a", "code=b", "mail=c"]}
    with pytest.raises(BadInput, match=r"^--as-is: chat was planned on 1/2 of a GPU"):
        asked(file(portfolio_json(dict.fromkeys(("chat", "code", "mail"), 1), 2, workers_per_gpu=2)), **as_is)


ZONED = in_zones({"chat": "east", "code": "east", "mail": "eu-west.1"}, {"east": 3, "eu-west.1": 6})


def test_a_model_of_a_zone_has_what_others_leave_of_that_zone(file):
    found = asked(file(ZONED))
    assert {n: one.zone for n, one in found.members.items()} == {
        "chat": "east",
        "code": "east",
        "mail": "eu-west.1",
    }
    bounds = {n: one.flags.autoscale for n, one in found.members.items()}
    assert bounds == {"chat": "1..2", "code": "1..2", "mail": "1..6"}
    assert found.limits.zones == {("east", "h100-sxm"): 3, ("eu-west.1", "h100-sxm"): 6}


def test_workers_begin_beside_those_of_the_models_of_their_zone_and_one_speaks_for_all(file):
    found = asked(file(ZONED))
    checked = {
        n: SimpleNamespace(types=planned_types(one.plan, (), as_is=False)) for n, one in found.members.items()
    }
    sites = {name: _site(name, found, checked) for name in found.members}
    (worker,) = checked["chat"].types.groups
    assert sites == {
        "chat": Site("east", (Begun(worker),), is_first=True),
        "code": Site("east", (Begun(worker),), is_first=False),
        "mail": Site("eu-west.1", (), is_first=True),
    }
    without = asked(file(portfolio_json({"chat": 1, "code": 1}, 4)))
    assert _site("code", without, checked) == Site(None, (Begun(worker),), is_first=False)


def partly(spot=True, on_demand=2, usd=24.0, **fields):
    """A plan of a model of three workers of $5 on spot, two of them on demand at $9.50, and one on demand."""
    document = portfolio_json({"chat": 3, "code": 1}, 8)
    for model, told in zip(document["models"], ((spot, on_demand, usd), (False, 1, 5.0)), strict=True):
        names = "spot", "on_demand_workers", "constant_usd_per_hour"
        model |= {name: value for name, value in zip(names, told, strict=True) if value is not None}
        model["plan"]["fleet"][0]["usd_per_hour"] = 5.0 * model["plan"]["workers"]
        model["plan"]["usd_per_hour"] = 5.0 * model["plan"]["workers"]
    return document | fields


def test_a_model_has_as_many_workers_on_demand_as_planned_and_their_dollars_count(file):
    found = asked(file(partly(limits=[{"name": "budget-usd-per-h", "most": 30}])))
    members = found.members
    assert {name: one.on_demand for name, one in members.items()} == {"chat": 2, "code": math.inf}
    tenants = [one.tenants[0] for one in members.values()]
    assert [(p.usd_per_h, p.fixed_usd_per_h, p.right) for p in tenants] == [(5.0, 9.0, 3), (5.0, 0.0, 1)]
    assert found.limits.used(tenants, [3, 1]) == [("budget-usd-per-h", 29.0, 30.0)]
    assert members["chat"].flags.autoscale == "1..3"  # a fourth, of $5, is beyond the budget
    # Of one on spot none; older plans do not say what is on spot.
    on_spot, untold = (asked(file(partly(*told))).members["chat"] for told in ((True, None), (None, None)))
    assert (on_spot.on_demand, untold.on_demand) == (0, None)
    assert on_spot.tenants[0].fixed_usd_per_h == untold.tenants[0].fixed_usd_per_h == 0.0


def ray_nodes(*markets):
    """Ray's nodes, from pairs of (market label or None, number of H100s)."""
    return [
        {
            "Alive": True,
            "Resources": {"GPU": float(n), "accelerator_type:H100": 1.0},
            "Labels": {MARKET: market} if market else {},
        }
        for market, n in markets
    ]


def test_workers_begin_on_nodes_that_are_bought_as_they_were_planned_where_nodes_say_so(file):
    found = asked(file(partly()))
    checked = {
        n: SimpleNamespace(types=planned_types(one.plan, (), as_is=False)) for n, one in found.members.items()
    }
    types = checked["chat"].types
    chat, code = (_site(name, found, checked) for name in ("chat", "code"))
    assert [begun.on_demand for begun in (*chat.begun(types.groups),)] == [2, math.inf]

    def check(*markets, site=chat):
        nodes = ray_nodes(*markets)
        site.check(nodes, types.groups)
        for market in site.markets(nodes):
            types.check_gpus([node["Resources"] for node in site.nodes(nodes, market)], site, market)

    # Three are on demand, on nodes that say so or nothing, and one is on spot.
    check(("on-demand", 2), (None, 1), ("spot", 1))
    check((None, 4))  # no node says how it is bought
    for markets, says in (
        ([("spot", 8)], f"no node without the label {MARKET}=spot; 3 workers are planned on demand"),
        (
            [("on-demand", 8), (None, 8)],
            f"no node with the label {MARKET}=spot; 1 workers are planned on spot",
        ),
        ([("on-demand", 2), ("spot", 8)], r"on demand: .* need 3, Ray's nodes there have 2"),
        ([("on-demand", 8), ("spot", 0)], r"on spot: .* need 1, Ray's nodes there have 0"),
        ([(None, 3)], r"--portfolio: 3 workers of 1 GPUs, 1 workers of 1 GPUs need 4, Ray has 3"),
    ):
        with pytest.raises(BadInput, match=f"^--portfolio: .*{says}" if "need 4" not in says else says):
            check(*markets)
    # The next goes on demand while fewer than two are; all of code's do.
    nodes = ray_nodes(("spot", 8), ("on-demand", 8), (None, 8))
    assert [chat.market(nodes, n) for n in (0, 1, 2)] == ["on-demand", "on-demand", "spot"]
    assert {code.market(nodes, n) for n in range(9)} == {"on-demand"}
    assert [len(chat.nodes(nodes, market)) for market in ("spot", "on-demand", None)] == [1, 2, 3]
    # A node that is gone still tells that nodes are told apart.
    gone = [node | {"Alive": False} for node in ray_nodes(("spot", 8))] + ray_nodes((None, 8))
    assert (chat.market(gone, 2), chat.nodes(gone, "spot")) == ("spot", [])
    assert Site().market(nodes, 0) is None


TWO = portfolio_json({"chat": 1, "code": 1}, 4)
SPLIT = plan_of_fleet(
    [
        {"gpu": "h100-sxm", "tp_degree": 1, "workers": n, "usd_per_hour": 2.0 * n, "role": role}
        for role, n in (("prefill", 1), ("decode", 2))
    ],
    "llama-3.1-8b",
)


def mixed(types, gpus, **fields):
    """A plan of chat on `types` (workers by GPU and TP degree), and of code on one H100."""
    document = portfolio_json({"chat": 1, "code": 1}, gpus, **fields)
    parts = [
        {"gpu": gpu, "tp_degree": tp, "workers": n, "usd_per_hour": 5.0 * n * tp, "role": "any"}
        for (gpu, tp), n in types.items()
    ]
    document["models"][0]["plan"] = plan_of_fleet(parts, "llama-3.1-8b")
    return document


def test_prefill_and_decode_workers_have_shares_of_their_own_and_each_role_keeps_one(file):
    document = portfolio_json({"chat": 1, "code": 1}, 4)
    document["models"][0]["plan"] = SPLIT
    found = asked(file(document)).members
    chat = found["chat"]
    prefill, decode = "h100-sxm TP1 prefill", "h100-sxm TP1 decode"
    assert chat.share == {prefill: 1, decode: 2}
    assert [tenant.floor for tenant in chat.tenants] == [1, 1]
    assert (chat.flags.autoscale, found["code"].flags.autoscale) == ("1..3", "1..2")
    # Where the limits are less than what was planned, neither role is without a worker.
    document["limits"] = [{"name": "gpus.h100-sxm", "most": 3}]
    few = asked(file(document)).members["chat"]
    assert few.share == {prefill: 1, decode: 1}
    types = planned_types(few.plan, (), as_is=False)
    assert {group.worker_type.name: group.workers for group in types.groups} == few.share
    assert asked(file(document), as_is=True, engine="vllm", model=["chat=a", "code=b"]).members[
        "chat"
    ].share == {"TP1 prefill": 1, "TP1 decode": 1}
    document["limits"] = [{"name": "gpus.h100-sxm", "most": 2}]
    with pytest.raises(BadInput, match="no room for the least of each model"):
        asked(file(document))


def test_a_model_of_two_tp_degrees_has_a_share_of_each_and_its_whole_plan_before_others_grow(file):
    types = {("h100-sxm", 2): 2, ("h100-sxm", 4): 1}
    found = asked(file(mixed(types, 9)))
    chat, code = found.members.values()
    wide, narrow = "h100-sxm TP4", "h100-sxm TP2"
    assert chat.share == {narrow: 2, wide: 1}
    assert [(p.kind, p.gpus, p.right, p.floor) for p in chat.tenants] == [(narrow, 2, 2, 1), (wide, 4, 1, 0)]
    assert (chat.flags.autoscale, code.flags.autoscale) == ("1..3", "1..7")
    assert _checked(chat).autoscale.most_kinds == chat.share
    assert _checked(code).autoscale.most_kinds == {}
    # Of nine GPUs it needs eight, though code was planned with two workers as well.
    document = mixed(types, 9)
    document["models"][1]["plan"] = plan_json(2)
    assert asked(file(document)).members["chat"].share == chat.share
    # Seven are too few for all of it: it has a fair part, and code keeps one.
    less = asked(file(mixed(types, 7))).members
    assert [sum(p.gpus * p.right for p in one.tenants) for one in less.values()] == [6, 1]
    assert less["chat"].plan.workers == sum(less["chat"].share.values())
    with pytest.raises(BadInput, match=r"chat 2 h100-sxm, code 1 h100-sxm"):
        asked(file(mixed(types, 2)))


def test_a_model_of_two_gpu_types_is_served_within_the_limits_of_each(file):
    types = {("h100-sxm", 1): 1, ("a100-sxm", 1): 2}
    document = mixed(types, 2)
    document["limits"] += [{"name": "gpus.a100-sxm", "most": 2}]
    found = asked(file(document))
    assert found.members["chat"].share == {"h100-sxm TP1": 1, "a100-sxm TP1": 2}
    tenants = [p for one in found.members.values() for p in one.tenants]
    assert found.limits.used(tenants, [1, 2, 1]) == [("gpus.h100-sxm", 2, 2), ("gpus.a100-sxm", 2, 2)]
    sites = {
        n: SimpleNamespace(types=planned_types(one.plan, (), as_is=False)) for n, one in found.members.items()
    }
    begun = _site("code", found, sites).begun(sites["code"].types.groups)
    assert [(one.group.worker_type.name, one.group.workers) for one in begun] == [
        ("h100-sxm TP1", 1),
        ("h100-sxm TP1", 1),
        ("a100-sxm TP1", 2),
    ]
    where = {"engine": "vllm", "model": ["chat=a", "code=b"], "as_is": True}
    with pytest.raises(BadInput, match=r"^--as-is: chat was planned on several types of GPU"):
        asked(file(document), **where)
    degrees = asked(file(mixed({("h100-sxm", 1): 1, ("a100-sxm", 2): 1}, 9)), **where).members["chat"]
    assert degrees.share == {"TP1": 1, "TP2": 1}
    with pytest.raises(
        BadInput, match=r"^--autoscale: expected MIN..MAX around the plan's 3 workers, got 1..2"
    ):
        _checked(asked(file(document), autoscale="1..2").members["chat"])


CUT_UNALIKE = portfolio_json({"chat": 1, "code": 1}, 8)
for _model, _parts in zip(CUT_UNALIKE["models"], (2, 4), strict=True):
    _model["plan"] = on_parts(_model["plan"], _parts)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("schema: tokenfleet.portfolio/1", "a portfolio file is planned first: `tokenfleet portfolio "),
        (plan_json(), "is the plan of one model; give it as --plan"),
        (TWO | {"schema": "tokenfleet.portfolio-plan/9"}, "expected tokenfleet.portfolio-plan/1, got"),
        ([], "schema: expected"),
        (TWO | {"models": []}, "models"),
        (TWO | {"models": TWO["models"] * 2}, "models: chat is given twice"),
        (CUT_UNALIKE, "workers have 0.25, 0.5 of a h100-sxm; expected the same of all that share one"),
        (TWO | {"models": [{"name": "a/b", "plan": {}}]}, "models.0.name"),
        (TWO | {"models": [{"name": "chat", "plan": plan_json(fleet=[])}]}, "models.0.plan"),
        (TWO | {"limits": [{"name": "gpus.h100-sxm", "most": 1}]}, "no room for the least of each model"),
        (partly(on_demand=4), "models.0.on_demand_workers: expected at most the plan's 3, got 4"),
        (partly(usd=None), "models.0.constant_usd_per_hour: missing; some of its workers are on spot"),
        (partly(on_demand=-1), "models.0.on_demand_workers: "),
        (TWO | {"limits": [{"name": "zones", "most": 1}]}, "limits: zones: no such limit"),
        (
            TWO | {"limits": ZONED["limits"]},
            "models: chat: zone: missing, and limits have zones.east.h100-sxm",
        ),
        (TWO | {"models": [model | {"zone": "east,"} for model in TWO["models"]]}, "models.0.zone: "),
        (
            in_zones({"chat": "east", "code": "east"}, {"east": 1, "west": 8}),
            "no room for the least of each model (chat 1 h100-sxm in east, code 1 h100-sxm in east)",
        ),
    ],
)
def test_what_is_no_plan_of_a_portfolio_is_refused_in_one_line(file, capsys, document, says):
    assert main(["serve", "--engine", "emulated", "--model", "m", "--portfolio", str(file(document))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "m"], "--model: expected NAME=FOLDER once for each of chat, code, got 'm'"),
        (["--model", "chat=a"], "where is code? give --model code=FOLDER"),
        (["--model", "chat=a", "--model", "chat=b"], "once for each of chat, code, got 'chat=b'"),
        (["--model", "mail=a"], "once for each of chat, code, got 'mail=a'"),
        (["--workers", "2"], "--workers: is for one fleet"),
        (["--slo", "ttft=1s,tpot=50ms"], "--slo: is for one fleet"),
        (["--advisory"], "--advisory: is for one fleet"),
        (["--reclaim-notice", "/x"], "--reclaim-notice: expected"),
        (
            ["--otlp", "collector:4318"],
            "--otlp: expected an http:// or https:// address, got 'collector:4318'",
        ),
        (["--autoscale", "0..4"], "--autoscale: each model of a portfolio keeps a worker, got 0..4"),
        (["--", "--lora-modules", "a=b"], "--lora-modules: is for one model"),
        (["--", "--served-model-name=a"], "--served-model-name: is for one model"),
    ],
)
def test_flags_of_one_fleet_are_refused_in_one_line(file, capsys, words, says):
    model = [] if "--model" in words else ["--engine", "emulated", "--model", "m"]
    assert main(["serve", *model, "--portfolio", str(file(TWO)), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_of_several_fleets_that_end_before_they_serve_only_the_one_that_was_refused_says_why(
    monkeypatch, capsys
):
    pytest.importorskip("uvloop", reason="the live extra is not installed")

    def ends(error, name):
        async def run_fleet(*told):
            raise error

        stands_in = SimpleNamespace(run_fleet=run_fleet)  # the module itself loads vLLM
        monkeypatch.setitem(sys.modules, "dataplane.live.control.fleet", stands_in)
        code = _run_core(None, print, name, SimpleNamespace(number=1))
        return code, capsys.readouterr().err.splitlines()

    lack = "--portfolio: zone east: Ray has no node with the label"
    assert ends(BadInput(lack), "chat") == (2, [f"error: chat: {lack}"])
    assert ends(asyncio.CancelledError(), "code") == (130, [])
    assert ends(asyncio.CancelledError(), "") == (130, [])  # the command itself says it, once
