"""Worker types that `tokenfleet serve` starts, from its flags or a plan."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from checkout import ROOT
from made_plans import PROFILE, document_of, on_parts, plan_of_fleet
from planning_builders import planned, worker, worker_type

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import KvModel
from controlplane.perfmodel.offload import HostKv
from controlplane.perfmodel.profile import speculating
from controlplane.perfmodel.speculation import Speculation
from controlplane.types import EngineMode
from controlplane.worker_type import KvLink, WorkerGroup, WorkerType
from dataplane.live.pool.fleet_types import ZONE, Begun, FleetTypes, Site, accelerator
from tokenfleet.cli.main import main
from tokenfleet.cli.serve.flags import ServeFlags
from tokenfleet.cli.serve.loop import autoscale_of
from tokenfleet.cli.serve.workers import check_model, planned_types, types_asked, types_of
from tokenfleet.export.deployment import deployment, serve_words
from tokenfleet.planning.plan_file import read_plan
from tokenfleet.profiles.form import profile_document
from tokenfleet.profiles.library import find_profiles, read_profile, write_profile
from tokenfleet.profiles.prices import read_prices
from tokenfleet.report.plan_json import plan_json

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
    types = planned_types(plan_of(tmp_path, MIX), (), as_is=False)
    assert described(types) == [
        ("h100-sxm TP2", 2, 5.38, "llama-3.1-70b on h100-sxm TP2 (predicted)"),
        ("a100-sxm TP4", 1, None, "llama-3.1-70b on a100-sxm TP4 (predicted)"),
    ]
    fixed = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "tensor_parallel_size": 4}
    fixed["gpu_memory_utilization"] = 0.9  # what the library's KV is from; vLLM's own default is another
    assert types.engine_settings("a100-sxm TP4", {"model": "m"}, on_cpus=False) == fixed | {"model": "m"}
    unplanned = types_of(2, 1, (), (), is_emulated=False)
    assert unplanned.engine_settings("TP1", {"model": "m"}, on_cpus=True) == {
        "model": "m",
        "tensor_parallel_size": 1,
    }


def test_an_engine_on_a_part_of_a_gpu_is_told_its_memory_and_its_kv_so_that_neighbours_do_not_count(tmp_path):
    path, part = tmp_path / "plan.json", {"gpu": PROFILE.gpu, "workers": 1, "usd_per_hour": 2.0}
    path.write_text(json.dumps(on_parts(plan_of_fleet([part | {"tp_degree": 1}], PROFILE.model), 2)))
    types = planned_types(read_plan(path), (), as_is=False)
    (kind,), profile = types.names, PROFILE.shared(2)
    settings = types.engine_settings(kind, {}, on_cpus=False)
    assert settings["gpu_memory_utilization"] == 0.45
    assert settings["kv_cache_memory_bytes"] == profile.kv.capacity_tokens * profile.kv.bytes_per_token
    assert types.engine_settings(kind, {"gpu_memory_utilization": 0.9}, on_cpus=False) == settings
    asked = ServeFlags(model=["m"], plan=path, as_is=False, engine="emulated")
    plan = read_plan(path)
    for flag in ("--gpu-memory-utilization=0.9", "--kv_cache_memory_bytes"):
        with pytest.raises(BadInput, match=r"the plan says what its workers take of a GPU that they share"):
            types_asked(replace(asked, engine_flags=[flag]), plan, "m")
    assert types_asked(asked, plan, "m").names == types.names
    with pytest.raises(BadInput, match=r"^export: its workers have 1/2 of a GPU"):
        deployment(plan)
    # A profile of one's own is of a worker that has the GPU to itself.
    write_profile(replace(PROFILE, model="mine"), tmp_path / "mine.yaml")
    (mine,) = planned_types(read_plan(path), [tmp_path / "mine.yaml"], as_is=False)
    assert (mine.profile.model, mine.reserved_gpus) == ("mine", 0.5)
    assert mine.profile.step.base_s == pytest.approx(2 * PROFILE.step.base_s)


def test_a_plan_served_as_is_keeps_numbers_and_limits_and_leaves_out_what_is_of_other_hardware(tmp_path):
    plan = plan_of(tmp_path, [*MIX, MIX[0] | {"gpu": "h200-sxm", "workers": 3}])
    types = planned_types(plan, (), as_is=True)
    assert described(types) == [("TP2", 5, None, None), ("TP4", 1, None, None)]
    assert [t.limit for t in types] == [None, None]
    types.check_cpus()
    types.check_gpus([{"GPU": 8.0}, {"GPU": 8.0}])
    types.check_flags(flags(max_num_seqs=8))
    settings = types.engine_settings("TP4", {"max_num_seqs": 8}, on_cpus=True)
    assert settings == {"max_num_seqs": 8, "max_num_batched_tokens": 8192, "tensor_parallel_size": 4}
    assert types.shortfall("TP2", 16) is None
    file = LIBRARY / "h100-sxm" / "llama-3.1-8b_tp2.yaml"
    own = planned_types(plan_of(tmp_path, MIX[:1]), [file], as_is=True)
    assert described(own) == [("TP2", 2, None, "llama-3.1-8b on h100-sxm TP2 (predicted)")]


def flags(**given):
    plain = {"max_num_seqs": None, "max_num_batched_tokens": None}
    return SimpleNamespace(**plain | {"tensor_parallel_size": 1, "enable_chunked_prefill": None} | given)


@pytest.mark.parametrize("caches", [True, False])
def test_engines_cache_prefixes_as_the_plan_says(tmp_path, caches):
    plan = plan_of(tmp_path, MIX[:1]).model_copy(update={"prefix_cache": caches})
    types = planned_types(plan, (), as_is=False)
    assert types.engine_settings("h100-sxm TP2", {}, on_cpus=False)["enable_prefix_caching"] is caches
    types.check_flags(flags(enable_prefix_caching=None))
    types.check_flags(flags(enable_prefix_caching=caches))
    says = f"^--enable-prefix-caching: h100-sxm TP2 was planned with {caches}, not {not caches}"
    with pytest.raises(BadInput, match=says):
        types.check_flags(flags(enable_prefix_caching=not caches))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_num_seqs": 64}, r"^--max-num-seqs: h100-sxm TP2 was planned with 256, not 64; --as-is"),
        ({"max_num_batched_tokens": 2048}, "^--max-num-batched-tokens: .* 8192, not 2048"),
        ({"tensor_parallel_size": 4}, "^--tensor-parallel-size: h100-sxm TP2 was planned with 2, not 4"),
        ({"enable_chunked_prefill": False}, "^--enable-chunked-prefill: .* True, not False"),
    ],
)
def test_engine_flags_that_contradict_a_plan_are_refused(tmp_path, given, says):
    types = planned_types(plan_of(tmp_path, MIX[:1]), (), as_is=False)
    types.check_flags(flags(max_num_seqs=256, max_num_batched_tokens=8192, tensor_parallel_size=2))
    with pytest.raises(BadInput, match=says):
        types.check_flags(flags(**given))


H100, A100 = {"accelerator_type:H100": 1.0}, {"accelerator_type:A100": 1.0}


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([{"GPU": 4.0} | H100], "--plan: 2 workers of 2 GPUs, 1 workers of 4 GPUs need 8, Ray has 4"),
        ([{"GPU": 8.0} | H100], "a100-sxm TP4: Ray has no node with A100 GPUs; --as-is"),
        ([{"GPU": 8.0}], "a100-sxm TP4: Ray has no node with A100 GPUs"),
        (
            [{"GPU": 6.0} | H100, {"GPU": 2.0} | A100],
            "1 workers of 4 A100 GPUs, each on one node, do",
        ),
        (
            [{"GPU": 3.0} | H100, {"GPU": 5.0} | A100],
            "2 workers of 2 H100 GPUs, each on one node, do",
        ),
    ],
)
def test_a_plans_gpus_are_there_by_type_number_and_node_or_it_is_refused(tmp_path, nodes, says):
    types = planned_types(plan_of(tmp_path, MIX), (), as_is=False)
    types.check_gpus([{"GPU": 2.0} | H100, {"GPU": 2.0} | H100, {"GPU": 4.0} | A100])
    with pytest.raises(BadInput, match=says):
        types.check_gpus(nodes)


def nodes_of(zones):
    """Ray's nodes: for each its zone, None for no label, and its H100 GPUs."""
    return [
        {"Alive": True, "Resources": {"GPU": n} | H100, "Labels": {ZONE: zone} if zone else {}}
        for zone, n in zones
    ]


def test_the_gpus_of_a_zone_are_on_its_own_nodes_and_enough_for_all_models_there(tmp_path):
    types = planned_types(plan_of(tmp_path, MIX[:1]), (), as_is=False)  # two workers of two GPUs
    site = Site("east", tuple(map(Begun, types.groups)))
    has_room = nodes_of([("east", 4.0), ("west", 8.0), (None, 8.0), ("east", 4.0)])
    there = site.nodes(has_room)
    assert [node["Resources"]["GPU"] for node in there] == [4.0, 4.0]
    site.check(has_room)
    types.check_gpus([node["Resources"] for node in there], site)
    types.check_gpus([{"GPU": 4.0} | H100], Site("east"))
    for short, says in (
        (
            [{"GPU": 7.0} | H100],
            r"--portfolio: zone east: 2 workers of 2 .* need 8, Ray's nodes there have 7",
        ),
        (
            [{"GPU": 5.0} | H100, {"GPU": 3.0} | H100],
            r"--portfolio: zone east: 2 workers of 2 H100 GPUs, each",
        ),
        ([{"GPU": 8.0} | A100], r"--portfolio: zone east: h100-sxm TP2: Ray has no node with H100 GPUs"),
    ):
        with pytest.raises(BadInput, match=says):
            types.check_gpus(short, site)


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([("west", 8.0), ("south", 8.0)], "there are south, west"),
        ([(None, 8.0)], "none has a zone"),
        ([], "none has a zone"),
    ],
)
def test_a_zone_without_a_node_is_refused_by_its_label(nodes, says):
    line = f"--portfolio: zone east: Ray has no node with the label ray.io/availability-zone=east; {says}"
    with pytest.raises(BadInput, match=f"^{line}$"):
        Site("east").check(nodes_of(nodes))
    gone = [node | {"Alive": False} for node in nodes_of([("east", 8.0)])]
    with pytest.raises(BadInput, match=f"^{line}$"):
        Site("east").check(gone + nodes_of(nodes))
    Site().check(gone)


def test_a_plan_for_gpus_is_refused_where_engines_compute_on_cpus(tmp_path):
    with pytest.raises(BadInput, match=r"planned for h100-sxm TP2, but this host has no GPU; --as-is"):
        planned_types(plan_of(tmp_path, MIX), (), as_is=False).check_cpus()
    types_of(2, 1, ["gpu=h100-sxm"], (), is_emulated=False).check_cpus()  # an operator's own word


def test_a_plan_of_an_engine_on_cpus_fixes_its_kv_memory_and_a_smaller_one_is_refused(tmp_path):
    made = replace(worker("cpu"), kv=KvModel(13_616, 16, bytes_per_token=2048))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_json(planned(worker_types=[worker_type(made)], attainment=0.5))))
    types = planned_types(read_plan(path), (), as_is=False)
    types.check_cpus()
    settings = types.engine_settings("cpu TP1", {}, on_cpus=True)
    assert settings["kv_cache_memory_bytes"] == 13_616 * 2048
    assert (settings["max_num_seqs"], settings["max_num_batched_tokens"]) == (64, 1024)
    assert types.shortfall("cpu TP1", 13_600) is None
    lacks = types.shortfall("cpu TP1", 8192)
    assert "has room for 8,192 tokens of KV, cpu TP1 was planned with 13,616" in lacks


@pytest.mark.parametrize("as_is", [False, True])
def test_prefill_and_decode_workers_of_a_plan_keep_their_roles(tmp_path, as_is):
    document = plan_of_fleet(MIX[:1])
    parts = [document["fleet"][0] | {"role": role} for role in ("prefill", "decode")]
    document |= {"fleet": parts, "workers": 4, "gpus": 8}
    document["inputs"]["profiles"][0] |= {
        "profile": document_of("llama-3.1-70b", "h100-sxm", 2, EngineMode.SPLIT),
        "kv_link": {"gb_per_s": 50.0, "latency_s": 0.01},
    }
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    types = planned_types(read_plan(path), (), as_is)
    gpu = "" if as_is else "h100-sxm "
    assert types.workers == {f"{gpu}TP2 prefill": 2, f"{gpu}TP2 decode": 2}
    assert [t.role for t in types] == ["prefill", "decode"]
    assert types.engine_settings(f"{gpu}TP2 decode", {}, on_cpus=False)["max_num_seqs"] == 256
    if not as_is:
        assert {t.kv_link for t in types} == {KvLink(50e9, 0.01)}


SPECULATING = profile_document(
    speculating(read_profile(LIBRARY / "h100-sxm" / "llama-3.1-70b_tp2.yaml"), Speculation((0.8, 0.6)))
)


TIERED = profile_document(
    replace(read_profile(LIBRARY / "h100-sxm" / "llama-3.1-70b_tp2.yaml"), host_kv=HostKv(1 << 36, 50e9))
)


def test_engines_draft_as_many_tokens_as_their_step_times_count(tmp_path):
    plain, drafts = plan_of_fleet(MIX[:1]), plan_of_fleet(MIX[:1])
    drafts["inputs"]["profiles"][0]["profile"] = SPECULATING
    types = {}
    for name, document in (("plain", plain), ("drafts", drafts)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(document))
        types[name] = planned_types(read_plan(path), (), as_is=False)
    three = {"method": "ngram", "num_speculative_tokens": 3}
    types["plain"].check_drafts(None)
    types["drafts"].check_drafts(three | {"num_speculative_tokens": 2})
    planned_types(read_plan(path), (), as_is=True).check_drafts(three)
    with pytest.raises(BadInput, match=r"^--speculative-config: the step times of h100-sxm TP2 count no"):
        types["plain"].check_drafts(three)
    says = "h100-sxm TP2: its step times count 2 drafted tokens: say -- --speculative-config '"
    for asked in (None, three):
        with pytest.raises(BadInput, match=f"^{says}"):
            types["drafts"].check_drafts(asked)
    with pytest.raises(BadInput, match=r"^export: speculate: what makes the drafts is not in the plan"):
        serve_words(deployment(read_plan(path), "weights"), "plan.json", ())


def test_a_plans_host_memory_is_its_workers_whatever_profile_stands_in(tmp_path):
    document = plan_of_fleet(MIX[:1])
    document["inputs"]["profiles"][0]["profile"] = TIERED
    path, own = tmp_path / "plan.json", tmp_path / "own.yaml"
    path.write_text(json.dumps(document))
    own.write_text((LIBRARY / "h100-sxm" / "llama-3.1-70b_tp2.yaml").read_text())
    plan, plain = read_plan(path), {"speculative_config": None, "enable_prefix_caching": None}

    def asked(gib, **more):
        return SimpleNamespace(**(plain | {"kv_offloading_size": gib} | more))

    for profiles in ((), (own,)):
        types = planned_types(plan, profiles, as_is=False)
        settings = types.engine_settings("h100-sxm TP2", {}, on_cpus=False)
        assert settings["kv_offloading_size"] == 64.0
        types.check_host_memory(asked(64.0))
        with pytest.raises(BadInput, match="planned with 64 GiB, not with 32 GiB; --as-is"):
            types.check_host_memory(asked(32.0))
        for more, says in (
            ({"speculative_config": {"method": "ngram"}}, "not with --speculative-config"),
            ({"enable_prefix_caching": False}, "prefixes, which are not cached"),
        ):
            with pytest.raises(BadInput, match=says):
                types.check_host_memory(asked(None, **more))
    there = planned_types(plan, (), as_is=True)
    assert "kv_offloading_size" not in there.engine_settings(there.names[0], {}, on_cpus=True)
    there.check_host_memory(asked(32.0))
    split = FleetTypes([WorkerGroup(WorkerType(None, 1, role=role), 1) for role in ("prefill", "decode")])
    split.check_host_memory(asked(None))
    with pytest.raises(BadInput, match="not with prefill and decode workers"):
        split.check_host_memory(asked(1.0))
    with pytest.raises(BadInput, match=r"^export: host_kv: pods are given no memory for it"):
        serve_words(deployment(plan, "weights"), "plan.json", ())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"policy": "psychic"}, "--plan: policy: no fleet runs 'psychic'"),
        ({"fleet": "role"}, "fleet: prefill and decode workers need each other, got"),
        ({"profiles": {"profile": document_of("llama-3.1-70b", "h100-sxm", 2, EngineMode.PREFILL_FIRST)}},
         "engine_mode: no engine here forms its steps prefill-first; plan with --engine chunked"),
    ],
)  # fmt: skip
def test_a_plan_that_no_fleet_runs_is_refused_whole(tmp_path, change, says):
    document = plan_of_fleet(MIX[:1])
    if "fleet" in change:
        document["fleet"][0]["role"] = "prefill"
    document |= {"policy": change.get("policy", "spread")}
    document["inputs"]["profiles"][0] |= change.get("profiles", {})
    document["fleet"][0]["gpu"] = document["inputs"]["profiles"][0]["gpu"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(BadInput, match=re.escape(says)):
        planned_types(read_plan(path), (), as_is=False)


@pytest.mark.parametrize(
    ("model", "engine_flags", "config"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", (), None),
        ("/models/mine", ("--served-model-name", "mine", "llama-3.1-70b", "--dtype", "auto"), None),
        ("/models/mine", ("--served-model-name=llama-3.1-70b",), None),
        ("FOLDER", (), {"_name_or_path": "meta-llama/Llama-3.1-70B"}),
    ],
)
def test_a_model_is_known_by_its_names(tmp_path, model, engine_flags, config):
    plan = plan_of(tmp_path, MIX)
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config) if config else "no JSON")
    check_model(plan, model.replace("FOLDER", str(folder)), engine_flags)
    for other, more in (("meta-llama/Llama-3.1-8B", ()), ("/models/mine", ("--dtype", "llama-3.1-70b"))):
        with pytest.raises(BadInput, match=r"does not match the plan's model llama-3\.1-70b; .* --as-is"):
            check_model(plan, other, more)


def test_a_mixed_plans_line_counts_workers_of_no_kind(tmp_path):
    line = {"workers_per_rps": 1.0, "intercept": 0.5}
    mixed = plan_of(tmp_path, MIX, demand_line=line)
    assert autoscale_of("1..8", "80s", mixed).line is None
    alike = plan_of(tmp_path, MIX[:1], demand_line=line)
    assert autoscale_of("1..8", "80s", alike).line == (1.0, 0.5)


def test_kinds_are_taken_from_the_line():
    given = ["gpu=h100-sxm,tp=2,workers=3,max=4,usd=7.5", "gpu=a100-sxm", "tp=8"]
    types = types_of(2, 1, given, (), is_emulated=False)
    assert types.workers == {"h100-sxm TP2": 3, "a100-sxm TP1": 1, "TP8": 1}
    assert [t.limit for t in types] == [4, None, None]
    listed = read_prices().usd_per_gpu_h("a100-sxm").usd
    assert [t.usd_per_h for t in types] == [7.5, listed, None]
    assert types_of(5, 2, (), (), is_emulated=False).workers == {"TP2": 5}
    (spot,) = types_of(2, 1, ["gpu=h100-sxm,reclaims=0.1"], (), is_emulated=False)
    assert (spot.reclaims_per_h, spot.usd_per_h) == (0.1, read_prices().usd_per_gpu_h("h100-sxm", "spot").usd)


def test_roles_are_kinds_of_their_own():
    types = types_of(2, 1, ["workers=2,role=prefill", "workers=3,role=decode"], (), is_emulated=False)
    assert types.workers == {"TP1 prefill": 2, "TP1 decode": 3}
    assert [t.role for t in types] == ["prefill", "decode"]


def test_profiles_find_their_kinds():
    files = [LIBRARY / "h100-sxm" / "llama-3.1-8b_tp2.yaml", LIBRARY / "h100-sxm" / "llama-3.1-8b_tp1.yaml"]
    types = types_of(2, 1, ["gpu=h100,tp=1", "gpu=h100,tp=2"], files, is_emulated=True)
    assert [t.profile.tp_degree for t in types] == [1, 2]
    (alone,) = types_of(2, 1, (), files[:1], is_emulated=True)
    assert alone.profile.tp_degree == 2  # of one kind there is no doubt which is meant
    with pytest.raises(BadInput, match=r"--profile: none is of h100 TP1"):
        types_of(2, 1, ["gpu=h100,tp=1", "gpu=h100,tp=2"], files[:1], is_emulated=True)


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
        (["role=both"], "role: one of any, prefill, decode"),
        (["role=prefill"], "need a decode worker"),
        (["role=decode,workers=2"], "need a prefill worker"),
    ],
)
def test_kinds_that_cannot_be_are_refused(given, says):
    with pytest.raises(BadInput, match=says):
        types_of(2, 1, given, (), is_emulated=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--kind", "tp=2"], "--kind: the plan says which workers; give either"),
        (["--workers", "3"], "--workers: the plan says which workers; give either"),
        (["--tp", "1"], "--tp: the plan says which workers; give either"),
        (["--policy", "fastest"], "--policy: one of spread"),
        (["--model", "meta-llama/Llama-3.1-8B"], "--model: meta-llama/Llama-3.1-8B does not match"),
        (["--engine", "emulated", "--as-is"], "--as-is: emulated engines are what the plan says"),
        (["--host-kv", "64GB"], "--host-kv: expected memory of a worker"),
        (["--host-kv", "64GiB@25GB/s"], "--host-kv: how fast it is loaded is measured here"),
        (["--host-kv", "64GiB", "--engine", "emulated"], "--host-kv: emulated engines keep no KV"),
        (["--host-kv", "1GiB", "--", "--kv-offloading-size", "2"], "--host-kv: is --kv-offloading-size"),
    ],
)
def test_flags_that_contradict_a_plan_are_refused_before_anything_starts(tmp_path, capsys, words, says):
    plan_of(tmp_path, MIX)
    model = [] if "--model" in words else ["--model", "meta-llama/Llama-3.1-70B"]
    assert main(["serve", "--plan", str(tmp_path / "plan.json"), *model, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {says}")


def test_a_class_s_share_of_the_requests_is_for_plans(capsys):
    assert main(["serve", "--model", "org/name", "--slo", "chat:ttft=1s,tpot=50ms,share=0.3"]) == 2
    assert "--slo: chat: share: is for plans; clients decide what they send" in capsys.readouterr().err


def test_as_is_without_a_plan_is_refused(capsys):
    assert main(["serve", "--model", "m", "--as-is"]) == 2
    assert "--as-is: says how to run a plan; give --plan, too" in capsys.readouterr().err


def test_gpus_are_looked_for_by_type_where_types_differ():
    types = FleetTypes(
        [WorkerGroup(WorkerType("h100-sxm", 2), 2), WorkerGroup(WorkerType("rtx-pro-6000"), 1)]
    )
    assert [accelerator(t) for t in types] == ["H100", "RTX-PRO-6000"]
    assert accelerator(WorkerType("h1000")) is None
    rtx = {"accelerator_type:RTX-PRO-6000": 1.0}
    types.check_gpus([{"GPU": 4.0} | H100, {"GPU": 1.0} | rtx])
    with pytest.raises(BadInput, match="need 5, Ray has 4"):
        types.check_gpus([{"GPU": 4.0} | H100])
    with pytest.raises(BadInput, match="no node with H100"):
        types.check_gpus([{"GPU": 8.0}])
    # Of one type that no plan fixed none is asked for.
    FleetTypes([WorkerGroup(WorkerType("h100-sxm", 2), 2)]).check_gpus([{"GPU": 4.0}])


def test_the_memory_that_a_plan_was_made_with_is_what_its_engines_take(tmp_path):
    (profile,) = find_profiles("llama-3.1-70b", ["a100"], [2])
    for asked, fixed in (((0.95, None), 0.95), ((None, 40_000), None), ((0.95, 40_000), 0.95)):
        document = plan_of_fleet([{"gpu": "a100-sxm", "tp_degree": 2, "workers": 1}])
        document["inputs"]["profiles"][0]["profile"] = profile_document(profile.with_kv(*asked))
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(document))
        types = planned_types(read_plan(path), (), as_is=False)
        settings = types.engine_settings("a100-sxm TP2", {}, on_cpus=False)
        assert settings.get("gpu_memory_utilization") == fixed
        assert types.shortfall("a100-sxm TP2", 19_824).startswith("has room for 19,824 tokens of KV")
    asked = {"gpu_memory_utilization": 0.97}  # the operator's own word
    assert types.engine_settings("a100-sxm TP2", asked, on_cpus=False)["gpu_memory_utilization"] == 0.97
