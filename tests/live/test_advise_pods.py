"""`tokenfleet advise` of pods that a fake Kubernetes API lists, and the Deployment that it scales."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager

from checkout import ROOT
from counted_servers import busy
from fake_kubernetes import FakeKubernetes, kubeconfig, serving

COMMAND = [
    *(sys.executable, "-m", "tokenfleet", "advise", "--selector", "app=vllm", "--gpu", "h100"),
    *("--slo", "ttft=1s,tpot=50ms", "--every", "1s", "--once", "--format", "json"),
    *("--apply", "deployment/vllm", "--replicas", "2..8", "--yes"),
]


@contextmanager
def cluster(fake):
    """The fake API in a thread of its own; its address."""
    loop, address, is_up = asyncio.new_event_loop(), [], threading.Event()
    over = asyncio.Event()

    async def serve():
        async with serving(fake) as server:
            address.append(server)
            is_up.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    is_up.wait(30)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def test_pods_of_a_selector_are_advised_and_their_deployment_is_scaled(tmp_path):
    fake = FakeKubernetes()
    fake.replicas["deployments/vllm"] = 5
    fake.put("web", "127.0.0.9", {"app": "web"})
    fake.put("vllm-starts", "127.0.0.2")  # where nothing answers
    fake.put("vllm-0", "127.0.0.1")
    with busy() as address, cluster(fake) as server:
        config = kubeconfig(tmp_path / "config", server)
        done = subprocess.run(
            [*COMMAND, "--port", address.rpartition(":")[2]],
            cwd=ROOT,
            env=os.environ | {"KUBECONFIG": str(config)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["replicas"], told["starting"], told["held"]) == (1, 1, None)
    assert told["wanted_replicas"] == 2  # the floor
    assert told["applied"] == "deployment/vllm goes from 5 to 2"
    assert fake.patches == [("deployments/vllm", 2, False)]
