"""Traces that were sent to the service, kept by their content: the same trace twice is one file."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from controlplane.errors import BadInput
from dataplane.http.rules import UnknownName
from tokenfleet.service.data_folder import Database
from tokenfleet.traces import Trace, read_trace

SAMPLE = "sample_trace.csv"


class Uploads:
    """The traces in `folder`; at most about `most_bytes` of those that no unfinished job needs."""

    def __init__(self, folder: Path, database: Database, most_bytes: int) -> None:
        self._folder, self._database, self._most_bytes = folder, database, most_bytes
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, upload: str) -> Path:
        """The path of a trace."""
        return self._folder / f"{upload}.trace"

    def find(self, upload: str) -> dict[str, Any]:
        """A trace's summary (forms.TraceSummary). Raises UnknownName, also for one whose file was removed."""
        rows = self._database.rows("SELECT summary FROM uploads WHERE id = ?", upload)
        if not rows or not self.path(upload).is_file():
            raise UnknownName(f"trace {upload}: is not here (any more); send it with POST /v1/traces")
        with self._database.transaction() as cursor:
            cursor.execute("UPDATE uploads SET used_s = ? WHERE id = ?", (time.time(), upload))
        summary: dict[str, Any] = json.loads(rows[0]["summary"])
        return summary

    def draft(self) -> Path:
        """An empty file next to the others, for a body to be written to."""
        handle, path = tempfile.mkstemp(prefix="part-", dir=self._folder)
        os.close(handle)
        return Path(path)

    def keep(
        self, draft: Path, name: str, warnings: Sequence[str] = (), drawn: Trace | None = None
    ) -> dict[str, Any]:
        """Read and keep a drafted trace, and return its summary; the draft is gone afterwards.

        `drawn`: the trace, where the draft holds only what it was drawn from. Raises BadInput, naming
        `name`, for what is no trace.
        """
        try:
            digest = hashlib.sha256()
            with draft.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
                os.fsync(file.fileno())
            upload = digest.hexdigest()[:16]
            trace = drawn or _read(draft, name)
            trace.warnings[:0] = warnings
            summary = summary_of(trace, upload, name, draft.stat().st_size)
            with self._database.transaction() as cursor:
                # Under the database's lock, so that the file is not removed between these two.
                os.replace(draft, self.path(upload))
                cursor.execute(
                    "INSERT INTO uploads (id, summary, bytes, used_s) VALUES (?, ?, ?, ?)"
                    " ON CONFLICT (id) DO UPDATE SET used_s = excluded.used_s",
                    (upload, json.dumps(summary), summary["bytes"], time.time()),
                )
        finally:
            draft.unlink(missing_ok=True)
        self._let_go(upload)
        return self.find(upload)

    def keep_text(self, text: str, name: str, drawn: Trace | None = None) -> dict[str, Any]:
        """Keep a trace that came as text, or the text that one was `drawn` from."""
        draft = self.draft()
        try:
            draft.write_text(text, encoding="utf-8")
            return self.keep(draft, name, drawn=drawn)
        finally:
            draft.unlink(missing_ok=True)

    def _let_go(self, newest: str) -> None:
        """Remove the files longest unused beyond the bound; jobs over keep their summary and their plan."""
        rows = self._database.rows(
            "SELECT id, bytes FROM uploads WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE"
            " state IN ('queued', 'running') AND (upload = uploads.id OR instr(question, uploads.id)))"
            " ORDER BY used_s DESC"
        )
        total = 0
        for row in rows:
            path = self.path(row["id"])
            total += row["bytes"] if path.is_file() else 0
            if total > self._most_bytes and row["id"] != newest:
                path.unlink(missing_ok=True)


def summary_of(trace: Trace, upload: str, name: str, size: int) -> dict[str, Any]:
    """A trace as forms.TraceSummary says it."""
    return {
        "id": upload,
        "name": name,
        "format": trace.format,
        "requests": len(trace),
        "rate_rps": float(f"{trace.workload.rate_rps:.6g}"),
        "duration_s": round(trace.workload.duration_s, 3),
        "bytes": size,
        "warnings": trace.warnings,
    }


def sample_path() -> Path | None:
    """The trace that ships: in the wheel, or in the repository next to the package; None if not here."""
    package = Path(__file__).resolve().parents[1]
    places = (package / "_sample" / SAMPLE, package.parent / "examples" / SAMPLE)
    return next((place for place in places if place.is_file()), None)


def _read(path: Path, name: str) -> Trace:
    """The trace, with the sender's name for it in every message."""
    try:
        trace = read_trace(path)
    except BadInput as error:
        raise BadInput(str(error).replace(str(path), name)) from None
    trace.warnings[:] = [warning.replace(str(path), name) for warning in trace.warnings]
    return trace
