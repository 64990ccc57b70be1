"""The pictures of the documentation that need a run: python examples/pictures/take.py [NAME ...]

report.png        the report of the demo's plan, in a browser (Chromium, by Playwright)
console-plan.png  the console's plan page, which has planned the demo's question
console-live.png  the console's live page: the demo's plan on emulated engines, under its own trace
move.json         a request that moves between two vLLM engines on CPU; draw.py makes move-timeline.svg of it

They lie in docs/pictures/. Without names all four are made. `make pictures` does what must come first.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/pictures"
DEMO, MODEL = ROOT / "tokenfleet-out/demo", ROOT / "tokenfleet-out/tiny-llama"
SIZE = 1200, 1150
QUESTION = "model=llama-3.1-70b&ttft=1.6s&tpot=75ms&gpu=a100&gpu=h100&gpu=h200"
BUSY_S = 1600.0, 1800.0  # of the sample trace, its peak among them
LETTERS = 256  # ids of the tiny model's tokens that stand for single bytes
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
PROMPT_TOKENS, BEFORE, SHOWN, LOOK_S = 6000, 60, 40, 0.004


@contextmanager
def page(width: int, height: int) -> Iterator[Page]:
    """A page of a browser of our own."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((found for name in names if (found := shutil.which(name))), None)
    if program is None:
        raise SystemExit("no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        opened = browser.new_page(viewport={"width": width, "height": height})
        opened.set_default_timeout(600_000)
        yield opened
        browser.close()


@contextmanager
def running(*words: str) -> Iterator[list[str]]:
    """`tokenfleet` with these words on free ports, once it is ready; yields the addresses it prints."""
    ports = [free_port(), free_port()]
    command = [sys.executable, "-m", "tokenfleet", *(word.format(*ports) for word in words)]
    with tempfile.TemporaryDirectory() as data:
        environment = os.environ | {"TOKENFLEET_DATA": data, "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            if not line.startswith("ready "):
                raise SystemExit(f"{' '.join(command)}: not ready: {line}")
            yield [word for word in line.split() if "://" in word]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def take_report() -> None:
    """The top of the demo's report."""
    with page(*SIZE) as shown:
        shown.goto(f"file://{DEMO}/report.html")
        shown.wait_for_load_state("networkidle")
        shown.screenshot(path=FOLDER / "report.png")


def take_plan() -> None:
    """The plan page once it has answered the demo's question."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running("api", "--port", "{0}", "--data", f"{folder}/plans") as (api,),
        page(*SIZE) as shown,
    ):
        shown.goto(f"{api}/plan?{QUESTION}")
        shown.click("#submit:enabled")
        shown.locator("#answer-title").wait_for()
        shown.locator("#progress").wait_for(state="hidden")
        shown.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        shown.screenshot(path=FOLDER / "console-plan.png")


def take_live() -> None:
    """The live page of the planned fleet after minutes of its own traffic."""
    words = ("--model", str(MODEL), "--plan", str(DEMO / "plan.json"), "--engine", "emulated")
    words += ("--port", "{0}", "--control-port", "{1}")
    with running("serve", *words) as (gateway, control), page(*SIZE) as shown:
        traffic = Thread(target=lambda: asyncio.run(busy(gateway)))
        traffic.start()
        shown.goto(f"{control}/live")
        shown.wait_for_timeout(1000 * (BUSY_S[1] - BUSY_S[0] - 5))
        shown.screenshot(path=FOLDER / "console-live.png")
        traffic.join()


async def busy(gateway: str) -> None:
    """Send the busiest minutes of the sample trace, each request when it is due."""
    with (ROOT / "examples/sample_trace.csv").open(newline="") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    begin_s, end_s = BUSY_S
    rows = [row for row in rows if begin_s <= row["arrival_s"] < end_s]
    draw, began_s = random.Random(0), time.monotonic()
    async with httpx.AsyncClient(
        base_url=gateway, timeout=600, limits=httpx.Limits(max_connections=None)
    ) as client:
        sent = []
        for row in rows:
            await asyncio.sleep(max(0.0, began_s + row["arrival_s"] - begin_s - time.monotonic()))
            prompt = [draw.randrange(2, LETTERS) for _ in range(int(row["prompt_tokens"]))]
            body = {
                "model": "tiny-llama",
                "prompt": prompt,
                "max_tokens": int(row["output_tokens"]),
                "ignore_eos": True,
            }
            sent.append(asyncio.create_task(client.post("/v1/completions", json=body)))
        for one in sent:
            one.cancel()


def record_move() -> None:
    """Move a running request between two vLLM engines, and note each copy and each token by the clock."""
    words = ("--model", str(MODEL), "--workers", "2", "--port", "{0}", "--control-port", "{1}")
    with running("serve", *words) as (gateway, control), httpx.Client(timeout=60) as client:
        for _ in range(3):  # the first copy between two engines opens their connection
            move = moved(client, gateway, control)
    (FOLDER / "move.json").write_text(json.dumps(move, indent=1) + "\n")


def moved(client: httpx.Client, gateway: str, control: str) -> dict[str, Any]:
    """One request that is moved while it decodes. Times are seconds from the order to move."""
    draw = random.Random(time.time_ns())
    prompt = [draw.randrange(2, LETTERS) for _ in range(PROMPT_TOKENS)]
    body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
    tokens: list[float] = []
    looks: list[tuple[float, dict[str, Any]]] = []
    watching = Thread(target=order_and_watch, args=(control, looks))
    with client.stream("POST", f"{gateway}/v1/completions", json=body) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                tokens.append(time.time())
                if len(tokens) == BEFORE:
                    watching.start()
    watching.join()
    return told(tokens, looks)


def order_and_watch(control: str, looks: list[tuple[float, dict[str, Any]]]) -> None:
    """Order the move of the only request, and look at it until it is over."""
    with httpx.Client(base_url=control, timeout=60) as operator:
        (request,) = operator.get("/v1/requests").json()["requests"]
        ask = {"request_id": request["request_id"], "target": "w1" if request["worker"] == "w0" else "w0"}
        move = operator.post("/v1/migrations", json=ask).raise_for_status().json()
        while move["open"]:
            time.sleep(LOOK_S)
            move = operator.get(f"/v1/migrations/{move['id']}").json()
            looks.append((time.time(), move))


def told(tokens: list[float], looks: list[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """What a drawing needs of a move."""
    last = looks[-1][1]
    if last["outcome"] != "done":
        raise SystemExit(f"the request did not move: {last['outcome']}: {last['reason']}")
    start_s = last["started_s"]
    cut_s = last["finished_s"] - last["downtime_s"]
    times = [round(at - start_s, 4) for at in tokens]
    gaps = [(b - a, a, b) for a, b in pairwise(times)]
    end_s = last["finished_s"] - start_s
    around = [gap for gap in gaps if gap[2] >= 0 and gap[1] <= end_s + 0.1]
    _, pause_begin, pause_end = max(around)
    usual_s = statistics.median(gap for gap, _, _ in gaps)
    first, rest = times[BEFORE - SHOWN], next((i for i, at in enumerate(times) if at > end_s), len(times) - 1)
    return {
        "source": last["source"],
        "target": last["target"],
        "prompt_tokens": PROMPT_TOKENS,
        "moved_bytes": last["bytes"],
        "tail_tokens": last["tail_tokens"],
        "stages": stages_of(looks, start_s, cut_s),
        "cut_over_s": round(cut_s - start_s, 4),
        "resumed_s": round(end_s, 4),
        "downtime_s": round(last["downtime_s"], 4),
        "pause_s": [pause_begin, pause_end],
        "usual_s": round(usual_s, 4),
        "from_s": first,
        "to_s": times[min(rest + SHOWN, len(times) - 1)],
        "tokens_s": times,
    }


def stages_of(looks: list[tuple[float, dict[str, Any]]], start_s: float, cut_s: float) -> list[list[float]]:
    """Begin, end and tokens of each copy before the switch-over; a copy ends where a look first shows it."""
    stages: list[list[float]] = []
    begin_s = start_s
    for at_s, move in looks:
        for tokens in move["stages_tokens"][len(stages) :]:
            end_s = min(at_s, cut_s)
            stages.append([round(begin_s - start_s, 4), round(end_s - start_s, 4), tokens])
            begin_s = end_s
    return stages


TAKES = {"report": take_report, "plan": take_plan, "live": take_live, "move": record_move}

if __name__ == "__main__":
    for name in sys.argv[1:] or TAKES:
        TAKES[name]()
        print(f"{name}: done")
