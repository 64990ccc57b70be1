"""Traffic as two looks at a fleet's servers show it, and the cases in which they show nothing."""

import math
import sys

import pytest
from counted_servers import CountedServer
from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.advise.look import NoCounts, Watched, look, nearest_edges, share_within

DOWN = NoCounts("does not answer: refused")


def seen(watched, servers, at_s, down=(), model=""):
    pages = {name: DOWN if name in down else one.page(at_s) for name, one in servers.items()}
    return look(watched, pages, at_s, model)


moves = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.sampled_from(("run", "wait", "admit", "end", "leave", "look")),
        st.integers(1, 9),
    ),
    max_size=60,
)


@given(moves)
def test_arrivals_are_counted_to_the_request_whatever_requests_do(story):
    servers = {"a": CountedServer(), "b": CountedServer()}
    watched, _ = seen(Watched(), servers, 0.0)
    sent = counted = 0
    has_left = False
    rest = [("a", "admit", sys.maxsize), ("b", "admit", sys.maxsize), *[("a", "look", 1)] * 2]
    for n, (name, what, count) in enumerate([*story, *rest], 1):
        one = servers[name]
        if what in ("run", "wait"):
            one.arrive(count, waits=what == "wait")
            sent += count
        elif what == "admit":
            one.admit(count)
        elif what == "end":
            one.end(count)
        elif what == "leave":
            one.leave(count)
            has_left = True
        else:
            watched, traffic = seen(watched, servers, float(n))
            counted += traffic.arrivals
            assert counted <= sent if has_left else counted == sent
            assert traffic.running == tuple(float(one.running) for one in servers.values())
    assert counted == sent


def test_a_gauge_that_is_ahead_of_its_counter_is_made_up_for():
    servers = {"a": CountedServer()}
    servers["a"].arrive(5)
    watched, _ = seen(Watched(), servers, 0.0)
    servers["a"].running = 3  # two have left the batch, and are not counted as ended yet
    watched, early = seen(watched, servers, 5.0)
    servers["a"].ended = 2
    servers["a"].arrive(1)
    _, later = seen(watched, servers, 10.0)
    assert (early.arrivals, later.arrivals) == (0.0, 1.0)


def test_a_first_look_counts_no_arrivals_and_tells_of_whole_lives():
    servers = {"a": CountedServer()}
    servers["a"].arrive(7)
    servers["a"].end(4)
    watched, traffic = seen(Watched(), servers, 0.0)
    assert (traffic.arrivals, traffic.held, traffic.ended, traffic.prompt_tokens) == (None, "", 4.0, 2400.0)
    assert not watched.is_first


@pytest.mark.parametrize(
    "what", ["silent", "restart", "restart of a young one", "gone", "model", "number", "engine"]
)
def test_what_would_have_to_be_guessed_is_not_counted(what):
    servers = {"a": CountedServer(), "b": CountedServer()}
    servers["b"].arrive(9)
    servers["b"].end(0 if "young" in what else 9)
    watched, _ = seen(Watched(), servers, 0.0, model="m")
    servers["a"].arrive(3)
    down, said = (), {}
    if what == "silent":
        down, said = ("b",), "b: does not answer: refused"
    elif what.startswith("restart"):
        servers["b"].restart()
        said = "b: its counters fell, it was restarted"
    elif what == "gone":
        del servers["b"]
        said = "b: is gone"
    elif what == "model":
        servers["b"].model = "other"
        said = "b: serves other, expected m"
    elif what == "number":
        servers["b"].running = math.nan
        said = "b: a counter is no number"
    pages = {name: DOWN if name in down else one.page(5.0) for name, one in servers.items()}
    if what == "engine":
        pages["b"] = NoCounts("metrics of SGLang, expected vLLM's", answers=True)
        said = "b: metrics of SGLang, expected vLLM's"
    watched, traffic = look(watched, pages, 5.0, "m")
    assert (traffic.arrivals, traffic.held) == (None, said)


def test_what_arrived_while_a_server_was_silent_is_no_burst_when_it_answers_again():
    servers = {"a": CountedServer(), "b": CountedServer()}
    watched, _ = seen(Watched(), servers, 0.0)
    servers["b"].arrive(500)
    watched, silent = seen(watched, servers, 5.0, down=("b",))
    watched, again = seen(watched, servers, 10.0)
    servers["b"].arrive(2)
    _, then = seen(watched, servers, 15.0)
    assert (silent.held, again.held) == ("b: does not answer: refused", "b: answers again")
    assert (silent.arrivals, again.arrivals, then.arrivals) == (None, None, 2.0)


def test_a_server_that_never_answered_is_starting_and_one_that_joins_counts_from_then_on():
    servers = {"a": CountedServer(), "b": CountedServer()}
    watched, first = seen(Watched(), servers, 0.0, down=("b",))
    servers["a"].arrive(2)
    watched, alone = seen(watched, servers, 5.0, down=("b",))
    servers["b"].arrive(4)
    watched, joined = seen(watched, servers, 10.0)
    servers["b"].arrive(1)
    _, both = seen(watched, servers, 15.0)
    assert [(one.servers, one.starting, one.arrivals) for one in (first, alone, joined, both)] == [
        (1, 1, None), (1, 1, 2.0), (2, 0, 0.0), (2, 0, 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(("pages", "held"), [({}, "no server is listed"), ({"a": DOWN}, "no server answers")])
def test_no_server_is_no_idle_fleet(pages, held):
    _, traffic = look(Watched(), pages, 0.0)
    assert (traffic.arrivals, traffic.held) == (None, held)


@given(st.lists(st.floats(0.001, 2.0), min_size=1, max_size=50), st.floats(0.001, 2.0))
def test_a_share_within_a_target_lies_between_its_bounds_and_is_exact_at_an_edge(latencies, target_s):
    edges = (0.01, 0.05, 0.1, 0.5, 1.0, math.inf)
    buckets = {edge: float(sum(s <= edge for s in latencies)) for edge in edges}
    low, high = share_within(buckets, target_s)
    assert low <= sum(s <= target_s for s in latencies) / len(latencies) <= high
    assert share_within(buckets, 0.05) == (buckets[0.05] / len(latencies),) * 2
    assert nearest_edges(buckets, 0.07) == (0.05, 0.1)
    assert share_within(dict.fromkeys(edges, 0.0), target_s) is None
