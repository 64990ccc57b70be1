"""Figures and facts in the words that people read."""

import pytest

from controlplane.figures import bytes_text, fact_lines


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (900, "900 bytes"), (30_300, "29.6 KiB"), (3.2e9, "2.98 GiB"), (2**60, "1.05e+06 TiB")],
)
def test_bytes_have_the_unit_of_their_size(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_the_facts_of_a_decision_are_words_with_units() -> None:
    facts = {
        "before": 1,
        "workers": 3,
        "kinds": {"h100 TP2": 3},
        "seen": {"workers_per_rps": 0.16, "rate_rps": 9.0, "changed_s_ago": 40.0, "context_tokens": 123456.0},
        "compared": {"backlog": 1.704},
        "cost": {"ready_after_s": 60, "usd_per_h": -3.2, "mix_usd_per_h": 1234.5},
    }
    assert fact_lines(facts) == [
        "1 → 3 workers",
        "by type: h100 TP2 3",
        "observed: workers 0.16 per req/s, rate 9 req/s, changed 40 s ago, context tokens 123,456",
        "workers by: backlog 1.704",
        "cost: ready after 60 s, -$3.20/h, mix $1,234.50/h",
    ]


def test_the_facts_of_a_move_begin_with_its_way() -> None:
    facts = {
        "request_id": "r1",
        "worker": "w2",
        "source": "w1",
        "cost": {"bytes": 30_300, "downtime_s": 0.003},
    }
    assert fact_lines(facts) == ["w1 → w2, request r1", "cost: copied 29.6 KiB, paused 3 ms"]


def test_the_cost_that_a_failed_move_does_not_have_is_left_out() -> None:
    facts = {"request_id": "r1", "worker": "w2", "source": "w1"}
    cut_short = facts | {"cost": {"bytes": 30_300, "downtime_s": None}}
    assert fact_lines(cut_short) == ["w1 → w2, request r1", "cost: copied 29.6 KiB"]
    assert fact_lines(facts | {"cost": {"downtime_s": None}}) == ["w1 → w2, request r1"]


def test_empty_facts_are_left_out_and_lists_are_told_whole() -> None:
    rollout = {
        "workers": {"new": 1, "old": 2},
        "flags": ["--a", "b"],
        "cause": "",
        "share": {},
        "model": None,
    }
    assert fact_lines(rollout) == ["flags --a, b", "workers: new 1, old 2"]
    assert fact_lines({}) == []
