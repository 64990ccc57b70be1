"""Ray Serve's own controller follows the advice: a second replica for more traffic, one without traffic."""

import asyncio
import os
import random
import subprocess
from contextlib import suppress

import aiohttp
import psutil
import pytest
import yaml
from checkout import ROOT

from harness.served import free_port, session

pytest.importorskip("grpc_reflection", reason="ray.serve needs it: pip install grpcio-reflection==1.80.0")
PROMPT, OUTPUT = 1500, 16
KNOWN = [7, 8, 9]
RPS = 3  # and as many short ones: one replica of the profile does not carry them in time
SERVED_S = 600
PATIENT = {
    f"RAY_SERVE_PROXY_{check}_TIMEOUT_S": str(SERVED_S) for check in ("READY_CHECK", "HEALTH_CHECK")
}  # a busy machine starts Ray's proxy in more than its 5 seconds
QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_worker_niceness": "0",
}
ENGINE = {
    "dtype": "float32",
    "max_model_len": 4096,
    "kv_cache_memory_bytes": 256 << 20,
    "enforce_eager": True,
}
ASKED = {"model": "llama-3.1-70b", "gpu": "a100", "tp": 4, "max_replicas": 2, "gpus": 0, "engine": ENGINE}


class Application:
    """A running `serve run`."""

    def __init__(self, process, url):
        self.process, self.url = process, url

    def below(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def replicas(self):
        """The processes that Ray's controller has started as replicas."""
        assert self.process.poll() is None
        found = set()
        for process in self.below():
            with suppress(psutil.Error):
                if "ServeReplica" in " ".join(process.cmdline()):
                    found.add(process.pid)
        return found


@pytest.fixture(scope="module")
def application(model_folder, scratch):
    config = yaml.safe_load((ROOT / "examples/ray_serve.yaml").read_text())
    port = config["http_options"]["port"] = free_port()
    config["applications"][0]["args"] |= ASKED | {"weights": str(model_folder)}
    (scratch / "ray_serve.yaml").write_text(yaml.safe_dump(config))
    environment = os.environ | PATIENT | QUIET | {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'examples'}"
    with (scratch / "ray_serve.log").open("w") as said:
        command = ["serve", "run", str(scratch / "ray_serve.yaml")]
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
    running = Application(process, f"http://127.0.0.1:{port}")
    yield running
    below = running.below()
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=60)
    for one in (process, *below):
        with suppress(psutil.NoSuchProcess):
            one.kill()


async def ask(http, url, prompt):
    async with http.post(url, json={"prompt": prompt, "max_tokens": OUTPUT}) as reply:
        return (await reply.json())["tokens"] if reply.status == 200 else await reply.text()


async def answers(http, application, prompt):
    """The answer, once the application gives one."""
    while True:
        assert application.process.poll() is None
        with suppress(aiohttp.ClientError):
            if isinstance(found := await ask(http, application.url, prompt), list):
                return found
        await asyncio.sleep(1)


async def asked_until(application, holds):
    """Send RPS requests a second until `holds`. Returns the answers to one prompt, of all sent."""
    draws = random.Random(1)
    async with asyncio.timeout(SERVED_S), session() as http:
        expected = await answers(http, application, KNOWN)
        sent, fresh = [], []
        while not await asyncio.to_thread(holds):
            prompt = [draws.randrange(5, 2000) for _ in range(PROMPT)]
            sent.append(asyncio.create_task(ask(http, application.url, prompt)))
            fresh.append(asyncio.create_task(ask(http, application.url, KNOWN)))
            await asyncio.sleep(1 / RPS)
        return expected, await asyncio.gather(*sent), await asyncio.gather(*fresh)


async def left_alone_until(application, holds):
    """Send nothing until `holds`. Returns the answer to the known prompt then."""
    async with asyncio.timeout(SERVED_S), session() as http:
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(1)
        return await ask(http, application.url, KNOWN)


@pytest.mark.timeout(3 * SERVED_S)
@pytest.mark.nightly
def test_rays_controller_starts_and_ends_the_replica_by_the_advice_and_no_request_fails(application, scratch):
    expected, sent, again = asyncio.run(asked_until(application, lambda: len(application.replicas()) == 2))
    assert {len(tokens) for tokens in sent} == {OUTPUT}
    assert all(tokens == expected for tokens in again)
    assert "AdvicePolicy" in (scratch / "ray_serve.log").read_text()
    both = application.replicas()
    after = asyncio.run(left_alone_until(application, lambda: len(application.replicas()) == 1))
    assert application.replicas() < both  # one of them goes on; none was started anew
    assert after == expected
