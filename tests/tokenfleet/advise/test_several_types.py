"""A model that two types of server serve behind one gateway: one advice, with the counts of each type."""

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
from counted_servers import OUTPUT, PROMPT, CountedServer, busy
from prometheus_client import CollectorRegistry, generate_latest

from controlplane.errors import BadInput
from controlplane.scaler.bounds import Autoscale
from controlplane.scaler.line import line_of
from controlplane.scaler.traffic import Traffic as Lengths
from controlplane.types import ClassArrivals, Slo
from controlplane.worker_type import WorkerType
from tokenfleet.advise.advice import AdviceSettings, AdviceState
from tokenfleet.advise.decide import ORIGIN_S, advise
from tokenfleet.advise.look import NoCounts, Watched, look
from tokenfleet.advise.published import AdviceGauges
from tokenfleet.advise.servers import TypedServers
from tokenfleet.advise.view import document, verdict
from tokenfleet.advise.watch import first_pages
from tokenfleet.cli.advise.command import _profile
from tokenfleet.cli.advise.flags import AdviseFlags, kinds_asked
from tokenfleet.cli.main import main
from tokenfleet.profiles.engine_metrics import EngineCounts
from tokenfleet.profiles.library import find_profiles

SLO, EVERY_S = Slo(1.0, 0.05), 5.0
PRICES = {"h100": 4.0, "a100": 1.0}  # so that an A100 is cheaper for what it carries
NAMES = ["h100-sxm TP1", "a100-sxm TP1"]
PROFILES = [find_profiles("llama-3.1-8b", [gpu], [1])[0] for gpu in PRICES]
CLOCK = datetime(2026, 1, 1, tzinfo=UTC)
LENGTHS = Lengths((ClassArrivals(SLO, 100.0, 100.0 * PROMPT, 100.0 * OUTPUT),))
CARRIES = [1.0 / line_of(profile, LENGTHS).workers_per_rps for profile in PROFILES]


def asked(**most):
    """Settings of both types; `most`: replicas of a GPU."""
    types = [
        replace(WorkerType.of(profile, usd), low=1, limit=most.get(gpu))
        for profile, (gpu, usd) in zip(PROFILES, PRICES.items(), strict=True)
    ]
    return AdviceSettings(SLO, 0.99, Autoscale(1, 100).settings(tuple(types)), 60.0, "llama")


class Mixed:
    """Servers of both types, and the advice for all of them."""

    def __init__(self, settings, *counts):
        self.settings = settings
        self.servers = {(kind, n): CountedServer() for kind, count in enumerate(counts) for n in range(count)}
        self.watched, self.state = Watched(), AdviceState()
        self.at_s, self.rng, self.silent = ORIGIN_S, np.random.default_rng(0), ()

    def look(self, rps):
        for server in self.servers.values():
            server.end(server.running)
            server.arrive(int(self.rng.poisson(rps * EVERY_S / len(self.servers))))
        pages = {
            f"{kind}-{n}": NoCounts("is silent", kind=kind)
            if (kind, n) in self.silent
            else replace(server.page(self.at_s), kind=kind)
            for (kind, n), server in self.servers.items()
        }
        self.watched, traffic = look(self.watched, pages, self.at_s)
        self.state, advice = advise(self.settings, self.state, traffic)
        self.at_s += EVERY_S
        return advice

    def looks(self, rps, count):
        return [self.look(rps) for _ in range(count)]


def wanted(advice):
    return [one.wanted for one in advice.of_types]


def carried(advice):
    """Requests a second that the wanted replicas carry."""
    return sum(n * rps for n, rps in zip(wanted(advice), CARRIES, strict=True))


@pytest.fixture(scope="module")
def advised():
    """A fleet of 4 and 6 whose gateway sends each server as many requests as any other."""
    fleet = Mixed(asked(), 4, 6)
    return fleet, fleet.looks(6.0 * CARRIES[1], 60)


def test_the_first_advice_is_the_cheapest_mix_within_the_floors(advised):
    _, advices = advised
    first = next(advice for advice in advices if advice.wanted is not None)
    assert first.at_s - ORIGIN_S <= 30.0
    last = advices[-1]
    assert [one.has for one in last.of_types] == [4, 6]
    h100, a100 = wanted(last)
    assert h100 == 1  # its floor: for its price an A100 carries more
    assert a100 >= 1
    assert carried(last) >= 0.95 * 6.0 * CARRIES[1]
    assert carried(last) - CARRIES[1] < 1.3 * 6.0 * CARRIES[1]
    for one in last.of_types:
        assert one.likely[0] <= one.wanted <= one.likely[1]
    assert last.usd_per_h == 4 * 4.0 + 6 * 1.0
    assert last.wanted_usd_per_h == h100 * 4.0 + a100 * 1.0


def test_a_ceiling_of_the_cheap_type_is_kept_and_the_other_carries_the_rest():
    last = Mixed(asked(a100=2), 4, 2).looks(12.0 * CARRIES[1], 60)[-1]
    assert wanted(last)[1] <= 2
    assert wanted(last)[0] > 1
    assert carried(last) >= 0.95 * 12.0 * CARRIES[1]


def test_a_rise_is_followed_at_once_and_a_fall_after_its_window_and_silence_of_one_type_holds_all():
    fleet = Mixed(asked(), 1, 4)
    low = fleet.looks(3.0 * CARRIES[1], 60)[-1]
    rise = fleet.looks(15.0 * CARRIES[1], 12)
    assert carried(rise[3]) > 1.5 * carried(low)
    fleet.silent = ((0, 0),)
    held = fleet.looks(15.0 * CARRIES[1], 4)
    assert all(advice.held and wanted(advice) == wanted(rise[-1]) for advice in held)
    fleet.silent = ()
    fall = fleet.looks(3.0 * CARRIES[1], 60)
    assert wanted(fall[6]) == wanted(rise[-1])
    assert carried(fall[-1]) < 1.3 * carried(low)


def test_each_type_has_its_gauge_its_row_and_its_share_of_the_requests(advised):
    fleet, advices = advised
    last = advices[-1]
    gauges, registry = AdviceGauges("llama"), CollectorRegistry()
    gauges.advice = last
    registry.register(gauges)
    page = generate_latest(registry).decode()
    for name, one in zip(NAMES, last.of_types, strict=True):
        labels = f'model="llama",worker_type="{name}"'
        assert f"tokenfleet_wanted_replicas{{{labels}}} {one.published:.1f}" in page
        assert f"tokenfleet_advice_arrivals_total{{{labels}}} {one.arrivals:.1f}" in page
    assert sum(one.arrivals for one in last.of_types) == pytest.approx(last.arrivals)
    assert [one.gets for one in last.of_types] == pytest.approx([0.4, 0.6], abs=0.02)
    told = document(fleet.settings, last, lambda at_s: CLOCK)
    assert [one["worker_type"] for one in told["worker_types"]] == NAMES
    says = dict(told["says"])
    assert "could take" in says[NAMES[0]]
    assert f"{last.of_types[0].wanted} desired" in says[NAMES[0]]
    assert verdict(fleet.settings, last).startswith("Remove 3 h100-sxm TP1, ")


class Listed:
    """A source of pages."""

    def __init__(self, *servers):
        self.servers, self.discovered = servers, frozenset()

    async def pages(self, at_s):
        return {name: EngineCounts(at_s, {"ended": 0.0}, model="llama") for name in self.servers}


def test_a_server_that_two_types_list_is_refused():
    pages = asyncio.run(TypedServers([Listed("a"), Listed("b")]).pages(ORIGIN_S))
    assert {name: page.kind for name, page in pages.items()} == {"a": 0, "b": 1}
    with pytest.raises(BadInput, match="b: is listed for two worker types"):
        asyncio.run(first_pages(TypedServers([Listed("a", "b"), Listed("b")])))


def test_kinds_are_read_with_their_servers_last():
    h100 = "gpu=h100,tp=2,min=2,max=16,apply=deployment/vllm-h100,servers=app=vllm,gpu=h100"
    one, other = kinds_asked([h100, "gpu=a100,servers=a-0:8000,dns:a:8000"])
    assert (one.gpu, one.tp, one.low, one.high, one.apply) == ("h100", 2, 2, 16, "deployment/vllm-h100")
    assert (one.servers, one.is_listed) == ("app=vllm,gpu=h100", False)
    assert (other.low, other.high, other.servers, other.is_listed) == (1, None, "a-0:8000,dns:a:8000", True)


def test_the_command_advises_and_applies_for_each_type(tmp_path, capsys):
    """Two servers over HTTP, under traffic; the first advice, in JSON, and what it would set."""
    script = tmp_path / "scale.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    with busy() as h100, busy() as a100:
        kinds = [
            f"--kind=gpu=h100,max=4,apply={script} h100 {{replicas}},servers={h100}",
            f"--kind=gpu=a100,max=4,apply={script} a100 {{replicas}},servers={a100}",
        ]
        words = ["advise", *kinds, "--model", "llama-3.1-8b", "--slo", "ttft=1s,tpot=50ms"]
        assert main([*words, "--every", "1s", "--once", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["worker_type"] for one in told["worker_types"]] == NAMES
    assert [one["replicas"] for one in told["worker_types"]] == [1, 1]
    assert told["wanted_replicas"] == sum(one["wanted_replicas"] for one in told["worker_types"])
    assert told["applied"].count(str(script)) == 2


OTHER = "--kind=gpu=a100,servers=a:8000"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kind=gpu=h100,servers=h:8000"], "--kind: a mixed fleet has two types or more"),
        (["--kind=gpu=h100", OTHER], "--kind: needs servers= at its end, got"),
        (["--kind=servers=h:8000", OTHER], "--kind: needs either gpu= or profile=, got"),
        (["--kind=gpu=h100,max=0,servers=h:8000", OTHER], "--kind: max: expected a number"),
        (["--kind=gpu=h100,min=3,max=2,servers=h:8000", OTHER], "--kind: min: must not be above max"),
        (["--kind=gpu=h100,colour=red,servers=h:8000", OTHER], "--kind: expected gpu=h100,tp=2"),
        (["--kind=gpu=h100,apply=deployment/h,servers=h:8000", OTHER], "--kind: apply: needs a ceiling"),
        (["--kind=gpu=h100,servers=h:8000", OTHER, "--gpu=h100"], "--kind: names hardware and servers"),
        (["--kind=gpu=h100,servers=h:8000", OTHER, "c:8000"], "--kind: has the servers"),
        (["--kind=gpu=h100,servers=h:8000", OTHER, "--yes"], "--yes: of --apply"),
        (
            ["--kind=gpu=h100,servers=h:8000", OTHER, "--replay=day.csv", "--model=llama-3.1-8b"],
            "--replay: reads a trace and no servers; leave out servers= and apply= of --kind",
        ),
    ],
)
def test_a_kind_that_is_none_is_one_line(flags, says, capsys):
    assert main(["advise", "--slo", "ttft=1s,tpot=50ms", *flags]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line


def test_servers_of_two_kv_sizes_are_named_in_a_warning(capsys):
    page = EngineCounts(0.0, {}, 400_000, 16, {}, "llama-3.1-8b")
    first = {"h100-0:8000": page, "a100-0:8000": replace(page, kv_tokens=120_000)}
    _profile(AdviseFlags(slo="ttft=1s,tpot=50ms", gpu="h100"), first, None)
    said = " ".join(capsys.readouterr().err.split())
    assert "400,000 tokens at h100-0:8000, 120,000 tokens at a100-0:8000" in said
    assert "name each with --kind" in said
