"""`tokenfleet advise`: how many replicas a running vLLM fleet should have, by its own metrics."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from controlplane.errors import BadInput, ProfileMissing
from controlplane.perfmodel.profile import Profile
from controlplane.types import EngineMode
from controlplane.worker_type import WorkerType
from tokenfleet.advise.advice import AdviceSettings
from tokenfleet.cli.advise.flags import AdviseFlags, bounds, of_types, refuse_contradictions, seconds, watch_s
from tokenfleet.cli.advise.shown import ShownAdvice, replay_day
from tokenfleet.cli.flags import OutputFormat, takes_flags
from tokenfleet.cli.terminal import warn
from tokenfleet.profiles.engine_metrics import EngineCounts, kv_of
from tokenfleet.profiles.library import find_profiles, read_profile
from tokenfleet.profiles.prices import read_prices
from tokenfleet.texts import listening_at, parse_slo

if TYPE_CHECKING:
    from tokenfleet.cli.advise.plan import WatchedTraffic


@takes_flags()
def advise_command(flags: AdviseFlags) -> int:
    """Advise how many replicas a running vLLM fleet should have. It reads metrics and changes nothing.

    The first advice takes some 30 seconds. Model and KV size come from the metrics. The GPU does not: give
    --gpu, or --profile. Step times are then corrected by what the servers count.

    tokenfleet advise vllm-0:8000 vllm-1:8000 --gpu h100 --slo ttft=1s,tpot=50ms
    tokenfleet advise dns:vllm-headless:8000 --profile mine.yaml --slo ttft=1s,tpot=50ms --listen 0.0.0.0:9105

    tokenfleet advise --servers servers.txt --gpu h100 --slo ttft=1s,tpot=50ms --once --format json
    tokenfleet advise --kind gpu=h100,servers=dns:vllm-h100:8000 --kind gpu=a100,servers=dns:vllm-a100:8000
    --slo ttft=1s,tpot=50ms

    tokenfleet advise vllm-0:8000 --gpu h100 --slo ttft=1s,tpot=50ms --plan 10m --output-dir out
    tokenfleet advise --replay day.csv --model llama-3.1-8b --gpu h100 --slo ttft=1s,tpot=50ms
    """
    slo = parse_slo(flags.slo)
    low, high = bounds(flags.replicas)
    usual, longest_s = ("5s", 30.0) if flags.prometheus is None else ("15s", 60.0)
    every_s = seconds(flags.every or usual, "--every", 1.0, longest_s)
    cold_start_s = seconds(flags.cold_start, "--cold-start", 0.0, 86_400.0)
    hold_s = seconds(flags.scale_in_after, "--scale-in-after", 1.0, 86_400.0)
    watched_s = watch_s(flags)
    refuse_contradictions(flags)
    each = of_types(flags)
    given = [None if one.profile is None else read_profile(one.profile) for one in each]

    from controlplane.scaler.bounds import Autoscale

    follows = Autoscale(low, high, hold_s=hold_s, attainment=flags.attainment)

    def settings_of(profiles: Sequence[Profile]) -> AdviceSettings:
        types = tuple(map(_worker_type, profiles, each))
        return AdviceSettings(slo, flags.attainment, follows.settings(types), cold_start_s)

    if flags.replay:
        profiles = [_replayed(one, given[kind]) for kind, one in enumerate(each)]
        replay_day(flags.replay, settings_of(profiles), (low, high), flags.output_format)
        return 0

    def settings(first: Mapping[str, EngineCounts]) -> AdviceSettings:
        return settings_of([_profile(one, first, given[kind], kind) for kind, one in enumerate(each)])

    from tokenfleet.cli.advise.plan import planned_for
    from tokenfleet.cli.plan import refuse_unwritable_plan

    refuse_unwritable_plan(flags.output_dir)
    with ExitStack() as cleanup:
        seen = asyncio.run(_watch(flags, every_s, watched_s, settings, cleanup))
    return 0 if seen is None else planned_for(seen, flags)


async def _watch(
    flags: AdviseFlags,
    every_s: float,
    watched_s: float | None,
    settings_of: Callable[[Mapping[str, EngineCounts]], AdviceSettings],
    cleanup: ExitStack,
) -> WatchedTraffic | None:
    """Watch until a signal; with `watched_s` for that long, and what was seen."""
    from tokenfleet.advise.day import page_document
    from tokenfleet.advise.published import AdviceGauges, demand_of, scaler_at
    from tokenfleet.advise.watch import FleetWatch, answering, first_pages, some_answer
    from tokenfleet.cli.advise.fleet import opened
    from tokenfleet.cli.advise.plan import Until, WatchedTraffic
    from tokenfleet.console.pages import console_extension

    listening = None if flags.listen is None else listening_at(flags.listen, "--listen")
    if listening is not None:
        cleanup.callback(listening.close)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, stop.set)
    async with AsyncExitStack() as stack:
        fleet = await opened(flags, stack)
        gauges, demand = AdviceGauges(""), None
        if flags.picker:
            demand = await stack.enter_async_context(demand_of(flags.picker))
        if flags.scaler is not None:
            await stack.enter_async_context(scaler_at(flags.scaler, gauges, demand))
        if demand and not await some_answer(fleet.servers, every_s, stop, lambda why: warn([why])):
            return None
        first = await first_pages(fleet.servers, is_planned=watched_s is not None)
        model = gauges.model = next(iter(first.values())).model
        settings = replace(settings_of(first), served=model)
        is_silent = watched_s is not None and flags.output_format == OutputFormat.JSON
        shown = ShownAdvice(flags.once, None if is_silent else flags.output_format, settings, gauges, cleanup)
        watch = FleetWatch(fleet.servers, settings, model, every_s, fleet.applied)
        until = Until(shown, watched_s)
        if listening is not None:

            def page() -> dict[str, Any] | None:
                if gauges.advice is None or until.clock is None:
                    return None
                return page_document(settings, gauges.advice, watch.history, until.clock)

            console = console_extension("advice.html", {})
            await stack.enter_async_context(answering(listening, gauges, page, [console]))
        await watch.run(first, until, stop)
        if not until.is_over:
            return None
        assert until.clock is not None
        return WatchedTraffic(settings, watch.record.counted(until.clock))


def _replayed(flags: AdviseFlags, given: Profile | None) -> Profile:
    """The step times of a replica, where no server tells its model."""
    given_too = {"an address": flags.addresses, "--servers": flags.servers, "--listen": flags.listen}
    given_too |= {"--prometheus": flags.prometheus, "--scaler": flags.scaler}
    given_too |= {"--selector": flags.selector, "--pool": flags.pool, "--apply": flags.apply}
    if flags.plan:
        raise BadInput("--plan: of servers; `tokenfleet plan --trace` plans for a recorded day")
    for flag, value in {**given_too, "--once": flags.once}.items():
        if value:
            raise BadInput(f"--replay: reads a trace and no servers; leave out {flag}")
    if given is None and flags.model is None:
        raise BadInput("--replay: which model? give --model and --gpu, or --profile")
    return chunked(given or _of_library(flags, ""))


def chunked(profile: Profile) -> Profile:
    """The profile. Raises BadInput for one of another engine mode."""
    if profile.engine.mode != EngineMode.CHUNKED:
        raise BadInput(
            f"--profile: {profile.label}: its engine mode is {profile.engine.mode}, expected chunked"
        )
    return profile


def _profile(
    flags: AdviseFlags, first: Mapping[str, EngineCounts], given: Profile | None, kind: int = 0
) -> Profile:
    """The step times of a replica, with the KV that the servers of its type tell of."""
    profile = chunked(given or _of_library(flags, next(iter(first.values())).model))
    first = {server: page for server, page in first.items() if page.kind == kind}
    if not first:  # none of this type answers yet
        return profile
    kv_tokens, block_tokens = kv_of(first)
    if not kv_tokens:
        sizes = {f"{page.kv_tokens:,}": server for server, page in first.items() if page.kv_tokens}
        told = ", ".join(f"{size} tokens at {server}" for size, server in sizes.items())
        several = f"; are they of several types ({told})? name each with --kind" if len(sizes) > 1 else ""
        warn([f"the servers report no common KV size; the profile's is used{several}"])
        return profile
    return profile.with_kv(None, kv_tokens, block_tokens)


def _of_library(flags: AdviseFlags, served: str) -> Profile:
    name = flags.model or served
    try:
        found = find_profiles(name, [flags.gpu] if flags.gpu else [], [flags.tp or 1])
    except ProfileMissing as missing:
        hint = "" if flags.model else "; --model names another, --profile gives step times"
        raise ProfileMissing(f"{missing}{hint}") from None
    if len(found) > 1:
        names = ", ".join(one.gpu for one in found)
        raise BadInput(f"--gpu: the metrics do not tell; for {name} there are {names}")
    return found[0]


def _worker_type(profile: Profile, flags: AdviseFlags) -> WorkerType:
    """A type with its price, and with its bounds in a mixed fleet."""
    price = read_prices(flags.prices).usd_per_gpu_h(profile.gpu)
    usd_per_h = None if price is None else price.usd * profile.gpus / profile.workers_per_gpu
    worker_type = WorkerType.of(profile, usd_per_h)
    if flags.kind is not None or flags.replicas is None:
        return worker_type
    low, high = bounds(flags.replicas, least=0)
    return replace(worker_type, low=low, limit=high)
