"""A trace drawn from users and a published shape: its rate, its lengths, and what is refused."""

from contextlib import closing

import numpy as np
import pytest

from controlplane.errors import BadInput
from tokenfleet.service.forms import PlanOrder
from tokenfleet.service.plan_service import PlanService, ServiceLimits
from tokenfleet.traces.usage import SHAPES, Usage, arrivals, trace_of_usage

MEANS = {  # tokens of the sources: prompts, outputs
    "chat": (1155, 211),
    "long-chat": (2340, 439),
    "code": (2048, 28),
    "rag": (15_325, 149),
    "agents": (79_449, 429),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_has_the_lengths_of_its_source_and_the_rate_of_the_busiest_hour(shape):
    usage = Usage(requests_per_day=60_000, shape=shape)
    load = trace_of_usage(usage).workload
    assert usage.rate_rps == pytest.approx(1.25)
    assert load.rate_rps == pytest.approx(usage.rate_rps, rel=0.2)
    assert load.duration_s == pytest.approx(3600, rel=0.01)
    for tokens, mean in zip((load.prompt_tokens, load.output_tokens), MEANS[shape], strict=True):
        assert float(tokens.mean()) == pytest.approx(mean, rel=0.2)
    assert (load.sessions is not None) == (shape in ("rag", "agents"))


@pytest.mark.parametrize("shape", SHAPES)
def test_given_means_scale_the_lengths_of_a_shape_and_leave_the_rest(shape):
    plain = trace_of_usage(Usage(requests_per_day=60_000, shape=shape)).workload
    trace = trace_of_usage(Usage(requests_per_day=60_000, shape=shape, prompt_tokens=3000))
    load = trace.workload
    assert float(load.prompt_tokens.mean()) == pytest.approx(3000, rel=0.001)
    assert (load.output_tokens == plain.output_tokens).all()
    assert (load.arrival_s == plain.arrival_s).all()
    hits, plain_hits = (of.ideal_hits.sum() / of.prompt_tokens.sum() for of in (load, plain))
    assert hits == pytest.approx(plain_hits, abs=0.03)
    (source,) = (row[2] for row in trace.assumed.rows if row[0] == "Tokens")
    assert source == f"mean prompt given; {SHAPES[shape].source}"


def test_cache_hits_of_sessions_are_near_those_of_their_sources():
    for shape, hits in (("rag", 0.65), ("agents", 0.96)):
        load = trace_of_usage(Usage(requests_per_day=40_000, shape=shape)).workload
        assert load.ideal_hits.sum() / load.prompt_tokens.sum() == pytest.approx(hits, abs=0.1)


def test_growth_and_peak_multiply_the_rate_and_users_their_requests():
    assert Usage(users=864, shape="chat", peak=2.0, growth=0.5).rate_rps == pytest.approx(0.3)
    assert Usage(request_rate=10, growth=0.5).rate_rps == pytest.approx(15.0)
    assert Usage(users=2000).name == "chat, 2,000 users"
    assert Usage(request_rate=10).name == "chat, 10 req/s"


def test_a_rate_is_drawn_as_the_busiest_hour_s():
    trace = trace_of_usage(Usage(request_rate=10, prompt_tokens=1000, output_tokens=200))
    assert trace.workload.rate_rps == pytest.approx(10.0, rel=0.02)
    assert trace.workload.prompt_tokens.mean() == pytest.approx(1000, rel=0.01)
    assert trace.workload.output_tokens.mean() == pytest.approx(200, rel=0.01)
    assert trace.assumed.rows[0] == ("Busiest hour", "10 req/s", "given")


def test_arrivals_swing_by_the_minute_as_azure_s_do():
    arrival_s = arrivals(20.0, 36_000.0, np.random.RandomState(1))
    counts, _ = np.histogram(arrival_s, 600, (0, 36_000))
    beyond = (counts.var() - counts.mean()) / counts.mean() ** 2
    assert np.sqrt(beyond) == pytest.approx(0.21, abs=0.03)
    assert (np.diff(arrival_s) >= 0).all()
    assert counts.mean() == pytest.approx(1200, rel=0.01)


def test_few_users_get_a_longer_trace_and_many_a_shorter_one():
    few, many = (trace_of_usage(Usage(users=users)).workload for users in (100, 2_000_000))
    assert len(few) == pytest.approx(2000, rel=0.1)
    assert many.duration_s == pytest.approx(600, rel=0.01)


@pytest.mark.parametrize("shape", ["rag", "agents"])
def test_a_drawn_session_that_began_before_the_hour_goes_on_in_it(shape):
    load = trace_of_usage(Usage(requests_per_day=20_000, shape=shape)).workload
    first = np.diff(load.sessions.offsets) == 0
    early = load.arrival_s < 60.0
    # Some of the first requests have a history, longer than any message of a session's first turn.
    assert load.prompt_tokens[early & first].max() > np.quantile(load.prompt_tokens, 0.5)
    assert len(load) * load.prompt_tokens.mean() < 1e9


def test_the_same_seed_draws_the_same_trace():
    one, same, other = (trace_of_usage(Usage(users=2000), seed).workload for seed in (1, 1, 2))
    assert (one.arrival_s == same.arrival_s).all()
    assert len(one) != len(other) or (one.arrival_s != other.arrival_s).any()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "--users: expected --users, --requests-per-day or --request-rate, got none"),
        (
            {"users": 1, "request_rate": 1},
            "--users: expected --users, --requests-per-day or --request-rate, got --users and --request-rate",
        ),
        ({"request_rate": -1}, "--request-rate: -1, expected more than 0, at most 100000"),
        (
            {"request_rate": 41, "shape": "agents"},
            "--request-rate: 41 requests per second in the busiest hour, at most 40",
        ),
        ({"request_rate": 1, "peak": 2}, "--peak: contradicts --request-rate, which is the busiest hour's"),
        ({"users": 0}, "--users: 0, expected more than 0, at most 1e+10"),
        ({"requests_per_day": float("nan")}, "--requests-per-day: nan, expected more than 0"),
        ({"users": 1, "shape": "chatt"}, "--shape: chatt: expected chat, long-chat, code, rag, agents"),
        ({"users": 1, "growth": -0.2}, "--growth: -0.2, expected 0 to 100 (0.3: 30 % more traffic)"),
        ({"users": 1, "peak": 0.5}, "--peak: 0.5, expected 1 to 100"),
        (
            {"users": 100_000, "shape": "agents"},
            "--users: 417 requests per second in the busiest hour, at most 40 of agents are drawn",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(given, told):
    with pytest.raises(BadInput) as refused:
        Usage(**given)
    assert str(refused.value).startswith(told)
    assert "\n" not in str(refused.value)


def test_the_upload_of_a_drawn_trace_is_refused_as_another_orders_trace(tmp_path):
    order = {"model": "llama-3.1-8b", "slo": {"ttft_s": 1.6, "tpot_s": 0.075}}
    with closing(PlanService(tmp_path, ServiceLimits())) as service:
        job = service.order(PlanOrder.model_validate(order | {"trace": {"users": 500}}))
        upload = job["trace"]["id"]
        with pytest.raises(BadInput, match=f"trace: {upload} was drawn for chat, 500 users"):
            service.order(PlanOrder.model_validate(order | {"trace": {"upload": upload}}))
