"""Seeded schedules of faults over the core and emulated engines, and the judge of what clients saw."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from dataplane.live.emulated.batch import EmulatedBatch
from dataplane.live.emulated.segment import Noise
from harness.fault_schedules import STREAMS, History, played, schedule_of, violations

TOGETHER = 6


def histories(seeds: range) -> list[History]:
    async def all_of_them() -> list[History]:
        found: list[History] = []
        for first in range(seeds.start, seeds.stop, TOGETHER):
            some = seeds[first - seeds.start : first - seeds.start + TOGETHER]
            found += await asyncio.gather(*(played(schedule_of(seed)) for seed in some))
        return found

    return asyncio.run(all_of_them())


@pytest.mark.always
@pytest.mark.parametrize("first", [0, 30, *(pytest.param(n, marks=pytest.mark.nightly) for n in (60, 90))])
def test_no_client_sees_a_wrong_stream_whatever_happens(first: int) -> None:
    seeds = range(first, first + 30)
    found = histories(seeds)
    assert {seed: violations(one) for seed, one in zip(seeds, found, strict=True) if violations(one)} == {}
    happened = sum((one.happened for one in found), Counter[str]())
    assert sum(times for what, times in happened.items() if what.startswith("kill")) > 20


def whole() -> History:
    """What clients of a schedule see where nothing happens."""
    plan = schedule_of(0)
    names = [f"r{i}" for i in range(STREAMS)]
    return History(
        plan,
        sent=set(names),
        tokens={
            n: Noise().continuation(p, k) for n, p, k in zip(names, plan.prompts, plan.outputs, strict=True)
        },
        ends={n: ["LENGTH"] for n in names},
        remains={"KV blocks": 0},
    )


def test_the_judge_passes_whole_streams_explicit_errors_and_clients_that_left() -> None:
    history = whole()
    history.ends["r0"], history.tokens["r0"] = ["ERROR"], history.tokens["r0"][:3]
    history.ends["r1"], history.left = ["ABORT"], {"r1"}
    assert violations(history) == []


@pytest.mark.parametrize(
    ("tokens", "ends", "says"),
    [
        (lambda t: t[:4] + t[5:], ["ERROR"], "r2: a token was lost, repeated or swapped"),
        (lambda t: t[:4] + t[3:], ["LENGTH"], "r2: a token was lost, repeated or swapped"),
        (lambda t: [t[1], t[0], *t[2:]], ["LENGTH"], "r2: a token was lost, repeated or swapped"),
        (lambda t: t[:-1], ["LENGTH"], "r2: ended as if whole after"),
        (lambda t: t, [], "r2: ended 0 times"),
        (lambda t: t, ["LENGTH", "LENGTH"], "r2: ended 2 times"),
        (lambda t: t[:3], ["ABORT"], "r2: was aborted though its client stayed"),
        (lambda t: t[:3], ["STOP"], "r2: ended in STOP"),
    ],
)
def test_the_judge_finds_what_no_client_may_see(tokens, ends, says) -> None:
    history = whole()
    history.tokens["r2"], history.ends["r2"] = tokens(history.tokens["r2"]), ends
    assert any(what.startswith(says) for what in violations(history))


def test_the_judge_finds_what_is_left_behind() -> None:
    assert violations(replace(whole(), remains={"KV blocks": 3})) == ["3 KV blocks were left"]
    assert "the core had 1 requests too many at an instant" in violations(replace(whole(), too_many=1))


@pytest.mark.parametrize(
    ("ended", "finished", "holds"), [(8, 8, True), (8, 7, False), (9, 8, False), (7, 8, False), (8, 9, False)]
)
def test_the_judge_compares_what_clients_saw_with_what_the_core_counted(ended, finished, holds) -> None:
    assert (violations(replace(whole(), counted=(ended, finished))) == []) is holds


def test_streams_of_a_model_are_compared_with_undisturbed_ones() -> None:
    history = whole()
    history.expected = [list(tokens) for tokens in history.tokens.values()]
    assert violations(history) == []
    history.expected[3][0] += 1
    assert violations(history) == ["r3: a token was lost, repeated or swapped"]


def test_a_planted_leak_of_kv_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that keeps the blocks of what is aborted, as a lost release would."""
    end = EmulatedBatch._end

    def leaky(batch, segment, now_s, **how):
        kept = segment.blocks if how.get("aborted") else 0
        end(batch, segment, now_s, **how)
        batch.free_blocks -= kept

    monkeypatch.setattr(EmulatedBatch, "_end", leaky)
    monkeypatch.setattr("harness.fault_schedules.FREE_S", 0.1)
    assert any("KV blocks were left" in what for one in histories(range(6)) for what in violations(one))
