"""Which types of worker `tokenfleet serve` starts, from its flags or a plan."""

import json

import pytest
from checkout import ROOT
from made_plans import plan_of_fleet

from controlplane.errors import BadInput
from controlplane.worker_type import WorkerGroup, WorkerType
from dataplane.live.pool.fleet_types import FleetTypes, accelerator
from tokenfleet.cli.serve_plan import autoscale_of, types_of
from tokenfleet.planning.plan_file import read_plan
from tokenfleet.profiles.prices import read_prices

LIBRARY = ROOT / "profiles"
MIX = [
    {"gpu": "h100-sxm", "tp_degree": 2, "workers": 2, "usd_per_hour": 10.76},
    {"gpu": "a100-sxm", "tp_degree": 4, "workers": 1, "usd_per_hour": None},
]


def plan_of(tmp_path, fleet, **more):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_of_fleet(fleet, **more)))
    return read_plan(path)


def described(types):
    return [
        (t.name, types.workers[t.name], t.usd_per_h, t.known_profile and t.known_profile.label) for t in types
    ]


def test_a_mixed_plan_is_served_as_it_is(tmp_path):
    plan = plan_of(tmp_path, MIX)
    real = types_of(2, 1, (), plan, (), is_emulated=False)
    assert described(real) == [
        ("h100-sxm TP2", 2, 5.38, "llama-3.1-70b on h100-sxm TP2 (composed)"),
        ("a100-sxm TP4", 1, None, "llama-3.1-70b on a100-sxm TP4 (composed)"),
    ]
    emulated = types_of(2, 1, (), plan, (), is_emulated=True)
    assert [(t.profile.model, t.profile.gpu, t.profile.tp_degree) for t in emulated] == [
        ("llama-3.1-70b", "h100-sxm", 2),
        ("llama-3.1-70b", "a100-sxm", 4),
    ]


def test_a_mixed_plans_line_counts_workers_of_no_kind(tmp_path):
    line = {"workers_per_rps": 1.0, "intercept": 0.5}
    mixed = plan_of(tmp_path, MIX, demand_line=line)
    assert autoscale_of("1..8", "80s", mixed).line is None
    alike = plan_of(tmp_path, MIX[:1], demand_line=line)
    assert autoscale_of("1..8", "80s", alike).line == (1.0, 0.5)


def test_prefill_and_decode_workers_of_one_kind_are_counted_together(tmp_path):
    parts = [MIX[0] | {"role": "prefill"}, MIX[0] | {"role": "decode", "workers": 3, "usd_per_hour": 16.14}]
    assert described(types_of(2, 1, (), plan_of(tmp_path, parts), (), False)) == [
        ("h100-sxm TP2", 5, 5.38, "llama-3.1-70b on h100-sxm TP2 (composed)")
    ]


def test_kinds_are_taken_from_the_line():
    given = ["gpu=h100-sxm,tp=2,workers=3,max=4,usd=7.5", "gpu=a100-sxm", "tp=8"]
    types = types_of(2, 1, given, None, (), is_emulated=False)
    assert types.workers == {"h100-sxm TP2": 3, "a100-sxm TP1": 1, "TP8": 1}
    assert [t.limit for t in types] == [4, None, None]
    listed = read_prices().usd_per_gpu_h("a100-sxm").usd
    assert [t.usd_per_h for t in types] == [7.5, listed, None]
    assert types_of(5, 2, (), None, (), is_emulated=False).workers == {"TP2": 5}
    (spot,) = types_of(2, 1, ["gpu=h100-sxm,reclaims=0.1"], None, (), is_emulated=False)
    assert (spot.reclaims_per_h, spot.usd_per_h) == (0.1, read_prices().usd_per_gpu_h("h100-sxm", True).usd)


def test_profiles_find_their_kinds():
    files = [LIBRARY / "h100-sxm" / "llama-3.1-8b_tp2.yaml", LIBRARY / "h100-sxm" / "llama-3.1-8b_tp1.yaml"]
    types = types_of(2, 1, ["gpu=h100,tp=1", "gpu=h100,tp=2"], None, files, is_emulated=True)
    assert [t.profile.tp_degree for t in types] == [1, 2]
    (alone,) = types_of(2, 1, (), None, files[:1], is_emulated=True)
    assert alone.profile.tp_degree == 2  # of one kind there is no doubt which is meant
    with pytest.raises(BadInput, match=r"--profile: none is of h100 TP1"):
        types_of(2, 1, ["gpu=h100,tp=1", "gpu=h100,tp=2"], None, files[:1], is_emulated=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["h100"], "expected gpu="),
        (["gpu=h100,colour=red"], "expected gpu="),
        (["tp=1,tp=2"], "expected gpu="),
        (["tp=two"], "expected numbers"),
        (["tp=0"], "TP degree: must be at least 1"),
        (["workers=2", "tp=2,workers=-1"], "workers: must be at least 0"),
        (["workers=3,max=2"], "max"),
        (["usd=nan"], "usd"),
        (["usd=-1"], "usd"),
        (["workers=0"], "at least one"),
        (["reclaims=-1"], "reclaims"),
        (["reclaims=often"], "expected numbers"),
        (["tp=2", "tp=2"], "expected different ones"),
    ],
)
def test_kinds_that_cannot_be_are_refused(given, says):
    with pytest.raises(BadInput, match=says):
        types_of(2, 1, given, None, (), is_emulated=False)


def test_a_plan_and_kinds_are_not_both_given(tmp_path):
    with pytest.raises(BadInput, match="the plan says"):
        types_of(2, 1, ["tp=2"], plan_of(tmp_path, MIX), (), is_emulated=False)


def test_gpus_are_looked_for_by_type_where_types_differ():
    types = FleetTypes(
        [WorkerGroup(WorkerType("h100-sxm", 2), 2), WorkerGroup(WorkerType("rtx-pro-6000"), 1)]
    )
    assert [accelerator(t) for t in types] == ["H100", None]
    types.check_gpus({"GPU": 5.0, "accelerator_type:H100": 1.0})
    with pytest.raises(BadInput, match="need 5, Ray has 4"):
        types.check_gpus({"GPU": 4.0, "accelerator_type:H100": 1.0})
    with pytest.raises(BadInput, match="no node with H100"):
        types.check_gpus({"GPU": 8.0})
    FleetTypes([WorkerGroup(WorkerType("h100-sxm", 2), 2)]).check_gpus(
        {"GPU": 4.0}
    )  # of one type none is asked for
