"""The fleet that the flags of `advise` name: its servers, and what is scaled."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

from tokenfleet.advise.advice import KINDS, Advice, ScaleTarget, scale_target
from tokenfleet.advise.apply import Applied, CommandScale, KubernetesScale, command_scale
from tokenfleet.advise.bearer import Bearer
from tokenfleet.advise.kubernetes.cluster import KubernetesApi, found_cluster
from tokenfleet.advise.kubernetes.pods import PodWatch
from tokenfleet.advise.prometheus import PrometheusServers
from tokenfleet.advise.servers import Servers, TypedServers
from tokenfleet.advise.watch import Act, MetricsSource
from tokenfleet.cli.advise.flags import AdviseFlags, bounds, of_pods, of_types


@dataclass(frozen=True, slots=True)
class NamedServers:
    """Where the metrics are read, and what sets the replicas; None without `--apply`."""

    servers: MetricsSource
    applied: Act | None


async def opened(flags: AdviseFlags, stack: AsyncExitStack) -> NamedServers:
    """The servers and the targets, with their connections open until the stack closes. Raises BadInput."""
    each = of_types(flags)
    targets = [None if one.apply is None else applied_to(one.apply) for one in each]
    api = None
    if any(map(of_pods, each)) or any(isinstance(target, ScaleTarget) for target in targets):
        api = await stack.enter_async_context(KubernetesApi(found_cluster(flags.namespace)))
    servers = [await _servers(one, api, stack) for one in each]
    asked = enumerate(zip(targets, each, strict=True))
    applied = [await _applied(target, api, one, kind) for kind, (target, one) in asked if target is not None]

    async def act(advice: Advice) -> str:
        return "; ".join([await one(advice) for one in applied])

    return NamedServers(servers[0] if len(each) == 1 else TypedServers(servers), act if applied else None)


async def _servers(
    flags: AdviseFlags, api: KubernetesApi | None, stack: AsyncExitStack
) -> Servers | PrometheusServers:
    """The servers of a type."""
    bearer = Bearer(flags.token_file)
    if flags.prometheus is not None:
        asked = PrometheusServers(flags.prometheus, flags.selector or "{}", bearer)
        return await stack.enter_async_context(asked)
    pods = None
    if api is not None and of_pods(flags):
        pods = await stack.enter_async_context(PodWatch(api, flags.selector, flags.port, flags.pool))
    servers = Servers(flags.addresses or (), flags.servers, pods, bearer)
    return await stack.enter_async_context(servers)


def applied_to(text: str) -> ScaleTarget | CommandScale:
    """An object of Kubernetes, or a command. Raises BadInput."""
    kind, is_object, _ = text.partition("/")
    return scale_target(text, "--apply") if is_object and kind in KINDS else command_scale(text)


async def _applied(
    target: ScaleTarget | CommandScale, api: KubernetesApi | None, flags: AdviseFlags, kind: int
) -> Applied:
    """What sets the replicas of a type. Raises BadInput for an object that cannot be scaled."""
    low, high = bounds(flags.replicas, least=0)
    if isinstance(target, CommandScale):
        return Applied(target, target.name, low, high, not flags.yes, kind)
    assert api is not None
    scale = KubernetesScale(api, target)
    await scale.refuse_scaled()
    return Applied(scale, str(target), low, high, not flags.yes, kind)
