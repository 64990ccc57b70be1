"""The fleet that the flags of `advise` name: its servers, and what is scaled."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

from tokenfleet.advise.apply import Applied, CommandScale, KubernetesScale, command_scale
from tokenfleet.advise.bearer import Bearer
from tokenfleet.advise.kubernetes.cluster import KubernetesApi, found_cluster
from tokenfleet.advise.kubernetes.pods import PodWatch
from tokenfleet.advise.prometheus import PrometheusServers
from tokenfleet.advise.servers import Servers
from tokenfleet.advise.target import KINDS, ScaleTarget, scale_target
from tokenfleet.cli.advise.flags import AdviseFlags, bounds, of_pods


@dataclass(frozen=True, slots=True)
class NamedServers:
    """Where the metrics are read, and what sets the replicas; None without `--apply`."""

    servers: Servers | PrometheusServers
    applied: Applied | None


async def opened(flags: AdviseFlags, stack: AsyncExitStack) -> NamedServers:
    """The servers and the target, with their connections open until the stack closes. Raises BadInput."""
    bearer = Bearer(flags.token_file)
    target = None if flags.apply is None else applied_to(flags.apply)
    api = None
    if of_pods(flags) or isinstance(target, ScaleTarget):
        api = await stack.enter_async_context(KubernetesApi(found_cluster(flags.namespace)))
    servers: Servers | PrometheusServers
    if flags.prometheus is not None:
        servers = PrometheusServers(flags.prometheus, flags.selector or "{}", bearer)
    else:
        pods = None
        if api is not None and of_pods(flags):
            pods = await stack.enter_async_context(PodWatch(api, flags.selector, flags.port, flags.pool))
        servers = Servers(flags.addresses or (), flags.servers, pods, bearer)
    await stack.enter_async_context(servers)
    return NamedServers(servers, None if target is None else await _applied(target, api, flags))


def applied_to(text: str) -> ScaleTarget | CommandScale:
    """An object of Kubernetes, or a command. Raises BadInput."""
    kind, is_object, _ = text.partition("/")
    return scale_target(text, "--apply") if is_object and kind in KINDS else command_scale(text)


async def _applied(
    target: ScaleTarget | CommandScale, api: KubernetesApi | None, flags: AdviseFlags
) -> Applied:
    """What sets the replicas. Raises BadInput for an object that cannot be scaled."""
    low, high = bounds(flags.replicas)
    if isinstance(target, CommandScale):
        return Applied(target, target.name, low, high, not flags.yes)
    assert api is not None
    scale = KubernetesScale(api, target)
    await scale.refuse_scaled()
    return Applied(scale, str(target), low, high, not flags.yes)
