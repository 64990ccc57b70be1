"""`tokenfleet serve --portfolio`: what it runs of a portfolio's plan, and what it refuses in one line."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest
from made_plans import on_parts, plan_json, plan_of_fleet, portfolio_json

from controlplane.errors import BadInput
from dataplane.live.pool.fleet_types import Site
from tokenfleet.cli.main import main
from tokenfleet.cli.serve import ServeFlags, _site
from tokenfleet.cli.serve_plan import members_of, planned_types
from tokenfleet.cli.serve_processes import _run_core


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


def test_plans_that_peak_at_different_times_begin_with_fair_parts_of_the_limits(file):
    found = asked(file(portfolio_json({"chat": 6, "code": 2}, 4)))
    shares = {name: (one.plan.workers, one.pool.right, one.pool.share) for name, one in found.members.items()}
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
    with pytest.raises(BadInput, match="code stands there twice"):
        asked(file(with_adapters(["code"])))


def in_zones(zone_of, most, **fields):
    """A plan of models of one worker in these zones, each of which has so many GPUs."""
    document = portfolio_json(dict.fromkeys(zone_of, 1), 9, **fields)
    for model in document["models"]:
        model["zone"] = zone_of[model["name"]]
    document["limits"] += [{"name": f"zones.{zone}.h100-sxm", "most": n} for zone, n in most.items()]
    return document


def test_models_that_share_gpus_have_parts_of_what_the_limits_leave(file):
    found = asked(file(portfolio_json(dict.fromkeys(("chat", "code", "mail"), 1), 2, workers_per_gpu=2)))
    pools = [one.pool for one in found.members.values()]
    assert [(p.gpus, p.usd_per_h, p.right) for p in pools] == [(0.5, 2.5, 1)] * 3
    assert {one.flags.autoscale for one in found.members.values()} == {"1..2"}
    types = planned_types(found.members["chat"].plan, (), as_is=False)
    beside = [group for _ in range(2) for group in types.groups]
    types.check_gpus([{"GPU": 2.0, "accelerator_type:H100": 1.0}], Site(beside=tuple(beside)))
    with pytest.raises(BadInput, match=r"--portfolio: .* 1 workers of 0.5 GPUs need 1.5, Ray has 1"):
        types.check_gpus([{"GPU": 1.0, "accelerator_type:H100": 1.0}], Site(beside=tuple(beside)))
    as_is = {"as_is": True, "engine": "vllm", "model": ["chat=a", "code=b", "mail=c"]}
    with pytest.raises(BadInput, match=r"^--as-is: chat was planned on 1/2 of a GPU"):
        asked(file(portfolio_json(dict.fromkeys(("chat", "code", "mail"), 1), 2, workers_per_gpu=2)), **as_is)


ZONED = in_zones({"chat": "east", "code": "east", "mail": "eu-west.1"}, {"east": 3, "eu-west.1": 6})


def test_a_model_of_a_zone_has_what_others_leave_of_that_zone(file):
    found = asked(file(ZONED))
    assert {n: one.pool.zone for n, one in found.members.items()} == {
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
        "chat": Site("east", (worker,), is_first=True),
        "code": Site("east", (worker,), is_first=False),
        "mail": Site("eu-west.1", (), is_first=True),
    }
    without = asked(file(portfolio_json({"chat": 1, "code": 1}, 4)))
    assert _site("code", without, checked) == Site(None, (worker,), is_first=False)


TWO = portfolio_json({"chat": 1, "code": 1}, 4)
MIXED = plan_of_fleet(
    [
        {"gpu": gpu, "tp_degree": 1, "workers": 1, "usd_per_hour": 2.0, "role": "any"}
        for gpu in ("h100-sxm", "a100-sxm")
    ],
    "llama-3.1-8b",
)


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
        (TWO | {"models": TWO["models"] * 2}, "models: chat stands there twice"),
        (CUT_UNALIKE, "workers have 0.25, 0.5 of a h100-sxm; expected the same of all that share one"),
        (TWO | {"models": [{"name": "a/b", "plan": {}}]}, "models.0.name"),
        (TWO | {"models": [{"name": "chat", "plan": plan_json(fleet=[])}]}, "models.0.plan"),
        (TWO | {"models": [{"name": "chat", "plan": MIXED}]}, "chat: is planned on several kinds of worker"),
        (TWO | {"limits": [{"name": "gpus.h100-sxm", "most": 1}]}, "no room for the least of each model"),
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
        (["--workers", "2"], "--workers: is of one fleet"),
        (["--slo", "ttft=1s,tpot=50ms"], "--slo: is of one fleet"),
        (["--advisory"], "--advisory: is of one fleet"),
        (["--reclaim-notice", "/x"], "--reclaim-notice: expected"),
        (["--autoscale", "0..4"], "--autoscale: each model of a portfolio keeps a worker, got 0..4"),
        (["--", "--lora-modules", "a=b"], "--lora-modules: is of one model"),
        (["--", "--served-model-name=a"], "--served-model-name: is of one model"),
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
    assert ends(asyncio.CancelledError(), "") == (130, ["error: interrupted; nothing was written"])
