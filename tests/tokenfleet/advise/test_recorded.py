"""The traffic that was watched: its steps, its gaps, its lengths, and the plan for it."""

import math
from datetime import UTC, datetime

import pytest
from counted_servers import OUTPUT, PROMPT, CountedServer

from controlplane.errors import BadInput
from tokenfleet.advise.look import NoCounts, Watched, look
from tokenfleet.advise.watch import ENOUGH, TrafficRecord
from tokenfleet.traces.from_metrics import trace_of_metrics

EVERY_S = 5.0


def clock(at_s):
    return datetime.fromtimestamp(1_700_000_000.0 + at_s, UTC)


class Story:
    """Two servers under traffic, watched and recorded."""

    def __init__(self):
        self.servers = {"a": CountedServer(), "b": CountedServer()}
        self.watched, self.record, self.at_s = Watched(), TrafficRecord(), 0.0

    def look(self, arrivals=0, silent=()):
        for server in self.servers.values():
            server.end(server.running)
        self.servers["a"].arrive(arrivals)
        pages = {
            name: NoCounts("does not answer") if name in silent else server.page(self.at_s)
            for name, server in self.servers.items()
        }
        self.watched, traffic = look(self.watched, pages, self.at_s)
        self.record.add(traffic)
        self.at_s += EVERY_S


def test_the_trace_has_the_arrivals_of_each_look_and_the_servers_lengths():
    story = Story()
    story.look()
    for arrivals in (20, 0, 400, 300):
        story.look(arrivals)
    counted = story.record.counted(clock)
    assert counted.rates_rps == [4.0, 0.0, 80.0, 60.0]
    assert counted.times_s[0] == 1_700_000_000.0
    assert counted.source == "vLLM's metrics, lengths since the servers started"
    load = trace_of_metrics(counted).workload
    assert len(load) == 720
    assert load.prompt_tokens.mean() == pytest.approx(PROMPT, rel=0.02)
    assert load.output_tokens.mean() == pytest.approx(OUTPUT, rel=0.02)


def test_lengths_are_of_the_watch_where_it_saw_enough():
    story = Story()
    story.servers["b"].arrive(10)
    for _ in range(4):
        story.look(int(ENOUGH / 2))
    assert story.record.counted(clock).source == "vLLM's metrics, lengths while watched"


def test_a_look_without_counts_is_a_gap_and_no_idle_time():
    story = Story()
    for silent in ((), (), ("b",), (), ()):
        story.look(50, silent)
    rates = story.record.counted(clock).rates_rps
    assert [math.isnan(rate) for rate in rates] == [False, True, True, False]
    assert rates[0] == rates[3] == 10.0


def test_a_watch_without_requests_or_lengths_is_refused_in_a_line():
    story = Story()
    story.look()
    story.look()
    with pytest.raises(BadInput, match="no request arrived in 5 s; watch for longer"):
        story.record.counted(clock)
    story.look(5)  # which has not ended, as no other ever did
    with pytest.raises(BadInput, match="no vllm:request_prompt_tokens_bucket; no lengths to plan for"):
        story.record.counted(clock)
