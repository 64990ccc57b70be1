"""`tokenfleet serve --autoscale`: up with a burst, down by migration, and nothing lost on the way."""

import asyncio
import re

import pytest
from checkout import ROOT
from raw_stream import session, stream
from served_fleet import serve

HOLD = "3s"


def counts(fleet):
    view = fleet.ask("GET", "/v1/fleet")
    serving = sum(w["state"] == "serving" for w in view["workers"])
    return view["wanted_workers"], serving, len(view["workers"])


def check_whole(got, tokens):
    for s in got:
        assert (s.error, s.is_done, s.tokens, s.finish) == ("", True, tokens, "length")


async def burst(fleet, streams, tokens, spread_s):
    """Begin `streams` streams evenly over `spread_s`; return what each was sent."""
    async with session() as http:

        async def one(i):
            await asyncio.sleep(spread_s * i / streams)
            return await stream(http, fleet.gateway, prompt=[5 + i % 50] * 20, max_tokens=tokens)

        return await asyncio.gather(*(one(i) for i in range(streams)))


async def clients_until(fleet, holds, clients, tokens):
    """Let `clients` stream, each one after the other, until something holds; return what they were sent."""
    sent = []
    async with session() as http:

        async def client(i):
            while not await asyncio.to_thread(holds):
                sent.append(await stream(http, fleet.gateway, prompt=[5 + i] * 20, max_tokens=tokens))

        await asyncio.wait_for(asyncio.gather(*map(client, range(clients))), 120)
    return sent


def scales(view):
    """The last changes of the fleet's size, without what is only said of it."""
    return [event for event in view["scaling"] if event["kind"] == "scale"]


def check_none_left_while_requests_waited(view):
    """What each fall saw as it was decided."""
    falls = [event for event in scales(view) if event["workers"] < event["before"]]
    assert falls
    assert [event["seen"]["waiting_requests"] for event in falls] == [0] * len(falls)


def four_seats(folder, tp):
    """The profile of a worker that carries four requests at once, and so about five a second of 60 tokens."""
    library = ROOT / "profiles" / "h100-sxm" / f"llama-3.1-8b_tp{tp}.yaml"
    text = re.sub(r"max_seqs: \d+", "max_seqs: 4", library.read_text())
    assert "max_seqs: 4" in text
    path = folder / f"four_seats_tp{tp}.yaml"
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def scaled_fleet(model_folder, scratch):
    flags = ("--engine", "emulated", "--profile", four_seats(scratch, 1), "--workers", "1")
    fleet = serve(
        model_folder, *flags, "--autoscale", "0..4", "--scale-in-after", HOLD, "--queue-wait", "5m",
        "--slo", "ttft=2s,tpot=50ms", folder=scratch,
    )  # fmt: skip
    yield fleet
    fleet.stop()


@pytest.fixture
def mixed_scaled_fleet(model_folder, scratch):
    """One cheap worker, the only one of its type, and dearer ones."""
    profiles = [word for tp in (1, 2) for word in ("--profile", four_seats(scratch, tp))]
    kinds = ("--kind", "gpu=h100-sxm,tp=1,usd=2,max=1", "--kind", "gpu=h100-sxm,tp=2,usd=5,workers=0")
    fleet = serve(
        model_folder, "--engine", "emulated", *profiles, *kinds, "--autoscale", "1..4",
        "--scale-in-after", HOLD, "--queue-wait", "5m", "--slo", "ttft=2s,tpot=50ms", folder=scratch,
    )  # fmt: skip
    yield fleet
    fleet.stop()


def raised_by_bursts(fleet):
    """What the controller decides under bursts; it begins after the fleet."""
    for _ in range(20):
        check_whole(asyncio.run(burst(fleet, 60, 100, 2.0)), 100)
        up = [e for e in scales(fleet.ask("GET", "/v1/fleet")) if e["workers"] > e["before"]]
        if up:
            return up
    pytest.fail("20 bursts have raised nothing")


def test_a_burst_raises_the_kind_that_can_be_had_and_silence_leaves_the_cheaper(mixed_scaled_fleet):
    cheap, dear = "h100-sxm TP1", "h100-sxm TP2"
    up = raised_by_bursts(mixed_scaled_fleet)
    assert all(e["kinds"][cheap] <= 1 <= e["kinds"][dear] for e in up)
    assert dear in up[0]["reason"]
    mixed_scaled_fleet.until(
        lambda: mixed_scaled_fleet.ask("GET", "/v1/fleet")["wanted_kinds"] == {cheap: 1, dear: 0}
    )
    mixed_scaled_fleet.until(lambda: counts(mixed_scaled_fleet) == (1, 1, 1))
    check_none_left_while_requests_waited(mixed_scaled_fleet.ask("GET", "/v1/fleet"))
    check_whole(asyncio.run(burst(mixed_scaled_fleet, 3, 20, 0.0)), 20)
    assert dear in mixed_scaled_fleet.told("explain")


def test_a_burst_raises_the_fleet_and_silence_brings_it_to_zero_and_back(scaled_fleet):
    up = raised_by_bursts(scaled_fleet)
    assert max(e["workers"] for e in up) > 1
    assert all(e["seen"] and e["compared"] and e["cost"]["workers"] > 0 for e in up)
    scaled_fleet.until(lambda: counts(scaled_fleet) == (0, 0, 0))
    check_none_left_while_requests_waited(scaled_fleet.ask("GET", "/v1/fleet"))
    # Nobody serves: the next request waits for a worker to start, and is served.
    check_whole(asyncio.run(burst(scaled_fleet, 3, 20, 0.0)), 20)
    said = scaled_fleet.told("explain")
    assert "requests/s" in said
    assert " per req/s" in said
    assert scaled_fleet.metric("tokenfleet_requests_total", outcome="failed") == 0
    assert scaled_fleet.metric("tokenfleet_requests_total", outcome="rejected") == 0


def test_an_operators_number_stands_until_it_is_given_back_and_streams_of_workers_that_go_end_whole(
    scaled_fleet,
):
    scaled_fleet.ask("POST", "/v1/fleet/scale", {"workers": 3})
    scaled_fleet.until(lambda: counts(scaled_fleet) == (3, 3, 3))
    before = scales(scaled_fleet.ask("GET", "/v1/fleet"))[-1]
    check_whole(asyncio.run(burst(scaled_fleet, 40, 40, 1.0)), 40)
    view = scaled_fleet.ask("GET", "/v1/fleet")
    assert (view["wanted_workers"], scales(view)[-1], view["auto"]) == (3, before, False)
    scaled_fleet.ask("POST", "/v1/fleet/scale", {"auto": True})
    sent = asyncio.run(clients_until(scaled_fleet, lambda: counts(scaled_fleet)[2] < 3, 3, 100))
    assert sent
    check_whole(sent, 100)
    last = max(d["id"] for d in view["decisions"])
    decided = [d["kind"] for d in scaled_fleet.ask("GET", "/v1/fleet")["decisions"] if d["id"] > last]
    assert "draining" in decided
    assert "replay" not in decided  # nothing was cut
    scaled_fleet.until(lambda: counts(scaled_fleet)[0] == 0)
