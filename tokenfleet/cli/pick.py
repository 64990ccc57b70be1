"""`tokenfleet pick`: an endpoint picker for Envoy, over vLLM servers that run elsewhere."""

from __future__ import annotations

import asyncio
import gc
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.errors import BadInput, ProfileMissing
from controlplane.perfmodel.engine import EngineLimits
from controlplane.perfmodel.profile import Profile
from tokenfleet.advise.look import NoCounts
from tokenfleet.cli.advise.command import chunked
from tokenfleet.cli.advise.flags import ServerFlags
from tokenfleet.cli.flags import Insecure, TlsCert, TlsKey, flag, takes_flags
from tokenfleet.cli.terminal import warn
from tokenfleet.planning.request import tightest
from tokenfleet.profiles.engine_metrics import EngineCounts
from tokenfleet.profiles.library import find_profiles, read_profile
from tokenfleet.texts import host_port, listening_at, parse_duration_s

if TYPE_CHECKING:
    from tokenfleet.advise.servers import Servers
    from tokenfleet.pick.asked import PickTargets
    from tokenfleet.pick.fleet import PickedFleet
    from tokenfleet.pick.watch import ServerLimits, ServerWatch

OWN = ""  # the kind of a server whose step times are known
UNKNOWN = "unknown"
PRIOR_OUTPUT_TOKENS = 256.0
LEAST_ROOM = 16  # servers, in the ledger


@dataclass(frozen=True, kw_only=True)
class PickFlags(ServerFlags):
    """What `tokenfleet pick` is asked."""

    slo: Annotated[list[str], typer.Option(help="targets: ttft=1s,tpot=50ms; of a class: NAME:ttft=…,tpot=…")]
    tokenizer: str | None = flag(None, "folder of the model's tokenizer, to count prompts and know prefixes")
    policy: str = flag("spread", "placement policy, as of `tokenfleet serve`")
    max_num_seqs: int | None = flag(None, "vLLM's --max-num-seqs (default: the profile's, else 256)", min=1)
    max_num_batched_tokens: int | None = flag(
        None, "vLLM's flag of that name (default: the profile's, else 2048)", min=1
    )
    kv_events: str | None = flag(None, "ZMQ port of KV events: PORT or +N")
    kv_replay: str | None = flag(None, "ZMQ port that replays KV events: PORT, or +N")
    queue: int = flag(1000, "most requests that wait for room", min=0)
    queue_wait: str = flag("30s", "longest wait for room; then a 429")
    fallbacks: int = flag(3, "addresses a request; 1 for ORIGINAL_DST", min=1, max=16)
    data: Path | None = flag(None, "folder for the history of requests")
    listen: str = flag("127.0.0.1:9002", "HOST:PORT for the gateway (gRPC)")
    metrics_listen: str | None = flag(None, "HOST:PORT to serve /metrics at")
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    client_ca: Path | None = flag(None, "PEM file of the authority for gateways")
    insecure: Insecure = False


@takes_flags()
def pick_command(flags: PickFlags) -> None:
    """Choose a vLLM server for each request of an Envoy gateway, by its external processor (ext_proc).

    The servers are plain vLLM: nothing runs on them. Their metrics show their load. With --gpu or
    --profile requests go where they meet their targets; without, to the least loaded server.

    tokenfleet pick vllm-0:8000 vllm-1:8000 --gpu h100 --slo ttft=1s,tpot=50ms
    tokenfleet pick dns:vllm-headless:8000 --profile mine.yaml --tokenizer ./llama --slo ttft=1s,tpot=50ms
    """
    asyncio.run(_pick(flags))


async def _pick(flags: PickFlags) -> None:
    from dataplane.http.tls import certificate_of
    from tokenfleet.advise.servers import Servers
    from tokenfleet.pick.server import PickerPort, for_gateways, serving

    targets = _targets(flags.slo)
    _check(flags)
    host, _ = host_port(flags.listen, "--listen")
    certificate = certificate_of(flags.tls_cert, flags.tls_key, flags.insecure, {"--listen": host})
    context = None if certificate is None else for_gateways(certificate.context, flags.client_ca)
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(Servers(flags.addresses or (), flags.servers))
        model = await _served_model(servers)
        profile = _profile(flags, model)
        listening = stack.enter_context(listening_at(flags.listen, "--listen"))
        fleet = await _fleet(flags, servers, profile, model)
        stack.callback(fleet.close)
        watch = await _watch(flags, stack, servers, profile, fleet, model)
        fleet.warm_up(targets.plain)
        await stack.enter_async_context(serving(PickerPort(fleet, targets), listening, context))
        gc.freeze()  # a full collection, of what is never garbage, would stop the picker for 80 ms
        ready = f"{len(fleet.servers)} of {len(await servers.listed())}"
        _say(f"{_known(flags, profile)}\npicking at {flags.listen}; servers that answer: {ready}")
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(one, stop.set)
        await watch.run(stop)
    _say("stopped")


def _check(flags: PickFlags) -> None:
    """Raise BadInput for flags that do not go together."""
    if not flags.addresses and flags.servers is None:
        raise BadInput("pick: no server is named, expected addresses or --servers FILE")
    if flags.client_ca is not None and flags.tls_cert is None:
        raise BadInput("--client-ca: needs --tls-cert and --tls-key too")
    if flags.kv_events and not flags.tokenizer:
        raise BadInput("--kv-events: needs --tokenizer too, to know the tokens of prompts")
    if flags.kv_replay and not flags.kv_events:
        raise BadInput("--kv-replay: needs --kv-events too")


async def _fleet(flags: PickFlags, servers: Servers, profile: Profile | None, model: str) -> PickedFleet:
    """The ledger, the queue and the history, still without servers."""
    import numpy as np

    from controlplane.placement.lengths import LengthTable
    from controlplane.placement.policies import read_policy
    from controlplane.placement.queue import QueueSettings
    from dataplane.live.gateway.history import History
    from tokenfleet.pick.call import PromptLengths, tokenizer
    from tokenfleet.pick.fleet import PickedFleet
    from tokenfleet.pick.subsets import SubsetPlacement

    policy, moves = read_policy(flags.policy)
    if moves or policy == "exact":
        raise BadInput(f"--policy: expected one that places requests once, on arrival, got {flags.policy!r}")
    queue = QueueSettings(flags.queue, parse_duration_s(flags.queue_wait, "--queue-wait"))
    lengths = PromptLengths(None if flags.tokenizer is None else tokenizer(flags.tokenizer))
    history = History(PRIOR_OUTPUT_TOKENS, flags.data, model)
    room = max(LEAST_ROOM, 2 * len(await servers.listed()))
    prior = LengthTable.constant(PRIOR_OUTPUT_TOKENS)
    known = {} if profile is None else {OWN: profile}
    placement = SubsetPlacement(known, room, prior, np.random.default_rng(0), policy)
    return PickedFleet(placement, history, queue, lengths, flags.fallbacks)


async def _watch(
    flags: PickFlags,
    stack: AsyncExitStack,
    servers: Servers,
    profile: Profile | None,
    fleet: PickedFleet,
    model: str,
) -> ServerWatch:
    """The watch over the servers, after its first look; metrics are served from then on."""
    from tokenfleet.advise.watch import answering
    from tokenfleet.pick.kv_events import KvFollower
    from tokenfleet.pick.server import PickGauges
    from tokenfleet.pick.unseen import Unseen
    from tokenfleet.pick.watch import ServerWatch

    unseen, events = Unseen(fleet), None
    kind = UNKNOWN if profile is None else OWN
    watch = ServerWatch(servers, fleet, unseen, _limits(flags, profile), _say, model, kind)
    if flags.kv_events:
        events = KvFollower(fleet, flags.kv_events, flags.kv_replay, fleet.block_tokens)
        stack.push_async_callback(events.close)
        watch.on_server.append(events.told)
    await watch.look()
    if flags.metrics_listen is not None:
        gauges = PickGauges(fleet, unseen, None if events is None else events.counts)
        metrics = listening_at(flags.metrics_listen, "--metrics-listen")
        await stack.enter_async_context(answering(metrics, gauges))
    return watch


def _say(line: str) -> None:
    print(line, flush=True)


def _known(flags: PickFlags, profile: Profile | None) -> str:
    """How requests are placed, a line for each fact."""
    by = "least loaded server (no --gpu, no --profile)"
    if profile is not None:
        by = f"policy {flags.policy}, step times of {profile.label}"
    sent = "known by the prompts sent (no --kv-events)" if flags.tokenizer else "unknown (no --tokenizer)"
    caches = "known by KV events" if flags.kv_events else sent
    prompts = "counted by the tokenizer" if flags.tokenizer else "estimated from bytes (no --tokenizer)"
    return f"placement: {by}\nprompt tokens: {prompts}\nprefix caches: {caches}"


def _targets(texts: list[str]) -> PickTargets:
    from tokenfleet.cli.serve.workers import targets_asked
    from tokenfleet.pick.asked import PickTargets

    plain, classes = targets_asked(texts, None)
    return PickTargets(plain or tightest(classes), {one.name: one for one in classes})


async def _served_model(servers: Servers) -> str:
    """The model that the servers say they serve, or nothing where none answers. Raises BadInput for two."""
    pages = await servers.pages(0.0)
    if not pages:
        raise BadInput("pick: the list of servers is empty")
    models = {page.model: server for server, page in pages.items() if isinstance(page, EngineCounts)}
    if len(models) > 1:
        (one, at), (other, there) = sorted(models.items())[:2]
        raise BadInput(f"pick: one model at a time; {at} serves {one}, {there} serves {other}")
    if not models:
        warn([f"{server}: {page.why}" for server, page in pages.items() if isinstance(page, NoCounts)])
    return next(iter(models), "")


def _profile(flags: PickFlags, served: str) -> Profile | None:
    """The step times of a server; None where they are not known."""
    if flags.profile is not None and (flags.gpu or flags.tp):
        raise BadInput("--profile: names GPU and TP; leave out --gpu and --tp")
    if flags.profile is not None:
        profile = read_profile(flags.profile)
    elif flags.gpu is None:
        warn(["without --gpu or --profile, requests are placed by load, not by their targets"])
        return None
    else:
        name = flags.model or served
        if not name:
            raise BadInput("--gpu: no server tells its model; give --model")
        try:
            profile = find_profiles(name, [flags.gpu], [flags.tp or 1])[0]
        except ProfileMissing as missing:
            hint = "" if flags.model else "; --model names another, --profile gives step times"
            raise ProfileMissing(f"{missing}{hint}") from None
    return chunked(profile)


def _limits(flags: PickFlags, profile: Profile | None) -> ServerLimits:
    from tokenfleet.pick.watch import UNKNOWN_KV, ServerLimits

    engine = EngineLimits() if profile is None else profile.engine
    kv_tokens = UNKNOWN_KV if profile is None else profile.kv.capacity_tokens
    seqs = flags.max_num_seqs or engine.max_seqs
    return ServerLimits(seqs, flags.max_num_batched_tokens or engine.max_batched_tokens, kv_tokens)
