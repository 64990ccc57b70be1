"""Workers evacuated by a deadline, on emulated engines: streams are moved or recomputed, and end whole."""

import asyncio
from itertools import takewhile

import pytest
from front import A, Front, alone, pool_on, profile, until

from controlplane.errors import BadInput
from controlplane.types import WorkerId

W0 = WorkerId("w0")
KINDS = ("replay", "evacuated")


@pytest.fixture
def play():
    from controlplane.placement.queue import QueueSettings
    from controlplane.worker_type import WorkerGroup, WorkerType

    def run(story, workers=3, **sizes):
        async def scene():
            front = Front((), profile(**sizes), QueueSettings())
            async with pool_on(front, [WorkerGroup(WorkerType(None), workers)], 6) as fleet:
                await asyncio.wait_for(story(front, fleet), 60)

        asyncio.run(scene())

    return run


async def streams(front, count, tokens, prompt_tokens=30, **params):
    """Begin streams, and return their prompts once all decode."""
    prompts = {f"r{i}": [i + 1] * prompt_tokens for i in range(count)}
    for name, prompt in prompts.items():
        await front.send(name, prompt, max_tokens=tokens, **params)
    await asyncio.gather(*(front.until(name, 3) for name in prompts))
    return prompts


def whole(front, prompts, tokens):
    return all(front.tokens[name] == alone(prompt, tokens) for name, prompt in prompts.items())


def evacuated(front):
    return next((e for e in front.events if e.kind == "evacuated"), None)


def replays(front):
    """The replays before the worker was empty."""
    return takewhile(lambda e: e.kind != "evacuated", (e for e in front.events if e.kind in KINDS))


def test_an_evacuated_workers_streams_go_on_whole_and_another_takes_its_place(play):
    async def story(front, fleet):
        prompts = await streams(front, 12, 400)
        fleet.evacuate([W0], 5.0, "a test")
        await until(lambda: evacuated(front))
        facts = evacuated(front).facts
        assert facts["in_time"]
        assert facts["moved"] > 0
        assert (facts["replayed"], facts["failed"]) == (0, 0)
        await until(lambda: fleet.serving == 3)
        assert fleet.state_of(W0) is None
        await front.ended(*prompts)
        assert whole(front, prompts, 400)

    play(story)


def test_what_there_is_no_time_to_move_is_computed_anew_in_time(play):
    async def story(front, fleet):
        prompts = await streams(front, 9, 7500, prompt_tokens=600)
        front.fabric.bytes_per_s = 1.5e5  # a move of one takes four seconds, and more as it grows
        fleet.evacuate([W0], 6.0, "a test")  # a tenth of it for the last replays, on a busy machine, too
        await until(lambda: evacuated(front))
        facts = evacuated(front).facts
        assert facts["in_time"]
        assert facts["failed"] == 0
        assert facts["replayed"] > 0
        await front.ended(*prompts)
        assert whole(front, prompts, 7500)

    play(story)


def test_the_last_move_is_waited_for_and_its_stream_is_not_recomputed(play):
    async def story(front, fleet):
        segments, cut_over = front.core.segments, front.core.segments.cut_over

        async def slow(*move):
            front.fabric.bytes_per_s = 2e5  # the last tokens take longer than a look
            return await cut_over(*move)

        segments.cut_over = slow
        prompts = await streams(front, 4, 3000, prompt_tokens=300)
        leaving = sum(front.core.requests.get(name).worker == W0 for name in prompts)
        fleet.evacuate([W0], 30.0, "a test")
        await until(lambda: evacuated(front))
        facts = evacuated(front).facts
        assert (facts["moved"], facts["replayed"], facts["ended"], facts["failed"]) == (leaving, 0, 0, 0)
        assert [e.reason for e in replays(front)] == []
        await front.ended(*prompts)
        assert whole(front, prompts, 3000)

    play(story, workers=2)


def test_with_nowhere_to_go_nothing_is_done(play):
    async def story(front, fleet):
        prompts = await streams(front, 2, 300)
        with pytest.raises(BadInput, match="worker w0: its requests have nowhere to go"):
            fleet.evacuate([W0], 5.0, "a test")
        assert fleet.state_of(W0) == "serving"
        await front.ended(*prompts)
        assert whole(front, prompts, 300)

    play(story, workers=1)


def test_what_cannot_be_continued_ends_in_an_explicit_error_and_the_others_go_on(play):
    async def story(front, fleet):
        prompts = await streams(front, 6, 3000)
        for i in range(6):
            await front.send(f"g{i}", [90 + i] * 30, max_tokens=30_000, thinking_token_budget=9)
        await asyncio.gather(*(front.until(f"g{i}", 3) for i in range(6)))
        fixed = [f"g{i}" for i in range(6) if front.core.requests.get(f"g{i}").worker == W0]
        fleet.evacuate([W0], 0.6, "a test")
        await until(lambda: evacuated(front))
        assert evacuated(front).facts["failed"] == len(fixed) > 0
        assert [front.finish.get(name) for name in fixed] == ["ERROR"] * len(fixed)
        assert "reached its deadline" in next(e.reason for e in front.events if e.kind == "failed")
        await front.ended(*prompts)
        assert whole(front, prompts, 3000)

    play(story)


def test_a_haven_that_dies_meanwhile_loses_no_stream(play):
    async def story(front, fleet):
        prompts = await streams(front, 12, 800, prompt_tokens=300)
        front.fabric.bytes_per_s = 3e6
        fleet.evacuate([W0], 4.0, "a test")
        await until(lambda: front.core.migrations.open)
        here = {name for name in prompts if front.core.requests.get(name).worker == W0}
        haven = next(iter(front.core.migrations.open.values())).target
        front.engines[haven].kill("kill -9")
        await until(lambda: evacuated(front))
        facts, recomputed = evacuated(front).facts, {e.facts["request_id"] for e in replays(front)}
        assert facts["in_time"]
        assert facts["replayed"] == len(here & recomputed)
        assert sum(facts[how] for how in ("moved", "replayed", "ended", "failed")) == len(here)
        await front.ended(*prompts)
        assert whole(front, prompts, 800)

    play(story)


def test_a_stream_whose_haven_dies_after_its_switch_counts_as_recomputed(play):
    async def story(front, fleet):
        segments, cut_over, dead = front.core.segments, front.core.segments.cut_over, []

        async def dying(request, target, transfer):
            arrival = await cut_over(request, target, transfer)
            if not dead:
                dead.append((request, target))
                front.engines[target].kill("kill -9")
            return arrival

        segments.cut_over = dying
        prompts = await streams(front, 3, 3000, prompt_tokens=300)
        fleet.evacuate([W0], 10.0, "a test")
        await until(lambda: evacuated(front))
        facts, recomputed = evacuated(front).facts, {e.facts["request_id"] for e in replays(front)}
        assert dead[0][0] in recomputed
        assert facts["replayed"] > 0
        assert facts["ended"] == 0
        await front.ended(*prompts)
        assert whole(front, prompts, 3000)

    play(story)


def test_a_worker_that_dies_while_it_is_evacuated_is_replaced(play):
    async def story(front, fleet):
        prompts = await streams(front, 6, 800, prompt_tokens=300)
        front.fabric.bytes_per_s = 3e6
        fleet.evacuate([W0], 4.0, "a test")
        front.engines[W0].kill("the machine was taken")
        await until(lambda: fleet.serving == 3 and fleet.state_of(W0) is None)
        await front.ended(*prompts)
        assert whole(front, prompts, 800)

    play(story)


def test_an_evacuation_is_neither_ordered_twice_nor_taken_back(play):
    async def story(front, fleet):
        prompts = await streams(front, 6, 800, prompt_tokens=300)
        front.fabric.bytes_per_s = 3e6
        fleet.evacuate([W0], 4.0, "a test")
        with pytest.raises(BadInput, match="being evacuated or replaced already"):
            fleet.evacuate([W0], 4.0, "again")
        with pytest.raises(BadInput, match="being evacuated"):
            fleet.cancel_drain(W0, "changed my mind")
        with pytest.raises(BadInput, match="no such worker"):
            fleet.evacuate([A], 4.0, "a test")
        await front.ended(*prompts)

    play(story)


def test_a_node_s_workers_are_evacuated_together_and_none_into_another(play):
    async def story(front, fleet):
        prompts = await streams(front, 9, 600)
        leaving = [W0, WorkerId("w1")]
        fleet.evacuate(leaving, 5.0, "a test")
        await until(lambda: sum(e.kind == "evacuated" for e in front.events) == 2)
        moves = [e.facts for e in front.events if e.kind == "migrate"]
        assert {facts["source"] for facts in moves} == set(leaving)
        assert not {facts["worker"] for facts in moves} & set(leaving)
        await until(lambda: fleet.serving == 3)
        await front.ended(*prompts)
        assert whole(front, prompts, 600)

    play(story)


def test_workers_that_leave_together_are_no_refuge_for_each_other(play):
    async def story(front, fleet):
        prompts = await streams(front, 4, 200)
        with pytest.raises(BadInput, match="nowhere to go"):
            fleet.evacuate([m.worker for m in fleet.members()], 5.0, "a test")
        assert {m.state for m in fleet.members()} == {"serving"}
        await front.ended(*prompts)
        assert whole(front, prompts, 200)

    play(story)


def test_a_drain_copies_what_is_cached_and_a_copy_that_fails_costs_that_text_alone(play):
    from controlplane.migration.drain import Text
    from controlplane.snapshot import Cached
    from dataplane.live.migration.move import CopyFailed
    from harness.bare_fleet import token_request

    class Ended:
        def __init__(self, number):
            self.ids = list(range(100 * number, 100 * number + 4))
            self.as_request = lambda: token_request(f"t{number}", [number] * 100, {})

    async def story(front, fleet):
        block = next(front.core.attached()).link.info.block_tokens
        texts = [
            Text(n, block, Ended(n).ids, lambda w: Cached(4 * block * (w == W0)), Ended(n)) for n in range(3)
        ]
        brought, bring, told = [], front.core.migrations.bring, []

        async def failing(text, *where):
            if text.request_id == "t1":
                raise CopyFailed("a test")
            brought.append((text.request_id, await bring(text, *where)))

            return brought[-1][1]

        front.core.placement.texts = lambda: iter(texts)
        front.core.placement.brought = lambda worker, ids: told.append(ids)
        front.core.migrations.bring = failing
        prompts = await streams(front, 6, 600)
        fleet.drain(W0, "a test")
        await until(lambda: fleet.state_of(W0) is None)
        assert brought == [("t0", 4 * block), ("t2", 4 * block)]
        assert told == [texts[0].ids, texts[2].ids]
        [event] = [e for e in front.events if e.kind == "bring"]
        assert (event.facts["texts"], event.facts["tokens"]) == (2, 8 * block)
        await front.ended(*prompts)
        assert whole(front, prompts, 600)
        await until(lambda: all(not at.telemetry.kv_used_blocks for at in front.core.attached()))

    play(story)


def test_a_fault_in_copying_caches_keeps_no_worker_from_leaving_or_coming(play):
    async def story(front, fleet):
        def broken():
            raise RuntimeError("a fault of ours")

        front.core.placement.texts = broken
        prompts = await streams(front, 6, 600)
        fleet.drain(W0, "a test")
        await until(lambda: fleet.state_of(W0) is None)
        fleet.scale({fleet.types.only(): 3}, "a test")
        await until(lambda: fleet.serving == 3)
        await front.ended(*prompts)
        assert whole(front, prompts, 600)

    play(story)


def test_a_noticed_worker_is_evacuated_once(play):
    from dataplane.live.engine_api.notices import Notice
    from dataplane.live.pool.notice_watch import NoticeWatch

    async def story(front, fleet):
        prompts = await streams(front, 9, 600)
        watch = NoticeWatch(fleet, None, clock=lambda: 1000.0)
        fleet.host.told = {W0: Notice("Ray drains its node", 1005.0)}
        await watch.look()
        await watch.look()
        await until(lambda: evacuated(front))
        draining = [e.reason for e in front.events if e.kind == "draining"]
        assert draining == ["must be empty within 5 s: Ray drains its node"]
        await front.ended(*prompts)
        assert whole(front, prompts, 600)

    play(story)


def test_where_all_machines_go_away_it_is_said_and_nothing_done(play):
    from dataplane.live.engine_api.notices import Notice
    from dataplane.live.pool.notice_watch import NoticeWatch

    async def story(front, fleet):
        fleet.host.told = {m.worker: Notice("the file says so") for m in fleet.members()}
        watch = NoticeWatch(fleet, None)
        await watch.look()
        await watch.look()
        said = [e.reason for e in front.events if e.kind == "notice"]
        assert len(said) == 3
        assert all("nowhere to go" in reason for reason in said)
        assert fleet.serving == 3

    play(story)
