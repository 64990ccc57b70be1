"""Fixtures of live tests: a tiny model, served fleets, and two bare workers for moves."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import runpy
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from checkout import ROOT
from made_plans import plan_of_fleet
from served_fleet import ServedFleet, serve
from xdist.scheduler import LoadScopeScheduling

from tokenfleet.export.deployment import deployment
from tokenfleet.export.kuberay import kuberay
from tokenfleet.planning.plan_file import parse_plan

STORY_S = 120.0


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Importing these modules takes ten seconds; a run without live tests need not wait for it."""
    return True if config.getoption("markexpr") == "not live" else None


# These lines are dealt out in this order, the longest first: all processes end together. Files of one line
# stay in one process and share its fixtures. Any other file is a line of its own, behind.
GROUPS = (
    ("test_hosts", "test_zones"),
    (
        *("test_console_live", "test_console_access", "test_mixed_fleet", "test_gateway", "test_control_api"),
        *("test_compare_command", "test_fleet_changes_command", "test_step_times_served"),
    ),
    ("test_model_families",),
    ("test_served_vllm",),
    ("test_live_migration",),
    ("test_api_command",),
    ("test_served_portfolio",),
    ("test_autoscale",),
)
LINE_OF = {name: at for at, names in enumerate(GROUPS) for name in names}


class Lines(LoadScopeScheduling):  # type: ignore[misc]
    """Deals out whole lines. (`--dist loadgroup` of xdist 3.8 marks node ids, which pytest 9.2 ignores.)"""

    def _split_scope(self, nodeid: str) -> str:
        name = Path(nodeid.partition("::")[0]).stem
        return GROUPS[LINE_OF[name]][0] if name in LINE_OF else name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lines:
    return Lines(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LINE_OF.get(item.path.stem, len(GROUPS)))
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.live)
            # vLLM, torch and Ray warn of their own affairs as they are imported.
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def live_extra() -> None:
    """Skip where vLLM or Ray is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("vllm", "ray", "openai")):
        pytest.skip("the live extra is not installed (requirements/live-cpu.txt)")


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tokenfleet-tests-") as folder:
        yield Path(folder)


def run_example(name: str, *words: str) -> None:
    """Run a script of `examples` in this process: another would load torch and transformers first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *words])
        patch.syspath_prepend(ROOT / "examples")
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


@pytest.fixture(scope="session")
def model_folder(live_extra: None, scratch: Path) -> Path:
    """A tiny Llama with random weights, of a fixed seed, and a real tokenizer."""
    folder = scratch / "tiny-llama"
    run_example("tiny_llama.py", str(folder))
    return folder


@pytest.fixture(scope="session")
def emulated_fleet(model_folder: Path, scratch: Path) -> Iterator[ServedFleet]:
    """Three emulated workers behind a real gateway, with two classes and the plain targets."""
    classes = "batch:ttft=20s,tpot=500ms,attainment=0.9", "hasty:ttft=1s,tpot=5us,attainment=0.99"
    slos = [word for one in classes for word in ("--slo", one)]
    fleet = serve(model_folder, "--engine", "emulated", "--workers", "3", *slos, folder=scratch)
    yield fleet
    fleet.stop()


@pytest.fixture(scope="session")
def mixed_fleet(model_folder: Path, scratch: Path) -> Iterator[ServedFleet]:
    """A plan's mix, served as its export says: an emulated worker of one kind and two of another."""
    parts = [("h100-sxm", 2, 1, 5.38), ("a100-sxm", 1, 2, 2.78)]
    fleet = [{"gpu": gpu, "tp_degree": tp, "workers": n, "usd_per_hour": usd} for gpu, tp, n, usd in parts]
    plan = parse_plan(plan_of_fleet(fleet, "llama-3.1-8b", policy="best-fit"), "mixed.json")
    made = {one["kind"]: one for one in kuberay(deployment(plan, str(model_folder)), "mixed", "image")}
    (scratch / "plan.json").write_text(made["ConfigMap"]["data"]["plan.json"])
    script = made["Deployment"]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    words = shlex.split(script.replace("/etc/tokenfleet", str(scratch)))
    asked = [words[i : i + 2] for i, word in enumerate(words) if word in ("--plan", "--max-workers")]
    served = serve(model_folder, "--engine", "emulated", "--fixed", *itertools.chain(*asked), folder=scratch)
    yield served
    served.stop()


def shared_inodes(fleet: ServedFleet) -> set[int]:
    """The shared memory and the semaphores that the fleet's processes have mapped."""
    found = set()
    for process in psutil.Process(fleet.process.pid).children(recursive=True):
        with suppress(OSError):  # it has ended meanwhile
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            found |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return found


@pytest.fixture(scope="module")
def vllm_fleet(model_folder: Path, scratch: Path) -> Iterator[ServedFleet]:
    """Two real vLLM workers and two gateways, as many workers until a test lets the controller decide.

    fp32: batching changes a bf16 result, also without any move. The targets hold at any speed of the machine:
    a drain moves what keeps them elsewhere.
    """
    flags = ("--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20))
    scaling = ("--workers", "2", "--autoscale", "1..2", "--scale-in-after", "3s", "--gateways", "2")
    slo = ("--slo", "ttft=60s,tpot=5s")
    fleet = serve(model_folder, *scaling, *slo, engine_flags=flags, folder=scratch)
    fleet.ask("POST", "/v1/fleet/scale", {"workers": 2})
    yield fleet
    shared = shared_inodes(fleet)
    assert fleet.stop() == 0
    with os.scandir("/dev/shm") as there:
        assert [one.name for one in there if one.inode() in shared] == []


class TwoWorkers:
    """Two real workers, `a` and `b`, on a local Ray; `play` runs a story over a fresh fleet of links."""

    def __init__(self, workers: list[Any], key: str, loop: asyncio.AbstractEventLoop) -> None:
        self.workers, self.key, self._loop = workers, key, loop

    def play(self, story: Any, **budget: float) -> None:
        self._loop.run_until_complete(asyncio.wait_for(self._play(story, budget), STORY_S))

    async def _play(self, story: Any, budget: dict[str, float]) -> None:
        import zmq.asyncio

        from dataplane.live.engine_api.vllm_surface import SamplingParams, VllmCodec
        from dataplane.live.migration.move import MoveBudget
        from dataplane.live.worker.link import WorkerLink
        from harness.bare_fleet import BareFleet

        context = zmq.asyncio.Context()
        links = [await WorkerLink.connect(w.info, self.key, context, VllmCodec()) for w in self.workers]
        fleet = BareFleet(links, MoveBudget(**budget), SamplingParams)
        try:
            await story(fleet)
        finally:
            await fleet.close()
            for link in links:
                await link.close()
            context.destroy(linger=0)


@contextmanager
def pair_of_workers(model_folder: Path, kv_tokens: int, **engine: Any) -> Iterator[TwoWorkers]:
    """Two workers with room for `kv_tokens` of KV each, in fp32; NIXL moves KV where it is installed."""
    import quiet_vllm  # noqa: F401  # first
    import ray

    from dataplane.live.engine_api.wire import new_key, public_key
    from dataplane.live.kv.nixl import installed
    from dataplane.live.worker.launch import WorkerResources, launch_worker
    from harness.two_workers import start_ray

    # Ray would run its workers at the lowest priority, behind everything else on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")

    asked = {
        "model": str(model_folder),
        "dtype": "float32",
        "max_model_len": 4096,
        "kv_cache_memory_bytes": kv_tokens * 2048,
        **engine,
    }
    transport = "nixl" if installed() else "auto"
    loop, key = asyncio.new_event_loop(), new_key()
    start_ray(address="local", include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)

    async def launch() -> list[Any]:
        return await asyncio.gather(
            *(
                launch_worker(name, asked, public_key(key), WorkerResources(cores=core, transport=transport))
                for name, core in (("a", "0"), ("b", "1"))
            )
        )

    workers = loop.run_until_complete(launch())
    yield TwoWorkers(workers, key, loop)
    for worker in workers:
        loop.run_until_complete(worker.stop())
    loop.close()
    ray.shutdown()


@pytest.fixture(scope="session")
def hosts(live_extra: None) -> Iterator[Any]:
    """Two hosts, each with a Ray node: the first on demand in the west, the other on spot in the east."""
    from harness.linux_hosts import linux_hosts, why_not

    if reason := why_not():
        pytest.skip(f"no hosts can be made here: {reason}")
    zone, market = "ray.io/availability-zone", "ray.io/market-type"
    labels = [f"{zone}=west,{market}=on-demand", f"{zone}=east,{market}=spot"]
    with linux_hosts(2, labels=labels) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def two_workers(model_folder: Path) -> Iterator[TwoWorkers]:
    """Room for 8192 tokens of KV each (served fleets do without NIXL)."""
    with pair_of_workers(model_folder, 8192) as workers:
        yield workers
