"""Workers of a portfolio stay in their model's zone, on real Ray clusters where the other zone has room."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from made_plans import PROFILE, plan_of_fleet
from planning_builders import worker

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import KvModel
from controlplane.worker_type import WorkerGroup, WorkerType
from tokenfleet.profiles.form import profile_document

ZONE = "ray.io/availability-zone"
ENGINE_FLAGS = ("--dtype", "float32", "--max-model-len", "4096")
CPU = replace(worker("cpu"), model="tiny-llama", kv=KvModel(8192, 16, bytes_per_token=2048))


@pytest.fixture
def cluster(live_extra, monkeypatch):
    """A Ray of two nodes: four GPUs in the west, two in the east; to Ray they are but numbers."""
    import quiet_vllm  # noqa: F401  # first
    from ray.cluster_utils import Cluster

    from dataplane.live.pool import ray_host

    for name, value in {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ray_host, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    made = Cluster()
    for zone, gpus in (("west", 4), ("east", 2)):
        made.add_node(
            num_cpus=1,
            num_gpus=gpus,
            labels={ZONE: zone},
            resources={"accelerator_type:H100": 1},
            object_store_memory=80 << 20,
        )
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    made.shutdown()


def test_gpus_of_a_zone_are_reserved_there_and_nowhere_else(cluster, monkeypatch, tmp_path):
    import ray

    from dataplane.live.pool.fleet_types import FleetTypes, Site
    from dataplane.live.pool.ray_host import RayHost
    from dataplane.live.worker import launch

    class Started:  # in place of an engine, which a number is no GPU for
        def __init__(self, *told):
            pass

        def phase(self):
            return "there"

        def start(self, *told):
            return None

        def node(self):
            import ray

            return ray.get_runtime_context().get_node_id()

    kind = WorkerType("h100-sxm", 1, PROFILE)
    types = FleetTypes([WorkerGroup(kind, 2)], {kind.name: PROFILE.engine})
    monkeypatch.setattr(launch, "Worker", Started)
    monkeypatch.setattr(launch, "PLACE_S", 5.0)

    async def joined(site):
        return await RayHost.start(types, site, 0.0, 1, tmp_path / "fleet" / "ray", "auto")

    async def story():
        with pytest.raises(BadInput, match=r"zone north: Ray has no .*; there are east, west"):
            await joined(Site("north"))
        with pytest.raises(BadInput, match=r"zone east: .* need 4, Ray's nodes there have 2"):
            await joined(Site("east", types.groups))
        host = await joined(Site("east"))
        zone_of = {node["NodeID"]: node["Labels"][ZONE] for node in ray.nodes()}

        async def launched(name):
            place = await host._place(name, kind)
            return await launch.launch_worker(name, {}, "key", place)

        started = [await launched("w0"), await launched("w1")]
        assert [zone_of[one.node] for one in started] == ["east", "east"]
        while host.room(kind.name) is None:  # Ray's own count is a moment late
            await asyncio.sleep(0.1)
        assert host.room(kind.name) == "no node of zone east has 1 free GPUs"
        with pytest.raises(BadInput, match=f"no node with {ZONE}=east has 1 free H100 GPUs"):
            await launched("w2")
        launch._end(started[0].actor, started[0].group)
        while host.room(kind.name) is not None:
            await asyncio.sleep(0.1)
        assert zone_of[(await launched("w3")).node] == "east"
        await host.close()

    asyncio.run(asyncio.wait_for(story(), 120))


def test_halves_of_gpus_are_reserved_two_on_each_and_a_half_left_is_no_whole(cluster, monkeypatch, tmp_path):
    from dataplane.live.pool.fleet_types import FleetTypes, Site
    from dataplane.live.pool.ray_host import RayHost
    from dataplane.live.worker import launch

    class Started:  # in place of an engine; Ray tells its process which GPU it is to see
        def __init__(self, *told):
            pass

        def phase(self):
            return "there"

        def start(self, *told):
            import ray

            return ray.get_runtime_context().get_accelerator_ids()["GPU"]

        def node(self):
            return "here"

    half, whole = WorkerType.of(PROFILE.shared(2)), WorkerType.of(PROFILE)
    types = FleetTypes([WorkerGroup(half, 3)], {half.name: PROFILE.engine})
    monkeypatch.setattr(launch, "Worker", Started)
    monkeypatch.setattr(launch, "PLACE_S", 5.0)

    async def story():
        beside = Site("east", (WorkerGroup(whole, 1),))
        with pytest.raises(BadInput, match=r"3 workers of 0.5 GPUs, 1 workers of 1 GPUs need 2.5, .* have 2"):
            await RayHost.start(types, beside, 0.0, 1, tmp_path / "fleet" / "ray", "auto")
        host = await RayHost.start(types, Site("east"), 0.0, 1, tmp_path / "fleet" / "ray", "auto")

        async def launched(name, kind):
            return await launch.launch_worker(name, {}, "key", await host._place(name, kind))

        seen = [(await launched(f"w{i}", half)).info for i in range(3)]
        assert [len(gpus) for gpus in seen] == [1, 1, 1]
        assert sorted(seen.count(gpus) for gpus in seen) == [1, 2, 2]
        with pytest.raises(BadInput, match=f"no node with {ZONE}=east has 1 free H100 GPUs"):
            await launched("whole", whole)
        seen.append((await launched("w3", half)).info)
        assert [seen.count(gpus) for gpus in seen] == [2, 2, 2, 2]
        while host.room(half.name) is None:  # Ray's own count is a moment late
            await asyncio.sleep(0.1)
        assert host.room(half.name) == "no node of zone east has 0.5 free GPUs"
        await host.close()

    asyncio.run(asyncio.wait_for(story(), 120))


def planned(path, zone_of):
    """The file of a portfolio of CPU workers, one a model; two fit into the east and eight into the west."""
    plan = plan_of_fleet([{"gpu": "cpu", "tp_degree": 1, "workers": 1, "usd_per_hour": 1.0}], CPU.model)
    plan["inputs"]["profiles"][0] |= {"profile": profile_document(CPU)}
    models = [{"name": name, "zone": zone, "plan": plan} for name, zone in zone_of.items()]
    limits = [{"name": f"zones.{zone}.cpu", "most": n} for zone, n in (("east", 2), ("west", 8))]
    schema = "tokenfleet.portfolio-plan/1"
    path.write_text(json.dumps({"schema": schema, "models": models, "limits": limits}))
    return path


@pytest.fixture(scope="module")
def hosts(live_extra):
    from experiments.lib.linux_hosts import linux_hosts, why_not

    if reason := why_not():
        pytest.skip(f"no hosts can be made here: {reason}")
    with linux_hosts(2, labels=[f"{ZONE}=west", f"{ZONE}=east"]) as hosts:
        yield hosts


def test_a_zone_that_the_cluster_lacks_is_one_line_and_exit_code_2(hosts, model_folder, scratch):
    file = planned(scratch / "north.json", {"chat": "north", "code": "north"})
    words = ["--portfolio", str(file), "--model", f"chat={model_folder}", "--model", f"code={model_folder}"]
    serve = [sys.executable, "-m", "tokenfleet", "serve", "--port", "8798", "--control-port", "8799", *words]
    done = subprocess.run(
        hosts[0].command(*serve, "--", *ENGINE_FLAGS),
        env=os.environ | hosts.environment | {"TOKENFLEET_DATA": str(scratch / "data")},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    has = f"Ray has no node with the label {ZONE}=north; there are east, west"
    assert line == f"error: chat: --portfolio: zone north: {has}"


def test_a_model_starts_grows_and_is_restarted_in_its_zone_alone(hosts, model_folder, scratch):
    file = planned(scratch / "zones.json", {"chat": "east", "code": "west"})
    by_zone = {"west": hosts[0].ip, "east": hosts[1].ip}
    flags = "--portfolio", str(file), "--scale-in-after", "10m"

    def serving(fleet, model):
        listed = fleet.ask("GET", f"/models/{model}/v1/fleet")["workers"]
        return {w["worker"]: w["host"] for w in listed if w["state"] == "serving"}

    async def story(fleet):
        async def until(holds):
            while not holds():
                await asyncio.sleep(0.1)

        def scale(workers):
            fleet.ask("POST", "/models/chat/v1/fleet/scale", {"workers": workers})

        def share():
            return next(one for one in fleet.ask("GET", "/v1/fleet")["shares"] if one["name"] == "chat")

        assert list(serving(fleet, "code").values()) == [by_zone["west"]]
        scale(2)
        await until(lambda: list(serving(fleet, "chat").values()) == [by_zone["east"]] * 2)
        scale(4)
        await until(lambda: share()["asked"] == 4)
        old = min(serving(fleet, "chat"))
        fleet.ask("POST", f"/models/chat/v1/workers/{old}/restart", {})
        await until(lambda: len(now := serving(fleet, "chat")) == 2 and old not in now)
        assert list(serving(fleet, "chat").values()) == [by_zone["east"]] * 2
        seen = share()
        assert (seen["zone"], seen["asked"], seen["share"], seen["held"]) == ("east", 4, 2, 2)

    with hosts.fleet(model_folder, *flags, engine_flags=ENGINE_FLAGS, names=("chat", "code")) as fleet:
        hosts[0].call(lambda: asyncio.run(asyncio.wait_for(story(fleet), 300)))
