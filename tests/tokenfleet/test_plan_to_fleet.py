"""Facts about a plan's worker types arrive where the plan goes: in the scaler and in the exports."""

import json
import shlex

import pytest
import yaml
from planning_builders import planned, worker, worker_type

from controlplane.errors import BadInput
from controlplane.placement.strictness import LEVELS, NORMAL, Strictness
from controlplane.scaler.state import ScalingSettings
from dataplane.live.control.controller_process import CONTROLLER_SETTINGS, ControllerSettings
from tokenfleet.cli.serve.loop import autoscale_of
from tokenfleet.cli.serve.workers import headroom_of, planned_types, strictness_of
from tokenfleet.export.deployment import deployment, serve_words
from tokenfleet.export.files import ExportSettings, export_files
from tokenfleet.export.kuberay import kuberay
from tokenfleet.export.production_stack import production_stack
from tokenfleet.planning.plan_file import PlanFile, read_plan
from tokenfleet.profiles.form import parse_profile
from tokenfleet.report.plan_json import plan_json

TP, USD, RECLAIMS, MAX_GPUS, BUDGET = 2, 2.25, 0.04, 48, 90.0
MADE = worker("made-gpu", TP)


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> PlanFile:
    """A plan on spot workers of a profile that the library does not have, within limits."""
    made = planned(
        worker_types=[worker_type(MADE, USD)],
        max_gpus=MAX_GPUS,
        budget_usd_per_h=BUDGET,
        reclaims_per_h=RECLAIMS,
        cold_start_s=60.0,
        priority_headroom=0.3,
        strictness="strict",
    )
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(json.dumps(plan_json(made)))
    return read_plan(path)


def test_price_limit_reclaims_profile_and_degree_of_a_plan_are_the_scalers(plan):
    types = planned_types(plan, (), as_is=False)
    autoscale = autoscale_of("1..24", "60s", plan)
    sent = ControllerSettings("", None, False, 0, tuple(types), autoscale)
    read = CONTROLLER_SETTINGS.validate_json(CONTROLLER_SETTINGS.dump_json(sent))
    scaling = read.tick(read.profiles).scaling
    assert isinstance(scaling, ScalingSettings)
    (one,) = scaling.worker_types
    assert (one.gpu, one.tp_degree, one.known_profile) == (MADE.gpu, TP, MADE)
    assert one.usd_per_h == pytest.approx(TP * USD)
    assert (one.limit, one.reclaims_per_h) == (MAX_GPUS // TP, RECLAIMS)
    assert (scaling.mix.max_gpus, scaling.mix.budget_usd_per_h) == (MAX_GPUS, BUDGET)
    assert scaling.is_mix, "of workers that are reclaimed, more than serve are kept"
    assert types.workers == {one.name: plan.workers}


def test_whether_requests_move_is_the_plans_word():
    for moves in (True, False):
        settings = ControllerSettings("", None, False, 0, (), moves=moves).tick({})
        assert (settings.moves is not None) == moves


def test_an_export_carries_the_plan_itself_and_serves_it(plan, tmp_path):
    fleet = deployment(plan, "/srv/weights")
    texts = export_files(fleet, ["kuberay", "systemd"], ExportSettings(), tmp_path)
    made = {one["kind"]: one for one in yaml.safe_load_all(texts[tmp_path / "kuberay" / "kuberay.yaml"])}
    config, pod = made["ConfigMap"], made["Deployment"]["spec"]["template"]["spec"]
    carried = [config["data"]["plan.json"], texts[tmp_path / "systemd" / "plan.json"]]
    for text in carried:
        (tmp_path / "carried.json").write_text(text)
        read = read_plan(tmp_path / "carried.json")
        assert read.document == plan.document
        (one,) = planned_types(read, (), as_is=False)
        assert one.profile == MADE
    words = shlex.split(pod["containers"][0]["command"][2].rpartition(" exec ")[2])
    assert words[:6] == serve_words(fleet, "/etc/tokenfleet/plan.json", [])[:6]
    # The model's own name says that the weights are of it, whatever their folder is called.
    assert words[-4:] == ["--served-model-name", "weights", "/srv/weights", "made"]
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "plan"]
    assert mount["mountPath"] == "/etc/tokenfleet"
    assert {"name": "plan", "configMap": {"name": config["metadata"]["name"]}} in pod["volumes"]
    unit = texts[tmp_path / "systemd" / "tokenfleet.service"]
    assert "--plan /etc/tokenfleet/plan.json" in unit


def test_production_stack_is_written_only_for_the_placement_that_its_router_has(plan):
    with pytest.raises(BadInput, match=r"production-stack: its router places requests round-robin"):
        production_stack(deployment(plan, "a/model"))
    fleet = deployment(plan.model_copy(update={"policy": "round-robin"}), "a/model")
    (spec,) = production_stack(fleet)["servingEngineSpec"]["modelSpec"]
    assert (spec["requestGPU"], spec["replicaCount"]) == (TP, plan.workers)
    assert spec["vllmConfig"]["tensorParallelSize"] == TP
    assert spec["vllmConfig"]["maxNumSeqs"] == MADE.engine.max_seqs


def test_a_split_plan_is_carried_whole_by_what_serves_it_and_refused_by_what_does_not(plan):
    parts = [plan.fleet[0].model_copy(update={"role": role}) for role in ("prefill", "decode")]
    fleet = deployment(plan.model_copy(update={"fleet": parts, "policy": "round-robin"}), "a/model")
    assert kuberay(fleet, "f", "i")
    with pytest.raises(BadInput, match="prefill and decode workers need the chart's own"):
        production_stack(fleet)


def test_a_plan_carries_the_profiles_it_was_made_with():
    (document,) = plan_json(planned(worker_types=[worker_type(MADE)], attainment=0.5))["inputs"]["profiles"]
    assert parse_profile(json.dumps(document["profile"]), "plan") == MADE


def test_the_headroom_of_a_plan_is_the_fleets_unless_an_operator_says_another(plan, tmp_path):
    assert plan.priority_headroom == 0.3
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.document))
    older = {name: value for name, value in plan.document.items() if name != "priority_headroom"}
    (tmp_path / "older.json").write_text(json.dumps(older))
    flags = [
        ("plan.json", None, 0.3),
        ("plan.json", 0.1, 0.1),
        ("plan.json", 0.0, 0.0),
        ("older.json", None, 0.0),
    ]
    for name, asked, meant in flags:
        assert headroom_of(asked, read_plan(tmp_path / name)) == meant
    assert headroom_of(None, None) == 0.0


def test_the_strictness_of_a_plan_is_the_fleets_unless_an_operator_asks_for_another(plan, tmp_path):
    assert strictness_of(None, plan) == LEVELS["strict"]
    assert strictness_of("theta=0.1", plan) == Strictness(theta=0.1)
    assert strictness_of(None, None) == strictness_of("normal", plan) == NORMAL
    sent = ControllerSettings("", None, False, 0, (), strictness=LEVELS["strict"])
    assert CONTROLLER_SETTINGS.validate_json(CONTROLLER_SETTINGS.dump_json(sent)) == sent
    with pytest.raises(BadInput, match=r"^--strictness: gamma: must be above 0 and at most 1, got 2$"):
        strictness_of("gamma=2", plan)
    (tmp_path / "plan.json").write_text(json.dumps({**plan.document, "strictness": "stern"}))
    with pytest.raises(BadInput, match=r"strictness: .*loose, normal, strict.*'stern'"):
        read_plan(tmp_path / "plan.json")
