"""A fleet without servers is woken by requests that a picker refuses: pickers' pages, KEDA's own calls."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from controlplane.types import Slo
from dataplane.http.server import bind
from tests.builders.picked import made_fleet
from tokenfleet.advise import servers as listed
from tokenfleet.advise.published import (
    QUIET_S,
    SERVICE,
    AdviceGauges,
    PickedDemand,
    demand_of,
    messages,
    picker_counts,
    scaler_at,
)
from tokenfleet.advise.servers import Servers
from tokenfleet.advise.watch import answering, some_answer
from tokenfleet.pick.asked import AskedBody
from tokenfleet.pick.call import Asker, Call
from tokenfleet.pick.server import PickGauges
from tokenfleet.pick.unseen import Unseen


def page(picked=0, refused=0, running=None, faulty=0):
    """A picker's page. `running`: by server; None where it has none."""
    lines = [f'tokenfleet_pick_picked_total{{server="a:1"}} {picked}'] if picked else []
    lines += [f'tokenfleet_pick_refused_total{{reason="no_server"}} {refused}'] if refused else []
    lines += [f'tokenfleet_pick_refused_total{{reason="unclear_request"}} {faulty}'] if faulty else []
    lines += [f'tokenfleet_pick_running{{server="{name}"}} {n}' for name, n in (running or {}).items()]
    return "\n".join([*lines, "tokenfleet_pick_waiting 0.0", ""])


def test_what_is_no_pickers_page_tells_nothing():
    assert picker_counts("vllm:num_requests_running 3\n") is None
    assert picker_counts("<html>{") is None


@pytest.mark.parametrize(
    ("pages", "is_needed"),
    [
        ([page(), page()], False),
        ([page(refused=7), page(refused=7)], False),  # refused before the first look
        ([page(), page(refused=1)], True),
        ([page(refused=7), page(refused=1)], True),  # the picker has started again
        ([page(), page(faulty=5)], False),
        ([page(running={"a:1": 0})], True),  # a fleet with servers is not idle at once
    ],
)
def test_a_request_asks_for_a_fleet_and_what_is_none_does_not(pages, is_needed):
    demand = PickedDemand()
    for at_s, one in enumerate(pages):
        demand.heard({"picker": one}, float(at_s))
    assert (demand.is_heard, demand.is_needed) == (True, is_needed)


def test_a_fleet_is_needed_for_as_long_as_requests_run_and_a_while_after():
    demand = PickedDemand()
    for at_s in (0.0, QUIET_S, 2 * QUIET_S):
        demand.heard({"picker": page(1, running={"a:1": 1})}, at_s)
        assert demand.is_needed
    demand.heard({"picker": page(1, running={"a:1": 0})}, 3 * QUIET_S - 1)
    assert demand.is_needed
    demand.heard({"picker": page(1, running={"a:1": 0})}, 3 * QUIET_S)
    assert not demand.is_needed


def test_a_picker_that_does_not_answer_is_not_idle():
    demand = PickedDemand()
    demand.heard({"one": page(), "other": None}, 0.0)
    assert not demand.is_heard


def test_keda_wakes_a_fleet_without_servers_once_the_picker_refuses_a_request(tmp_path):
    """The scaler, a picker's real page and grpc's own client; before any server has told its model."""
    grpc = pytest.importorskip("grpc")
    keda, address = messages(), f"unix:{tmp_path}/scaler"

    async def story():
        fleet = made_fleet(is_known=False)
        listening = bind("127.0.0.1", 0, "--metrics-listen")
        port = listening.getsockname()[1]
        ref = keda.ScaledObjectRef(scalerMetadata=[keda.Entry(key="model", value="m")])
        async with (
            answering(listening, PickGauges(fleet, Unseen(fleet), Counter())),
            demand_of([f"127.0.0.1:{port}"]) as demand,
            scaler_at(address, AdviceGauges(""), demand),
            grpc.aio.insecure_channel(address) as channel,
        ):

            def call(verb, reply, streams=False):
                kind = channel.unary_stream if streams else channel.unary_unary
                return kind(f"/{SERVICE}/{verb}", lambda m: m.SerializeToString(), reply.FromString)

            async def number():
                asked = keda.GetMetricsRequest(scaledObjectRef=ref)
                (value,) = (await call("GetMetrics", keda.GetMetricsResponse)(asked)).metricValues
                return value.metricValue

            stream = call("StreamIsActive", keda.IsActiveResponse, streams=True)(ref)
            before = (await stream.read()).result, await number()
            fleet.ask(Call(Asker(), Slo(1.0, 0.05), "", ""), AskedBody(text_bytes=8))
            after = (await stream.read()).result, await number()
            stream.cancel()
        fleet.close()
        return before, after

    assert asyncio.run(story()) == ((False, 0), (True, 1))


def test_servers_whose_metrics_are_missing_are_not_taken_for_none(tmp_path):
    """The picker has a server; without an advice KEDA gets an error, not a number."""
    grpc = pytest.importorskip("grpc")
    keda, address, demand = messages(), f"unix:{tmp_path}/scaler", PickedDemand()
    demand.heard({"picker": page(running={"a:1": 2})}, 0.0)

    async def story():
        async with (
            scaler_at(address, AdviceGauges("m"), demand),
            grpc.aio.insecure_channel(address) as channel,
        ):
            verb = channel.unary_unary(
                f"/{SERVICE}/GetMetrics", lambda m: m.SerializeToString(), keda.GetMetricsResponse.FromString
            )
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await verb(keda.GetMetricsRequest())
            return error.value.code().name

    assert asyncio.run(story()) == "UNAVAILABLE"


@pytest.mark.parametrize(("quiet_s", "is_active"), [(QUIET_S - 1, True), (QUIET_S, False)])
def test_a_fleet_that_nobody_asks_for_is_not_active(tmp_path, quiet_s, is_active):
    grpc = pytest.importorskip("grpc")
    keda, address, demand = messages(), f"unix:{tmp_path}/scaler", PickedDemand()
    for at_s in (0.0, quiet_s):
        demand.heard({"picker": page(9, running={"a:1": 0})}, at_s)
    gauges = AdviceGauges("m")
    of_type = SimpleNamespace(worker_type=SimpleNamespace(name="h100-sxm TP1"), published=1)
    gauges.advice = SimpleNamespace(of_types=[of_type])

    async def story():
        async with scaler_at(address, gauges, demand), grpc.aio.insecure_channel(address) as channel:
            verb = channel.unary_unary(
                f"/{SERVICE}/IsActive", lambda m: m.SerializeToString(), keda.IsActiveResponse.FromString
            )
            return (await verb(keda.ScaledObjectRef())).result

    assert asyncio.run(story()) is is_active


def test_a_name_without_addresses_has_no_servers_and_a_resolver_that_fails_leaves_the_last(monkeypatch):
    said = []

    async def getaddrinfo(*asked, **how):
        if isinstance(said[-1], int):
            raise listed.socket.gaierror(said[-1], "of a test")
        return [(listed.socket.AF_INET, 0, 0, "", (said[-1], 0))]

    async def story():
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
        servers, found = Servers(["dns:vllm:8000"]), []
        for one in ("10.0.0.1", listed.socket.EAI_AGAIN, listed.socket.EAI_NONAME, "10.0.0.2"):
            said.append(one)
            found.append(await servers.listed())
        return found

    assert asyncio.run(story()) == [["10.0.0.1:8000"], ["10.0.0.1:8000"], [], ["10.0.0.2:8000"]]


def test_a_start_without_servers_waits_for_one_and_ends_when_asked_to(tmp_path):
    (tmp_path / "servers.txt").write_text("# none yet\n")

    async def story():
        stop, told = asyncio.Event(), []

        def tell(line):
            told.append(line)
            stop.set()

        async with Servers((), tmp_path / "servers.txt") as servers:
            return await some_answer(servers, 60.0, stop, tell), told

    assert asyncio.run(story()) == (False, ["no server answers; waiting for one"])
