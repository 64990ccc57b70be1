"""A made profile for simulated moves, and the check that every count of a run is that of its lists."""

import numpy as np
from made_profiles import made_profile

from controlplane.migration.move import Stage
from controlplane.perfmodel import coefficients as speed
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.ledger import DECODING, DONE, HELD, NONE, PREFILLING, QUEUED, SERVING, generated
from controlplane.types import EngineMode
from dataplane.simulated.kv import blocks_of
from dataplane.simulated.records import IDLE


def profile(mode=EngineMode.PREFILL_FIRST, capacity=1024, seqs=16, kv_bytes=1_000_000):
    return made_profile(
        StepModel(0.02, 1e-4, 1e-3, 1e-5),
        KvModel(capacity, 16, kv_bytes),
        EngineLimits(mode=mode, max_batched_tokens=512, max_seqs=seqs),
        PrefillModel(0.01, 2e-4),
    )


def check(run, moves):
    """Every request in one place, and every count that of the lists."""
    led, eng, clu = run.ledger, run.engines, run.cluster
    phase, worker = led.requests["phase"], led.requests["worker"]
    arrived = len(run.arrived)
    rooms = {w: [m.room for m in moves.open if m.target == w and m.room] for w in range(len(led.workers))}
    promised = {w: [room.tokens for room in rooms[w]] for w in rooms}
    for w in range(len(led.workers)):
        row, there = led.workers[w], eng.workers[w]
        running = [int(r) for r in led.running[w, : row["running_n"]]]
        assert len(set(running)) == len(running)
        assert all(worker[r] == w and phase[r] in (DECODING, PREFILLING) for r in running)
        queue = []
        for p in (1, 0):
            r = int(led.queue_head[p, w])
            while r != NONE:
                assert worker[r] == w
                assert phase[r] == QUEUED
                queue.append(r)
                r = int(led.requests["next"][r])
        decoding = [r for r in running if phase[r] == DECODING]
        prefilling = [r for r in running if phase[r] == PREFILLING]
        length = led.requests["prompt"] + led.requests["key"]
        assert row["decoding"] == len(decoding)
        assert row["context"] == sum(int(led.requests["prompt"][r]) + generated(led, r) for r in decoding)
        assert row["queued"] == len(queue) + len(prefilling) + len(promised[w])
        assert row["queued_context"] == sum(length[queue + prefilling]) + sum(promised[w])
        assert there["reserved_seats"] == len(promised[w])
        assert there["reserved_blocks"] == sum(
            blocks_of(room.tokens + 1, 16) - room.cached // 16 for room in rooms[w]
        )
        assert len(running) + there["reserved_seats"] <= led.coefficients[row["variant"]][speed.MAX_SEQS]
        if row["status"] == SERVING and there["activity"] == IDLE:
            assert not running
            assert not queue or promised[w]
    held = clu.queue.waiting
    travelling = sum(m.stage is Stage.CUTTING_OVER for m in moves.open)
    assert int((phase[:arrived] == HELD).sum()) == held + travelling
    assert np.isnan(eng.requests["finish_s"][phase != DONE]).all()
