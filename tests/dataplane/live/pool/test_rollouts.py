"""Updates and restarts on emulated engines: the fleet ends wholly new or wholly old, and loses no stream."""

import asyncio
import itertools
from contextlib import suppress
from functools import partial

import pytest
from front import Deaths, PoolStory, alone, play_watched, until

from controlplane.errors import BadInput
from controlplane.types import WorkerId

OLD, NEW = "old", "new"


class Story(PoolStory):
    """A pool of emulated workers of revision 1, and rollouts over it."""

    def __init__(self, workers, most):
        from controlplane.worker_type import WorkerGroup, WorkerType
        from dataplane.live.pool.member import Revision

        super().__init__([WorkerGroup(WorkerType(None), workers)], most, revision=Revision(1, OLD))
        self.least = workers

    def rollout(self, revision=None, only=None, finish_s=20.0):
        from dataplane.live.pool.rollout import Rollout

        return Rollout(self.pool, revision or self.revision(), finish_s, only, gate_s=0.05)

    def revision(self, model=NEW):
        from dataplane.live.pool.member import Revision

        return Revision(2, model, ("--some-flag",))

    def revisions(self):
        return sorted(m.revision for m in self.pool.members())

    async def watch(self):
        """Note the fewest workers that ever serve."""
        while True:
            self.least = min(self.least, self.pool.serving)
            await asyncio.sleep(0)


@pytest.fixture
def play(monkeypatch):
    from dataplane.processes import keeper

    monkeypatch.setattr(keeper, "PAUSES", keeper.Pauses(longest_s=0.01))  # else a replacement waits a second

    return lambda play_it, workers=3, most=6: play_watched(lambda: Story(workers, most), play_it)


def test_an_update_with_room_for_one_more_never_has_fewer_workers_and_moves_every_stream(play):
    async def story(s):
        prompts = await s.streams(9, 900)
        update = s.rollout(s.revision(OLD))
        await update.run()
        assert (update.state, update.replaced) == ("done", 3)
        assert update.how.startswith("start-first")
        assert s.revisions() == [2, 2, 2]
        assert s.least == 3
        await s.front.ended(*prompts)
        assert all(len(s.front.tokens[name]) == 900 for name in prompts)
        assert {e.kind for e in s.front.events} >= {"update", "migrate", "stop"}

    play(story)


def test_an_update_without_room_has_one_worker_fewer_at_most(play):
    async def story(s):
        prompts = await s.streams(9, 900)
        update = s.rollout(s.revision(OLD))
        await update.run()
        assert update.state == "done"
        assert "--max-workers 3 leaves no room" in update.how
        assert s.revisions() == [2, 2, 2]
        assert s.least == 2
        await s.front.ended(*prompts)
        assert all(len(s.front.tokens[name]) == 900 for name in prompts)

    play(story, most=3)


def test_streams_of_the_old_model_finish_on_it_and_new_requests_go_to_the_new_one(play):
    async def story(s):
        prompts = await s.streams(6, 1200)
        update = asyncio.ensure_future(s.rollout().run())
        await until(lambda: any(m.revision == 2 and m.state == "serving" for m in s.pool.members()))
        await s.front.ended(*prompts)
        assert all(s.front.finish[name] == "LENGTH" for name in prompts)
        went_to = {e.facts["worker"] for e in s.front.events if e.kind == "migrate" and "; done" in e.reason}
        assert went_to <= {"w0", "w1", "w2"}
        await update
        assert s.revisions() == [2, 2, 2]
        weights = {at.link.info.weights for at in s.front.core.attached()}
        assert weights == {NEW}

    play(story)


def test_what_does_not_finish_in_time_on_an_old_model_ends_in_an_error_that_says_why(play):
    async def story(s):
        prompts = await s.streams(3, 20_000)
        unfinished = prompts.keys() - s.front.finish.keys()  # the others outran a cold start of this test
        assert unfinished
        await s.rollout(finish_s=0.2).run()
        await s.front.ended(*prompts)
        assert {s.front.finish[name] for name in unfinished} == {"ERROR"}
        why = {e.reason for e in s.front.events if e.kind == "failed"}
        assert all("given 0.2 s to finish" in reason for reason in why)
        assert any("no worker runs the weights" in reason for reason in why)

    play(story, workers=1)


def test_a_dead_workers_stream_is_not_continued_by_another_model(play):
    async def story(s):
        prompts = await s.streams(6, 3000)
        update = asyncio.ensure_future(s.rollout().run())
        await until(lambda: any(m.revision == 2 and m.state == "serving" for m in s.pool.members()))
        victim = next(m.worker for m in s.pool.members() if m.revision == 1 and m.state == "serving")
        s.front.engines[victim].kill("kill -9")
        await s.front.ended(*prompts)
        await update
        for name, prompt in prompts.items():
            tracked_wrong = s.front.finish[name] == "LENGTH" and len(s.front.tokens[name]) != 3000
            assert not tracked_wrong, prompt
        await until(lambda: s.revisions() == [2, 2, 2])

    play(story)


@pytest.mark.parametrize("most", [3, 6])
def test_a_new_worker_that_does_not_start_leaves_the_fleet_wholly_old_and_says_the_cause(play, most):
    async def story(s):
        s.host.broken.add(NEW)
        prompts = await s.streams(6, 600)
        update = s.rollout()
        await update.run()
        assert update.state == "rolled-back"
        assert "did not start: no such model" in update.cause
        assert s.revisions() == [1, 1, 1]
        assert s.least >= 2
        await s.front.ended(*prompts)
        assert all(len(s.front.tokens[name]) == 600 for name in prompts)

    play(story, most=most)


@pytest.mark.parametrize("most", [3, 6])
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_new_worker_lost_at_any_step_leaves_the_fleet_wholly_old(play, most, after):
    """`after`: how many workers have been replaced when a new one dies; at 0 it dies at its gate."""

    async def story(s):
        prompts = await s.streams(6, 1500)
        update = s.rollout()
        running = asyncio.ensure_future(update.run())
        if after == 0:
            await until(lambda: any(m.phase.startswith("showing") for m in s.pool.members()))
            victim = next(m for m in s.pool.members() if m.phase.startswith("showing"))
        else:
            await until(lambda: update.replaced >= after)
            victim = next(m for m in s.pool.members() if m.revision == 2 and m.state == "serving")
        if not running.done():
            s.front.engines[victim.worker].kill("kill -9")
        await running
        ends = [1, 1, 1] if update.state == "rolled-back" else [2, 2, 2]
        await until(lambda: s.revisions() == ends)  # an old one that was kept may be one too many, and drains
        assert (update.state == "rolled-back") == bool(update.cause)
        await s.front.ended(*prompts)

    play(story, most=most)


def test_an_old_worker_lost_meanwhile_is_replaced_and_the_update_goes_on(play):
    async def story(s):
        update = s.rollout()
        running = asyncio.ensure_future(update.run())
        await until(lambda: update.replaced >= 1)
        with suppress(StopIteration):
            victim = next(m for m in s.pool.members() if m.revision == 1 and m.state == "serving")
            s.front.engines[victim.worker].kill("kill -9")
        await running
        await until(lambda: s.revisions() == [2, 2, 2])
        assert update.state == "done"

    play(story)


def test_a_cancelled_update_is_rolled_back(play):
    async def story(s):
        update = s.rollout()
        running = asyncio.ensure_future(update.run())
        await until(lambda: update.replaced >= 1)
        update.cancel("an operator cancelled it")
        await running
        assert (update.state, update.cause) == ("rolled-back", "an operator cancelled it")
        assert s.revisions() == [1, 1, 1]
        with pytest.raises(BadInput, match="nothing to cancel"):
            update.cancel("again")

    play(story)


def test_a_rollback_is_tried_until_it_is_done(play):
    async def story(s):
        update = s.rollout()
        running = asyncio.ensure_future(update.run())
        await until(lambda: update.replaced >= 2)
        s.host.failures = 3
        update.cancel("an operator cancelled it")
        await running
        assert update.state == "rolled-back"
        assert s.revisions() == [1, 1, 1]

    play(story)


def test_without_room_a_later_worker_that_does_not_start_leaves_the_fleet_wholly_old(play):
    async def story(s):
        launch, starts = s.host.launch, itertools.count(1)

        async def second_fails(worker, kind, revision, say):
            if revision.model == NEW and next(starts) == 2:
                raise RuntimeError("no such model")
            return await launch(worker, kind, revision, say)

        s.host.launch = second_fails
        update = s.rollout()
        await update.run()
        assert (update.state, update.replaced > 0) == ("rolled-back", True)
        await until(lambda: s.revisions() == [1, 1, 1])

    play(story, most=3)


def test_a_restart_replaces_one_worker_and_its_streams_go_on(play):
    async def story(s):
        prompts = await s.streams(9, 900)
        restart = s.rollout(s.pool.revision, WorkerId("w1"))
        await restart.run()
        assert (restart.state, restart.replaced) == ("done", 1)
        assert sorted(m.worker for m in s.pool.members()) == ["w0", "w2", "w3"]
        assert s.least == 3
        await s.front.ended(*prompts)
        assert all(len(s.front.tokens[name]) == 900 for name in prompts)

    play(story)


@pytest.mark.parametrize("most", [3, 6])
def test_a_restart_whose_worker_does_not_start_changes_nothing_or_is_tried_again(play, most):
    async def story(s):
        s.host.failures = 1
        restart = s.rollout(s.pool.revision, WorkerId("w1"))
        await restart.run()
        assert (restart.state, "no such model" in restart.cause) == ("failed", True)
        await until(lambda: s.pool.serving == 3)
        assert (s.pool.state_of(WorkerId("w1")) == "serving") == (most == 6)

    play(story, most=most)


def test_an_evacuation_in_the_middle_of_an_update_goes_through_and_so_does_the_update(play):
    async def story(s):
        prompts = await s.streams(6, 800)
        update = s.rollout(s.revision(OLD))
        running = asyncio.ensure_future(update.run())
        await until(lambda: update.replaced >= 1)
        with suppress(StopIteration):
            s.pool.evacuate([next(m.worker for m in s.pool.members() if m.state == "serving")], 5.0, "a test")
        await running
        await until(lambda: s.revisions() == [2, 2, 2])
        assert update.state == "done"
        await s.front.ended(*prompts)
        assert all(len(s.front.tokens[name]) == 800 for name in prompts)

    play(story)


def test_the_only_worker_is_not_stopped_before_another_serves(play):
    async def story(s):
        prompts = await s.streams(2, 400)
        update = s.rollout()
        await update.run()
        assert update.state == "rolled-back"
        assert "w0 is the only one serving, and --max-workers 1 leaves no room" in update.cause
        assert s.pool.state_of(WorkerId("w0")) == "serving"
        await s.front.ended(*prompts)

    play(story, workers=1, most=1)


class Reign:
    """A core's end of a fleet whose cores die: its pool, and an operator's way to it."""

    def __init__(self, front, pool, revised=lambda model, flags: {}):
        from dataplane.live.control.fleet_state import DemandCount
        from dataplane.live.control.operations import Operations
        from dataplane.live.control.step_times import StepTimes
        from harness.bare_fleet import bare_facts

        facts = bare_facts()
        arrived = DemandCount()
        self.pool, self.events = pool, front.events
        step_times = StepTimes({}, front.events)
        self.operations = Operations(facts, front.core, pool, arrived, step_times, revised)

    def die_at(self, note):
        """Return an event: the core has come to its note of that number, and writes no more."""
        dead, count, write = asyncio.Event(), itertools.count(1), self.pool._record_file.note

        def noted(**facts):
            if next(count) >= note or dead.is_set():
                dead.set()
            else:
                write(**facts)

        self.pool._record_file.note = noted
        return dead

    async def order(self, what):
        if what == "restart":
            self.operations.updates.restart(WorkerId("w1"), 20.0)
            return
        await self.operations.updates.begin(NEW, None, 20.0)
        if what == "cancelled":
            rollout = self.operations.updates.rollout
            await until(lambda: rollout.replaced or not rollout.is_open)
            if rollout.state == "running":
                rollout.cancel("an operator cancelled it")

    def standing_of(self, revision):
        return sum(m.revision == revision and m.state == "serving" for m in self.pool.members())

    @property
    def standing(self):
        there = sorted((m.worker, m.revision) for m in self.pool.members() if m.state == "serving")
        is_settled = len(there) == len(list(self.pool.members())) == self.pool.wanted
        return there if is_settled else []


@pytest.fixture
def reigns(monkeypatch, tmp_path):
    """A fleet of two, whose first core dies at a note of it; how its rollout ends under the next."""
    from dataplane.live.control import updates
    from dataplane.live.pool import rollout
    from dataplane.processes import keeper

    monkeypatch.setattr(keeper, "PAUSES", keeper.Pauses(longest_s=0.01))
    monkeypatch.setattr(updates, "Rollout", partial(rollout.Rollout, gate_s=0.02))

    def run(what, most, note, **second):
        deaths, ends = Deaths(tmp_path / f"{what}-{most}-{note}"), []
        deaths.file.parent.mkdir()

        async def story():
            first = Reign(*await deaths.core(2, most))
            dead = first.die_at(note)
            ordered = asyncio.ensure_future(first.order(what))
            await until(
                lambda: dead.is_set() or (ordered.done() and not first.operations.updates.rollout.is_open)
            )
            has_died = dead.is_set()
            ordered.cancel()
            await deaths.die()
            next_one = Reign(*await deaths.core(2, most), **second)
            next_one.operations.updates.resume()
            left = next_one.operations.updates.rollout
            await until(lambda: left is None or not left.is_open)
            await until(lambda: next_one.standing)
            ends.append((has_died, left, dict(next_one.standing), next_one.pool.revision.number))

        deaths.played(story)
        return ends[0]

    return run


@pytest.mark.parametrize("most", [2, 4])
@pytest.mark.parametrize("what", ["update", "cancelled", "restart"])
def test_a_rollout_goes_on_to_its_end_wherever_its_core_dies(reigns, what, most):
    for note in itertools.count(1):
        has_died, left, standing, number = reigns(what, most, note)
        begun = left is not None  # else the core died before it had written that it had begun
        assert set(standing.values()) == {number}, f"at note {note}"
        if what == "update" and begun:
            assert (left.state, number) == ("done", 2)
        if what == "restart" and begun:
            assert left.state == "done"
            assert "w1" not in standing
        if not has_died:
            return  # it was over before


def test_what_a_new_core_cannot_go_on_with_leaves_the_fleet_as_it_is_and_says_why(reigns):
    def revised(model, flags):
        raise BadInput("update: the model is not there any more")

    for note in itertools.count(1):
        has_died, left, standing, _ = reigns("update", 2, note, revised=revised)
        assert len(standing) == 2
        if left is not None:
            assert left.state == "failed"
            assert "cannot go on with it: update: the model is not there" in left.cause
        if not has_died:
            return


async def brought_back(deaths, front):
    """The one request of the core that died, as its gateway brings it to the next, and its tokens so far."""
    from dataplane.live.ledger.request import CURRENT_TICKET

    (left,) = deaths.requests
    so_far = list(left.output_token_ids)
    left.ticket.requests.clear()
    CURRENT_TICKET.set(left.ticket)
    front.ends["r"] = asyncio.Event()
    await front.core.resume(left.request, so_far, left.first_token_s, 2)
    return left, so_far


@pytest.mark.parametrize("dies_too", [False, True])
def test_a_stream_goes_on_with_its_own_model_or_not_at_all_where_a_core_dies_in_an_update(
    monkeypatch, tmp_path, dies_too
):
    from dataplane.live.control import updates
    from dataplane.live.pool.rollout import Rollout

    monkeypatch.setattr(updates, "Rollout", partial(Rollout, gate_s=0.02))
    deaths = Deaths(tmp_path)

    async def story():
        first, pool = await deaths.core(2, 4)
        await first.send("r", [1, 2], max_tokens=100_000)
        await first.until("r", 3)
        old = first.core.requests.get("r").worker
        reign = Reign(first, pool)
        await reign.operations.updates.begin(NEW, None, 600.0)
        await until(lambda: pool.state_of(old) == "draining")
        await until(lambda: reign.standing_of(2) == 2)
        await deaths.die()
        if dies_too:
            deaths.engines[old].kill("kill -9")
        front, pool = await deaths.core(2, 4)
        Reign(front, pool).operations.updates.resume()
        left, so_far = await brought_back(deaths, front)
        if dies_too:
            await front.ended("r")
            assert "not known which weights" in left.ticket.failure
        else:
            await front.until("r", 3)
            assert front.core.requests.get("r").worker == old
            assert so_far + front.tokens["r"][:3] == alone([1, 2], len(so_far) + 3)
            await front.core.abandon(left.ticket)
        await until(lambda: pool.state_of(old) is None)

    deaths.played(story)


@pytest.mark.parametrize("in_update", [False, True])
def test_a_stream_outlives_its_core_and_every_worker_unless_its_weights_are_not_known(
    monkeypatch, tmp_path, in_update
):
    """A core that begins without a worker knows the weights of those before by its record."""
    from dataplane.live.pool import pool as pools
    from dataplane.live.pool.member import Revision

    monkeypatch.setattr(pools, "FIRST", Revision(1, "a model"))
    deaths = Deaths(tmp_path)

    async def story():
        first, pool = await deaths.core(1, 4)
        await first.send("r", [1, 2], max_tokens=300)
        await first.until("r", 3)
        if in_update:
            await Reign(first, pool).operations.updates.begin(NEW, None, 600.0)
            await until(lambda: '"rollout"' in deaths.file.read_text())
        await deaths.die()
        for engine in deaths.engines.values():
            engine.kill("kill -9")
        await until(lambda: all(engine.is_lost for engine in deaths.engines.values()))
        front, pool = await deaths.core(1, 4)
        assert not pool.serving
        left, so_far = await brought_back(deaths, front)
        await front.ended("r")
        if in_update:
            assert "not known which weights" in left.ticket.failure
        else:
            assert so_far + front.tokens["r"] == alone([1, 2], 300)

    deaths.played(story)
