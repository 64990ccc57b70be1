"""The fleet that the flags of `advise` name: its servers, and what is scaled."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from tokenfleet.advise.advice import Advice
from tokenfleet.advise.apply import Applied, CommandScale, KubernetesScale, command_scale
from tokenfleet.advise.bearer import Bearer
from tokenfleet.advise.kubernetes.cluster import KubernetesApi, found_cluster
from tokenfleet.advise.kubernetes.pods import PodWatch
from tokenfleet.advise.prometheus import PrometheusServers
from tokenfleet.advise.servers import Servers, TypedServers
from tokenfleet.advise.target import KINDS, ScaleTarget, scale_target
from tokenfleet.advise.view import MOST
from tokenfleet.advise.watch import Act, MetricsSource
from tokenfleet.cli.advise.flags import AdviseFlags, KindAsked, bounds, kinds_asked, of_pods

Within = tuple[int, int, bool, int]  # floor, ceiling, whether it is a dry run, and the place of the type


@dataclass(frozen=True, slots=True)
class NamedServers:
    """Where the metrics are read, and what sets the replicas; None without `--apply`."""

    servers: MetricsSource
    applied: Act | None


async def opened(flags: AdviseFlags, stack: AsyncExitStack) -> NamedServers:
    """The servers and the targets, with their connections open until the stack closes. Raises BadInput."""
    kinds, low_high = kinds_asked(flags), bounds(flags.replicas)
    targets = [(kind.apply, kind.low, kind.high or MOST) for kind in kinds] or [(flags.apply, *low_high)]
    named = [None if text is None else applied_to(text) for text, _, _ in targets]
    api = None
    if of_pods(flags) or any(isinstance(one, ScaleTarget) for one in named):
        api = await stack.enter_async_context(KubernetesApi(found_cluster(flags.namespace)))
    of_types = [
        await _servers(one, api, stack) for one in [_of_kind(flags, kind) for kind in kinds] or [flags]
    ]
    applied = [
        await _applied(one, api, (low, high, not flags.yes, kind))
        for kind, (one, (_, low, high)) in enumerate(zip(named, targets, strict=True))
        if one is not None
    ]

    async def act(advice: Advice) -> str:
        return "; ".join([await one(advice) for one in applied])

    return NamedServers(TypedServers(of_types) if kinds else of_types[0], act if applied else None)


def _of_kind(flags: AdviseFlags, kind: KindAsked) -> AdviseFlags:
    """The flags of one type alone."""
    if flags.prometheus is not None or not kind.is_listed:
        return replace(flags, kind=None, selector=kind.servers)
    return replace(flags, kind=None, addresses=kind.servers.split(","))


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


async def _applied(target: ScaleTarget | CommandScale, api: KubernetesApi | None, within: Within) -> Applied:
    """What sets the replicas of a type. Raises BadInput for an object that cannot be scaled."""
    if isinstance(target, CommandScale):
        return Applied(target, target.name, *within)
    assert api is not None
    scale = KubernetesScale(api, target)
    await scale.refuse_scaled()
    return Applied(scale, str(target), *within)
