"""The plans that are kept: those of jobs, and those a fleet was served under."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

from tokenfleet.service.database import Database
from tokenfleet.service.jobs import BRIEF, keep_plan


@dataclass(frozen=True, slots=True)
class Serving:
    """A stretch of time in which a fleet ran under a plan; `ended_s` None while it runs (Unix seconds)."""

    plan: str
    started_s: float
    ended_s: float | None


class Plans:
    """The kept plans of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def text(self, name: str) -> str | None:
        """A plan's JSON as it was made; None if none is kept under that name."""
        rows = self._database.rows("SELECT plan FROM plans WHERE id = ?", name)
        return str(rows[0]["plan"]) if rows else None

    def find(self, name: str) -> dict[str, Any] | None:
        """A plan; None if none is kept under that name."""
        text = self.text(name)
        found: dict[str, Any] | None = None if text is None else json.loads(text)
        return found

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
        """When a fleet ran under a plan, oldest first."""
        rows = self._database.rows(
            "SELECT plan, started_s, ended_s FROM servings WHERE plan = ? ORDER BY number", plan
        )
        return [Serving(row["plan"], row["started_s"], row["ended_s"]) for row in rows]


def _brief(plan: dict[str, Any]) -> str:
    return json.dumps({field: plan.get(field) for field in BRIEF})
