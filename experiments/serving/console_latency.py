"""How soon does the console's live page show what has happened?

    python experiments/serving/console_latency.py [--quick] [--seed N] [--format table|json]

A real Chromium watches a fleet of three emulated workers while streams run. From the moment an event was
recorded (its own `at_s`) to the second animation frame after its line is in the page, both on this machine's
clock. Decisions come one by one at random gaps, moves are real ones of running requests, a burst comes as
fast as the API takes it, and for a change of scale the time is until the tile says the new number.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
from playwright.sync_api import Page, sync_playwright

from experiments.lib.results import bar, flags, show
from harness.served import MODEL, Server, fleet, tiny_model

BAR_S = 1.0
EVENTS, QUICK_EVENTS = 100, 50
MOVES, QUICK_MOVES = 20, 5
BURST, QUICK_BURST = 200, 50
SCALES, QUICK_SCALES = 10, 4
STREAMS = 24
BROWSER_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip

# Notes when each decision's line, and each new text of the first tile, has been painted.
WATCH = """() => {
  window.painted = {};
  window.tiles = [];
  const after = (note) => requestAnimationFrame(() => requestAnimationFrame(() => note(Date.now() / 1e3)));
  new MutationObserver((changes) => {
    for (const line of changes.flatMap((change) => [...change.addedNodes])) {
      after((at) => (window.painted[line.dataset.id] = at));
    }
  }).observe(document.getElementById("decisions"), { childList: true });
  const tile = document.querySelector("#tiles b");
  new MutationObserver(() => {
    const text = tile.textContent;
    after((at) => window.tiles.push([text, at]));
  }).observe(tile, { childList: true, characterData: true, subtree: true });
}"""


@contextmanager
def watching(server: Server) -> Iterator[Page]:
    """The live page, open and noting what it shows."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("no Chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(BROWSER_FLAGS))
        page = browser.new_page()
        page.goto(f"{server.control}/live")
        page.locator("#decisions li").first.wait_for()
        page.evaluate(WATCH)
        yield page
        browser.close()


@contextmanager
def streams(server: Server) -> Iterator[None]:
    """Requests that run as long as this is open."""
    is_over = threading.Event()
    body = {"model": MODEL, "prompt": "x " * 50, "max_tokens": 2000, "ignore_eos": True, "stream": True}

    def one() -> None:
        while not is_over.is_set():
            with httpx.stream("POST", f"{server.gateway}/v1/completions", json=body, timeout=60) as reply:
                for _ in reply.iter_lines():
                    if is_over.is_set():
                        return

    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(one) for _ in range(STREAMS)]
        try:
            yield
        finally:
            is_over.set()
    for stream in running:
        stream.result()


def advise(server: Server, reason: str) -> None:
    """A decision that is only recorded."""
    decision = {"workers": 3, "advisory": True, "reason": reason}
    server.ask("POST", "/v1/decisions/scale", decision)


def move_one(server: Server, rng: np.random.Generator) -> None:
    """Move a request that runs, if there is one to move just now."""
    running = [r for r in server.ask("GET", "/v1/requests")["requests"] if r["output_tokens"] > 0]
    if running:
        request = running[int(rng.integers(len(running)))]["request_id"]
        try:
            server.ask("POST", "/v1/migrations", {"request_id": request})
        except OSError:  # it ended meanwhile
            return


def recorded(server: Server, after_id: int) -> list[dict[str, Any]]:
    """Events later than that id, from the stream that programs read."""
    found: list[dict[str, Any]] = []
    newest = server.ask("GET", "/v1/fleet")["decisions"][-1]["id"]
    headers = {"last-event-id": str(after_id)}
    with httpx.stream("GET", f"{server.control}/v1/events", headers=headers, timeout=30) as reply:
        for line in reply.iter_lines() if newest > after_id else ():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
                if found[-1]["id"] >= newest:
                    break
    return found


def shown(page: Page, events: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds from each event's record to its painted line; waits until every line is there."""
    ids = [event["id"] for event in events]
    page.wait_for_function("(ids) => ids.every((id) => id in window.painted)", arg=ids, timeout=60_000)
    painted = page.evaluate("window.painted")
    return [painted[str(event["id"])] - event["at_s"] for event in events]


def rescale(server: Server, page: Page, workers: int, after_id: int) -> float:
    """Seconds from a scale order's record until the tile says the new number."""
    server.ask("POST", "/v1/fleet/scale", {"workers": workers})
    order = next(event for event in recorded(server, after_id) if event["kind"] == "scale")
    says = f"of {workers}"
    page.wait_for_function(
        "(says) => window.tiles.some(([text]) => text.endsWith(says))", arg=says, timeout=60_000
    )
    at_s = next(at for text, at in page.evaluate("window.tiles") if text.endswith(says))
    page.evaluate("window.tiles = []")
    return float(at_s - order["at_s"])


def measured(server: Server, quick: bool, seed: int) -> list[dict[str, Any]]:
    """A row for each kind of event."""
    rng = np.random.default_rng(seed)
    rows = []

    def add(what: str, latencies_s: Sequence[float]) -> None:
        latencies = 1e3 * np.array(latencies_s)
        row = {"what": what, "events": len(latencies)}
        row |= {"p50 (ms)": float(np.median(latencies)), "p99 (ms)": float(np.quantile(latencies, 0.99))}
        rows.append(row | {"max (ms)": float(latencies.max())})

    def last_id() -> int:
        return int(server.ask("GET", "/v1/fleet")["decisions"][-1]["id"])

    with watching(server) as page, streams(server):
        start = last_id()
        for turn in range(QUICK_EVENTS if quick else EVENTS):
            advise(server, f"one by one, {turn}")
            time.sleep(float(rng.uniform(0.02, 0.25)))
        add("decision", shown(page, [e for e in recorded(server, start) if e["kind"] == "advice-scale"]))

        start, wanted, deadline_s = last_id(), QUICK_MOVES if quick else MOVES, time.monotonic() + 60.0
        moved: list[dict[str, Any]] = []
        while len(moved) < wanted and time.monotonic() < deadline_s:
            move_one(server, rng)
            time.sleep(0.1)
            moved = [e for e in recorded(server, start) if e["kind"] == "migrate"]
        add("move", shown(page, moved))

        start, many = last_id(), QUICK_BURST if quick else BURST
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: advise(server, f"burst, {i}"), range(many)))
        add(
            "decision in a burst",
            shown(page, [e for e in recorded(server, start) if e["kind"] == "advice-scale"]),
        )

        scales = []
        for turn in range(QUICK_SCALES if quick else SCALES):
            scales.append(rescale(server, page, 4 if turn % 2 == 0 else 3, last_id()))
        add("scale, until the tile", scales)
    return rows


def main() -> int:
    asked = flags(__doc__).parse_args()
    with tiny_model() as model, fleet(model, "--engine", "emulated", "--workers", "3") as server:
        rows = measured(server, asked.quick, asked.seed)
    worst_s = max(row["max (ms)"] for row in rows) / 1e3
    bars = {"event to page, worst (s)": bar(worst_s, BAR_S)}
    return show("console latency", rows, bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
