"""Plan jobs and kept plans in the database: each change of a job (queued, claimed, ended) is one transaction.

`claim` begins a job, and no two callers can win it. `finish` ends it: it writes the plan and the state
together, and only while its attempt is still the job's present one. So whatever is killed in between, a job
has at most one result, and a job without one is queued again by `requeue`.

Kept plans are those of jobs and those that a fleet was served under.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenfleet.planning.plan_file import PlanBrief, PlanFile, parse_plan
from tokenfleet.service.data_folder import Database
from tokenfleet.service.forms import command_of

MOST_ATTEMPTS = 3  # a job that takes the service down with it is not begun for ever
BRIEF = tuple(PlanBrief.model_fields)
PORTFOLIO = "portfolio"  # in the question of a job of several models, and whence its answer is

_JOB = """
    SELECT jobs.*, uploads.summary AS trace, plans.brief AS brief FROM jobs
    JOIN uploads ON uploads.id = jobs.upload LEFT JOIN plans ON plans.id = jobs.id
"""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A job to be run now, `attempt` counting from 1."""

    id: str
    attempt: int
    question: dict[str, Any]
    upload: str
    timeout_s: float


class Jobs:
    """The jobs of one database. Times are Unix seconds."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
        self,
        question: Mapping[str, Any],
        upload: str,
        timeout_s: float,
        most_queued: int,
        idempotency_key: str | None = None,
    ) -> dict[str, Any] | None:
        """A new job, or the one this key has made before; None when as many wait as may."""
        with self._database.transaction() as cursor:
            if idempotency_key is not None:
                row = cursor.execute(f"{_JOB} WHERE jobs.idempotency_key = ?", (idempotency_key,)).fetchone()
                if row is not None:
                    return _view(row)
            waiting = cursor.execute("SELECT count(*) FROM jobs WHERE state = 'queued'").fetchone()[0]
            if waiting >= most_queued:
                return None
            name = secrets.token_hex(8)
            cursor.execute(
                "INSERT INTO jobs (id, idempotency_key, state, question, upload, timeout_s, created_s)"
                " VALUES (?, ?, 'queued', ?, ?, ?, ?)",
                (name, idempotency_key, json.dumps(question), upload, timeout_s, time.time()),
            )
            return _view(cursor.execute(f"{_JOB} WHERE jobs.id = ?", (name,)).fetchone())

    def find(self, job: str) -> dict[str, Any] | None:
        """A job without its plan; None if there is none of that id."""
        rows = self._database.rows(f"{_JOB} WHERE jobs.id = ?", job)
        return _view(rows[0]) if rows else None

    def newest(self, limit: int, state: str | None = None, kind: str = "plan") -> list[dict[str, Any]]:
        """The last jobs of plans, or of portfolios, newest first."""
        where, values = ("AND state = ?", [state]) if state else ("", [])
        of_kind = f"(json_extract(question, '$.{PORTFOLIO}') IS NOT NULL) = ?"
        query = f"{_JOB} WHERE {of_kind} {where} ORDER BY number DESC LIMIT ?"
        return [_view(row) for row in self._database.rows(query, kind == PORTFOLIO, *values, limit)]

    def counts(self) -> dict[str, int]:
        """The number of jobs in each state."""
        rows = self._database.rows("SELECT state, count(*) AS n FROM jobs GROUP BY state")
        return {row["state"]: row["n"] for row in rows}

    def claim(self) -> Claimed | None:
        """Begin the job that has waited longest; None when none waits."""
        with self._database.transaction() as cursor:
            row = cursor.execute(
                "UPDATE jobs SET state = 'running', attempts = attempts + 1, started_s = ?, progress = 0,"
                " simulations = 0, says = 'starting' WHERE number ="
                " (SELECT number FROM jobs WHERE state = 'queued' ORDER BY number LIMIT 1) RETURNING *",
                (time.time(),),
            ).fetchone()
            if row is None:
                return None
            cursor.execute(
                "INSERT INTO runs (job, attempt, started_s) VALUES (?, ?, ?)",
                (row["id"], row["attempts"], row["started_s"]),
            )
            question = json.loads(row["question"])
            return Claimed(row["id"], row["attempts"], question, row["upload"], row["timeout_s"])

    def advance(self, job: Claimed, progress: float, text: str, simulations: int) -> None:
        """Note how far a running job is."""
        with self._database.transaction() as cursor:
            _change(cursor, job, progress=progress, says=text, simulations=simulations)

    def finish(
        self, job: Claimed, state: str, text: str, plan: str | None = None, error: str | None = None
    ) -> bool:
        """End an attempt, its plan with it; False if it is not the job's present one (nothing is written)."""
        now_s = time.time()
        with self._database.transaction() as cursor:
            whole = {"progress": 1.0} if state == "done" else {}
            changed = _change(cursor, job, state=state, says=text, error=error, finished_s=now_s, **whole)
            if changed and plan is not None:
                keep_plan(cursor, job.id, PORTFOLIO if PORTFOLIO in job.question else "job", plan, now_s)
            _end_run(cursor, job.id, job.attempt, state if changed else "superseded", now_s)
            return changed

    def cancel(self, job: str) -> None:
        """Cancel a job: at once while it waits, through its runner while it runs."""
        with self._database.transaction() as cursor:
            cursor.execute(
                "UPDATE jobs SET state = 'cancelled', says = 'cancelled before it began', finished_s = ?"
                " WHERE id = ? AND state = 'queued'",
                (time.time(), job),
            )
            cursor.execute("UPDATE jobs SET cancel = 1 WHERE id = ? AND state = 'running'", (job,))

    def to_cancel(self) -> set[str]:
        """Running jobs whose cancellation was asked for."""
        asked = self._database.rows("SELECT id FROM jobs WHERE state = 'running' AND cancel")
        return {row["id"] for row in asked}

    def release(self, job: Claimed) -> None:
        """Put an attempt back that was interrupted on purpose; it does not count."""
        with self._database.transaction() as cursor:
            text = "interrupted; waiting to be begun again"
            _change(cursor, job, state="queued", says=text, progress=0)
            _end_run(cursor, job.id, job.attempt, "released", time.time())

    def requeue(self) -> int:
        """Queue again what a killed service left running; only the holder of the runner's lock may.

        A job asked to be cancelled is cancelled; one whose every attempt went down with the service fails.
        """
        now_s = time.time()
        with self._database.transaction() as cursor:
            unfinished = cursor.execute(
                "SELECT id, attempts, cancel FROM jobs WHERE state = 'running'"
            ).fetchall()
            for row in unfinished:
                killed = cursor.execute(
                    "SELECT count(*) FROM runs WHERE job = ? AND (outcome IS NULL OR outcome = 'killed')",
                    (row["id"],),
                ).fetchone()[0]
                state, text, error = "queued", "its service was killed; waiting to be begun again", None
                if row["cancel"]:
                    state, text = "cancelled", "cancelled"
                elif killed >= MOST_ATTEMPTS:
                    state, text = "failed", "failed"
                    error = f"the service was killed {killed} times while this job ran"
                ended_s = None if state == "queued" else now_s
                cursor.execute(
                    "UPDATE jobs SET state = ?, says = ?, error = ?, finished_s = ?, progress = 0"
                    " WHERE id = ?",
                    (state, text, error, ended_s, row["id"]),
                )
                _end_run(cursor, row["id"], row["attempts"], "killed", now_s)
            return len(unfinished)

    def runs(self, job: str) -> list[tuple[int, str | None]]:
        """Every attempt at a job and how it ended."""
        rows = self._database.rows("SELECT attempt, outcome FROM runs WHERE job = ? ORDER BY attempt", job)
        return [(row["attempt"], row["outcome"]) for row in rows]


def keep_plan(cursor: sqlite3.Cursor, name: str, source: str, plan: str, made_s: float) -> None:
    """Keep a plan under its name, with its one-line summary for lists."""
    whole = json.loads(plan)
    brief = _brief(whole)
    if source == PORTFOLIO:
        names = [model["name"] for model in whole["models"]]
        brief = json.dumps({"models": names, "usd_per_hour": whole["usd_per_hour"]})
    cursor.execute(
        "INSERT OR IGNORE INTO plans (id, source, made_s, brief, plan) VALUES (?, ?, ?, ?, ?)",
        (name, source, made_s, brief, plan),
    )


def _change(cursor: sqlite3.Cursor, job: Claimed, **columns: object) -> bool:
    """Set columns of a running job; False, and nothing is set, where this is not its present attempt."""
    sets = ", ".join(f"{name} = ?" for name in columns)
    query = f"UPDATE jobs SET {sets} WHERE id = ? AND attempts = ? AND state = 'running'"
    return cursor.execute(query, (*columns.values(), job.id, job.attempt)).rowcount > 0


def _end_run(cursor: sqlite3.Cursor, job: str, attempt: int, outcome: str, now_s: float) -> None:
    cursor.execute(
        "UPDATE runs SET ended_s = ?, outcome = ? WHERE job = ? AND attempt = ? AND outcome IS NULL",
        (now_s, outcome, job, attempt),
    )


_SHOWN: Sequence[str] = (
    "id", "state", "progress", "says", "error", "created_s", "started_s", "finished_s", "attempts",
)  # fmt: skip


def _view(row: sqlite3.Row) -> dict[str, Any]:
    """A job as JSON says it (forms.JobBrief, or forms.PortfolioJobBrief)."""
    question, trace = json.loads(row["question"]), json.loads(row["trace"])
    view = {name: row[name] for name in _SHOWN} | {
        "question": question,
        "brief": json.loads(row["brief"]) if row["brief"] else None,
    }
    if PORTFOLIO in question:
        return view
    of_plan = {"simulations": row["simulations"], "command": command_of(question, trace["name"])}
    return view | of_plan | {"trace": trace}


@dataclass(frozen=True, slots=True)
class Serving:
    """A stretch of time in which a fleet ran under a plan; `ended_s` None while it runs (Unix seconds)."""

    started_s: float
    ended_s: float | None


class Plans:
    """The kept plans of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def text(self, name: str, of_portfolio: bool = False) -> str | None:
        """A plan's JSON as it was made, or that of a portfolio; None if none is kept under that name."""
        query = "SELECT plan FROM plans WHERE id = ? AND (source = ?) = ?"
        rows = self._database.rows(query, name, PORTFOLIO, of_portfolio)
        return str(rows[0]["plan"]) if rows else None

    def find(self, name: str) -> PlanFile | None:
        """A plan; None if none is kept under that name. Raises BadInput for one that cannot be read."""
        text = self.text(name)
        return None if text is None else parse_plan(json.loads(text), f"plan {name}")

    def keep(self, plan: dict[str, Any], source: str) -> str:
        """Keep a plan and return its name: that of the kept plan it equals, else one made of its content."""
        text = json.dumps(plan)
        for row in self._database.rows("SELECT id, plan FROM plans WHERE brief = ?", _brief(plan)):
            if json.loads(row["plan"]) == plan:
                return str(row["id"])
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        with self._database.transaction() as cursor:
            keep_plan(cursor, name, source, text, time.time())
        return name

    def begin_serving(self, plan: str) -> int:
        """Note that a fleet runs under a kept plan from now on; returns the serving's number.

        One that a killed fleet left open ends here: a folder is one fleet's.
        """
        with self._database.transaction() as cursor:
            cursor.execute("UPDATE servings SET ended_s = ? WHERE ended_s IS NULL", (time.time(),))
            cursor.execute("INSERT INTO servings (plan, started_s) VALUES (?, ?)", (plan, time.time()))
            return int(cursor.lastrowid or 0)

    def end_serving(self, number: int) -> None:
        """Note that it does no longer."""
        with self._database.transaction() as cursor:
            cursor.execute("UPDATE servings SET ended_s = ? WHERE number = ?", (time.time(), number))

    def last_served(self) -> str | None:
        """The plan a fleet ran under last; None if none ever did."""
        rows = self._database.rows("SELECT plan FROM servings ORDER BY number DESC LIMIT 1")
        return str(rows[0]["plan"]) if rows else None

    def servings(self, plan: str) -> list[Serving]:
        """The stretches of time in which a fleet ran under a plan, oldest first."""
        query = "SELECT started_s, ended_s FROM servings WHERE plan = ? ORDER BY number"
        return [Serving(*row) for row in self._database.rows(query, plan)]


def _brief(plan: dict[str, Any]) -> str:
    return json.dumps({field: plan.get(field) for field in BRIEF})
