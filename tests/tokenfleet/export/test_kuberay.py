"""The fleet on KubeRay: what its schemas take, what each pod is given, and how a pod ends."""

import copy
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import BENCH_DATA, ROOT
from kubernetes_models import checked_object
from test_export import documents, fleet, plan

from controlplane.errors import BadInput
from harness.crd_schemas import Schemas, faults, read_schemas
from tokenfleet.cli.main import VERBS, command_of, main
from tokenfleet.export.deployment import deployment
from tokenfleet.export.files import ExportSettings, export_files
from tokenfleet.planning.plan_file import parse_plan

CRDS = BENCH_DATA / "kuberay"
MIX = [{"gpu": "h100-sxm", "tp_degree": 1, "workers": 2}, {"gpu": "a100-sxm", "tp_degree": 4, "workers": 3}]


@pytest.fixture(scope="module")
def schemas() -> Schemas:
    if not CRDS.is_dir():
        pytest.skip(f"{CRDS}: KubeRay's definitions are not there (docs/data.md)")
    return read_schemas(str(CRDS))


def made(**more: Any) -> list[dict[str, Any]]:
    settings = ExportSettings(name="chat", image="registry/tokenfleet:1")
    return documents(export_files(fleet(**more), ["kuberay"], settings, Path("out")))


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(one for one in objects if one["kind"] == kind)


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every pod template by its part: head, worker groups and gateway."""
    cluster = of_kind(objects, "RayCluster")["spec"]
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    gateway = of_kind(objects, "Deployment")["spec"]["template"]
    return {"head": cluster["headGroupSpec"]["template"], "gateway": gateway} | groups


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return {one["name"]: one for one in container["env"]}


def test_gpu_pods_keep_their_home_on_a_claim_that_is_named(schemas: Schemas) -> None:
    kept = replace(fleet(fleet=MIX), home_claim="models")
    objects = documents(export_files(kept, ["kuberay"], ExportSettings(name="chat"), Path("out")))
    assert faults(schemas, of_kind(objects, "RayCluster")) == []
    homes = {
        part: next(v for v in pod["spec"]["volumes"] if v["name"] == "home")
        for part, pod in pods(objects).items()
    }
    assert homes.pop("head") == {"name": "home", "emptyDir": {}}
    claim = {"name": "home", "persistentVolumeClaim": {"claimName": "models"}}
    assert list(homes.values()) == [claim] * len(homes)
    for pod in pods(objects).values():
        (container,) = pod["spec"]["containers"]
        (mount,) = (one["mountPath"] for one in container["volumeMounts"] if one["name"] == "home")
        assert variables(pod)["HOME"]["value"] == mount


def test_a_claim_s_name_that_kubernetes_refuses_is_refused(tmp_path: Path, capsys: Any) -> None:
    file, folder = tmp_path / "plan.json", tmp_path / "out"
    file.write_text(json.dumps(plan()))
    words = ["export", "kuberay", "--plan", str(file), "--output-dir", str(folder)]
    assert main([*words, "--home-claim", "My_Models"]) == 2
    assert "--home-claim: expected a PersistentVolumeClaim's name" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize("parts", [None, MIX, [{"gpu": "h100-sxm", "tp_degree": 8, "workers": 1}]])
def test_kuberay_s_own_schemas_take_the_cluster_and_its_pods(schemas: Schemas, parts: Any) -> None:
    objects = made(**({} if parts is None else {"fleet": parts}))
    cluster = of_kind(objects, "RayCluster")
    assert faults(schemas, cluster) == []
    # The gateway's pod is one that they take, too: their template is Kubernetes' own.
    held = copy.deepcopy(cluster)
    held["spec"]["headGroupSpec"]["template"] = of_kind(objects, "Deployment")["spec"]["template"]
    assert faults(schemas, held) == []


HEAD = ("spec", "headGroupSpec", "template", "spec", "containers", 0)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("spec", "workerGroupSpec"), [], "'workerGroupSpec' was unexpected"),
        ((*HEAD, "readynessProbe"), {}, "'readynessProbe' was unexpected"),
        ((*HEAD, "resources", "limit"), {}, "'limit' was unexpected"),
        ((*HEAD, "livenessProbe", "tcpSocket"), {}, "'port' is a required property"),
        ((*HEAD, "livenessProbe", "tcpSocket", "port"), 1.5, "is not valid under any"),
        ((*HEAD, "resources", "limits", "cpu"), "2 cores", "does not match"),
        ((*HEAD, "env", 1, "name"), "HF_TOKEN", "there twice"),
        (("spec", "authOptions", "mode"), "tokens", "is not one of"),
        (("spec", "workerGroupSpecs", 0, "replicas"), "4", "is not of type 'integer'"),
        (("spec", "headGroupSpec", "template", "metadata", "label"), {}, "'label' was unexpected"),
        (("kind",), "RayClusters", "no such definition"),
    ],
)
def test_the_schemas_refuse_what_a_server_would_refuse_or_drop(
    schemas: Schemas, path: tuple[Any, ...], value: Any, says: str
) -> None:
    cluster = of_kind(made(), "RayCluster")
    part: Any = cluster
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    (line,) = faults(schemas, cluster)
    assert says in line
    assert line.startswith(".".join(map(str, path[:-1][:4])) or "ray.io/v1")


def test_the_other_objects_are_as_their_apis_take_them() -> None:
    objects = made(fleet=MIX)
    kinds = [one["kind"] for one in objects if one["kind"] != "RayCluster"]
    assert kinds == ["ConfigMap", "Deployment", "Service", *["PodDisruptionBudget"] * 3, "NetworkPolicy"]
    for one in objects:
        if one["kind"] != "RayCluster":
            checked_object(one)


def test_ray_start_knows_every_parameter() -> None:
    start = pytest.importorskip("ray.scripts.scripts").start
    known = {name.lstrip("-") for option in start.params for name in option.opts}
    cluster = of_kind(made(), "RayCluster")["spec"]
    given = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert {name for group in given for name in group["rayStartParams"]} <= known
    (script,) = of_kind(made(), "Deployment")["spec"]["template"]["spec"]["containers"][0]["command"][2:]
    joined = script.partition("ray start")[2].partition("&&")[0]
    assert set(re.findall(r"--([a-z-]+)", joined)) <= known


def test_the_gateway_s_command_is_one_that_a_shell_and_serve_take() -> None:
    shell, _, script = of_kind(made(), "Deployment")["spec"]["template"]["spec"]["containers"][0]["command"]
    subprocess.run([shell, "-n", "-c", script], check=True)
    words = script.partition("exec tokenfleet serve ")[2].split()
    found = command_of(VERBS["serve"]).make_context("serve", words, resilient_parsing=False).params
    assert (found["plan"], found["nodes_wait"]) == (Path("/etc/tokenfleet/plan.json"), "30m")
    assert "key" not in script.lower()  # secrets come by the environment


def test_every_worker_has_a_pod_with_its_gpus_on_nodes_of_its_type() -> None:
    objects = made(fleet=MIX)
    groups = of_kind(objects, "RayCluster")["spec"]["workerGroupSpecs"]
    assert [(g["groupName"], g["replicas"]) for g in groups] == [("h100-sxm-tp1", 1), ("a100-sxm-tp4", 3)]
    there = pods(objects)
    gpus = {
        name: pod["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu")
        for name, pod in there.items()
    }
    assert gpus == {"head": None, "gateway": "1", "h100-sxm-tp1": "1", "a100-sxm-tp4": "4"}
    products = {
        n: pod["spec"].get("nodeSelector", {}).get("nvidia.com/gpu.product") for n, pod in there.items()
    }
    assert products["gateway"] == products["h100-sxm-tp1"] == "NVIDIA-H100-80GB-HBM3"
    assert products["a100-sxm-tp4"] == "NVIDIA-A100-SXM4-80GB"


def test_every_pod_has_shared_memory_probes_and_the_seed_that_names_prefixes_alike() -> None:
    for pod in pods(made(fleet=MIX)).values():
        (container,) = pod["spec"]["containers"]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
        assert variables(pod)["PYTHONHASHSEED"]["value"] == "0"
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


def test_secrets_are_references_wherever_they_are_needed() -> None:
    there = pods(made(fleet=MIX))
    needed = {"VLLM_API_KEY", "TOKENFLEET_CONTROL_KEY", "RAY_AUTH_TOKEN", "HF_TOKEN"}
    found = {name: one for name, one in variables(there["gateway"]).items() if name in needed}
    assert found.keys() == needed
    assert all("secretKeyRef" in one["valueFrom"] for one in found.values())
    assert "TOKENFLEET_CONTROL_KEY" in variables(there["a100-sxm-tp4"])  # of preStop


def test_a_pod_s_end_leaves_time_for_its_workers_evacuation() -> None:
    pod = pods(made())["h100-sxm-tp2"]
    (*_, order) = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    words = order.split()
    assert words[:4] == ["tokenfleet", "fleet", "--control", "http://chat:8001"]
    assert words[4:7] == ["evacuate", "--node", '"$POD_IP"']
    assert pod["spec"]["terminationGracePeriodSeconds"] > int(words[8].removesuffix("s"))
    assert variables(pod)["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    (order_of,) = [c for c in command_of(VERBS["fleet"]).commands.values() if c.name == "evacuate"]
    taken = order_of.make_context("evacuate", ["--node", "10.0.0.7", *words[7:]]).params
    assert (taken["node"], taken["worker"]) == ("10.0.0.7", "")


def test_services_budgets_and_doors_are_about_pods_there_are() -> None:
    objects = made(fleet=MIX)
    labelled = [pod["metadata"]["labels"] for pod in pods(objects).values()]
    about = [of_kind(objects, "Service")["spec"]["selector"]]
    about += [of_kind(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]]
    budgets = [one["spec"] for one in objects if one["kind"] == "PodDisruptionBudget"]
    about += [budget["selector"]["matchLabels"] for budget in budgets]
    for labels in about:
        assert any(labels.items() <= own.items() for own in labelled), labels
    assert [budget["minAvailable"] for budget in budgets] == [1, 1, 3]  # of 4 worker pods


def test_node_labels_can_be_named_and_must_tell_types_apart() -> None:
    parsed = parse_plan(plan(fleet=MIX), "plan.json")
    named = deployment(parsed, products=["h100-sxm=NVIDIA-H100-PCIe"])
    assert named.product(named.groups[0]) == "NVIDIA-H100-PCIe"
    for pair, says in (("h100-sxm", "GPU=LABEL"), ("h100-sxm=a b", "GPU=LABEL"), ("b200=X", "the plan has")):
        with pytest.raises(BadInput, match=says):
            deployment(parsed, products=[pair])
    other = [MIX[0], MIX[1] | {"gpu": "l40s"}]
    with pytest.raises(BadInput, match="--gpu-product: l40s: expected l40s=LABEL"):
        deployment(parse_plan(plan(fleet=other), "plan.json"))


def test_a_name_that_no_object_may_have_is_refused() -> None:
    with pytest.raises(BadInput, match="--name"):
        export_files(fleet(), ["kuberay"], ExportSettings(name="Not_A_Name"), Path("out"))


def test_the_script_finds_a_misspelt_field(tmp_path: Path, schemas: Schemas) -> None:
    import sys

    path = tmp_path / "kuberay.yaml"
    objects = made()
    of_kind(objects, "RayCluster")["spec"]["headGroupSpec"]["rayStartParam"] = {}
    path.write_text(yaml.safe_dump_all(objects))
    words = [sys.executable, "-m", "harness.crd_schemas", str(path), "--crds", str(CRDS)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "RayCluster chat: spec.headGroupSpec: " in done.stdout
    assert "'rayStartParam' was unexpected" in done.stdout
