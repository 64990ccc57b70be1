"""What is known of a plan's types of worker arrives where the plan goes: in the scaler and in the exports."""

import json
import shlex
from dataclasses import replace

import pytest
from planning_builders import planned, worker, worker_type

from controlplane.scaler.state import ScalingSettings
from dataplane.live.control.settings import CONTROLLER_SETTINGS, ControllerSettings
from dataplane.live.control.snapshot_builder import SnapshotBuilder
from tokenfleet.cli.serve_plan import autoscale_of, types_of
from tokenfleet.export.deployment import deployment
from tokenfleet.export.kuberay import kuberay, serve_words
from tokenfleet.export.production_stack import production_stack
from tokenfleet.planning.plan_file import PlanFile, read_plan
from tokenfleet.planning.plan_json import plan_json
from tokenfleet.profiles.library import find_profiles

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
    )
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(json.dumps(plan_json(made)))
    return read_plan(path)


def test_price_limit_reclaims_profile_and_degree_of_a_plan_are_the_scalers(plan):
    types = types_of(2, 1, (), plan, (), is_emulated=False)
    autoscale = autoscale_of("1..24", "60s", plan)
    sent = ControllerSettings("", None, False, 0, tuple(types), autoscale)
    read = CONTROLLER_SETTINGS.validate_json(CONTROLLER_SETTINGS.dump_json(sent))
    scaling = read.tick(SnapshotBuilder(read.profiles).profiles).scaling
    assert isinstance(scaling, ScalingSettings)
    (one,) = scaling.worker_types
    assert (one.gpu, one.tp_degree, one.known_profile) == (MADE.gpu, TP, MADE)
    assert one.usd_per_h == pytest.approx(TP * USD)
    assert (one.limit, one.reclaims_per_h) == (MAX_GPUS // TP, RECLAIMS)
    assert (scaling.mix.max_gpus, scaling.mix.budget_usd_per_h) == (MAX_GPUS, BUDGET)
    assert scaling.is_mix, "of workers that are reclaimed, more than serve are kept"
    assert types.workers == {one.name: plan.workers}


def test_price_limit_reclaims_profile_and_degree_of_a_plan_are_the_exports(plan):
    fleet = deployment(plan, "a/model")
    (group,) = fleet.groups
    one = group.worker_type
    assert (one.known_profile, one.limit, one.reclaims_per_h) == (MADE, MAX_GPUS // TP, RECLAIMS)
    n = plan.workers
    words = serve_words(fleet)
    assert words[words.index("--kind") + 1] == (
        f"gpu=made-gpu,tp={TP},workers={n},max={n},usd={TP * USD:g},reclaims={RECLAIMS:g}"
    )
    assert words[-4:] == ["--max-num-batched-tokens", "1024", "--max-num-seqs", "64"]
    (served,) = types_of(2, 1, [words[words.index("--kind") + 1]], None, (), is_emulated=False)
    assert (served.usd_per_h, served.reclaims_per_h, served.limit) == (TP * USD, RECLAIMS, n)
    job, _ = kuberay(fleet, "fleet", "image")
    assert shlex.split(job["spec"]["entrypoint"]) == words
    (spec,) = production_stack(fleet)["servingEngineSpec"]["modelSpec"]
    assert (spec["requestGPU"], spec["replicaCount"]) == (TP, n)
    assert spec["vllmConfig"]["tensorParallelSize"] == TP
    assert spec["vllmConfig"]["maxNumSeqs"] == MADE.engine.max_seqs


def test_a_plan_carries_a_profile_only_where_the_library_has_no_such_one():
    (shipped,) = find_profiles("llama-3.1-8b", ["h100"], [1])
    for profile, is_carried in (
        (shipped, False),
        (shipped.with_engine(max_seqs=64), False),
        (replace(shipped, step=replace(shipped.step, base_s=1.0)), True),
        (MADE, True),
    ):
        document = plan_json(planned(worker_types=[worker_type(profile)], attainment=0.5))
        (stated,) = document["inputs"]["profiles"]
        assert ("profile" in stated) == is_carried
