"""Mirrors: the blocks that the gateway believes to be cached, by the tokens that pass through it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from controlplane.migration.drain import pulled_along
from controlplane.placement.caches import chain
from controlplane.placement.hits import cached_tokens
from controlplane.placement.lengths import LengthTable
from controlplane.types import Slo, WorkerId
from dataplane.live.engine_api.cache_events import ROOT, CacheChange
from dataplane.live.engine_api.link import Telemetry, WorkerInfo
from dataplane.live.ledger.account import ROWS
from dataplane.live.ledger.mirrors import ASK_AGAIN, Found, Hits, Seen
from dataplane.live.ledger.placement import Placement
from dataplane.live.ledger.request import Ticket, Tracked

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
TEXT = np.random.default_rng(0).integers(0, 32_000, 4000).tolist()
INFO = WorkerInfo(
    A, "vllm", "any", "", (), block_tokens=16, kv_blocks=200, kv_bytes_per_token=1, max_model_len=2048,
    max_seqs=64, max_batched_tokens=2048, tp_degree=1, vllm_version="", dtype="none", pid=0,
)  # fmt: skip


def fleet(*infos: WorkerInfo) -> Placement:
    placement = Placement({}, 4, LengthTable.constant(20), np.random.default_rng(0))
    for info in infos or (INFO, replace(INFO, worker=B)):
        placement.attach(info, "")
    return placement


def request(i: int, tokens: list[int], **facts) -> Tracked:
    plain = {"cache_salt": None, "lora_request": None, "mm_features": None, "prompt_embeds": None}
    params = SimpleNamespace(prompt_logprobs=None, skip_reading_prefix_cache=False)
    what = {"request_id": f"r{i}", "prompt_token_ids": tokens, "sampling_params": params} | plain | facts
    return Tracked(SimpleNamespace(**what), Ticket("", "", Slo(10.0, 1.0), 0), 0.0, 20)


def serve(placement: Placement, tracked: Tracked, worker: WorkerId, answer: list[int], found=None) -> None:
    placement.put(tracked, worker, has_kv=False, now_s=0.0)
    for token in answer:
        told = {} if found is None else {tracked.id: found}
        placement.advance(worker, [(tracked, 1)], 0.0, told)
        tracked.output_token_ids.append(token)
        found = None
    placement.forget(tracked)


def expected(placement: Placement, tracked: Tracked, worker: WorkerId) -> int:
    tokens = cached_tokens(placement.ledger, placement.worker_rows[worker], placement.row(tracked), 0, False)
    placement.forget(tracked)
    return tokens


def test_the_next_turn_is_expected_to_hit_prompt_and_answer_where_they_were_computed():
    placement = fleet()
    serve(placement, request(0, TEXT[:100]), A, TEXT[100:161])
    after = request(1, TEXT[:161] + [7] * 50)
    assert expected(placement, after, A) == 160  # the last token's KV was never computed
    assert expected(placement, after, B) == 0
    assert placement.choose(after, 0.0) == A


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "mine"},
        {"lora_request": SimpleNamespace(lora_name="poet", lora_int_id=1)},
        {"mm_features": ["an image"]},
        {"sampling_params": SimpleNamespace(prompt_logprobs=1, skip_reading_prefix_cache=True)},
    ],
)
def test_requests_of_another_tree_or_none_find_nothing_there(other):
    placement = fleet()
    serve(placement, request(0, TEXT[:320]), A, [1, 2])
    assert expected(placement, request(1, TEXT[:320], **other), A) == 0
    serve(placement, request(2, TEXT[:320], **other), A, [1, 2])
    again = expected(placement, request(3, TEXT[:320], **other), A)
    assert again == (304 if {"cache_salt", "lora_request"} & set(other) else 0)


def test_what_is_on_its_way_to_a_worker_is_expected_there():
    placement = fleet()
    first = request(0, TEXT[:400])
    placement.put(first, A, has_kv=False, now_s=0.0)
    assert expected(placement, request(1, TEXT[:320] + [9] * 80), A) == 320
    placement.forget(first)  # its client left before it began
    assert expected(placement, request(2, TEXT[:320] + [9] * 80), A) == 0


def test_a_move_copies_a_prefix():
    placement = fleet()
    moved = request(0, TEXT[:100])
    placement.put(moved, A, has_kv=False, now_s=0.0)
    placement.advance(A, [(moved, 1)], 0.0)
    moved.output_token_ids.extend(TEXT[100:160])
    placement.put(moved, B, has_kv=True, now_s=0.0)
    after = TEXT[:160] + [7] * 50
    assert expected(placement, request(1, after), A) == expected(placement, request(2, after), B) == 144


def test_what_leaves_a_worker_goes_where_its_prefix_is_cached_for_as_long_as_it_is():
    placement = fleet(INFO, replace(INFO, worker=B, kv_blocks=60), replace(INFO, worker=C, kv_blocks=60))
    running = request(0, TEXT[:400])
    running.worker = A
    placement.put(running, A, has_kv=False, now_s=0.0)
    placement.advance(A, [(running, 1)], 0.0)
    running.output_token_ids.extend([5] * 20)
    for warm in (C, B):
        serve(placement, request(1, TEXT[:321]), warm, [1, 2])
        assert placement.cached_at(running, warm) == 320
        assert placement.cached_elsewhere(running)[warm] == 320
        assert placement.haven(running, 0.0) == warm
        serve(placement, request(2, TEXT[2000:2959]), warm, [1, 2])  # 60 blocks: nothing else is left
        assert placement.cached_at(running, warm) == 0
    assert placement.cached_elsewhere(running) == {}
    assert placement.cached_at(running, WorkerId("gone")) == 0


def test_what_has_ended_is_remembered_by_its_last_turn_for_as_much_as_workers_can_hold():
    placement = fleet(replace(INFO, kv_blocks=30))
    first = TEXT[:100]
    serve(placement, request(0, first), A, TEXT[100:111])
    serve(placement, request(1, TEXT[:150]), A, [1, 2])
    serve(placement, request(2, TEXT[1000:1050], mm_features=["an image"]), A, [1, 2])
    [text] = placement.texts()
    assert (len(text.ids), text.cached(A).tokens) == (9, 144)
    assert text.of.as_request().prompt_token_ids == [*TEXT[:150], 1, 2]
    for n in range(4):  # 480 tokens of KV: of 102 each the last four
        serve(placement, request(3 + n, TEXT[2000 + 100 * n : 2100 + 100 * n]), A, [1, 2])
    assert [t.of.as_request().prompt_token_ids[0] for t in placement.texts()] == TEXT[2300:1900:-100]
    placement.detach(A)
    placement.attach(replace(INFO, worker=B, kv_blocks=30), "")
    assert all(t.cached(B).tokens == 0 for t in placement.texts())


def test_what_was_brought_to_a_worker_is_expected_there():
    placement = fleet()
    serve(placement, request(0, TEXT[:400]), A, TEXT[400:410])
    [text] = placement.texts()
    [copy] = pulled_along([text], A, placement.views([B]), 1e9)
    assert (copy.tokens, copy.lacks, copy.target) == (400, 400, B)
    placement.brought(B, copy.text.of.ids[: copy.tokens // 16])
    placement.set_open(A, False)
    after = request(1, TEXT[:410] + [7] * 50)
    assert placement.choose(after, 0.0) == B
    assert expected(placement, after, B) == 400
    caches = placement.ledger.caches
    assert (caches.copies["users"] == 0).all()
    assert pulled_along(placement.texts(), A, placement.views([B]), 1e9) == []


def test_old_text_is_forgotten_as_memory_runs_out_the_oldest_first():
    placement = fleet(replace(INFO, kv_blocks=30))
    for i in range(3):
        serve(placement, request(i, TEXT[320 * i : 320 * i + 160]), A, [1, 2])
    assert [expected(placement, request(9, TEXT[320 * i : 320 * i + 161]), A) for i in range(3)] == [
        144,
        160,
        160,
    ]


def test_what_engines_found_is_counted_beside_what_was_expected():
    placement = fleet()
    serve(placement, request(0, TEXT[:320]), A, [1, 2], found=Found(0))
    serve(placement, request(1, TEXT[:100]), A, [1, 2], found=Found(16, loaded=16))
    serve(placement, request(2, TEXT[:100]), A, [1, 2], found=Found(96))
    assert placement.prefix_hits(A) == Hits(queried=520, hit=128, loaded=16, expected=192, off=64, ideal=192)


def test_what_engines_tell_of_host_memory_is_expected_there_and_takes_as_long_as_it_took():
    placement = fleet(replace(INFO, host_blocks=50, kv_bytes_per_token=1000), replace(INFO, worker=B))
    ids = np.zeros(20, np.int64)
    chain(np.array(TEXT[:320], np.int64), 16, ROOT, ids)
    placement.take_cached(A, CacheChange(0, ids[:4].tobytes(), is_all=True, to_host=ids[:12].tobytes()))
    placement.put(request(0, TEXT[1000:1200]), A, has_kv=False, now_s=0.0)  # its step begins, the next waits
    tracked = request(1, TEXT[:320])
    placement.put(tracked, A, has_kv=False, now_s=0.0)
    led, r = placement.ledger, placement.row(tracked)
    assert led.requests[r]["cached"] == 12 * 16
    assert led.host.loads[r] == led.host.links[0]["waiting"] == 8
    load = Telemetry(A, *[0] * 6, 0.0, 0, 0, 0, host_loaded_bytes=64_000, host_loading_s=0.5)
    placement.take_loads(replace(INFO, kv_bytes_per_token=1000), load)
    assert led.host.links[0]["copy_s"] == pytest.approx(0.5 * 16_000 / 64_000)
    placement.forget(tracked)
    assert led.host.links[0]["waiting"] == 0
    placement.take_cached(A, CacheChange(1, b"", ids[:4].tobytes(), off_host=ids[2:].tobytes()))
    placement.put(tracked := request(2, TEXT[:320]), A, has_kv=False, now_s=0.0)
    assert placement.ledger.requests[placement.row(tracked)]["cached"] == 2 * 16
    placement.forget(tracked)
    for i in range(ROWS + 5):
        placement.row(request(i + 3, TEXT[:320]))
    placement.put(tracked := request(ROWS + 9, TEXT[:320]), A, has_kv=False, now_s=0.0)
    assert placement.ledger.requests[placement.row(tracked)]["cached"] == 2 * 16
    placement.detach(A)
    placement.attach(replace(INFO, host_blocks=50), "")
    placement.put(tracked := request(ROWS + 10, TEXT[:320]), A, has_kv=False, now_s=0.0)
    assert placement.ledger.requests[placement.row(tracked)]["cached"] == 0


def test_beside_hits_stands_what_one_endless_cache_of_all_workers_would_have_hit():
    placement = fleet(replace(INFO, kv_blocks=40), replace(INFO, worker=B, kv_blocks=40))
    serve(placement, request(0, TEXT[:320]), A, [1, 2], found=Found(0))
    serve(
        placement, request(1, TEXT[:320]), B, [1, 2], found=Found(0)
    )  # all but the last block, which is computed
    serve(placement, request(2, TEXT[2000:2600]), B, [1, 2], found=Found(0))  # B has forgotten the others
    serve(placement, request(3, [*TEXT[:320], 1, *TEXT[500:600]]), B, [1, 2], found=Found(0))
    assert placement.prefix_hits(A).ideal == 0
    assert placement.prefix_hits(B).ideal == 304 + 0 + 320
    serve(placement, request(4, TEXT[:320], cache_salt="mine"), A, [1, 2], found=Found(0))
    assert placement.prefix_hits(A).ideal == 0


def test_of_what_was_computed_long_ago_nothing_is_kept(monkeypatch):
    monkeypatch.setattr("dataplane.live.ledger.mirrors.SEEN_BLOCKS", 8)
    seen = Seen()
    seen.add(np.arange(8))
    assert seen.leading(np.arange(10)) == 8
    seen.add(np.arange(20, 28))
    assert seen.leading(np.arange(8)) == 0
    assert seen.leading(np.arange(20, 28)) == 8


def test_a_worker_that_caches_nothing_or_came_anew_has_nothing():
    placement = fleet(replace(INFO, caches_prefixes=False), replace(INFO, worker=B))
    for worker in (A, B):
        serve(placement, request(0, TEXT[:320]), worker, [1, 2])
    assert expected(placement, request(1, TEXT[:320]), A) == 0
    assert expected(placement, request(1, TEXT[:320]), B) == 304
    placement.detach(B)
    placement.attach(replace(INFO, worker=B), "")
    assert expected(placement, request(1, TEXT[:320]), B) == 0


def test_mirrors_hold_more_requests_than_there_were_rows_for():
    placement = fleet()
    serve(placement, request(0, TEXT[:320]), A, [1, 2])
    many = [request(i + 1, TEXT[:64] + [i] * 20) for i in range(ROWS + 5)]
    for tracked in many:
        placement.row(tracked)
    assert expected(placement, request(0, TEXT[:320]), A) == 304
    assert {cached_tokens(placement.ledger, 0, placement.row(t), 0, False) for t in many} == {64}


def test_ids_are_those_of_whole_prefixes():
    tokens, ids = np.array(TEXT[:160], np.int64), np.zeros(10, np.int64)
    assert chain(tokens, 16, ROOT, ids) == 10
    rest = np.zeros(4, np.int64)
    assert chain(tokens[96:], 16, ids[5], rest) == 4
    assert (rest == ids[6:]).all()
    for at in (0, 95, 159):
        other, others = tokens.copy(), np.zeros(10, np.int64)
        other[at] += 1
        chain(other, 16, ROOT, others)
        assert ((ids == others) == (np.arange(10) < at // 16)).all()
    assert len(set(ids.tolist())) == 10
    assert ids.min() >= 0


def ids_of(tokens: list[int]) -> list[int]:
    ids = np.zeros(len(tokens) // 16, np.int64)
    chain(np.array(tokens, np.int64), 16, ROOT, ids)
    return ids.tolist()


def change(number: int, stored=(), removed=(), is_all=False) -> CacheChange:
    return CacheChange(
        number, np.array(stored, np.int64).tobytes(), np.array(removed, np.int64).tobytes(), is_all
    )


def test_what_an_engine_tells_is_believed_and_nothing_else():
    placement = fleet()
    assert not placement.tells_cached(A)
    assert placement.take_cached(A, change(0, is_all=True)) == ""
    assert (placement.tells_cached(A), placement.tells_cached(B)) == (True, False)
    serve(placement, request(0, TEXT[:320]), A, [1, 2])
    assert expected(placement, request(1, TEXT[:321]), A) == 0  # it has not said that it stored any of it
    blocks = ids_of(TEXT[:320])
    placement.take_cached(A, change(1, blocks))
    assert expected(placement, request(2, TEXT[:321]), A) == 320
    placement.take_cached(A, change(2, [], blocks[12:]))
    assert expected(placement, request(3, TEXT[:321]), A) == 192


def test_blocks_that_are_gone_while_a_request_uses_them_are_missed_and_nothing_breaks():
    placement = fleet()
    placement.take_cached(A, change(0, is_all=True))
    blocks = ids_of(TEXT[:320])
    both = [request(0, TEXT[:330]), request(1, TEXT[:340])]
    for tracked in both:
        placement.put(tracked, A, has_kv=False, now_s=0.0)
        placement.take_cached(A, change(1 + both.index(tracked), blocks))
        placement.advance(A, [(tracked, 1)], 0.0)
    caches = placement.ledger.caches
    assert caches.workers[0]["shared"] == 20
    placement.take_cached(A, change(3, [], blocks[10:]))  # both were preempted, and their ends evicted
    assert (caches.workers[0]["shared"], caches.workers[0]["empty"]) == (10, 190)
    for tracked in both:
        placement.forget(tracked)
    assert (caches.workers[0]["shared"], caches.workers[0]["asleep"]) == (0, 10)
    assert expected(placement, request(2, TEXT[:330]), A) == 160


@pytest.mark.parametrize("fault", ["none", "lost", "repeated", "reordered"])
def test_after_lost_repeated_or_reordered_changes_the_mirror_is_what_the_engine_has(fault):
    rng = np.random.default_rng(["none", "lost", "repeated", "reordered"].index(fault))
    for _ in range(20):
        placement, has, asked = fleet(), set[int](), 0
        placement.take_cached(A, change(0, is_all=True))
        sent: list[CacheChange] = []
        for number in range(1, 60):
            stored = set(rng.integers(1, 300, 6).tolist()) - has
            removed = set(rng.permutation(sorted(has))[: max(len(has | stored) - 150, 0)].tolist())
            has = (has | stored) - removed
            sent.append(change(number, list(stored), list(removed)))
            if number % 7 or fault == "none":
                order = [-1]
            else:
                order = {"lost": [], "repeated": [-1, -1], "reordered": [-1, -2]}[fault]
            if fault == "reordered" and number % 7 == 6:
                order = []  # it comes after the next one
            for i in order:
                if placement.take_cached(A, sent[i]):
                    asked += 1
                    assert placement.take_cached(A, change(number, list(has), is_all=True)) == ""
        placement.take_cached(A, change(60))
        if placement.take_cached(A, change(61)):
            placement.take_cached(A, change(61, list(has), is_all=True))
        caches = placement.ledger.caches
        there = {int(copy["id"]) for copy in caches.copies[0] if copy["id"] > 0}
        assert there == has
        assert caches.workers[0]["empty"] == 200 - len(has)
        assert (asked > 0) == (fault in ("lost", "reordered"))


def test_what_was_asked_for_and_does_not_come_is_asked_for_again():
    placement = fleet()
    placement.take_cached(A, change(0, is_all=True))
    assert "after change 0 of its cache came change 5" in placement.take_cached(A, change(5, [7]))
    assert [n for n in range(6, 6 + 2 * ASK_AGAIN) if placement.take_cached(A, change(n, [7]))] == [
        5 + ASK_AGAIN,
        5 + 2 * ASK_AGAIN,
    ]
    assert placement.take_cached(A, change(200, [9], is_all=True)) == ""
    assert placement.take_cached(A, change(201, [10])) == ""


def test_a_worker_that_comes_in_the_row_of_one_that_told_is_predicted_until_it_tells():
    placement = fleet()
    placement.take_cached(A, change(3, ids_of(TEXT[:320]), is_all=True))
    placement.detach(A)
    placement.attach(replace(INFO, worker=C), "")
    assert not placement.tells_cached(C)
    serve(placement, request(0, TEXT[1000:1160]), C, [1, 2])
    assert expected(placement, request(1, TEXT[:321]), C) == 0
    assert expected(placement, request(2, TEXT[1000:1161]), C) == 160
