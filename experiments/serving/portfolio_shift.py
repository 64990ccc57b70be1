"""A load that moves from one model to another: how many cold starts it takes until the GPUs have followed.

    python experiments/serving/portfolio_shift.py [--quick] [--cold-start S] [--rounds N] [--format FORM]

Three models behind `serve --portfolio`, emulated workers of four seats each, which take --cold-start seconds
(60) to start: `chat` and `code` were planned with two workers, `mail` with one, and there are six GPUs. A
rate that takes three workers goes to `chat` and an eighth of it to the others; then chat and code swap,
`--rounds` times. The stabilization window is the default, 80 s (`--quick`: one swap, 12 s, 10 s to start).

* cold starts: from a swap until the model that is busy now serves with as many workers as the other had (four
  at most); the bar is two, for the worst swap.
* lost: requests that failed, broke off or were refused.
* At the end `mail` is sent ten times what its share carries: it gets 429, the others none.
* GPUs held over the limit: the most at any look, ten a second; workers that start or leave are counted.

Arrivals are Poisson's, of 100 tokens; the machine is shared by three cores, their controllers and the
client, so seconds are upper bounds.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from experiments.lib.public_data import ROOT
from experiments.lib.results import bar, flags, show
from harness.served import Server, fleet, tiny_model
from tokenfleet.profiles.library import read_profile, write_profile

GPUS, SEATS, TOKENS = 6, 4, 100
PLANNED = {"chat": 2, "code": 2, "mail": 1}
BUSY_RPS, QUIET_RPS, FLOOD_RPS = 8.0, 1.0, 80.0
BUSY_WORKERS, MOST_WORKERS = 3, 4
STEADY_S, FLOOD_S = 60.0, 15.0
LIBRARY = ROOT / "profiles" / "h100-sxm" / "llama-3.1-8b_tp1.yaml"


def portfolio(folder: Path, cold_start_s: float) -> Path:
    """A portfolio's plan of such models, whose workers have few seats."""
    few = folder / "few.yaml"
    few.write_text(re.sub(r"max_seqs: \d+", f"max_seqs: {SEATS}", LIBRARY.read_text()))
    profile = read_profile(few)
    whole = folder / "whole.yaml"
    write_profile(profile, whole)
    import yaml

    part = {"gpu": profile.gpu, "tp_degree": 1, "usd_per_hour": 5.0, "role": "any"}
    planned = {
        "model": profile.model,
        "gpu": profile.gpu,
        "tp_degree": 1,
        "kind": str(profile.source.kind),
        "date": str(profile.source.date),
        "profile": json.loads(json.dumps(yaml.safe_load(whole.read_text()), default=str)),
    }

    def plan(workers: int) -> dict[str, Any]:
        return {
            "schema": "tokenfleet.plan/1",
            "feasible": True,
            "fleet": [part | {"workers": workers, "gpus": workers, "usd_per_hour": 5.0 * workers}],
            "workers": workers,
            "gpus": workers,
            "usd_per_hour": 5.0 * workers,
            "policy": "spread",
            "engine_mode": str(profile.engine.mode),
            "slo": {"ttft_s": 2.0, "tpot_s": 0.05},
            "attainment": {"target": 0.99},
            "ttft_s": None,
            "tpot_s": None,
            "schedule_detail": {"paid": {"cold_start_s": cold_start_s}},
            "inputs": {"rate_rps": None, "profiles": [planned]},
        }

    models = [{"name": name, "plan": plan(workers)} for name, workers in PLANNED.items()]
    limits = [{"name": f"gpus.{profile.gpu}", "most": GPUS}]
    path = folder / "portfolio.json"
    path.write_text(json.dumps({"schema": "tokenfleet.portfolio-plan/1", "models": models, "limits": limits}))
    return path


class Load:
    """Requests at a rate for each model, until it is stopped; what became of them, by model and status."""

    def __init__(self, server: Server, http: aiohttp.ClientSession, rng: np.random.Generator) -> None:
        self._server, self._http, self._rng = server, http, rng
        self.rates: dict[str, float] = {}
        self.ended: Counter[tuple[str, str]] = Counter()
        self._open: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Send until cancelled."""
        due = dict.fromkeys(PLANNED, time.perf_counter())
        while True:
            now_s = time.perf_counter()
            for model, rate in self.rates.items():
                while due[model] <= now_s:
                    due[model] = max(due[model], now_s - 1.0) + float(self._rng.exponential(1.0 / rate))
                    self._send(model)
            await asyncio.sleep(0.01)

    def _send(self, model: str) -> None:
        task = asyncio.ensure_future(self._one(model))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _one(self, model: str) -> None:
        body = {"model": model, "prompt": [5] * 20, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        try:
            async with self._http.post(f"{self._server.gateway}/v1/completions", json=body) as reply:
                text = await reply.text()
                whole = reply.status == 200 and text.rstrip().endswith("[DONE]") and '"error"' not in text
                self.ended[model, "ok" if whole else str(reply.status)] += 1
        except (aiohttp.ClientError, TimeoutError):
            self.ended[model, "broken"] += 1

    async def settle(self) -> None:
        """Return once every request has ended."""
        await asyncio.gather(*self._open)


class Watch:
    """The front's view, looked at ten times a second."""

    def __init__(self, server: Server) -> None:
        self._server, self.over = server, 0.0

    async def look(self) -> dict[str, Any]:
        """The models by name, with workers that serve; `over` keeps the most that was held of the limit."""
        seen = await asyncio.to_thread(self._server.ask, "GET", "/v1/fleet")
        self.over = max([self.over, *(one["held"] / one["most"] for one in seen["limits"])])
        shares = {one["name"]: one for one in seen["shares"]}
        return {one["name"]: one | shares[one["name"]] for one in seen["models"]}

    async def until_serving(self, model: str, workers: int, most_s: float) -> float:
        """The seconds until a model serves with so many workers; infinite after `most_s`."""
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < most_s:
            seen = (await self.look())[model]
            if seen["workers"]["serving"] >= workers and seen["share"] >= workers:
                return time.perf_counter() - began_s
            await asyncio.sleep(0.1)
        return float("inf")


async def shifts(
    server: Server, cold_start_s: float, rounds: int, seed: int
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """A row for each swap, and the figures against their bars."""
    rows: list[dict[str, Any]] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as http:
        load, watch = Load(server, http, np.random.default_rng(seed)), Watch(server)
        load.rates = {"chat": BUSY_RPS, "code": QUIET_RPS, "mail": QUIET_RPS}
        sending = asyncio.ensure_future(load.run())
        busy, quiet = "chat", "code"
        await watch.until_serving(busy, BUSY_WORKERS, STEADY_S + 2 * cold_start_s)
        for number in range(rounds):
            await asyncio.sleep(STEADY_S)
            if number == 0:
                load.ended.clear()  # of the start, which is not looked at
            had = (await watch.look())[busy]["workers"]["serving"]
            load.rates[busy], load.rates[quiet] = QUIET_RPS, BUSY_RPS
            busy, quiet = quiet, busy
            took_s = await watch.until_serving(busy, min(had, MOST_WORKERS), 10 * cold_start_s)
            row = {"swap": number + 1, "to": busy, "workers": had, "seconds": round(took_s, 1)}
            rows.append(row | {"cold starts": round(took_s / cold_start_s, 2)})
        before = load.ended.copy()
        load.rates = {"chat": QUIET_RPS, "code": QUIET_RPS, "mail": FLOOD_RPS}
        await asyncio.sleep(FLOOD_S)
        sending.cancel()
        await load.settle()
    since = load.ended - before
    refused = sum(n for (model, how), n in since.items() if how != "ok" and model != "mail")
    lost = sum(n for (_, how), n in before.items() if how != "ok")
    return rows, {
        "cold starts until the GPUs have followed, worst swap": bar(
            max(row["seconds"] for row in rows) / cold_start_s, 2.0
        ),
        f"requests lost of {before.total()}": bar(lost, 0),
        f"others' requests refused while mail got {since['mail', '429']} times 429": bar(refused, 0),
        "429 of the model out of its share": bar(since["mail", "429"], 1, at_least=True),
        "most GPUs held at any look, over the limit": bar(watch.over, 1.0),
    }


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--cold-start", type=float, default=60.0, metavar="S")
    parser.add_argument("--rounds", type=int, default=2, metavar="N")
    asked = parser.parse_args()
    cold_start_s, rounds = (10.0, 1) if asked.quick else (asked.cold_start, asked.rounds)
    with tiny_model() as model:
        words = ["--portfolio", str(portfolio(model.parent, cold_start_s)), "--engine", "emulated"]
        words += ["--queue", "600", "--queue-wait", "2m"]
        words += ["--scale-in-after", "12s"] if asked.quick else []
        with fleet(model, *words, engine_flags=()) as server:
            rows, bars = asyncio.run(shifts(server, cold_start_s, rounds, asked.seed))
    return show("a load that moves from model to model", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
