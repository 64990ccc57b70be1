"""Chunked engines in both planes, whole and split: what waits, when steps end, and who goes where."""

import asyncio
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from made_gateways import made_request, worker_info
from made_profiles import made_profile

from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.step import StepModel
from controlplane.placement.ledger import HELD
from controlplane.placement.lengths import LengthTable
from controlplane.placement.queue import QueueSettings
from controlplane.types import EngineMode, Slo, WorkerId
from controlplane.workload import Workload
from dataplane.live.ledger.admission import Admission
from dataplane.live.ledger.placement import Placement
from dataplane.live.ledger.request import Ticket, Tracked
from dataplane.simulated.cluster import advance, view_all
from dataplane.simulated.simulate import WorkerSpec, prepare

CHUNKED = made_profile(
    StepModel(0.02, 1e-4, 1e-3, 1e-6, 1e-8),
    KvModel(1_000_000, 16, 1),  # room for all
    EngineLimits(mode=EngineMode.CHUNKED, max_batched_tokens=512, max_seqs=64),
)
SPLIT = replace(CHUNKED, engine=replace(CHUNKED.engine, mode=EngineMode.SPLIT))
FLEETS = {"split": (SPLIT, ("prefill", "decode", "decode")), "whole": (CHUNKED, ("any", "any"))}
EASY = Slo(9.0, 1.0)
TICK_S, LOOK = 1e-3, 4  # a look each fourth tick


def a_load(seed):
    """Prompts of up to five steps, some urgent, that queue; outputs of all lengths."""
    rng = np.random.default_rng(seed)
    n = 40
    classes = [EASY, Slo(4.0, 0.2), Slo(2.0, 0.2)]
    return Workload(
        np.sort(rng.integers(1, 12_000, n)) * TICK_S, rng.integers(20, 2400, n), rng.integers(2, 150, n),
        slo_class=rng.integers(0, 3, n), priority=(rng.random(n) < 0.2).astype(np.int64),
    ), classes  # fmt: skip


class Engine:
    """An engine that chunks as vLLM does. `waiting` has each request with its tokens still to prefill."""

    def __init__(self, name, placement):
        self.name, self.placement = name, placement
        self.waiting, self.decoding, self.step = [], [], None

    def add(self, tracked, left):
        if left == 0:
            self.decoding.append(tracked)
            return
        self.waiting.append([tracked, left])

    def begin(self, now_s):
        """Those begun go on, then high priority before normal, each as they came."""
        self.waiting.sort(key=lambda one: (one[1] == one[0].prompt_tokens, -one[0].ticket.priority))
        budget, chunks, squares = 512 - len(self.decoding), [], 0
        for entry in self.waiting:
            tracked, left = entry
            chunk = min(left, budget)
            if chunk == 0:
                break
            begun = tracked.prompt_tokens - left
            squares += (begun + chunk) ** 2 - begun**2
            chunks.append((entry, chunk))
            budget -= chunk
        prefill = sum(chunk for _, chunk in chunks)
        context = sum(t.context_tokens for t in self.decoding)
        if prefill or self.decoding:
            ends_s = now_s + CHUNKED.step.step_s(prefill, len(self.decoding), context, squares)
            self.step = ends_s, chunks, list(self.decoding)

    def end(self):
        """The step's end, and those who got their first token; the next one has not begun."""
        ends_s, chunks, inside = self.step
        self.step, fresh = None, []
        for entry, chunk in chunks:
            entry[1] -= chunk
            if entry[1] == 0:
                self.waiting.remove(entry)
                fresh.append(entry[0])
        got = [(t, 1) for t in inside + fresh]
        self.placement.advance(self.name, got, ends_s, None, sum(chunk for _, chunk in chunks))
        for t, _ in got:
            t.output_token_ids.append(7)
        return ends_s, fresh

    def go_on(self, now_s):
        self.placement.begin_step(self.name, now_s)
        self.begin(now_s)


class Gateway:
    """The gateway's admission and placement before such engines."""

    def __init__(self, load, classes, profile, roles):
        self.load, self.classes, self.now_s, self.placed, self.seen = load, classes, 0.0, [], []
        self.placement = Placement(
            {"": profile}, len(roles), LengthTable.constant(40), np.random.default_rng(0)
        )
        self.admission = Admission(
            QueueSettings(), self.placement, self.begin, lambda *_: None, clock=lambda: self.now_s
        )
        self.engines = []
        for w, role in enumerate(roles):
            self.placement.attach(worker_info(str(w), 64, max_batched_tokens=512), "", role)
            self.engines.append(Engine(WorkerId(str(w)), self.placement))

    async def begin(self, tracked, worker):
        self.put(tracked, worker, self.now_s)

    def put(self, tracked, worker, now_s):
        at, has_kv = self.engines[int(worker)], bool(tracked.output_token_ids)
        self.placed.append((int(tracked.id), int(worker)))
        self.placement.put(tracked, worker, has_kv, now_s)
        tracked.worker = worker
        at.add(tracked, 0 if has_kv else tracked.prompt_tokens)
        if at.step is None:
            at.begin(now_s)

    def step(self, at):
        """End an engine's step; those prefilled go on, on a decode worker where there are some."""
        ends_s, fresh = at.end()
        going = [t for t in fresh if self.placement.hands_over(t)]
        at.decoding += [t for t in fresh if t not in going]
        over = [t for t in at.decoding if len(t.output_token_ids) == self.load.output_tokens[int(t.id)]]
        at.decoding = [t for t in at.decoding if t not in over]
        for t in over:
            self.placement.forget(t)
        for t in going:
            self.put(t, self.placement.choose_decode(t, ends_s), ends_s)
        at.go_on(ends_s)

    async def play(self):
        load = self.load
        coming = deque(
            Tracked(
                made_request(r, int(load.prompt_tokens[r])),
                Ticket(str(r), "", self.classes[load.slo_class[r]], int(load.priority[r])),
                load.arrival_s[r], 40,
            )
            for r in range(len(load))
        )  # fmt: skip
        tick = 0
        while coming or any(at.step for at in self.engines) or self.placement.ledger.workers["queued"].any():
            tick += 1
            self.now_s = tick * TICK_S
            while (at := min(self.engines, key=ends_s)).step is not None and ends_s(at) <= self.now_s:
                self.step(at)
            while coming and coming[0].arrival_s <= self.now_s:
                await self.admission.take_in(coming.popleft())
            self.admission.look()
            for _ in range(4):  # let the dispatcher offer whom it holds
                await asyncio.sleep(0)
            if tick % LOOK == 0:
                self.seen.append(seen(self.placement.ledger))
        self.admission.close()


def ends_s(engine):
    return np.inf if engine.step is None else engine.step[0]


def seen(led):
    at = led.workers[0]
    return int(at["queued"]), int(at["queued_tokens"]), float(at["boundary_s"])


def simulated(load, classes, profile, roles, looks):
    """Who was placed where, in order, and what waits at the first worker at each look."""
    workers = [WorkerSpec(profile, role=role) for role in roles]
    run = prepare(
        load, workers, classes, "spread", settings=None, predictor=LengthTable.constant(40),
        predicted_tokens=None, seed=0, patience=4.0, max_misses=None,
    )  # fmt: skip
    placed, all_seen, there, rows = [], [], np.full(len(load), -1), run.ledger.requests
    for look in range(1, looks + 1):
        now_s = look * LOOK * TICK_S
        advance(run.ledger, run.engines, run.cluster, run.rules, now_s)
        view_all(run.ledger, run.engines, now_s)
        now = np.where(rows["phase"] == HELD, -1, rows["worker"])
        moved = (now != there) & (now >= 0) & (load.arrival_s <= now_s)
        placed += [(int(r), int(now[r])) for r in np.flatnonzero(moved)]
        all_seen.append(seen(run.ledger))
        there = now
    advance(run.ledger, run.engines, run.cluster, run.rules, np.inf)
    assert run.outcome().complete
    return placed, all_seen


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fleet", FLEETS)
def test_both_planes_count_what_is_left_of_a_prompt_in_progress_and_place_alike(fleet, seed):
    load, classes = a_load(seed)

    async def live():
        gateway = Gateway(load, classes, *FLEETS[fleet])
        await gateway.play()
        return gateway

    gateway = asyncio.run(live())
    placed, looks = simulated(load, classes, *FLEETS[fleet], len(gateway.seen))
    assert {w for _, w in placed} == set(range(len(FLEETS[fleet][1])))
    pairs = list(zip(gateway.seen, looks, strict=True))
    other = [(look, *pair) for look, pair in enumerate(pairs) if pair[1][0] and not same(*pair)]
    assert len(other) < 2, other[:5]
    assert sum(theirs[1] > 0 for _, theirs in pairs) > 100 / LOOK
    assert sorted(gateway.placed) == sorted(placed)


def same(ours, theirs):
    return ours[:2] == theirs[:2] and ours[2] == pytest.approx(theirs[2], abs=1e-6)
