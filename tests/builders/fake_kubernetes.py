"""A small Kubernetes API: pods that are listed and watched, `scale`, autoscalers and pools.

It is no kube-apiserver: it has no admission, and of RBAC one token. Versions older than `oldest` answer
410, as they do after etcd has compacted them.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import yaml
from aiohttp import web

TOKEN = "t0ken"
KINDS = ("deployments", "statefulsets")


class FakeKubernetes:
    """The cluster's state; a change is an event of every watch."""

    def __init__(self):
        self.version, self.oldest = 100, 0
        self.pods, self.events = {}, []
        self.replicas = {"deployments/vllm": 4}
        self.autoscalers, self.pools = [], {}
        self.asked, self.patches, self.cuts = [], [], asyncio.Event()
        self.refuses_patches = None

    def put(self, name, ip="", labels=None, phase="Running", is_leaving=False):
        """Make a pod, or change it."""
        self.version += 1
        kind = "MODIFIED" if name in self.pods else "ADDED"
        metadata = {"name": name, "resourceVersion": str(self.version), "labels": labels or {"app": "vllm"}}
        if is_leaving:
            metadata["deletionTimestamp"] = "2026-11-25T00:00:00Z"
        self.pods[name] = {"metadata": metadata, "status": {"phase": phase, "podIP": ip}}
        self.events.append((self.version, kind, self.pods[name]))

    def delete(self, name):
        self.version += 1
        pod = self.pods.pop(name)
        pod["metadata"]["resourceVersion"] = str(self.version)
        self.events.append((self.version, "DELETED", pod))

    def cut(self):
        """End every watch that runs."""
        self.cuts.set()
        self.cuts = asyncio.Event()

    def app(self):
        app = web.Application(middlewares=[self._authorized])
        base = "/namespaces/{namespace}"
        app.router.add_get(f"/api/v1{base}/pods", self._pods)
        app.router.add_get("/apis/apps/v1" + base + "/{kind}/{name}/scale", self._scale)
        app.router.add_patch("/apis/apps/v1" + base + "/{kind}/{name}/scale", self._patch)
        app.router.add_get(f"/apis/autoscaling/v2{base}/horizontalpodautoscalers", self._autoscalers)
        pools = "/apis/inference.networking.k8s.io/v1" + base + "/inferencepools/{name}"
        app.router.add_get(pools, self._pool)
        return app

    @web.middleware
    async def _authorized(self, request, handler):
        self.asked.append(f"{request.method} {request.path_qs}")
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        return await handler(request)

    async def _pods(self, request):
        selector = dict(one.split("=") for one in request.query.get("labelSelector", "").split(",") if one)

        def chosen(pod):
            return selector.items() <= pod["metadata"]["labels"].items()

        if request.query.get("watch") != "true":
            items = [pod for pod in self.pods.values() if chosen(pod)]
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})
        since, cuts = int(request.query["resourceVersion"]), self.cuts
        reply = web.StreamResponse()
        await reply.prepare(request)
        if since < self.oldest:
            gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
            await reply.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return reply
        while not cuts.is_set():
            for version, kind, pod in [event for event in self.events if event[0] > since]:
                since = version
                if chosen(pod):
                    await reply.write(json.dumps({"type": kind, "object": pod}).encode() + b"\n")
            await asyncio.sleep(0.01)
        return reply

    def _known(self, request):
        return f"{request.match_info['kind']}/{request.match_info['name']}"

    async def _scale(self, request):
        if (key := self._known(request)) not in self.replicas:
            return _status(404, f"{key} not found")
        return web.json_response({"kind": "Scale", "spec": {"replicas": self.replicas[key]}})

    async def _patch(self, request):
        if self.refuses_patches:
            return _status(403, self.refuses_patches)
        assert request.content_type == "application/merge-patch+json"
        change, key = await request.json(), self._known(request)
        is_dry = request.query.get("dryRun") == "All"
        self.patches.append((key, change["spec"]["replicas"], is_dry))
        if not is_dry:
            self.replicas[key] = change["spec"]["replicas"]
        return web.json_response({"kind": "Scale", "spec": change["spec"]})

    async def _autoscalers(self, request):
        return web.json_response({"items": self.autoscalers})

    async def _pool(self, request):
        name = request.match_info["name"]
        return web.json_response(self.pools[name]) if name in self.pools else _status(404, "no such pool")


def _status(code, message):
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


@asynccontextmanager
async def serving(fake, port=0):
    """Its address, while it answers."""
    runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        fake.cut()
        await runner.cleanup()


def kubeconfig(path: Path, server: str, **user: str) -> Path:
    """A kubeconfig for that server, with a token unless `user` says otherwise."""
    content = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "llm"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user or {"token": TOKEN}}],
    }
    path.write_text(yaml.safe_dump(content))
    return path
