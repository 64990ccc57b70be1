"""The gateway's ledger: it holds as many requests, and a worker as many sequences, as there are."""

import gc
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from made_types import profile_of
from numba.core.dispatcher import Dispatcher

from controlplane.perfmodel.step import StepModel
from controlplane.placement.constraints import kept_tpot_s
from controlplane.placement.ledger import generated
from controlplane.placement.lengths import LengthTable
from controlplane.types import Slo, WorkerId
from dataplane.live.engine_api.link import WorkerInfo
from dataplane.live.ledger.account import ROWS, SLOTS
from dataplane.live.ledger.placement import Placement
from dataplane.live.ledger.request import Ticket, Tracked
from dataplane.startup import use_kernel_cache

BIG = 2 * SLOTS + 100


def worker(name, seats, blocks=1_000_000):
    sizes = {"block_tokens": 16, "kv_blocks": blocks, "kv_bytes_per_token": 1}
    return WorkerInfo(
        WorkerId(name), "emulated", "any", "", (), **sizes, max_model_len=8192, max_seqs=seats,
        max_batched_tokens=8192, tp_degree=1, vllm_version="", dtype="none", pid=0,
    )  # fmt: skip


def request(i, prompt=8):
    params = SimpleNamespace(prompt_logprobs=None, skip_reading_prefix_cache=False)
    what = SimpleNamespace(
        request_id=f"r{i}", prompt_token_ids=[1] * prompt, sampling_params=params, lora_request=None,
        cache_salt=None, mm_features=None, prompt_embeds=None,
    )  # fmt: skip
    return Tracked(what, Ticket("", "", Slo(10.0, 1.0), 0), 0.0, 100)


def placement_of(workers, seats):
    placement = Placement({}, workers, LengthTable.constant(100), np.random.default_rng(0))
    for w in range(workers):
        placement.attach(worker(f"w{w}", seats), "")
    return placement


def advance(placement, tracked, tokens):
    placement.advance(WorkerId("w0"), [(t, n) for t, n in zip(tracked, tokens, strict=True)], 0.0)
    for t, n in zip(tracked, tokens, strict=True):
        t.output_token_ids.extend([5] * n)


def test_a_worker_with_many_seats_is_filled_and_its_counts_stay_exact():
    placement, tracked = placement_of(1, BIG), [request(i) for i in range(BIG)]
    for t in tracked:
        assert placement.choose(t, 0.0) == "w0"
        placement.put(t, WorkerId("w0"), has_kv=False, now_s=0.0)
    assert placement.choose(request(BIG), 0.0) is None
    rng = np.random.default_rng(1)
    advance(placement, tracked, [1] * BIG)
    for _ in range(5):  # some get no token in a step: preempted, or left out of it
        advance(placement, tracked, rng.integers(0, 3, BIG).tolist())
    rows = [placement.row(t) for t in tracked]
    assert [generated(placement.ledger, r) for r in rows] == [len(t.output_token_ids) for t in tracked]
    for t in tracked:
        placement.forget(t)
    assert placement.ledger.workers[0]["decoding"] == placement.ledger.workers[0]["running_n"] == 0


def test_what_leaves_a_worker_with_its_kv_goes_where_it_fits_best():
    placement = Placement({}, 4, LengthTable.constant(100), np.random.default_rng(0))
    # Of 1,600 tokens each; the last is so full that what comes would be preempted there.
    for i, tokens in enumerate((300, 0, 700, 1300)):
        placement.attach(worker(f"w{i}", 8, blocks=100), "")
        there = request(i, tokens)
        if tokens:
            placement.put(there, WorkerId(f"w{i}"), has_kv=False, now_s=0.0)
            placement.advance(WorkerId(f"w{i}"), [(there, 1)], 0.0)
            there.output_token_ids.append(5)
        if i == 0:
            leaving = there
    assert placement.next_off(WorkerId("w0"), [leaving], set(), 0.0) == (leaving, "w2")
    assert placement.next_off(WorkerId("w0"), [leaving], {"w2"}, 0.0) == (leaving, "w1")
    assert placement.next_off(WorkerId("w0"), [leaving], {"w0"}, 0.0) is None  # one at a time
    newcomer = request(9, 300)
    assert placement.choose(newcomer, 0.0, [WorkerId("w0")]) == "w1"


def kernels():
    """How many forms of each kernel there are by now, in this process."""
    forms = Counter[str]()
    for d in gc.get_objects():
        if isinstance(d, Dispatcher):  # one for Python, one for other kernels
            forms[f"{d.py_func.__module__}.{d.py_func.__name__}"] += len(d.overloads)
    return forms


def test_no_clients_request_waits_for_a_kernel_to_be_compiled():
    # In a process of its own, in which no other test has compiled anything.
    told = subprocess.run(
        [sys.executable, "-c", "import test_placement; test_placement.story()"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-2000:]
    assert told.stdout.split() == []


def story():
    """Two workers that cache, all that becomes of requests there; print the kernels that were missing."""
    use_kernel_cache()
    placement = Placement({}, 2, LengthTable.constant(100), np.random.default_rng(0))
    before = kernels()
    for w in ("w0", "w1"):
        placement.attach(replace(worker(w, 8), engine="vllm"), "")
    first, second, third = (request(i, 100) for i in range(3))
    for t in (first, second, third):
        assert placement.choose(t, 0.0)
        placement.put(t, WorkerId("w0"), has_kv=False, now_s=0.0)
    advance(placement, [first, second], [1, 1])
    placement.begin_step(WorkerId("w0"), 0.0)
    advance(placement, [first, second], [1, 2])
    assert placement.next_off(WorkerId("w0"), [first, second], set(), 0.0)
    placement.put(first, WorkerId("w1"), has_kv=True, now_s=0.0)
    assert placement.haven(third, 0.0) == "w1"
    placement.take(third)
    placement.forget(second)
    assert list(placement.texts())
    placement.cached_elsewhere(first)
    placement.forget(first)
    placement.detach(WorkerId("w0"))
    after = kernels()
    print(*sorted(name for name, forms in after.items() if forms > before.get(name, 0)))


def test_a_fleet_of_a_thousand_workers_takes_what_has_a_seat():
    placement = placement_of(1000, 8)
    tracked = [request(i) for i in range(8 * ROWS - 192)]
    for t in tracked:
        chosen = placement.choose(t, 0.0)
        assert chosen is not None
        placement.put(t, chosen, has_kv=False, now_s=0.0)
    assert placement.choose(request(len(tracked)), 0.0) is None
    assert (placement.ledger.workers["queued"] == 8).all()


def test_a_silent_worker_gets_nothing_while_another_can_be_had():
    placement = placement_of(2, 4)
    placement.suspect(WorkerId("w0"), True)
    for i in range(4):
        one = request(i)
        assert placement.choose(one, 0.0) == "w1"
        placement.put(one, WorkerId("w1"), has_kv=False, now_s=0.0)
    assert placement.choose(request(4), 0.0) is None  # full, and the other one silent
    placement.suspect(WorkerId("w0"), False)
    assert placement.choose(request(5), 0.0) == "w0"


def test_a_silent_worker_is_better_than_none():
    placement = placement_of(2, 4)
    placement.set_open(WorkerId("w1"), False)
    placement.suspect(WorkerId("w0"), True)
    assert placement.choose(request(0), 0.0) == "w0"
    placement.detach(WorkerId("w0"))
    placement.attach(worker("w2", 4), "")
    placement.set_open(WorkerId("w1"), True)
    assert placement.choose(request(1), 0.0) == "w2"  # whoever comes in its row is not silent


def test_the_tpot_target_that_is_kept_for_a_request_is_the_rules_whatever_came_before():
    slow = StepModel(0.02, 1e-6, 1e-4, 1e-6)  # alone, 1,000 tokens of context take it 21 ms, 30,000 some 50
    placement = Placement(
        {"": profile_of(slow, 1_000_000, 64)}, 1, LengthTable.constant(100), np.random.default_rng(0)
    )
    placement.attach(worker("w0", 64), "")
    rng = np.random.default_rng(2)
    types = placement.ledger.coefficients

    def checked(turn):
        asked = request(turn, int(rng.integers(1, 40_000)))
        asked.ticket.slo = Slo(10.0, float(rng.choice([0.01, 0.025, 0.04, 0.1])))
        kept_s = placement.ledger.requests[placement.row(asked)]["tpot_s"]
        tokens, target_s = np.array([asked.prompt_tokens]), np.array([asked.slo.tpot_s])
        assert kept_s == kept_tpot_s(types, tokens, target_s)[0]
        placement.forget(asked)
        return kept_s

    assert len({checked(turn) for turn in range(60)}) > 2  # some are kept, some are lost
    placement.kinds.refit("", replace(slow, base_s=0.09))
    assert len({checked(turn) for turn in range(60)}) > 1


def test_finished_answers_shorter_than_predicted_shorten_predictions_and_abandoned_ones_do_not():
    for has_finished, expected in ((False, 100), (True, 60)):
        placement = placement_of(1, 8)
        for i in range(200):
            asked = request(i)  # 100 tokens are predicted
            assert placement.choose(asked, 0.0) == "w0"
            placement.put(asked, WorkerId("w0"), has_kv=False, now_s=0.0)
            advance(placement, [asked], [40])
            placement.forget(asked, has_finished)
        late = request(200)
        placement.choose(late, 0.0)
        predicted = placement.ledger.requests[placement.row(late)]["predicted"]
        assert 40 <= predicted <= expected if has_finished else predicted == expected
