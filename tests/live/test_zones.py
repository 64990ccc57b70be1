"""Workers of a portfolio are on nodes of their model's zone, and bought as they were planned, on real Ray
clusters where other nodes have room."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from made_plans import PROFILE, plan_of_fleet
from planning_builders import worker

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import KvModel
from controlplane.worker_type import WorkerGroup, WorkerType
from tokenfleet.profiles.form import profile_document

ZONE, MARKET = "ray.io/availability-zone", "ray.io/market-type"
ENGINE_FLAGS = ("--dtype", "float32", "--max-model-len", "4096")
CPU = replace(worker("cpu"), model="tiny-llama", kv=KvModel(8192, 16, bytes_per_token=2048))


@pytest.fixture(scope="module")
def cluster(live_extra):
    """A Ray of two nodes: four GPUs in the west, two in the east; to Ray they are but numbers."""
    import quiet_vllm  # noqa: F401  # first
    from ray.cluster_utils import Cluster

    from dataplane.live.pool import ray_host

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}.items():
            patch.setenv(name, value)
        patch.setattr(ray_host, "current_platform", SimpleNamespace(is_cpu=lambda: False))
        made = Cluster()
        for zone, gpus in (("west", 4), ("east", 2)):
            made.add_node(
                num_cpus=1,
                num_gpus=gpus,
                labels={ZONE: zone},
                resources={"accelerator_type:H100": 1},
                object_store_memory=80 << 20,
            )
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        made.shutdown()


def test_gpus_of_a_zone_are_reserved_there_and_nowhere_else(cluster, monkeypatch, tmp_path):
    import ray

    from dataplane.live.pool.fleet_types import Begun, FleetTypes, Site
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
            await joined(Site("east", tuple(map(Begun, types.groups))))
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


def test_halves_of_gpus_are_reserved_two_on_each_and_a_half_left_is_no_whole(
    cluster, monkeypatch, tmp_path, capfd
):
    from dataplane.live.pool.fleet_types import Begun, FleetTypes, Site
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
        beside = Site("east", (Begun(WorkerGroup(whole, 1)),))
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
        os.kill(os.getpid(), signal.SIGTERM)
        await told.wait()
        assert "SIGTERM received" not in capfd.readouterr().err  # by Ray, with addresses of its code
        await host.close()

    async def told_of(story):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
        await asyncio.wait_for(story(), 120)

    told = asyncio.Event()
    asyncio.run(told_of(story))


def test_workers_are_on_nodes_bought_as_they_were_planned_and_those_on_demand_first(
    cluster, monkeypatch, tmp_path
):
    import ray

    from dataplane.live.pool import ray_host
    from dataplane.live.pool.fleet_types import Begun, FleetTypes, Site
    from dataplane.live.pool.member import Revision
    from dataplane.live.pool.ray_host import RayHost
    from dataplane.live.worker import launch

    class Started:  # in place of an engine, which a number is no GPU for
        def __init__(self, worker, *told):
            self._info = SimpleNamespace(worker=worker)

        def phase(self):
            return "there"

        def start(self, *told):
            return self._info

        def node(self):
            import ray

            return ray.get_runtime_context().get_node_id()

        def adopt(self, *told):
            return self._info, []

        def stop(self, *told):
            return True

    async def linked(info, *told):
        return SimpleNamespace(info=info)

    kind = WorkerType("h100-sxm", 1, PROFILE)
    types = FleetTypes([WorkerGroup(kind, 2)], {kind.name: PROFILE.engine})
    monkeypatch.setattr(launch, "Worker", Started)
    monkeypatch.setattr(ray_host, "WorkerLink", SimpleNamespace(connect=linked))

    def added(gpus, market):
        settings = {"resources": {"accelerator_type:H100": 1}, "object_store_memory": 80 << 20}
        return cluster.add_node(num_cpus=1, num_gpus=gpus, labels={MARKET: market}, **settings)

    async def joined(site):
        return await RayHost.start(types, site, 0.0, 1, tmp_path / "fleet" / "ray", "auto")

    async def until_room(host, says):
        while host.room(kind.name) != says:  # Ray's own count is a moment late
            await asyncio.sleep(0.1)

    async def story():
        host = await joined(Site(on_demand=0))
        assert (await host._place("w", kind)).labels == {}  # no node says how it is bought: any will do
        await host.close()
        added(1, "on-demand")
        with pytest.raises(BadInput, match=f"no node with the label {MARKET}=spot; 2 .* planned on spot"):
            await joined(Site(on_demand=0))
        on_spot = added(3, "spot")
        with pytest.raises(BadInput, match=r"--portfolio: on spot: .* need 4, Ray's nodes there have 3"):
            await joined(Site(None, (Begun(WorkerGroup(kind, 2), 0),), on_demand=0))
        host = await joined(Site(on_demand=2))

        async def launched(name):
            await host.launch(name, kind.name, Revision(1, "tiny"), lambda phase: None)
            is_on_spot = {n["NodeID"]: n["Labels"].get(MARKET) == "spot" for n in ray.nodes()}
            return is_on_spot[host._workers[name].node]

        assert [await launched(f"w{i}") for i in range(4)] == [False, False, True, True]
        await host.stop("w0")
        assert [await launched(name) for name in ("w4", "w5")] == [False, True]
        await until_room(host, "no node on spot has 1 free GPUs")
        await host.stop("w1")
        await until_room(host, None)
        # The core that adopts w4, on demand, and w5 counts them as they are.
        successor = RayHost(types, Site(on_demand=2), 2, tmp_path / "fleet" / "ray", "auto")
        assert set(await successor.adopt({"w4", "w5"})) == {"w4", "w5"}
        places = [(await successor._place(name, kind)).labels for name in ("w6", "w7")]
        assert places == [{MARKET: "!spot"}, {MARKET: "spot"}]
        cluster.remove_node(on_spot)
        while any(n["Alive"] and n["Labels"].get(MARKET) == "spot" for n in ray.nodes()):
            await asyncio.sleep(0.1)
        assert Site("east", on_demand=0).market(ray.nodes(), 0) == "spot"
        await until_room(host, None)  # on demand
        await host.close()

    asyncio.run(asyncio.wait_for(story(), 200))


def planned(path, zone_of, **told):
    """The file of a portfolio of CPU workers, one a model; two fit into the east and eight into the west.

    `told`: other fields of models, by name.
    """
    plan = plan_of_fleet([{"gpu": "cpu", "tp_degree": 1, "workers": 1, "usd_per_hour": 1.0}], CPU.model)
    plan["inputs"]["profiles"][0] |= {"profile": profile_document(CPU)}
    models = [
        {"name": name, "zone": zone, "plan": plan} | told.get(name, {}) for name, zone in zone_of.items()
    ]
    limits = [{"name": f"zones.{zone}.cpu", "most": n} for zone, n in (("east", 2), ("west", 8))]
    schema = "tokenfleet.portfolio-plan/1"
    path.write_text(json.dumps({"schema": schema, "models": models, "limits": limits}))
    return path


def test_nodes_that_the_cluster_lacks_are_one_line_and_exit_code_2(hosts, model_folder, scratch):
    told = {"chat": {"spot": False}, "code": {"spot": True}}
    file = planned(scratch / "lacks.json", dict.fromkeys(told, "west"), **told)
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
    lacks = f"Ray has no node there with the label {MARKET}=spot; 1 workers are planned on spot"
    assert line == f"error: chat: --portfolio: zone west: {lacks}"


def serving(fleet, model):
    """The addresses of a model's workers that serve, by their names."""
    listed = fleet.ask("GET", f"/models/{model}/v1/fleet")["workers"]
    return {w["worker"]: w["host"] for w in listed if w["state"] == "serving"}


async def until(holds):
    async with asyncio.timeout(120):
        while not holds():
            await asyncio.sleep(0.1)


@pytest.mark.nightly
def test_a_model_starts_grows_and_is_restarted_in_its_zone_on_nodes_bought_as_planned(
    hosts, model_folder, scratch
):
    told = {"chat": {"spot": True}, "code": {"spot": False}}
    file = planned(scratch / "zones.json", {"chat": "east", "code": "west"}, **told)
    west, east = hosts[0].ip, hosts[1].ip
    flags = "--portfolio", str(file), "--scale-in-after", "10m"

    async def story(fleet):
        def share():
            return next(one for one in fleet.ask("GET", "/v1/fleet")["shares"] if one["name"] == "chat")

        def at(model):
            return list(serving(fleet, model).values())

        assert (at("chat"), at("code")) == ([east], [west])
        fleet.ask("POST", "/models/chat/v1/fleet/scale", {"workers": 4})
        await until(lambda: (share()["asked"], at("chat")) == (4, [east] * 2))
        old = min(serving(fleet, "chat"))
        fleet.ask("POST", f"/models/chat/v1/workers/{old}/restart", {})
        await until(lambda: len(now := serving(fleet, "chat")) == 2 and old not in now)
        assert at("chat") == [east] * 2
        seen = share()
        assert (seen["zone"], seen["asked"], seen["share"], seen["held"]) == ("east", 4, 2, 2)

    with hosts.fleet(model_folder, *flags, engine_flags=ENGINE_FLAGS, names=("chat", "code")) as fleet:
        hosts[0].call(lambda: asyncio.run(asyncio.wait_for(story(fleet), 300)))
