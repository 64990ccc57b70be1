"""Exports: objects as their APIs take them, the plan's own numbers in them, rules on metrics there are."""

import json
import math
import re
import shlex
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import ROOT
from kubernetes_models import checked_object
from made_plans import plan_of_fleet
from pydantic import ValidationError

from controlplane.errors import BadInput
from controlplane.types import Slo
from tokenfleet.advise.advice import ScaleTarget
from tokenfleet.advise.published import WANTED
from tokenfleet.cli.main import main
from tokenfleet.export.deployment import Deployment, deployment
from tokenfleet.export.files import KINDS, ExportSettings, export_files
from tokenfleet.export.keda import followed_plan, keda
from tokenfleet.export.monitoring import (
    BURNS,
    dashboard,
    dashboard_text,
    prometheus_rules,
    rule_groups,
    threshold,
)
from tokenfleet.planning.plan_file import parse_plan, read_plan

SLO, TARGET = Slo(1.6, 0.075), 0.99  # what `serve` promises by default; deploy/ has its rules and dashboard


def plan(**more: Any) -> dict[str, Any]:
    """A plan as `plan --format json` has it, of the fields that a deployment needs."""
    fleet = more.pop("fleet", [{"gpu": "h100-sxm", "tp_degree": 2, "workers": 5}])
    made = {
        "slo": {"ttft_s": 0.4, "tpot_s": 0.03},
        "attainment": {"target": 0.995},
        "schedule": [
            {"start_s": 0.0, "end_s": 3600.0, "workers": 3},
            {"start_s": 3600.0, "end_s": 7200.0, "workers": 5},
        ],
        "schedule_detail": {"paid": {"cold_start_s": 300.0}},
    }
    document: dict[str, Any] = plan_of_fleet(fleet, "llama-3.1-8b", **(made | more))
    began = datetime(2026, 1, 15, 7, 0, tzinfo=UTC).timestamp()
    document["inputs"] = {"clock_start_unix_s": began, "rate_scale": 1.0} | document["inputs"]
    return document


def fleet(**more: Any) -> Deployment:
    return deployment(parse_plan(plan(**more), "plan.json"))


def documents(texts: dict[Path, str]) -> list[dict[str, Any]]:
    return [d for p, t in texts.items() if p.suffix == ".yaml" for d in yaml.safe_load_all(t)]


def test_a_plan_of_a_newer_version_with_fields_that_are_not_known_is_read():
    known, newer = plan(), plan()
    newer |= {"a_later_field": 1}
    newer["inputs"] |= {"a_later_field": [1]}
    newer["fleet"][0] |= {"a_later_field": {"x": 1}}
    both = [deployment(parse_plan(document, "plan.json")) for document in (newer, known)]
    assert both[0].plan.model_dump() == both[1].plan.model_dump()


def test_every_kubernetes_object_is_as_its_api_takes_it() -> None:
    in_turn = fleet(policy="round-robin")
    texts = export_files(in_turn, ["keda", "prometheus"], ExportSettings(), Path("out"))
    objects = [d for d in documents(texts) if "kind" in d]
    assert {d["kind"] for d in objects} == {"ScaledObject", "PrometheusRule"}
    for one in objects:
        checked_object(one)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("metadata", "name"), "Not_A_Name"),
        (("spec", "replica"), 1),
        (("spec", "minReplicaCount"), "4"),
        (("spec", "scaleTargetRef", "kind"), ""),
    ],
)
def test_the_check_finds_what_an_api_would_refuse(path: tuple[Any, ...], value: Any) -> None:
    texts = export_files(fleet(), ["keda"], ExportSettings(), Path("out"))
    (scaled,) = documents(texts)
    part = scaled
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(ValidationError):
        checked_object(scaled)


def test_the_command_in_every_export_is_one_that_serve_takes() -> None:
    from tokenfleet.cli.main import VERBS, command_of
    from tokenfleet.export.deployment import serve_words

    command = command_of(VERBS["serve"])
    context = command.make_context("serve", serve_words(fleet(), "/p.json", [])[2:], resilient_parsing=False)
    assert context.params["plan"] == Path("/p.json")
    assert (context.params["max_workers"], context.params["engine_flags"]) == (5, ())
    made = export_files(fleet(), ["kuberay", "systemd"], ExportSettings(), Path("out"))
    assert "--insecure" in made[Path("out/kuberay/kuberay.yaml")]
    assert "\n  plan.json: |\n    {" in made[Path("out/kuberay/kuberay.yaml")]
    assert "--tls-cert /etc/tokenfleet/tls.crt" in made[Path("out/systemd/tokenfleet.service")]
    pod = yaml.safe_load((ROOT / "deploy/kustomize/base/deployment.yaml").read_text())["spec"]["template"][
        "spec"
    ]
    arguments = pod["containers"][0]["args"]
    assert arguments[0] == "serve"
    found = command.make_context("serve", arguments[1:], resilient_parsing=False).params
    wait_s = int(found["shutdown_wait"].removesuffix("s"))
    assert pod["terminationGracePeriodSeconds"] > wait_s


def test_production_stack_gets_a_model_for_each_kind_of_worker() -> None:
    parts = [
        {"gpu": "h100-sxm", "tp_degree": 2, "workers": 2},
        {"gpu": "a100-sxm", "tp_degree": 2, "workers": 3},
    ]
    (values,) = documents(
        export_files(
            fleet(fleet=parts, policy="round-robin"), ["production-stack"], ExportSettings(), Path("o")
        )
    )
    first, second = values["servingEngineSpec"]["modelSpec"]
    assert (first["replicaCount"], first["requestGPU"], second["replicaCount"]) == (2, 2, 3)
    assert first["vllmConfig"]["tensorParallelSize"] == 2
    assert first["vllmConfig"]["maxNumSeqs"] == 256
    extra = ["--max-num-batched-tokens", "8192", "--gpu-memory-utilization", "0.9"]
    assert first["vllmConfig"]["extraArgs"] == extra


def hpa(current: int, scaled: dict[str, Any], wanted: int) -> int:
    """The replicas that the HorizontalPodAutoscaler of a ScaledObject wants, by its documented rule."""
    spec = scaled["spec"]
    (trigger,) = spec["triggers"]
    target = int(trigger["metadata"]["threshold"]) * current
    way = "scaleUp" if wanted > current else "scaleDown"
    tolerance = float(spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"][way]["tolerance"])
    if abs(wanted / target - 1.0) <= tolerance:
        return current
    asked = math.ceil(wanted / int(trigger["metadata"]["threshold"]))
    return min(max(asked, spec["minReplicaCount"]), spec["maxReplicaCount"])


def test_keda_follows_the_advice_to_the_replica_within_the_plans_bounds() -> None:
    many = fleet(fleet=[{"gpu": "h100-sxm", "tp_degree": 2, "workers": 24}])
    scaled = keda(*followed_plan(many, "stack"), "http://prometheus:9090")
    assert [hpa(at, scaled, wanted) for at, wanted in ((11, 12), (20, 21), (21, 20), (5, 40), (5, 1))] == [
        12, 21, 20, 24, 3,
    ]  # fmt: skip
    without = {"scaleUp": {"tolerance": "0.1"}, "scaleDown": {"tolerance": "0.1"}}
    scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] = without
    assert hpa(20, scaled, 21) == 20  # the autoscaler's own tolerance would swallow it


def test_keda_asks_for_the_gauge_that_advise_serves_of_the_model_that_is_served() -> None:
    scaled = keda(*followed_plan(fleet(), "stack"), "http://prometheus:9090")
    (trigger,) = scaled["spec"]["triggers"]
    query = f'max({WANTED}{{model="meta-llama/Llama-3.1-8B-Instruct"}})'
    assert trigger["metadata"]["query"] == query
    assert scaled["spec"]["scaleTargetRef"]["name"] == "stack-h100-sxm-tp2-deployment-vllm"
    assert scaled["spec"]["fallback"]["replicas"] == scaled["spec"]["maxReplicaCount"] == 5
    assert scaled["spec"]["minReplicaCount"] == 3  # the least of the schedule


def test_the_advise_command_beside_keda_is_one_that_advise_takes(capsys: pytest.CaptureFixture[str]) -> None:
    texts = export_files(fleet(), ["keda"], ExportSettings(), Path("out"))
    (line,) = [line for text in texts.values() for line in text.splitlines() if "tokenfleet advise" in line]
    words = shlex.split(line.removeprefix("#"))
    assert words[words.index("--replicas") + 1] == "3..5"
    words[words.index("--listen") + 1] = "127.0.0.1:0"  # refused last: all other flags are taken
    assert main(words[1:]) == 2
    assert "--listen: expected HOST:PORT" in capsys.readouterr().err


def advice_text(**more: Any) -> str:
    """What `advise --format json` prints, of the fields that KEDA needs."""
    made = {"schema": "tokenfleet.advice/1", "model": "llama", "replicas": 8, "wanted_replicas": 3}
    made |= {"worker_type": "h100-sxm TP1"}
    return json.dumps(made | {"floor": 2, "ceiling": 12} | more) + "\n"


@pytest.mark.parametrize("scaler", [None, "advise.llm:6000"])
def test_an_advice_becomes_a_scaledobject_of_the_operator_s_own_workload(
    scaler: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "advice.json").write_text("{}\n" + advice_text())  # the last look counts
    words = ["export", "keda", "--advice", f"{tmp_path}/advice.json", "--target", "statefulset/vllm"]
    words += ["--output-dir", str(tmp_path / "out"), *(["--scaler", scaler] if scaler else [])]
    assert main(words) in (None, 0)
    text = (tmp_path / "out/keda/keda.yaml").read_text()
    spec = checked_object(yaml.safe_load(text))["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "vllm"}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"], spec["fallback"]["replicas"]) == (2, 12, 8)
    (trigger,) = spec["triggers"]
    if scaler:
        told = {"scalerAddress": scaler, "model": "llama", "workerType": "h100-sxm TP1"}
        assert trigger["metadata"] == told
        assert "--scaler 0.0.0.0:6000" in text
    else:
        query = f'max({WANTED}{{model="llama",worker_type="h100-sxm TP1"}})'
        assert trigger["metadata"]["query"] == query
        assert "--listen 0.0.0.0:9105" in text


@pytest.mark.parametrize("scaler", [None, "advise:6000"])
def test_a_plan_of_two_worker_types_becomes_a_scaledobject_of_each(
    scaler: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [{"gpu": gpu, "tp_degree": 2, "workers": n} for gpu, n in (("h100-sxm", 4), ("a100-sxm", 1))]
    (text,) = export_files(fleet(fleet=parts), ["keda"], ExportSettings(scaler=scaler), Path("o")).values()
    objects = [checked_object(one) for one in yaml.safe_load_all(text)]
    assert len({one["metadata"]["name"] for one in objects}) == 2
    for one, gpu, bounds in zip(objects, ("h100", "a100"), ((2, 4, 4), (1, 1, 1)), strict=True):
        spec, name = one["spec"], f"{gpu}-sxm TP2"
        assert spec["scaleTargetRef"]["name"] == f"tokenfleet-{gpu}-sxm-tp2-deployment-vllm"
        assert (spec["minReplicaCount"], spec["maxReplicaCount"], spec["fallback"]["replicas"]) == bounds
        (trigger,) = spec["triggers"]
        if scaler:
            assert trigger["metadata"]["workerType"] == name
        else:
            labels = f'model="meta-llama/Llama-3.1-8B-Instruct",worker_type="{name}"'
            assert trigger["metadata"]["query"] == f"max({WANTED}{{{labels}}})"
    (line,) = [line for line in text.splitlines() if "tokenfleet advise" in line]
    words = shlex.split(line.removeprefix("#"))
    assert "gpu=h100-sxm,tp=2,min=2,max=4,servers=dns:SERVICE-h100-sxm-tp2:8000" in words
    assert words[words.index("--replicas") + 1] == "3..5"
    words[-2:] = ["--listen", "127.0.0.1:0"]  # refused last: all other flags are taken
    assert main(words[1:]) == 2
    assert "--listen: expected HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (["deployment/vllm"], "--target: expected --target 'h100-sxm TP2=deployment/NAME' --target 'a100"),
        (
            [f"{gpu}-sxm TP2=deployment/vllm" for gpu in ("h100", "a100")],
            "--target: one object cannot have workers of two types",
        ),
    ],
)
def test_targets_that_are_not_those_of_a_plan_s_types_are_refused(
    targets: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [{"gpu": f"{gpu}-sxm", "tp_degree": 2, "workers": 2} for gpu in ("h100", "a100")]
    (tmp_path / "plan.json").write_text(json.dumps(plan(fleet=parts)))
    words = ["export", "keda", "--plan", f"{tmp_path}/plan.json", "--output-dir", f"{tmp_path}/out"]
    assert main([*words, *(f"--target={target}" for target in targets)]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


MIXED = [
    {"worker_type": "h100-sxm TP1", "replicas": 8, "wanted_replicas": 3, "floor": 2, "ceiling": 12},
    {"worker_type": "a100-sxm TP1", "replicas": 0, "wanted_replicas": 4, "floor": 0, "ceiling": 6},
]
TARGETS = [f"--target={name}-sxm TP1=deployment/vllm-{name}" for name in ("h100", "a100")]


def test_an_advice_for_two_worker_types_becomes_a_scaledobject_of_each(tmp_path: Path) -> None:
    (tmp_path / "advice.json").write_text(advice_text(worker_type=None, worker_types=MIXED))
    words = ["export", "keda", "--advice", f"{tmp_path}/advice.json", *TARGETS]
    assert main([*words, "--output-dir", str(tmp_path / "out")]) in (None, 0)
    objects = [*yaml.safe_load_all((tmp_path / "out/keda/keda.yaml").read_text())]
    specs = {one["spec"]["scaleTargetRef"]["name"]: checked_object(one)["spec"] for one in objects}
    for name, bounds in {"vllm-h100": (2, 12, 8), "vllm-a100": (0, 6, 4)}.items():
        spec = specs[name]
        assert (spec["minReplicaCount"], spec["maxReplicaCount"], spec["fallback"]["replicas"]) == bounds
        gpu = name.removeprefix("vllm-")
        query = f'max({WANTED}{{model="llama",worker_type="{gpu}-sxm TP1"}})'
        assert spec["triggers"][0]["metadata"]["query"] == query
    assert len(specs) == len({one["metadata"]["name"] for one in objects}) == 2


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        (
            advice_text(worker_types=MIXED),
            ["--target", "deployment/vllm"],
            "--target: expected --target 'h100-sxm TP1=deployment/NAME'",
        ),
        ("", ["--target", "deployment/vllm"], "expected a document of `tokenfleet advise --format json`"),
        ("[1]", ["--target", "deployment/vllm"], "expected a document of tokenfleet.advice/1"),
        (advice_text(ceiling=None), ["--target", "deployment/vllm"], "run advise with --replicas MIN..MAX"),
        (advice_text(floor=0), ["--target", "deployment/vllm"], "floor: Input should be greater than"),
        (advice_text(), ["--target", "pod/vllm"], "--target: expected deployment/NAME or statefulset/NAME"),
        (advice_text(), [], "--advice: for keda alone, with --target deployment/NAME"),
        (
            advice_text(),
            ["--target", "deployment/vllm", "--scaler", "advise"],
            "--scaler: expected HOST:PORT",
        ),
        (
            advice_text(),
            ["--target", "deployment/vllm", "--plan", "p.json"],
            "--advice: contradicts --plan",
        ),
    ],
)
def test_an_advice_that_keda_cannot_follow_is_one_line(
    text: str, flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "advice.json").write_text(text)
    words = [
        "export",
        "keda",
        "--advice",
        f"{tmp_path}/advice.json",
        "--output-dir",
        f"{tmp_path}/out",
        *flags,
    ]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_keda_asks_the_scaler_of_a_plan_s_own_advise() -> None:
    settings = ExportSettings(scaler="advise:6000", targets={"": ScaleTarget("Deployment", "vllm")})
    ((_, text),) = export_files(fleet(), ["keda"], settings, Path("out")).items()
    assert "--scaler 0.0.0.0:6000" in text
    spec = checked_object(yaml.safe_load(text))["spec"]
    assert spec["scaleTargetRef"]["name"] == "vllm"
    assert spec["triggers"][0]["type"] == "external-push"


def budget_rules(attainment: float) -> list[dict[str, Any]]:
    return rule_groups(SLO, attainment)["groups"][1]["rules"]


@pytest.mark.parametrize("attainment", [0.5, 0.9, 0.95, 0.99, 0.999, 0.9999])
def test_every_alert_can_fire_and_none_does_within_the_budget(attainment: float) -> None:
    for burn, rule in zip(BURNS, budget_rules(attainment), strict=True):
        limits = [float(text) for text in re.findall(r"> ([\d.e-]+)", rule["expr"])]
        assert limits == pytest.approx([threshold(burn.factor, 1 - attainment)] * 2, rel=1e-5)
        assert 1 - attainment <= limits[0] * (1 + 1e-5)
        assert limits[0] < 1.0


def metric_names() -> set[str]:
    """Every series of our registry and of `advise`, as Prometheus sees it."""
    metrics = pytest.importorskip("dataplane.live.gateway.metrics").Metrics()
    names = set()
    for family in metrics.registry.collect():
        kinds = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in kinds}
    return names | set(
        re.findall(r'"(tokenfleet_\w+)"', (ROOT / "tokenfleet/advise/published.py").read_text())
    )


def expressions() -> list[str]:
    rules = [r["expr"] for g in rule_groups(SLO, TARGET)["groups"] for r in g["rules"]]
    panels = [t["expr"] for p in dashboard(SLO, TARGET)["panels"] for t in p.get("targets", ())]
    return rules + panels


def test_rules_and_dashboard_ask_only_for_metrics_there_are() -> None:
    asked = set(re.findall(r"\btokenfleet_[a-z_]+", " ".join(expressions())))
    assert "tokenfleet_slo_requests_total" in asked
    assert asked <= metric_names()


def test_rules_use_only_what_they_record_and_brackets_match() -> None:
    recorded = {r["record"] for g in rule_groups(SLO, TARGET)["groups"] for r in g["rules"] if "record" in r}
    used = set(re.findall(r"tokenfleet:[a-z0-9_:]+", " ".join(expressions())))
    assert used <= recorded
    for text in expressions():
        for left, right in ("()", "[]", "{}"):
            assert text.count(left) == text.count(right)


def test_outcomes_in_the_rules_are_those_the_gateway_counts() -> None:
    source = "".join(p.read_text() for p in (ROOT / "dataplane" / "live").rglob("*.py"))
    for outcome in ("failed", "rejected"):
        assert f'"{outcome}"' in source


def test_what_deploy_has_is_what_the_exports_give() -> None:
    assert (ROOT / "deploy/grafana/tokenfleet.json").read_text() == dashboard_text(SLO, TARGET)
    assert (ROOT / "deploy/prometheus/tokenfleet.rules.yaml").read_text() == prometheus_rules(SLO, TARGET)


def test_prometheus_own_checker_takes_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    rules = str(ROOT / "deploy/prometheus/tokenfleet.rules.yaml")
    checked = subprocess.run([promtool, "check", "rules", rules], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "rules found" in checked.stdout


def test_panels_do_not_overlap_and_the_target_is_in_them() -> None:
    panels = dashboard(Slo(0.4, 0.03), 0.995)["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels if "id" in panel}) == len([p for p in panels if "id" in p])
    ttft = next(panel for panel in panels if panel["title"] == "Time to first token")
    assert ttft["fieldConfig"]["defaults"]["thresholds"]["steps"][1]["value"] == 0.4


_UNIT_KEYS = {
    "Unit": "Description After Wants StartLimitIntervalSec StartLimitBurst",
    "Service": "Type User EnvironmentFile Environment ExecStart KillMode KillSignal TimeoutStopSec Restart"
    " RestartSec StateDirectory LimitNOFILE LimitMEMLOCK TasksMax OOMPolicy NoNewPrivileges ProtectSystem"
    " ProtectHome PrivateTmp RestrictSUIDSGID",
    "Install": "WantedBy",
}


def test_the_unit_has_only_keys_that_systemd_knows(tmp_path: Path) -> None:
    from tokenfleet.export.files import systemd_unit

    section = ""
    for line in systemd_unit(fleet()).splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            assert line.partition("=")[0] in _UNIT_KEYS[section].split(), line
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return
    program = shutil.which("true")
    assert program
    unit = tmp_path / "tokenfleet.service"
    unit.write_text(systemd_unit(fleet(), program))
    said = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert "tokenfleet.service:" not in said.stderr, said.stderr


def test_the_manifests_of_advise_are_as_their_apis_take_them_and_grant_what_it_asks() -> None:
    from tokenfleet.cli.main import VERBS, command_of

    made = list(yaml.safe_load_all((ROOT / "deploy/advise/advise.yaml").read_text()))
    of_kind = {one["kind"]: checked_object(one) for one in made}
    granted = {
        (group, resource, verb)
        for rule in of_kind["Role"]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    asked = {("", "pods", "list"), ("", "pods", "watch"), ("autoscaling", "horizontalpodautoscalers", "list")}
    asked |= {("inference.networking.k8s.io", "inferencepools", "get")}
    scales = ("deployments/scale", "statefulsets/scale")
    assert granted == asked | {("apps", scale, verb) for scale in scales for verb in ("get", "patch")}
    pod = of_kind["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    arguments = container["args"][1:]
    flags = command_of(VERBS["advise"]).make_context("advise", arguments, resilient_parsing=False).params
    assert (flags["selector"], flags["replicas"]) == ("app=vllm", "2..16")
    ports = {one["containerPort"] for one in container["ports"]}
    assert ports == {int(flags[flag].rpartition(":")[2]) for flag in ("listen", "scaler")}
    allowed = {p["port"] for rule in of_kind["NetworkPolicy"]["spec"]["ingress"] for p in rule["ports"]}
    assert allowed == ports
    account = of_kind["ServiceAccount"]["metadata"]["name"]
    assert account == pod["serviceAccountName"] == of_kind["RoleBinding"]["subjects"][0]["name"]


def test_kustomize_renders_objects_that_their_apis_take() -> None:
    kubectl = shutil.which("kubectl")
    for folder in ("base", "emulated"):
        where = ROOT / "deploy" / "kustomize" / folder
        for path in where.glob("*.yaml"):
            for one in yaml.safe_load_all(path.read_text()):
                if one["kind"] != "Kustomization":
                    checked_object(one)
        if kubectl is None:
            continue
        done = subprocess.run([kubectl, "kustomize", str(where)], capture_output=True, text=True, check=True)
        rendered = list(yaml.safe_load_all(done.stdout))
        assert {one["kind"] for one in rendered} == {"Deployment", "Service", "PersistentVolumeClaim"}
        for one in rendered:
            checked_object(one)
        pod = next(one for one in rendered if one["kind"] == "Deployment")["spec"]["template"]["spec"]
        assert ("--engine=emulated" in pod["containers"][0]["args"]) == (folder == "emulated")
        assert ("nvidia.com/gpu" in pod["containers"][0]["resources"]["limits"]) == (folder == "base")


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"fleet": []}, "kuberay", "found no fleet"),
        ({"schema": "tokenfleet.plan/2"}, "kuberay", "schema"),
        ({"fleet": [{"gpu": "h100-sxm", "tp_degree": 2, "workers": -1}]}, "systemd", "fleet.0.workers"),
        ({"fleet": [{"gpu": "x\nExecStart=rm", "tp_degree": 1, "workers": 1}]}, "systemd", "fleet.0.gpu"),
        (
            {},
            "production-stack",
            "production-stack: its router places requests round-robin, and the fleet was planned with spread",
        ),
        (
            {
                "fleet": [
                    {"gpu": "h100-sxm", "tp_degree": 2, "workers": 2, "role": role}
                    for role in ("prefill", "decode")
                ]
            },
            "keda",
            "keda: no advice is for prefill and decode workers",
        ),
        (
            {"fleet": [{"gpu": "h100-sxm", "tp_degree": 2, "workers": 2}] * 2},
            "keda",
            "keda: fleet: expected each worker type once, got h100-sxm TP2, h100-sxm TP2",
        ),
        ({"policy": "psychic"}, "kuberay", "policy: no fleet runs 'psychic'"),
        (
            {"fleet": [{"gpu": "h100-sxm", "tp_degree": 2, "workers": 5, "role": "prefill"}]},
            "systemd",
            "prefill and decode workers need each other, got",
        ),
        ({"slo": {"ttft_s": 0, "tpot_s": 0.1}}, "prometheus", "slo.ttft_s"),
    ],
)
def test_a_plan_that_cannot_be_deployed_is_one_line(
    change: dict[str, Any], kind: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan(**change)))
    words = ["export", kind, "--plan", f"{tmp_path}/plan.json", "--output-dir", f"{tmp_path}/out"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def mixed(*gpus: str) -> Deployment:
    """A worker over one GPU of the first type, and two over two of the last."""
    parts = [{"gpu": gpu, "tp_degree": n, "workers": n} for n, gpu in ((1, gpus[0]), (2, gpus[-1]))]
    return fleet(fleet=parts)


def test_a_mix_of_one_type_is_one_serve() -> None:
    unit = export_files(mixed("h100-sxm"), ["systemd"], ExportSettings(), Path("out"))
    assert "this machine needs 5 GPU(s)" in "".join(unit.values())


def test_one_machine_has_one_type_of_gpu() -> None:
    with pytest.raises(BadInput, match="plan with"):
        export_files(mixed("h100-sxm", "a100-sxm"), ["systemd"], ExportSettings(), Path("out"))


def test_the_help_names_every_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--help"]) == 0
    words = set(re.findall(r"[a-z-]+", capsys.readouterr().out))
    assert words >= set(KINDS)


def test_a_saved_plan_is_exported_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from planning_builders import poisson, save

    save(poisson(requests=300), tmp_path / "trace.csv")
    words = [
        "plan",
        "--trace",
        f"{tmp_path}/trace.csv",
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "h100",
        "--tp",
        "1",
    ]
    words += ["--slo", "ttft=1s,tpot=50ms", "--attainment", "0.95", "--output-dir", f"{tmp_path}/out"]
    words += ["--policy", "round-robin"]
    assert main(words) == 0
    capsys.readouterr()
    words = ["export", *KINDS, "--plan", f"{tmp_path}/out/plan.json", "--output-dir", f"{tmp_path}/deployed"]
    assert main(words) == 0
    printed = capsys.readouterr()
    files = [Path(line) for line in printed.out.split()]
    steps = printed.err.splitlines()
    assert len(steps) == len(KINDS)
    named = {word.rstrip(";") for step in steps for word in step.split() if str(tmp_path) in word}
    assert named <= {str(path) for path in files}
    assert {path.parent.name for path in files} == set(KINDS)
    served = read_plan(tmp_path / "deployed/systemd/plan.json")
    assert served.document == read_plan(tmp_path / "out/plan.json").document
