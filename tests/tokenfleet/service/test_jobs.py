"""Plan jobs as they are kept: whatever is killed when, each has at most one result and none is lost."""

import json
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from by_day import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controlplane.errors import BadInput
from tokenfleet.service.data_folder import VERSIONS, Database, RunnerLock
from tokenfleet.service.jobs import MOST_ATTEMPTS, Jobs, Plans

PLAN = {"schema": "tokenfleet.plan/1", "feasible": True, "workers": 2, "fleet": [], "gpus": 2}


def database(folder):
    made = Database(folder / "tokenfleet.db")
    made._writer.execute(
        "PRAGMA synchronous = OFF"
    )  # no power is lost here, and thousands of syncs take a minute
    with made.transaction() as cursor:
        cursor.execute("INSERT OR IGNORE INTO uploads VALUES ('u', '{\"name\": \"u\"}', 0, 0)")
    return made


def add(jobs, most_queued=100, key=None):
    return jobs.add({"seed": 1}, "u", 60.0, most_queued, key)


def test_a_job_is_claimed_run_and_kept_with_its_plan(tmp_path):
    db = database(tmp_path)
    jobs = Jobs(db)
    name = add(jobs)["id"]
    claimed = jobs.claim()
    assert (claimed.id, claimed.attempt, claimed.question) == (name, 1, {"seed": 1})
    assert jobs.claim() is None
    jobs.advance(claimed, 0.5, "half", 7)
    assert (jobs.find(name)["progress"], jobs.find(name)["simulations"]) == (0.5, 7)
    assert jobs.finish(claimed, "done", "done", json.dumps(PLAN))
    view = jobs.find(name)
    assert (view["state"], view["progress"], view["brief"]["workers"]) == ("done", 1.0, 2)
    assert json.loads(Plans(db).text(name)) == PLAN
    assert jobs.runs(name) == [(1, "done")]


def test_the_queue_is_bounded_and_a_key_gives_the_same_job_even_when_it_is_full(tmp_path):
    jobs = Jobs(database(tmp_path))
    first = add(jobs, most_queued=1, key="k")
    assert add(jobs, most_queued=1) is None
    assert add(jobs, most_queued=1, key="k")["id"] == first["id"]
    assert jobs.counts() == {"queued": 1}


def test_who_asks_for_a_job_does_not_wait_for_a_commit(tmp_path):
    db = database(tmp_path)
    jobs = Jobs(db)
    name = add(jobs)["id"]
    with db.transaction() as cursor, ThreadPoolExecutor(1) as others:
        cursor.execute("UPDATE jobs SET says = 'half'")
        assert others.submit(jobs.find, name).result(timeout=30)["says"] == "waiting for its turn"
    assert jobs.find(name)["says"] == "half"


def test_many_claimers_never_win_the_same_job(tmp_path):
    jobs = Jobs(database(tmp_path))
    names = {add(jobs)["id"] for _ in range(40)}
    won, lock = [], threading.Lock()

    def claim():
        own = Jobs(Database(tmp_path / "tokenfleet.db"))  # as another process would have it
        while (claimed := own.claim()) is not None:
            with lock:
                won.append(claimed.id)

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), set(won)) == (40, names)


def test_a_job_that_takes_its_service_down_each_time_fails_at_last(tmp_path):
    jobs = Jobs(database(tmp_path))
    name = add(jobs)["id"]
    for _ in range(MOST_ATTEMPTS):
        assert jobs.find(name)["state"] == "queued"
        assert jobs.claim() is not None
        assert jobs.requeue() == 1
    view = jobs.find(name)
    assert (view["state"], "killed 3 times" in view["error"]) == ("failed", True)
    assert jobs.claim() is None


def test_an_attempt_put_back_on_purpose_does_not_count_against_the_job(tmp_path):
    jobs = Jobs(database(tmp_path))
    name = add(jobs)["id"]
    for _ in range(MOST_ATTEMPTS + 2):
        jobs.release(jobs.claim())
    assert jobs.find(name)["state"] == "queued"


def test_the_runners_lock_has_one_holder(tmp_path):
    one, other = RunnerLock(tmp_path), RunnerLock(tmp_path)
    assert (one.take(), other.take()) == (True, False)
    one.release()
    assert other.take()
    other.release()


def test_a_newer_database_is_refused_in_one_line_and_left_alone(tmp_path):
    path = tmp_path / "tokenfleet.db"
    Database(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute(f"PRAGMA user_version = {len(VERSIONS) + 1}")
    raw.close()
    with pytest.raises(BadInput, match=rf"schema {len(VERSIONS) + 1}, this version knows {len(VERSIONS)}"):
        Database(path)


def test_what_is_no_database_is_refused(tmp_path):
    path = tmp_path / "tokenfleet.db"
    path.write_text("no database at all, but long enough to be looked at as one" * 20)
    with pytest.raises(BadInput, match="cannot be opened as a database"):
        Database(path)


def test_an_equal_plan_is_kept_once_under_its_first_name(tmp_path):
    db = database(tmp_path)
    jobs, plans = Jobs(db), Plans(db)
    name = add(jobs)["id"]
    jobs.finish(jobs.claim(), "done", "done", json.dumps(PLAN))
    assert plans.keep(PLAN, "served") == name
    other = plans.keep(PLAN | {"workers": 3}, "served")
    assert other != name
    assert json.loads(plans.text(other))["workers"] == 3


@examples(25, stateful_step_count=30)
class KilledServices(RuleBasedStateMachine):
    """Any order of orders, claims, ends, cancellations, kills and late answers of killed attempts."""

    @initialize()
    def start(self):
        import tempfile
        from pathlib import Path

        self.folder = tempfile.TemporaryDirectory()
        self.db = database(Path(self.folder.name))
        self.jobs, self.plans = Jobs(self.db), Plans(self.db)
        self.ordered, self.live, self.dead, self.completed = set(), [], [], {}

    @rule()
    def order(self):
        self.ordered.add(add(self.jobs)["id"])

    @rule()
    def claim(self):
        claimed = self.jobs.claim()
        if claimed is not None:
            assert claimed.id not in {c.id for c in self.live}
            self.live.append(claimed)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), state=st.sampled_from(["done", "failed"]))
    def finish(self, data, state):
        claimed = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        plan = json.dumps(PLAN | {"gpus": claimed.attempt}) if state == "done" else None
        assert self.jobs.finish(claimed, state, state, plan, None if plan else "why")
        if plan:
            self.completed[claimed.id] = claimed.attempt

    @precondition(lambda self: self.ordered)
    @rule(data=st.data())
    def cancel(self, data):
        self.jobs.cancel(data.draw(st.sampled_from(sorted(self.ordered))))

    @rule()
    def kill(self):
        self.dead += self.live
        self.live = []
        self.jobs.requeue()

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def late_answer(self, data):
        claimed = data.draw(st.sampled_from(self.dead))
        assert not self.jobs.finish(claimed, "done", "done", json.dumps(PLAN | {"gpus": -1}))

    @invariant()
    def none_is_lost_and_none_has_two_results(self):
        if not hasattr(self, "jobs"):
            return
        views = {view["id"]: view for view in self.jobs.newest(500)}
        assert set(views) == self.ordered
        assert {n for n, v in views.items() if v["state"] == "running"} == {c.id for c in self.live}
        for name, view in views.items():
            text = self.plans.text(name)
            kept = None if text is None else json.loads(text)
            assert (kept is not None) == (view["state"] == "done") == (name in self.completed)
            if kept is not None:
                assert kept["gpus"] == self.completed[name]
            assert [outcome for _, outcome in self.jobs.runs(name)].count("done") == (name in self.completed)

    def teardown(self):
        if hasattr(self, "db"):
            self.db.close()
            self.folder.cleanup()


TestKilledServices = KilledServices.TestCase
