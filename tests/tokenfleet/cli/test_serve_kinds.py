"""Which kinds of worker `tokenfleet serve` starts, from its flags or a plan."""

import json

import pytest
from checkout import ROOT
from made_plans import plan_of_fleet

from controlplane.errors import BadInput
from dataplane.live.pool.worker_kinds import Kinds, WorkerKind
from tokenfleet.cli.serve_plan import autoscale_of, kinds_of
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


def described(kinds):
    return [(k.name, k.workers, k.usd_per_h, None if k.profile is None else k.profile.label) for k in kinds]


def test_a_mixed_plan_is_served_as_it_is(tmp_path):
    plan = plan_of(tmp_path, MIX)
    real = kinds_of(2, 1, (), plan, (), is_emulated=False)
    assert described(real) == [("h100-sxm TP2", 2, 5.38, None), ("a100-sxm TP4", 1, None, None)]
    emulated = kinds_of(2, 1, (), plan, (), is_emulated=True)
    assert [(k.profile.model, k.profile.gpu, k.profile.tp_degree) for k in emulated] == [
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
    assert described(kinds_of(2, 1, (), plan_of(tmp_path, parts), (), False)) == [
        ("h100-sxm TP2", 5, 5.38, None)
    ]


def test_kinds_are_taken_from_the_line():
    given = ["gpu=h100-sxm,tp=2,workers=3,max=4,usd=7.5", "gpu=a100-sxm", "tp=8"]
    kinds = kinds_of(2, 1, given, None, (), is_emulated=False)
    assert kinds.workers == {"h100-sxm TP2": 3, "a100-sxm TP1": 1, "TP8": 1}
    assert [k.high for k in kinds] == [4, None, None]
    listed = read_prices().usd_per_gpu_h("a100-sxm").usd
    assert [k.usd_per_h for k in kinds] == [7.5, listed, None]
    assert kinds_of(5, 2, (), None, (), is_emulated=False).workers == {"TP2": 5}
    (spot,) = kinds_of(2, 1, ["gpu=h100-sxm,reclaims=0.1"], None, (), is_emulated=False)
    assert (spot.reclaims_per_h, spot.usd_per_h) == (0.1, read_prices().usd_per_gpu_h("h100-sxm", True).usd)


def test_profiles_find_their_kinds():
    files = [LIBRARY / "h100-sxm" / "llama-3.1-8b_tp2.yaml", LIBRARY / "h100-sxm" / "llama-3.1-8b_tp1.yaml"]
    kinds = kinds_of(2, 1, ["gpu=h100,tp=1", "gpu=h100,tp=2"], None, files, is_emulated=True)
    assert [k.profile.tp_degree for k in kinds] == [1, 2]
    (alone,) = kinds_of(2, 1, (), None, files[:1], is_emulated=True)
    assert alone.profile.tp_degree == 2  # of one kind there is no doubt which is meant
    with pytest.raises(BadInput, match=r"--profile: none is of h100 TP1"):
        kinds_of(2, 1, ["gpu=h100,tp=1", "gpu=h100,tp=2"], None, files[:1], is_emulated=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["h100"], "expected gpu="),
        (["gpu=h100,colour=red"], "expected gpu="),
        (["tp=1,tp=2"], "expected gpu="),
        (["tp=two"], "expected numbers"),
        (["tp=0"], "expected at least 0 and 1"),
        (["workers=-1"], "expected at least 0 and 1"),
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
        kinds_of(2, 1, given, None, (), is_emulated=False)


def test_a_plan_and_kinds_are_not_both_given(tmp_path):
    with pytest.raises(BadInput, match="the plan says"):
        kinds_of(2, 1, ["tp=2"], plan_of(tmp_path, MIX), (), is_emulated=False)


def test_gpus_are_looked_for_by_type_where_types_differ():
    kinds = Kinds([WorkerKind(2, 2, "h100-sxm"), WorkerKind(1, 1, "rtx-pro-6000")])
    assert [k.accelerator for k in kinds] == ["H100", None]
    kinds.check_gpus({"GPU": 5.0, "accelerator_type:H100": 1.0})
    with pytest.raises(BadInput, match="need 5, Ray has 4"):
        kinds.check_gpus({"GPU": 4.0, "accelerator_type:H100": 1.0})
    with pytest.raises(BadInput, match="no node with H100"):
        kinds.check_gpus({"GPU": 8.0})
    Kinds([WorkerKind(2, 2, "h100-sxm")]).check_gpus({"GPU": 4.0})  # of one type none is asked for
