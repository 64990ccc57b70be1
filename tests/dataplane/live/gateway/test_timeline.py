"""The timeline: what it counts, when, and how much it keeps."""

import numpy as np
import pytest

from dataplane.live.gateway.timeline import BUCKET_S, KEPT, MOST_VALUES, Timeline

ALL = (True, True, True)


def test_counts_stand_in_the_bucket_of_their_time():
    timeline = Timeline()
    timeline.add_tokens(30, at_s=1000.0)
    timeline.add_judged("finished", 0.2, 0.01, (True, False, False), at_s=1009.9)
    timeline.add_tokens(10, at_s=1010.0)
    for outcome in ("failed", "aborted", "rejected", "rate_limited"):
        timeline.add_unfinished(outcome, at_s=1010.0)
    first, second = timeline.points(minutes=10, now_s=1020.0, unix_s=9020.0)
    assert (first["at_s"], first["tokens_per_s"], first["finished"]) == (9000.0, 3.0, 1)
    assert first["ttft_s"]["p90"] == 0.2
    assert first["attainment"]["tpot"] == {"met": 0, "of": 1}
    assert first["attainment"]["ttft"] == {"met": 1, "of": 1}
    assert (second["failed"], second["aborted"], second["rejected"]) == (1, 1, 2)
    assert second["ttft_s"] is None


def test_a_request_given_up_late_is_a_miss_and_its_wait_a_ttft():
    timeline = Timeline()
    timeline.add_judged("finished", 0.2, 0.01, ALL, at_s=1000.0)
    timeline.add_judged("aborted", 25.0, None, (False, True, False), at_s=1001.0)
    (point,) = timeline.points(minutes=10, now_s=1010.0, unix_s=0.0)
    assert (point["finished"], point["aborted"]) == (1, 1)
    assert point["attainment"]["both"] == {"met": 1, "of": 2}
    assert point["ttft_s"]["p99"] > 20.0


def test_the_last_minutes_are_one_point_over_all_their_requests():
    timeline = Timeline()
    values = np.random.default_rng(0).exponential(size=200)
    for i, value in enumerate(values):
        timeline.add_judged("finished", value, None, ALL, at_s=2000.0 + i)
    lately = timeline.lately(began_s=0.0, now_s=2200.0)
    assert lately["finished"] == 200
    assert lately["ttft_s"]["p90"] == pytest.approx(np.percentile(values, 90))
    assert lately["tpot_s"] is None


def test_a_young_fleet_is_judged_over_its_own_time():
    timeline = Timeline()
    timeline.add_tokens(400, at_s=1000.0)
    assert timeline.lately(began_s=1000.0, now_s=1040.0)["tokens_per_s"] == 10.0
    assert timeline.lately(began_s=1000.0, now_s=1000.5)["over_s"] == BUCKET_S


def test_memory_is_bounded():
    timeline = Timeline()
    for i in range(3 * KEPT):
        timeline.add_tokens(1, at_s=i * BUCKET_S)
    for _ in range(2 * MOST_VALUES):
        timeline.add_judged("finished", 1.0, 1.0, ALL, at_s=3 * KEPT * BUCKET_S)
    assert len(timeline._buckets) == KEPT
    assert len(timeline._buckets[-1].ttft_s) == MOST_VALUES
    assert len(timeline.points(1e9, 3 * KEPT * BUCKET_S, 0.0)) == KEPT
