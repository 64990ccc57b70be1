"""Workers' lives on emulated engines: launched, drained, lost, replaced, and refused with a reason."""

import asyncio
import re
import time
from dataclasses import replace

import pytest
from front import Deaths, Front, FrontHost, pool_on, profile, until

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import KvModel
from controlplane.types import WorkerId

HEALTH_EVERY_S = 0.01


@pytest.fixture
def play(monkeypatch):
    from controlplane.placement.queue import QueueSettings
    from controlplane.worker_type import WorkerGroup, WorkerType
    from dataplane.processes import keeper

    monkeypatch.setattr(keeper, "PAUSES", keeper.Pauses(longest_s=0.01))  # else a replacement waits a second

    def run(story, workers=2, **sizes):
        async def scene():
            front = Front((), profile(**sizes), QueueSettings())
            groups = [WorkerGroup(WorkerType(None), workers)]
            async with pool_on(front, groups, 4, health_every_s=HEALTH_EVERY_S) as fleet:
                await asyncio.wait_for(story(front, fleet, fleet.host), 30)
            assert all(engine.is_lost for engine in front.engines.values())

        asyncio.run(scene())

    return run


def names(fleet, state="serving"):
    return [member.worker for member in fleet.members() if member.state == state]


def told(front):
    """The lines that `serve` prints of losses, as they come."""
    from dataplane.live.gateway.events import tell_losses

    lines = []
    return lines, asyncio.ensure_future(tell_losses(front.events, lines.append))


def losses_counted(front):
    """Its metric, which counts what /v1/fleet lists as losses."""
    return front.core.metrics.lost_workers._value.get()


def test_a_lost_worker_is_replaced_its_requests_end_whole_and_both_are_told(play):
    async def story(front, fleet, host):
        lines, telling = told(front)
        await front.send("r", [1, 2], max_tokens=400)
        await front.until("r", 5)
        lost = front.core.requests.get("r").worker
        front.engines[lost].kill("kill -9")
        await front.ended("r")
        assert len(front.tokens["r"]) == 400
        await until(lambda: len(names(fleet)) == 2)
        assert lost not in names(fleet)
        await until(lambda: len(lines) == 2)
        telling.cancel()
        assert lines == [
            f"{lost} lost: kill -9; 1 request goes on elsewhere; a new worker starts in 0.01 s",
            f"w2 serving: its engine is ready and warm, in place of {lost}",
        ]
        (loss,) = [e for e in front.events if e.kind == "lost"]
        assert (loss.facts["worker"], loss.facts["cause"], loss.facts["go_on"]) == (lost, "kill -9", 1)

    play(story)


def test_a_request_that_cannot_go_on_is_told_with_the_loss_of_its_worker(play):
    async def story(front, fleet, host):
        lines, telling = told(front)
        await front.send("r", [1, 2], max_tokens=400, n=2)
        await front.until("r", 5)
        front.core.segments.obstacle_to_replay = lambda tracked: "a test"
        front.engines[front.core.requests.get("r").worker].kill("kill -9")
        await until(lambda: lines)
        telling.cancel()
        assert "lost: kill -9; 1 request failed; a new worker starts in 0.01 s" in lines[0]

    play(story)


def test_workers_of_a_type_that_keep_dying_are_told_with_their_number_and_the_next_start(play):
    async def story(front, fleet, host):
        lines, telling = told(front)
        host.failures = 2
        front.engines["w0"].kill("kill -9")
        await until(lambda: len(names(fleet)) == 2)
        await until(lambda: len(lines) == 4)
        telling.cancel()
        row = "workers of type TP1 in a row lasted less than 30 s; the next starts in 0.01 s"
        assert lines == [
            "w0 lost: kill -9; it had no requests; a new worker starts in 0.01 s",
            f"w2 lost: it did not start: no such model; 2 {row}",
            f"w3 lost: it did not start: no such model; 3 {row}",
            "w4 serving: its engine is ready and warm, in place of w3",
        ]
        assert losses_counted(front) == 3

    play(story)


def test_a_worker_that_is_lost_as_it_drains_is_told_and_no_other_is_wanted(play):
    async def story(front, fleet, host):
        lines, telling = told(front)
        for i in range(8):
            await front.send(f"r{i}", [i + 1] * 30, max_tokens=300)
        await asyncio.gather(*(front.until(f"r{i}", 5) for i in range(8)))
        fleet.drain(WorkerId("w0"), "a test")
        front.engines["w0"].kill("kill -9")
        await until(lambda: lines)
        telling.cancel()
        assert lines[0].startswith("w0 gone: lost while draining: kill -9; ")
        assert lines[0].endswith(" on elsewhere; no other is wanted in its place")
        assert losses_counted(front) == 1
        await front.ended(*(f"r{i}" for i in range(8)))

    play(story)


def test_a_worker_that_hangs_is_replaced_but_while_it_is_not_heard_of_its_link_decides(play):
    async def story(front, fleet, host):
        (there,) = [at for at in front.core.attached() if at.worker == "w0"]
        there.is_silent = True
        await until(lambda: host.asked["w1"] > 1)
        host.hung.add(WorkerId("w0"))
        before = dict(host.asked)
        await until(lambda: host.asked["w1"] > before["w1"] + 10)
        assert names(fleet) == ["w0", "w1"]
        there.is_silent = False
        await until(lambda: names(fleet) == ["w1", "w2"])
        causes = [e.facts["cause"] for e in front.events if e.kind == "lost"]
        assert causes == ["its process does not answer"]
        assert losses_counted(front) == 1

    play(story)


def test_a_start_that_takes_too_long_is_given_up_told_counted_and_made_good(play, monkeypatch):
    from dataplane.live.pool import lives

    async def story(front, fleet, host):
        async def launch(worker, *how, as_ever=host.launch):
            if worker == "w2":
                await asyncio.Event().wait()
            return await as_ever(worker, *how)

        lines, telling = told(front)
        monkeypatch.setattr(lives, "START_LIMIT_S", 0.2)
        monkeypatch.setattr(host, "launch", launch)
        fleet.scale({"TP1": 3}, "a test")
        await until(lambda: len(names(fleet)) == 3)
        await until(lambda: "in place of w2" in lines[-1])
        telling.cancel()
        assert lines[0] == "w2 lost: it did not start within 0.2 s; a new worker starts in 0.01 s"
        stops = [e.reason for e in front.events if e.kind == "stop" and e.facts["worker"] == "w2"]
        assert stops == ["it did not start within 0.2 s"]
        assert losses_counted(front) == len(lines) - 1

    play(story)


def test_a_drained_worker_is_stopped_once_its_requests_have_moved(play):
    async def story(front, fleet, host):
        for i in range(8):
            await front.send(f"r{i}", [i + 1] * 30, max_tokens=300)
        await asyncio.gather(*(front.until(f"r{i}", 5) for i in range(8)))
        fleet.drain(WorkerId("w0"), "a test")
        await until(lambda: "w0" in host.stopped and not names(fleet, "draining"))
        await front.ended(*(f"r{i}" for i in range(8)))
        assert all(len(front.tokens[f"r{i}"]) == 300 for i in range(8))
        assert fleet.wanted == 1

    play(story)


def test_a_drained_worker_that_is_being_stopped_is_not_taken_back(play):
    async def story(front, fleet, host):
        host.may_stop.clear()
        fleet.drain(WorkerId("w0"), "a test")
        await until(lambda: "w0" in host.stopped)
        with pytest.raises(BadInput, match="being stopped"):
            fleet.cancel_drain(WorkerId("w0"), "changed my mind")
        fleet.scale({"TP1": 2}, "a test")
        await until(lambda: names(fleet) == ["w1", "w2"])
        host.may_stop.set()
        await until(lambda: not names(fleet, "draining"))
        assert {at.worker for at in front.core.attached()} == {"w1", "w2"}

    play(story)


def test_a_drain_can_be_taken_back(play):
    async def story(front, fleet, host):
        for i in range(4):
            await front.send(f"r{i}", structured_outputs=None, max_tokens=200)
        fleet.drain(WorkerId("w0"), "a test")
        fleet.cancel_drain(WorkerId("w0"), "changed my mind")
        assert sorted(names(fleet)) == ["w0", "w1"]
        assert fleet.wanted == 2
        await front.ended(*(f"r{i}" for i in range(4)))
        assert host.stopped == []

    play(story)


def test_scaling_up_launches_and_scaling_down_drains_the_emptiest(play):
    async def story(front, fleet, host):
        fleet.scale({"TP1": 4}, "a test")
        await until(lambda: len(names(fleet)) == 4)
        await front.send("r", max_tokens=400)
        await front.until("r", 2)
        busy = front.core.requests.get("r").worker
        fleet.scale({"TP1": 1}, "a test")
        await until(lambda: len(list(fleet.members())) == 1)
        assert names(fleet) == [busy]
        await front.ended("r")

    play(story)


def test_a_worker_that_does_not_start_is_tried_again(play):
    async def story(front, fleet, host):
        host.failures = 2
        fleet.scale({"TP1": 3}, "a test")
        await until(lambda: len(names(fleet)) == 3)
        causes = [e.facts["cause"] for e in front.events if e.kind == "lost"]
        assert causes == ["it did not start: no such model"] * 2

    play(story)


@pytest.mark.parametrize(
    ("failures", "kv_tokens", "says"),
    [
        (1, 0, "no such model"),
        (0, 70_000, "w0: has room for 65,536 tokens of KV, TP1 was planned with 70,000"),
    ],
)
def test_a_fleet_whose_first_worker_cannot_start_or_is_less_than_planned_does_not_start(
    failures, kv_tokens, says
):
    from controlplane.placement.queue import QueueSettings
    from controlplane.worker_type import WorkerGroup, WorkerType
    from dataplane.live.pool.fleet_types import FleetTypes
    from dataplane.live.pool.pool import WorkerPool

    async def scene():
        front = Front((), profile(), QueueSettings())
        host = FrontHost(front)
        host.failures = failures
        asked = replace(profile(), kv=KvModel(max(kv_tokens, 1)))
        types = FleetTypes([WorkerGroup(WorkerType(None, 1, asked), 3)], {"TP1": asked.engine})
        fleet = WorkerPool(host, front.core, 4, types)
        try:
            with pytest.raises(RuntimeError, match=says):
                await fleet.start()
            assert "w0" not in names(fleet)
        finally:
            await fleet.close()
            await front.close()

    asyncio.run(scene())


def test_what_cannot_be_is_refused(play):
    async def story(front, fleet, host):
        with pytest.raises(BadInput, match="max-workers"):
            fleet.scale({"TP1": 5}, "a test")
        with pytest.raises(BadInput, match="no such worker"):
            fleet.drain(WorkerId("w9"), "a test")
        with pytest.raises(BadInput, match="not draining"):
            fleet.cancel_drain(WorkerId("w0"), "a test")
        await front.send("r", max_tokens=300)
        with pytest.raises(BadInput, match="only one"):
            fleet.drain(WorkerId("w0"), "a test")
        await front.ended("r")

    play(story, workers=1)


def test_a_gateway_links_to_a_thousand_workers():
    """Each link takes three of ZMQ's sockets; a context by itself allows 1,023."""
    import resource
    from types import SimpleNamespace

    from plain_codec import PlainCodec

    from dataplane.live.engine_api.wire import new_key, public_key
    from dataplane.live.worker.link import WorkerLink, link_context

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 5000:
        pytest.skip(f"only {hard} open files are allowed here")

    async def story():
        context, key = link_context(), new_key()
        nobody = SimpleNamespace(endpoint="tcp://127.0.0.1:1", link_key=public_key(new_key()))
        try:
            for link in [WorkerLink(nobody, key, context, PlainCodec()) for _ in range(1000)]:
                await link.close()
        finally:
            context.destroy(linger=0)

    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 5000), hard))
    try:
        asyncio.run(story())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def deaths(monkeypatch, tmp_path):
    monkeypatch.setattr("dataplane.live.gateway.segments.BACK_S", 0.05)  # no gateway brings requests back
    return Deaths(tmp_path)


def test_the_next_core_adopts_the_workers_and_keeps_the_wanted_number(deaths):
    async def story():
        front, pool = await deaths.core()
        pool.scale({pool.types.names[0]: 4}, "an operator asked")
        await until(lambda: len(names(pool)) == 4)
        before = names(pool)
        await deaths.die()
        front, pool = await deaths.core()
        assert names(pool) == before
        assert pool.wanted == 4
        await front.send("r", [1, 2], max_tokens=20)
        await front.ended("r")
        assert not [e for e in front.events if e.kind == "launch"]
        pool.scale({pool.types.names[0]: 5}, "an operator asked")
        await until(lambda: len(names(pool)) == 5)
        assert len(set(names(pool))) == 5  # no name is given twice

    deaths.played(story)


def test_a_fleet_whose_cores_die_one_after_another_is_still_whole(deaths):
    async def story():
        await deaths.core()
        for _ in range(3):  # each knows of the fleet what the one before it has left
            await deaths.die()
            _front, pool = await deaths.core()
            assert (pool.wanted, names(pool)) == (3, ["w0", "w1", "w2"])
            assert not [m for m in pool.members() if m.state != "serving"]

    deaths.played(story)


def test_a_core_that_dies_while_it_adopts_leaves_all_that_it_found(deaths):
    async def story():
        await deaths.core()
        await deaths.die()

        async def hang(link, kind, serves):
            if link.info.worker == "w1":
                await asyncio.sleep(3600)

        adopting = asyncio.ensure_future(deaths.core(measure=hang))
        await until(lambda: len(deaths.cores) == 2 and names(deaths.cores[-1][1]) == ["w0"])
        adopting.cancel()
        await deaths.die()
        _front, pool = await deaths.core()
        assert (pool.wanted, names(pool)) == (3, ["w0", "w1", "w2"])

    deaths.played(story)


def test_a_worker_that_was_starting_when_its_core_died_is_replaced(deaths):
    async def story():
        _, pool = await deaths.core()
        pool.host.launch = lambda *_: asyncio.sleep(3600)
        pool.scale({pool.types.names[0]: 4}, "an operator asked")
        await until(lambda: pool.starting == 1)
        await deaths.die()
        _front, pool = await deaths.core()
        await until(lambda: len(names(pool)) == 4)
        assert "w3" not in names(pool)

    deaths.played(story)


@pytest.mark.parametrize("how", ["drained", "evacuated"])
def test_a_worker_that_was_leaving_when_its_core_died_leaves(deaths, how):
    async def story():
        front, pool = await deaths.core()
        await front.send("r", [1, 2], max_tokens=100_000)
        await front.until("r", 2)
        leaving = front.core.requests.get("r").worker
        pool.host.stop = pool.core.detach = lambda *_: asyncio.sleep(3600)  # it gets no further
        if how == "drained":
            pool.drain(leaving, "an operator asked")
        else:
            pool.evacuate([leaving], 3600.0, "its machine goes away")
        assert pool.state_of(leaving) == "draining"
        await deaths.die()
        front, pool = await deaths.core()
        await until(lambda: pool.state_of(leaving) is None)
        assert pool.host.stopped == [leaving]
        await until(lambda: len(names(pool)) == (2 if how == "drained" else 3))
        assert pool.wanted == len(names(pool))

    deaths.played(story)


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_jumps_while_a_core_dies_moves_no_deadline(deaths, monkeypatch, jump_s):
    async def story():
        front, pool = await deaths.core()
        leaving = names(pool)[0]
        pool.host.stop = pool.core.detach = lambda *_: asyncio.sleep(3600)  # it gets no further
        pool.evacuate([leaving], 600.0, "its machine goes away")
        await deaths.die()
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        front, pool = await deaths.core()
        said = next(e.reason for e in front.events if "must be empty" in e.reason)
        assert 500.0 < float(re.search(r"within (\S+) s", said)[1]) <= 600.0

    deaths.played(story)


def test_a_worker_that_died_with_its_core_is_replaced(deaths):
    async def story():
        _, pool = await deaths.core()
        lost = names(pool)[0]
        await deaths.die()
        deaths.engines[lost].kill("kill -9")
        _front, pool = await deaths.core()
        assert lost not in names(pool)
        await until(lambda: len(names(pool)) == 3)

    deaths.played(story)


def test_a_share_is_not_exceeded_while_a_lost_or_drained_worker_has_not_ended(play):
    async def story(front, fleet, host):
        fleet.allow({"TP1": 2})
        host.may_stop.clear()
        front.engines["w0"].kill("kill -9")
        await until(lambda: "w0" in host.stopped)
        fleet.scale({"TP1": 4}, "a controller asks for more")
        assert (fleet.held["TP1"], names(fleet), names(fleet, "starting")) == (2, ["w1"], [])
        host.may_stop.set()
        await until(lambda: names(fleet) == ["w1", "w2"])
        assert (fleet.asked_kinds, fleet.wanted_kinds) == ({"TP1": 4}, {"TP1": 2})

        host.may_stop.clear()
        fleet.allow({"TP1": 1})
        fleet.drain(WorkerId(names(fleet)[0]), "an operator asked")
        await until(lambda: host.stopped == ["w0", "w1", "w2"] or host.stopped == ["w0", "w2", "w1"])
        fleet.allow({"TP1": 2})
        fleet.scale({"TP1": 2}, "the controller asks again")
        assert (fleet.held["TP1"], names(fleet, "starting")) == (2, [])
        host.may_stop.set()
        await until(lambda: names(fleet) == ["w3", "w4"])

    play(story)


def test_a_larger_share_takes_back_a_worker_that_drains_and_is_followed_at_once(play):
    async def story(front, fleet, host):
        for i in range(2):
            await front.send(f"r{i}", [i + 1] * 30, max_tokens=3000)
        await asyncio.gather(*(front.until(f"r{i}", 5) for i in range(2)))
        fleet.allow({"TP1": 1})
        (leaving,) = names(fleet, "draining")
        fleet.allow({"TP1": 3})
        assert leaving in names(fleet)
        fleet.scale({"TP1": 4}, "a test")
        await until(lambda: len(names(fleet)) == 3)
        assert fleet.held["TP1"] == 3

    play(story)
