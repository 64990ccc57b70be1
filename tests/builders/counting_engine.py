"""An engine of a few lines that counts as vLLM does for Prometheus; its step times are known."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np

from controlplane.perfmodel.calibration import Interval
from controlplane.perfmodel.engine import EngineLimits
from controlplane.perfmodel.step import StepModel

LIMITS = EngineLimits(max_batched_tokens=2048, max_seqs=256)
EVERY_S = 3.0


@lru_cache
def counted(
    truth: StepModel,
    rate,
    seconds,
    seed=0,
    noise=0.03,
    prompt=600.0,
    output=120.0,
    spread=0.6,
    frontend_s=0.0,
):
    """Intervals of an engine that serves Poisson arrivals whose rate follows `rate(t)`."""
    rng = np.random.default_rng(seed)
    now, waiting, running, scrapes, at_s = 0.0, [], [], [], EVERY_S
    total = np.zeros(
        10
    )  # gaps, gaps_s, firsts, firsts_s, prefill, finished, their prefill_s, tokens, queue_s
    next_s = rng.exponential(1 / rate(0.0))

    def scrape(t):
        held = sum(r["context"] for r in running)
        scrapes.append((t, total.copy(), len(running), held))

    scrape(0.0)
    while now < seconds:
        while next_s <= now:
            size = np.exp(0.6 * rng.standard_normal(2))
            tokens, out = int(max(prompt * size[0], 2)), int(max(output * size[1], 2))
            waiting.append({"at": next_s, "prompt": tokens, "left": tokens, "out": out, "context": 0})
            next_s += rng.exponential(1 / rate(next_s))
        if not waiting and not running:
            while at_s <= next_s:
                scrape(at_s)
                at_s += EVERY_S
            now = next_s
            continue
        decoding = [r for r in running if r["left"] == 0]
        budget, chunks, squares = LIMITS.max_batched_tokens - len(decoding), [], 0.0
        for r in [r for r in running if r["left"]] + waiting:
            size = min(r["left"], budget)
            if size <= 0:
                break
            r.setdefault("start", now)
            done = r["prompt"] - r["left"]
            squares += (done + size) ** 2 - done**2
            chunks.append((r, size))
            budget -= size
        P, C = sum(size for _, size in chunks), sum(r["context"] for r in decoding)
        step_s = float(truth.step_s(P, len(decoding), C, squares)) * np.exp(noise * rng.standard_normal())
        now += step_s
        for r in decoding:
            total[0] += 1
            total[1] += now - r["last"]
        for r, size in chunks:
            if r in waiting:
                waiting.remove(r)
                running.append(r)
            r["left"] -= size
            r["context"] += size
            if r["left"] == 0:
                r["first"] = now
                total[2:5] += 1, now + frontend_s - r["at"], r["prompt"]
        for r in [*decoding, *(r for r, _ in chunks if r["left"] == 0)]:
            r["last"] = now
            r["context"] += 1
            r["out"] -= 1
            if r["out"] == 0:
                running.remove(r)
                total[5:9] += 1, r["first"] - r["start"], r["prompt"], r["start"] - r["at"]
        while at_s <= now:
            scrape(at_s)
            at_s += EVERY_S
    return [
        Interval(t1 - t0, *(b - a)[:5], (n0 + n1) / 2, n1 - n0, (c0 + c1) / 2, *(b - a)[5:9])
        for (t0, a, n0, c0), (t1, b, n1, c1) in pairwise(scrapes)
    ]
