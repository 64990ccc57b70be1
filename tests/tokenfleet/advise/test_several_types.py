"""A model that two types of server serve behind one gateway: an advice for each type, told apart."""

import math
from dataclasses import replace

import numpy as np
import pytest
from counted_servers import OUTPUT, PROMPT, CountedServer
from prometheus_client import CollectorRegistry, generate_latest

from controlplane.scaler.line import line_of
from controlplane.scaler.traffic import Traffic as Lengths
from controlplane.types import ClassArrivals, Slo
from controlplane.worker_type import WorkerType
from dataplane.live.control.settings import Autoscale
from tokenfleet.advise.advice import AdviceSettings, AdviceState
from tokenfleet.advise.decide import ORIGIN_S, advise
from tokenfleet.advise.gauges import AdviceGauges
from tokenfleet.advise.look import Watched, look
from tokenfleet.cli.advise.command import _profile
from tokenfleet.cli.advise.flags import AdviseFlags
from tokenfleet.profiles.engine_metrics import EngineCounts
from tokenfleet.profiles.library import find_profiles

SLO, EVERY_S = Slo(1.0, 0.05), 5.0
GPUS = {"h100": 4, "a100": 6}  # and how many servers there are


class OfType:
    """The servers of one type, and what an `advise` of their own says."""

    def __init__(self, gpu, count):
        self.profile = find_profiles("llama-3.1-8b", [gpu], [1])[0]
        worker_type = WorkerType.of(self.profile, 2.0)
        scaling = Autoscale(1, 100).settings((worker_type,))
        self.settings = AdviceSettings(worker_type, SLO, 0.99, scaling, 60.0, "llama")
        self.servers = {f"{gpu}-{n}": CountedServer() for n in range(count)}
        self.watched, self.state = Watched(), AdviceState()

    def look(self, at_s):
        pages = {name: one.page(at_s) for name, one in self.servers.items()}
        self.watched, traffic = look(self.watched, pages, at_s)
        self.state, advice = advise(self.settings, self.state, traffic)
        return advice

    def needed(self, rps):
        lengths = Lengths((ClassArrivals(SLO, 100.0, 100.0 * PROMPT, 100.0 * OUTPUT),))
        line = line_of(self.profile, lengths)
        return math.ceil(line.workers_per_rps * rps + line.intercept)


@pytest.fixture(scope="module")
def advised():
    """Each type's last advice; the gateway sends each server as many requests as any other."""
    types, rng = {gpu: OfType(gpu, count) for gpu, count in GPUS.items()}, np.random.default_rng(0)
    each_rps = 10.0
    for number in range(60):
        for of in types.values():
            for server in of.servers.values():
                server.end(server.running)
                server.arrive(int(rng.poisson(each_rps * EVERY_S)))
        said = {gpu: of.look(ORIGIN_S + number * EVERY_S) for gpu, of in types.items()}
    return types, said, {gpu: count * each_rps for gpu, count in GPUS.items()}


def test_each_type_is_counted_by_its_own_step_times_and_its_own_traffic(advised):
    types, said, rps = advised
    for gpu, of in types.items():
        assert said[gpu].has == GPUS[gpu]
        assert said[gpu].likely[0] <= of.needed(rps[gpu]) <= said[gpu].likely[1]
    assert types["a100"].needed(rps["h100"]) > types["h100"].needed(rps["h100"])


def test_the_gauges_of_two_types_are_two_series_of_one_model(advised):
    types, said, _ = advised
    for gpu, name in (("h100", "h100-sxm TP1"), ("a100", "a100-sxm TP1")):
        gauges, registry = AdviceGauges("llama", types[gpu].settings), CollectorRegistry()
        gauges.advice = said[gpu]
        registry.register(gauges)
        page = generate_latest(registry).decode()
        labels = f'model="llama",worker_type="{name}"'
        assert f"tokenfleet_wanted_replicas{{{labels}}} {said[gpu].published:.1f}" in page


def test_servers_of_two_kv_sizes_are_named_in_a_warning(capsys):
    page = EngineCounts(0.0, {}, 400_000, 16, {}, "llama-3.1-8b")
    first = {"h100-0:8000": page, "a100-0:8000": replace(page, kv_tokens=120_000)}
    _profile(AdviseFlags(slo="ttft=1s,tpot=50ms", gpu="h100"), first, None)
    said = " ".join(capsys.readouterr().err.split())
    assert "400,000 tokens at h100-0:8000, 120,000 tokens at a100-0:8000" in said
    assert "run one advise for each" in said
