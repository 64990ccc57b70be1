"""The metrics that Prometheus scrapes; the dashboard asks for no others."""

import json
import re
import time
from types import SimpleNamespace

import pytest
from checkout import ROOT

from controlplane.types import Slo, WorkerId


@pytest.fixture
def metrics():
    from dataplane.live.gateway.metrics import Metrics

    return Metrics()


def names(metrics):
    return {sample.name for family in metrics.registry.collect() for sample in family.samples} | {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in metrics.registry.collect()
    }


def test_every_metric_of_ours_has_the_prefix_and_a_base_unit(metrics):
    for family in metrics.registry.collect():
        assert family.name.startswith("tokenfleet_")
        assert not re.search(r"_(ms|milliseconds|kb|percent)\b", family.name)
        assert "request_id" not in str(family.samples)


def test_the_dashboard_asks_only_for_metrics_there_are(metrics):
    text = (ROOT / "deploy" / "grafana" / "tokenfleet.json").read_text()
    asked = set(re.findall(r"\btokenfleet_[a-z_]+", " ".join(expressions(json.loads(text)))))
    known = names(metrics)
    histograms = {f"{f.name}_bucket" for f in metrics.registry.collect() if f.type == "histogram"}
    advised = set(re.findall(r'"(tokenfleet_\w+)"', (ROOT / "tokenfleet/advise/published.py").read_text()))
    assert asked & advised
    assert asked & known
    assert asked <= known | histograms | advised


def expressions(dashboard):
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def test_a_request_is_a_hit_by_its_own_figures_and_one_token_is_judged_by_ttft_alone(metrics):
    from dataplane.live.ledger.request import Ticket, Tracked

    def end(ttft_s, tokens, last_s):
        tracked = Tracked(SimpleNamespace(prompt_token_ids=[1]), Ticket("", "k", Slo(1.0, 0.1), 0), 0.0, 1)
        tracked.output_token_ids = [1] * tokens
        tracked.first_token_s, tracked.last_token_s = ttft_s, last_s
        metrics.count_end(tracked, "finished")

    end(0.5, 11, 1.5)  # TPOT 0.1
    end(0.5, 11, 1.6)  # TPOT 0.11
    end(1.5, 1, 1.5)  # one token, too late
    end(0.5, 1, 0.5)  # one token, in time
    lines = metrics.exposition().decode().splitlines()
    both = {line.split("{")[1] for line in lines if line.startswith("tokenfleet_slo_requests_total")}
    assert 'met="true",priority="normal",slo_class="default",target="both"} 2.0' in both
    assert 'met="false",priority="normal",slo_class="default",target="both"} 2.0' in both
    assert 'met="false",priority="normal",slo_class="default",target="tpot"} 1.0' in both
    assert 'met="false",priority="normal",slo_class="default",target="ttft"} 1.0' in both


@pytest.mark.parametrize(("waited_s", "of"), [(0.5, 0), (16.0, 1)])
def test_a_request_given_up_by_its_client_is_a_miss_once_it_is_beyond_its_target(metrics, waited_s, of):
    from dataplane.live.control.fleet_state import DemandCount
    from dataplane.live.ledger.request import Ticket, Tracked

    ticket, came_s = Ticket("", "k", Slo(1.0, 0.1), 0), time.monotonic() - waited_s
    tracked, demand = Tracked(SimpleNamespace(prompt_token_ids=[1]), ticket, came_s, 1), DemandCount()
    metrics.count_end(tracked, "aborted")
    demand.end(tracked, "aborted")
    assert metrics.attainment()["both"] == {"met": 0, "of": of}
    assert [(o.ended, o.met) for o in demand.outcomes()] == [(1, 0)] * of


def test_a_worker_that_is_gone_leaves_no_gauge(metrics):
    metrics.running.labels("w0").set(3)
    metrics.forget_worker(WorkerId("w0"))
    assert 'worker="w0"' not in metrics.exposition().decode()
