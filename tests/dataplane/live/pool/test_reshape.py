"""Reshapes on emulated engines: the fleet ends as planned or as it was, and loses no stream."""

import asyncio
from dataclasses import replace

import pytest
from front import PoolStory, alone, play_watched, profile, until

from controlplane.errors import BadInput
from controlplane.worker_type import WorkerGroup, WorkerType

SMALL, LARGE = "TP1", "TP2"
TOKENS = 900


class Story(PoolStory):
    """A pool of four small emulated workers, which a plan makes two large ones."""

    def __init__(self, most):
        large = replace(profile(8192), tp_degree=2)
        super().__init__([WorkerGroup(WorkerType(None), 4)], most, {LARGE: large})
        self.fault, self.ends, self.least = None, [], 4.0

    def reshape(self, **after):
        from dataplane.live.pool.rolling_change import Reshape

        self.pool.types.add([WorkerGroup(WorkerType(None, 2), 2)], {})
        self.pool.wanted_kinds = {SMALL: 4, LARGE: 0}
        after = after or {SMALL: 0, LARGE: 2}

        def fault():
            return (
                self.fault
                if any(m.kind == LARGE and m.state == "serving" for m in self.pool.members())
                else None
            )

        return Reshape(self.pool, "p2", after, fault, self.ends.append, gate_s=0.05)

    def said(self, text):
        return any(text in event.reason for event in self.front.events if event.kind == "update")

    def kinds(self):
        return sorted(m.kind for m in self.pool.members())

    async def watch(self):
        """Note the least capacity that ever serves, in small workers: a large one is two."""
        while True:
            serving = [m for m in self.pool.members() if m.state == "serving"]
            self.least = min(self.least, sum(2.0 if m.kind == LARGE else 1.0 for m in serving))
            await asyncio.sleep(0)

    async def streams(self, count=12, tokens=TOKENS):
        return await super().streams(count, tokens)

    async def all_whole(self, prompts):
        await self.front.ended(*prompts)
        for name, prompt in prompts.items():
            assert self.front.tokens[name] == alone(prompt, TOKENS)


@pytest.fixture
def play(monkeypatch):
    from dataplane.live.pool import rolling_change
    from dataplane.processes import keeper

    monkeypatch.setattr(keeper, "PAUSES", keeper.Pauses(longest_s=0.01))
    monkeypatch.setattr(rolling_change, "WATCH_S", 0.001)

    return lambda play_it, most=8: play_watched(lambda: Story(most), play_it)


def test_small_workers_become_large_ones_under_streams_and_capacity_is_never_less(play):
    async def story(s):
        prompts = await s.streams()
        reshape = s.reshape()
        await reshape.run()
        assert (reshape.state, reshape.replaced, s.ends) == ("done", 2, ["done"])
        assert s.kinds() == [LARGE, LARGE]
        assert s.pool.wanted_kinds == {SMALL: 0, LARGE: 2}
        assert s.least == 4.0
        await s.all_whole(prompts)

    play(story)


def test_without_room_old_workers_go_first_and_one_step_is_missing_at_most(play):
    async def story(s):
        prompts = await s.streams(4)
        reshape = s.reshape()
        await reshape.run()
        assert reshape.state == "done"
        assert s.said("(stop-first: --max-workers 4 leaves no room")
        assert s.kinds() == [LARGE, LARGE]
        assert s.least == 2.0
        await s.all_whole(prompts)

    play(story, most=4)


@pytest.mark.parametrize("by", ["attainment", "operator", "start"])
def test_what_goes_wrong_makes_the_fleet_what_it_was_and_loses_no_stream(play, by):
    async def story(s):
        prompts = await s.streams()
        reshape = s.reshape()
        if by == "start":
            s.host.failures = 1
        elif by == "attainment":
            s.fault = "SLO attainment fell to 80.00 %, the target is 99.00 %"
        walking = asyncio.ensure_future(reshape.run())
        if by == "operator":
            await until(lambda: LARGE in s.kinds())
            reshape.cancel("an operator cancelled it")
        await walking
        cause = {"attainment": "attainment fell", "operator": "cancelled", "start": "did not start: no such"}
        assert (reshape.state, s.ends) == ("rolled-back", ["rolled-back"])
        assert cause[by] in reshape.cause
        assert s.kinds() == [SMALL] * 4
        assert s.least == 4.0
        await s.all_whole(prompts)

    play(story)


def test_a_new_worker_that_is_lost_meanwhile_rolls_it_back(play):
    async def story(s):
        reshape = s.reshape()
        walking = asyncio.ensure_future(reshape.run())
        await until(lambda: any(m.kind == LARGE and m.state == "serving" for m in s.pool.members()))
        large = next(m.worker for m in s.pool.members() if m.kind == LARGE)
        s.front.engines[large].kill()
        await walking
        assert reshape.state == "rolled-back"
        assert f"{large}, which is new, was lost" in reshape.cause
        assert s.kinds() == [SMALL] * 4

    play(story)


def test_a_limit_that_leaves_no_room_for_more_makes_it_stop_first(play):
    async def story(s):
        from controlplane.scaler.mix import MixSettings

        s.pool.limits = MixSettings(max_gpus=4)
        reshape = s.reshape()
        await reshape.run()
        assert reshape.state == "done"
        assert s.said("(stop-first: 6 GPUs are more than the limit of 4)")

    play(story)


def test_one_that_is_over_cannot_be_cancelled(play):
    async def story(s):
        reshape = s.reshape(TP1=3, TP2=0)
        await reshape.run()
        assert s.kinds() == [SMALL] * 3
        with pytest.raises(BadInput, match="plan p2: is done"):
            reshape.cancel("too late")

    play(story)
