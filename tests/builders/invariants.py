"""Invariants of a simulated cluster: they hold at every instant, whatever has happened to it.

`check` recounts everything the ledger keeps as a running sum, from the lists of who is where.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from controlplane.perfmodel.coefficients import BLOCK_TOKENS, CHUNKED, KV_BLOCKS, MAX_SEQS, MODE
from controlplane.placement.ledger import (
    DECODE_ONLY,
    DECODING,
    DONE,
    HELD,
    NONE,
    OFF,
    ON_LINK,
    PREFILLING,
    QUEUED,
    generated,
)
from controlplane.placement.memory import free_blocks
from dataplane.simulated.cluster import view_all
from dataplane.simulated.records import PREFILL_STEP
from dataplane.simulated.simulate import RunState


def check(state: RunState, now_s: float) -> None:
    """Assert that no request is lost or doubled, and that every sum and every block is accounted for."""
    led, eng, clock = state.ledger, state.engines, state.cluster.clock[0]
    view_all(led, eng, now_s)
    place: dict[int, str] = {}

    def put(r: int, where: str) -> None:
        assert r not in place, f"request {r} is {place[r]} and {where}"
        place[r] = where

    for w in range(len(led.workers)):
        for r in _running(state, w):
            put(r, f"admitted at {w}")
        for p in range(2):
            for r in _linked(state, led.queue_head[p, w], led.queue_tail[p, w]):
                put(r, f"queued at {w}")
                assert led.requests["priority"][r] == p
                assert led.requests["phase"][r] == QUEUED
                assert led.requests["worker"][r] == w
        for r in _on_link(state, w):
            put(r, f"loading at {w}")
        _check_worker(state, w)
    queue = state.cluster.queue
    held = [r for at in range(4) for r in _linked(state, queue.head[at], queue.tail[at])]
    for r in held:
        put(r, "held")
    assert len(held) == queue.waiting
    for r in state.cluster.transit[: int(clock["transit_n"])]:
        put(int(r), "on its way")
    for r, where in place.items():
        if where == "held" or where == "on its way":
            assert led.requests["phase"][r] == HELD
    finished = np.flatnonzero(~np.isnan(eng.requests["finish_s"]))
    assert set(finished) == set(np.flatnonzero(led.requests["phase"] == DONE))
    for r in finished:
        put(int(r), "finished")
    assert set(place) == set(state.arrived.tolist()), "a request that arrived is nowhere"
    late = state.outcome()
    assert int(eng.total["misses"][0]) >= int((~late.met & ~np.isnan(late.finish_s)).sum())


def _check_worker(state: RunState, w: int) -> None:
    led, eng = state.ledger, state.engines
    worker, requests, k = led.workers[w], led.requests, led.coefficients[led.workers["variant"][w]]
    running = _running(state, w)
    assert len(running) <= k[MAX_SEQS]
    assert all(requests["worker"][r] == w for r in running)
    decoding = [r for r in running if requests["phase"][r] == DECODING]
    prefilling = [r for r in running if requests["phase"][r] == PREFILLING]
    assert sorted(decoding + prefilling) == sorted(running)
    waiting = [r for p in range(2) for r in _linked(state, led.queue_head[p, w], led.queue_tail[p, w])]
    on_link = _on_link(state, w)
    assert eng.workers["loading"][w] == len(on_link)
    assert all(requests["phase"][r] == PREFILLING and requests["worker"][r] == w for r in on_link)
    if led.host.chunks.tokens:
        assert led.host.links["waiting"][w] == sum(int(led.host.loads[r]) for r in waiting)

    @cache
    def tokens(r: int) -> int:
        return int(requests["prompt"][r]) + int(generated(led, r))

    assert worker["decoding"] == len(decoding)
    assert worker["context"] == sum(map(tokens, decoding))
    assert worker["queued"] == len(prefilling) + len(waiting) + len(on_link)
    assert worker["queued_context"] == sum(map(tokens, prefilling + waiting + on_link))
    to_prefill = sum(tokens(r) - int(requests["cached"][r]) for r in waiting)
    assert worker["queued_shared"] == sum(int(requests["shared"][r]) for r in waiting)
    assert all(0 <= requests["shared"][r] <= requests["cached"][r] < tokens(r) for r in waiting)
    for r in prefilling + on_link:
        to_prefill += tokens(r) - int(eng.requests["computed"][r]) - int(eng.requests["chunk"][r])
    assert worker["queued_tokens"] == to_prefill
    if worker["status"] == OFF:
        assert not running
        assert not waiting
        assert not on_link

    # Blocks used and free add up to the whole unless a lone request outgrew it.
    block, capacity = int(k[BLOCK_TOKENS]), int(k[KV_BLOCKS])

    def blocks(r: int) -> int:
        if requests["phase"][r] == DECODING:
            return -(-tokens(r) // block)
        done = tokens(r)
        if k[MODE] == CHUNKED:
            done = int(eng.requests["computed"][r]) + int(eng.requests["chunk"][r])
        return -(-done // block)

    used = sum(map(blocks, running)) + int(eng.workers["reserved_blocks"][w])
    if led.caches.tokens:  # what several use is there once
        used = capacity - int(free_blocks(led.caches, w, 1))
    assert used <= capacity or len(running) == 1
    if worker["role"] == DECODE_ONLY:
        assert not prefilling
    if eng.workers["activity"][w] == PREFILL_STEP:
        assert prefilling


def _running(state: RunState, w: int) -> list[int]:
    return [int(r) for r in state.ledger.running[w, : state.ledger.workers["running_n"][w]]]


def _on_link(state: RunState, w: int) -> list[int]:
    """Requests that load from host memory at a worker."""
    heads, tails = state.ledger.queue_head, state.ledger.queue_tail
    return _linked(state, heads[ON_LINK, w], tails[ON_LINK, w]) if len(heads) > ON_LINK else []


def _linked(state: RunState, head: int, tail: int) -> list[int]:
    rows, r = [], int(head)
    while r != NONE:
        rows.append(r)
        assert len(rows) <= len(state.ledger.requests), "a queue runs in a circle"
        r = int(state.ledger.requests["next"][r])
    assert (rows[-1] if rows else NONE) == tail
    return rows
