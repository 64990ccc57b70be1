"""A fleet in Kubernetes, against a fake API server: which pods are servers, and how many replicas are set."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_kubernetes import TOKEN, FakeKubernetes, kubeconfig, serving
from front import until

from controlplane.errors import BadInput
from tokenfleet.advise.advice import ScaleTarget
from tokenfleet.advise.apply import Applied, KubernetesScale, command_scale
from tokenfleet.advise.kubernetes.cluster import ApiRefused, ApiServer, KubernetesApi, found_cluster
from tokenfleet.advise.kubernetes.pods import PodSet, PodWatch


def run(story, **pods):
    """Run a story with a fake cluster and a session to its API."""

    async def whole():
        fake = FakeKubernetes()
        for name, ip in pods.items():
            fake.put(name, ip)
        async with serving(fake) as server, KubernetesApi(ApiServer(server, "llm", token=TOKEN)) as api:
            await story(fake, api)

    asyncio.run(whole())


def test_pods_are_listed_watched_and_leave():
    async def story(fake, api):
        fake.put("other", "10.0.0.9", {"app": "web"})
        async with PodWatch(api, "app=vllm") as pods:
            assert pods.listed() == ["10.0.0.1:8000"]  # b has no address yet
            fake.put("b", "10.0.0.2")
            fake.put("other", "10.0.0.8", {"app": "web"})
            await until(lambda: pods.listed() == ["10.0.0.1:8000", "10.0.0.2:8000"])
            fake.put("a", "10.0.0.1", is_leaving=True)
            await until(lambda: pods.listed() == ["10.0.0.2:8000"])
            fake.delete("a")
            fake.put("c", "10.0.0.1")  # an address that is used again
            await until(lambda: pods.listed() == ["10.0.0.1:8000", "10.0.0.2:8000"])

    run(story, a="10.0.0.1", b="")


def test_a_watch_that_is_cut_goes_on_where_it_ended():
    async def story(fake, api):
        async with PodWatch(api, "app=vllm", 9000) as pods:
            fake.put("b", "10.0.0.2")
            await until(lambda: len(pods.listed()) == 2)
            fake.cut()
            fake.delete("a")
            await until(lambda: pods.listed() == ["10.0.0.2:9000"])
        lists = [one for one in fake.asked if "pods" in one and "watch" not in one]
        assert len(lists) == 1

    run(story, a="10.0.0.1")


def test_a_version_that_is_too_old_lists_anew():
    async def story(fake, api):
        async with PodWatch(api, "app=vllm") as pods:
            await until(lambda: any("watch=true" in one for one in fake.asked))
            fake.oldest = fake.version + 5
            fake.pods.clear()  # events that were missed
            fake.put("z", "10.0.0.7")
            fake.version = fake.oldest
            fake.events.clear()
            fake.cut()
            await until(lambda: pods.listed() == ["10.0.0.7:8000"])

    run(story, a="10.0.0.1")


def test_the_last_list_stands_while_the_api_does_not_answer():
    async def story():
        fake = FakeKubernetes()
        fake.put("a", "10.0.0.1")
        async with serving(fake) as server:
            api = await KubernetesApi(ApiServer(server, "llm", token=TOKEN)).__aenter__()
            pods = await PodWatch(api, "app=vllm").__aenter__()
        port = int(server.rpartition(":")[2])
        await asyncio.sleep(0.05)
        assert pods.listed() == ["10.0.0.1:8000"]
        async with serving(fake, port):
            fake.put("b", "10.0.0.2")
            await until(lambda: len(pods.listed()) == 2)
            await pods.__aexit__()
            await api.__aexit__()

    asyncio.run(story())


def test_a_pool_gives_selector_and_port():
    async def story(fake, api):
        spec = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8200}]}
        fake.pools["llama"] = {"spec": spec}
        async with PodWatch(api, None, None, "llama") as pods:
            assert pods.listed() == ["10.0.0.1:8200"]
        with pytest.raises(BadInput, match=r"--selector: namespace llm: no such pool \(status 404\)"):
            await PodWatch(api, None, None, "qwen").__aenter__()

    run(story, a="10.0.0.1")


def test_what_no_pod_is_changes_nothing():
    pods = PodSet({"a": "10.0.0.1"}, "7")
    assert pods.after({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}).version == "9"
    assert pods.after({"type": "NEWS"}) == pods
    assert PodSet.listed({"items": [{}, {"status": {"podIP": 3}, "metadata": {"name": "b"}}]}).addresses == {
        "b": "3"
    }
    with pytest.raises(ApiRefused, match="too old"):
        pods.after({"type": "ERROR", "object": {"code": 410, "message": "too old"}})


ADVICE = SimpleNamespace(published=6, held="", has=4, starting=0)


def advice(**more):
    made = SimpleNamespace(**(vars(ADVICE) | more))
    return SimpleNamespace(held=made.held, of_types=[made])


def test_the_scale_follows_the_advice_within_its_bounds_and_never_without_metrics():
    async def story(fake, api):
        target = ScaleTarget("Deployment", "vllm")
        scale = KubernetesScale(api, target)
        await scale.refuse_scaled()
        dry, applied = (Applied(scale, str(target), 2, 8, is_dry) for is_dry in (True, False))
        assert await dry(advice()) == "deployment/vllm would go from 4 to 6; --yes applies it"
        assert (fake.patches.pop(), fake.replicas) == (("deployments/vllm", 6, True), {"deployments/vllm": 4})
        assert await applied(advice()) == "deployment/vllm goes from 4 to 6"
        assert await applied(advice()) == "deployment/vllm has 6"
        assert await applied(advice(published=99)) == "deployment/vllm goes from 6 to 8"
        assert (
            await applied(advice(published=1, held="s1: gone"))
            == "deployment/vllm stays: metrics are missing"
        )
        assert await applied(advice(published=None)) == "deployment/vllm stays: no advice yet"
        assert fake.replicas == {"deployments/vllm": 8}
        fake.refuses_patches = "scale is forbidden"
        told = "deployment/vllm: not applied: scale is forbidden (status 403)"
        assert await applied(advice(published=3)) == told
        fake.replicas["deployments/vllm"] = 0
        assert await applied(advice(published=3)) == "deployment/vllm has 0 replicas and stays switched off"

    run(story)


def test_a_target_that_is_missing_or_scaled_by_another_is_refused():
    async def story(fake, api):
        with pytest.raises(BadInput, match=r"statefulset/vllm in llm: statefulsets/vllm not found"):
            await KubernetesScale(api, ScaleTarget("StatefulSet", "vllm")).refuse_scaled()
        reference = {"kind": "Deployment", "name": "vllm"}
        fake.autoscalers = [{"metadata": {"name": "hpa"}, "spec": {"scaleTargetRef": reference}}]
        with pytest.raises(BadInput, match="HorizontalPodAutoscaler hpa scales deployment/vllm"):
            await KubernetesScale(api, ScaleTarget("Deployment", "vllm")).refuse_scaled()
        api.cluster = replace(api.cluster, token="wrong")
        with pytest.raises(BadInput, match=r"Unauthorized \(status 401\)"):
            await KubernetesScale(api, ScaleTarget("Deployment", "vllm")).refuse_scaled()

    run(story)


def test_a_command_gets_the_number_and_its_failure_is_said(tmp_path):
    script = tmp_path / "scale.sh"
    script.write_text(f"#!/bin/sh\necho $1 >> {tmp_path}/told\n[ $1 -lt 7 ]\n")
    script.chmod(0o755)

    async def story():
        command = command_scale(f"{script} {{replicas}}")
        applied = Applied(command, "scale.sh", 1, 9, False)
        dry = Applied(command_scale(f"{script} {{replicas}}"), "scale.sh", 1, 9, True)
        assert await dry(advice()) == "scale.sh would go from 4 to 6; --yes applies it"
        assert not (tmp_path / "told").exists()
        assert await applied(advice()) == "scale.sh goes from 4 to 6"
        assert await applied(advice(has=4)) == "scale.sh has 6"
        assert (
            await applied(advice(published=8)) == f"scale.sh: not applied: {script} ended with exit status 1"
        )
        assert (tmp_path / "told").read_text() == "6\n8\n"
        script.unlink()
        assert "not applied" in await applied(advice(published=7))

    asyncio.run(story())


@pytest.mark.parametrize("text", ["vllm", "deployment/", "scale 'x", "{replicas}", "pod/vllm"])
def test_what_is_neither_target_nor_command_is_refused_in_a_line(text):
    with pytest.raises(BadInput, match=r"^--apply: ") as refused:
        command_scale(text)
    assert "\n" not in str(refused.value)


def test_the_cluster_is_that_of_the_kubeconfig_or_of_the_pod(tmp_path, monkeypatch):
    config = kubeconfig(tmp_path / "config", "http://127.0.0.1:8001")
    found = found_cluster(None, {"KUBECONFIG": str(config)})
    assert (found.server, found.namespace) == ("http://127.0.0.1:8001", "llm")
    assert found.headers() == {"Authorization": f"Bearer {TOKEN}"}
    assert found_cluster("own", {"KUBECONFIG": str(config)}).namespace == "own"
    (tmp_path / "renewed").write_text("one\n")
    by_file = found_cluster(
        None, {"KUBECONFIG": str(kubeconfig(tmp_path / "c2", "http://h:1", tokenFile="renewed"))}
    )
    assert by_file.headers() == {"Authorization": "Bearer one"}
    (tmp_path / "renewed").write_text("two\n")
    assert by_file.headers() == {"Authorization": "Bearer two"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("current-context: here", "current-context: there"), "context: 'there' is not there"),
        (("http://", "ftp://"), "server: expected an http:// or https:// address"),
        (("token:", "exec:"), "no token and no client certificate; `kubectl proxy` helps"),
        (("clusters:", "clusters: 3\nothers:"), "cluster"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_refused_in_a_line(tmp_path, change, says):
    path = kubeconfig(tmp_path / "config", "http://127.0.0.1:8001")
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(BadInput) as refused:
        found_cluster(None, {"KUBECONFIG": str(path)})
    assert says in str(refused.value)
    with pytest.raises(BadInput, match="no kubeconfig"):
        found_cluster(None, {"KUBECONFIG": str(tmp_path / "none")})
