"""Notices that a machine goes away, read from a file or from a cloud's metadata service.

`--reclaim-notice` names the source, and each worker's own machine reads it:

    file:/path                                       if it is there: {"deadline_s": 30, "workers": ["w0"]}
    http://169.254.169.254/latest/meta-data/spot/instance-action              AWS: 404 until there is one
    http://metadata.google.internal/computeMetadata/v1/instance/preempted     Google: TRUE or FALSE
    http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01    Azure: Preempt, Terminate

A file without `workers` is for all of its machine; without `deadline_s`, and where a cloud gives no time, it
is `GIVEN_S` from when it was first seen.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from controlplane.errors import BadInput

READ_S = 1.0
GIVEN_S = 30.0
AWS, GOOGLE, AZURE = (
    "/latest/meta-data/spot/instance-action",
    "/computeMetadata/v1/instance/preempted",
    "/metadata/scheduledevents",
)
EXPECTED = f"expected file:PATH, or an address that ends in {AWS}, {GOOGLE} or {AZURE}"


@dataclass(frozen=True, slots=True)
class Notice:
    """A machine goes away at `at_s` (Unix time; None: not told)."""

    why: str
    at_s: float | None = None


def checked_source(source: str) -> str:
    """The source, where it is one. Raises BadInput."""
    url = urllib.parse.urlsplit(source)
    if url.scheme == "file" and url.path.startswith("/") and not url.netloc:
        return source
    if url.scheme in ("http", "https") and url.netloc and url.path.rstrip("/") in (AWS, GOOGLE, AZURE):
        return source
    raise BadInput(f"--reclaim-notice: {EXPECTED}, got {source!r}")


def read_notice(source: str, worker: str) -> Notice | None:
    """A source's notice for this machine and a worker on it, if any. Blocks, for a few seconds at most.

    Raises OSError where it cannot be asked, BadInput where its answer cannot be read.
    """
    url = urllib.parse.urlsplit(source)
    base, path = f"{url.scheme}://{url.netloc}", url.path.rstrip("/")
    if url.scheme == "file":
        file = Path(url.path)
        return of_file(file.read_text(encoding="utf-8"), worker, time.time()) if file.exists() else None
    if path == AWS:
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        token = _ask(f"{base}/latest/api/token", ttl, "PUT")
        said = _ask(source, {"X-aws-ec2-metadata-token": token} if token else {})
        return None if said is None else of_aws(said)
    if path == GOOGLE:
        return of_google(_ask(source, {"Metadata-Flavor": "Google"}) or "")
    azure = {"Metadata": "true"}
    name = _ask(f"{base}/metadata/instance/compute/name?api-version=2020-07-01&format=text", azure)
    return of_azure(_ask(source, azure) or "{}", name or "")


def _ask(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """The reply's text; None where there is no such thing."""
    request = urllib.request.Request(url, method=method, headers=dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=READ_S) as reply:
            return str(reply.read(1 << 20).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        if error.code in (404, 405):
            return None
        raise


def of_file(text: str, worker: str, now_s: float) -> Notice | None:
    """Of our own file."""
    said = _object(text or "{}", "interruption notice")
    workers, seconds = said.get("workers"), said.get("deadline_s")
    if not (workers is None or (isinstance(workers, list) and all(isinstance(w, str) for w in workers))):
        raise BadInput(f"interruption notice: workers: expected a list of names, got {workers!r}")
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not (seconds is None or (is_number and 0 <= seconds < 1e9)):
        raise BadInput(f"interruption notice: deadline_s: expected seconds, got {seconds!r}")
    if workers is not None and worker not in workers:
        return None
    return Notice("the notice file names it", None if seconds is None else now_s + float(seconds))


def of_aws(text: str) -> Notice:
    """Of AWS' instance action: {"action": "terminate", "time": "2027-09-18T08:22:00Z"}."""
    said = _object(text, "AWS instance-action")
    try:
        at = datetime.fromisoformat(str(said["time"]))
        at_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (KeyError, ValueError, OverflowError):
        raise BadInput(f"AWS instance-action: time: expected one, got {said.get('time')!r}") from None
    return Notice(f"AWS will {said.get('action', 'stop')} its machine", at_s)


def of_google(text: str) -> Notice | None:
    """Of Google's `preempted`."""
    return Notice("Google preempts its machine") if text.strip().upper() == "TRUE" else None


def of_azure(text: str, machine: str) -> Notice | None:
    """Of Azure's scheduled events, which are those of a whole group of machines."""
    events = _object(text, "Azure scheduledevents").get("Events", [])
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise BadInput(f"Azure scheduledevents: Events: expected a list of events, got {events!r}")
    for event in events:
        resources = event.get("Resources")
        ours = not machine or not isinstance(resources, list) or machine in resources
        if ours and event.get("EventType") in ("Preempt", "Terminate"):
            why = f"Azure: {event['EventType']}"
            try:
                return Notice(why, parsedate_to_datetime(str(event.get("NotBefore"))).timestamp())
            except (ValueError, TypeError, OverflowError):
                return Notice(why)  # it has begun
    return None


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise BadInput(f"{what}: expected a JSON object, got {text[:80]!r}")
    return said
