"""The servers of a fleet by a label selector: its pods, listed and then watched.

    list → watch from its version → watch again where it ended → list anew where that version is too old (410)

While the API does not answer, the last list stands. A pod counts from its address on, and until it is
deleted or its containers ended; one that does not answer yet counts as starting (`advise.look`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from controlplane.errors import BadInput
from tokenfleet.advise.kubernetes.cluster import ApiRefused, KubernetesApi

PORT = 8000
WATCH_S = 300
SOON_S, AGAIN_S = 0.1, 1.0  # until the next watch: after one that ended, after a failure
GONE = 410
POOLS = "/apis/inference.networking.k8s.io/v1"


@dataclass(frozen=True, slots=True)
class PodSet:
    """Pods by their names, with their addresses, as of a version of the cluster."""

    addresses: Mapping[str, str] = field(default_factory=dict)
    version: str = ""

    @classmethod
    def listed(cls, answer: Mapping[str, Any]) -> PodSet:
        """From a list of pods."""
        pods = (_seen(pod) for pod in answer.get("items") or ())
        addresses = {name: address for name, address in pods if address}
        return cls(addresses, str(_part(answer, "metadata").get("resourceVersion", "")))

    def after(self, event: Mapping[str, Any]) -> PodSet:
        """After an event of a watch. Raises ApiRefused for one that ends it."""
        pod, kind = _part(event, "object"), event.get("type")
        if kind == "ERROR":
            raise ApiRefused(str(pod.get("message", "the watch failed")), int(pod.get("code") or 0))
        version = str(_part(pod, "metadata").get("resourceVersion") or self.version)
        if kind not in ("ADDED", "MODIFIED", "DELETED"):
            return PodSet(self.addresses, version)
        name, address = _seen(pod)
        others = {one: at for one, at in self.addresses.items() if one != name}
        if kind == "DELETED" or not address:
            return PodSet(others, version)
        return PodSet({**others, name: address}, version)


class PodWatch:
    """The pods that a selector matches; a task follows them."""

    def __init__(
        self, api: KubernetesApi, selector: str | None, port: int | None = None, pool: str | None = None
    ) -> None:
        self._api, self._selector, self._port, self._pool = api, selector or "", port or PORT, pool
        self._is_port_given = port is not None
        self._pods = PodSet()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> PodWatch:
        """List them. Raises BadInput where that is refused."""
        namespace = self._api.cluster.namespace
        try:
            if self._pool is not None:
                await self._read_pool(self._pool)
            self._pods = await self._list()
        except ApiRefused as refused:
            raise BadInput(f"--selector: namespace {namespace}: {refused}") from None
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def listed(self) -> list[str]:
        """The servers now, each once."""
        hosts = sorted(set(self._pods.addresses.values()))
        return [f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts]

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self._api.cluster.namespace}/pods"

    async def _list(self) -> PodSet:
        return PodSet.listed(await self._api.get(self._path, labelSelector=self._selector))

    async def _follow(self) -> None:
        """Keep the pods as the cluster has them."""
        while True:
            try:
                events = self._api.watch(
                    self._path, WATCH_S, labelSelector=self._selector, resourceVersion=self._pods.version
                )
                async with contextlib.aclosing(events):
                    async for event in events:
                        self._pods = self._pods.after(event)
                await asyncio.sleep(SOON_S)
            except (ApiRefused, ValueError) as failed:  # the latter for a line without an end
                if getattr(failed, "status", 0) == GONE:
                    with contextlib.suppress(ApiRefused):
                        self._pods = await self._list()
                await asyncio.sleep(AGAIN_S)

    async def _read_pool(self, name: str) -> None:
        """Take the selector and the port of an InferencePool. Raises ApiRefused, BadInput."""
        namespace = self._api.cluster.namespace
        spec = _part(await self._api.get(f"{POOLS}/namespaces/{namespace}/inferencepools/{name}"), "spec")
        labels = _part(_part(spec, "selector"), "matchLabels")
        if not labels:
            raise BadInput(f"--pool: {name}: it has no selector.matchLabels")
        self._selector = ",".join(f"{key}={value}" for key, value in labels.items())
        ports = [one.get("number") for one in spec.get("targetPorts") or () if isinstance(one, dict)]
        if not self._is_port_given and ports and isinstance(ports[0], int):
            self._port = ports[0]


def _seen(pod: Mapping[str, Any]) -> tuple[str, str]:
    """A pod's name, and its address; none for one that ends or has ended."""
    metadata, status = _part(pod, "metadata"), _part(pod, "status")
    is_over = "deletionTimestamp" in metadata or status.get("phase") in ("Succeeded", "Failed")
    return str(metadata.get("name", "")), "" if is_over else str(status.get("podIP") or "")


def _part(whole: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = whole.get(key)
    return part if isinstance(part, dict) else {}
