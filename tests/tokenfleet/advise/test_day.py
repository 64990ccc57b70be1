"""The last day of an advice: the hours that were had and advised, and the page that shows them."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from test_advice import EVERY_S, Fleet, asked

from tokenfleet.advise.advice import Spent
from tokenfleet.advise.day import APART_S, KEPT_S, AdviceHistory, page_document
from tokenfleet.advise.view import lines, spent_text

USD = 2.69


def clock(at_s):
    return datetime.fromtimestamp(1_700_000_000.0 + at_s, UTC)


@pytest.fixture(scope="module")
def advices():
    return Fleet(8).looks(20.0, 40)


def story(first, *steps):
    """A history of looks: (seconds since the first, has, wanted, likely)."""
    history, spent = AdviceHistory(), None
    for at_s, has, wanted, likely in steps:
        costs = {"usd_per_h": has * USD, "wanted_usd_per_h": None if wanted is None else wanted * USD}
        spent = history.add(
            replace(first, at_s=at_s, has=has, starting=0, wanted=wanted, likely=likely, **costs)
        )
    return history, spent


def test_hours_are_summed_from_the_first_advice_on_with_the_bounds(advices):
    _, spent = story(
        advices[-1],
        (0.0, 9, None, None),
        (3600.0, 8, 4, (3, 5)),
        (5400.0, 8, 4, (3, 5)),
        (7200.0, 4, 4, (4, 6)),
        (9000.0, 4, 4, (4, 6)),
    )
    assert spent == Spent(1.5, 10.0, 6.0, (5.0, 8.0), pytest.approx((26.9, 16.14)))
    told = spent_text(spent)
    assert told == (
        "10 replica-hours ($26.90) in the last 90 min; the advice asked for 6 replica-hours ($16.14);"
        " 90 % sure: 5 to 8"
    )


def test_a_point_is_kept_when_something_changes_or_a_minute_passed_and_for_a_day(advices):
    looks = [(n * EVERY_S, 8, 4 + (n >= 30), (4, 5)) for n in range(60)]
    history, _ = story(advices[-1], *looks)
    *kept, newest = (point.at_s for point in history.points)
    assert kept == [0.0, APART_S, 2 * APART_S, 150.0, 150.0 + APART_S, 150.0 + 2 * APART_S]
    assert newest == looks[-1][0]
    history, spent = story(advices[-1], *((at_s, 2, 1, (1, 1)) for at_s in range(0, 200_000, 600)))
    assert spent is not None
    assert spent.hours == pytest.approx(KEPT_S / 3600.0, rel=0.01)
    assert len(history.points) <= KEPT_S / 600 + 1


def test_the_page_has_the_sentences_of_the_terminal_and_charts_of_the_day(advices):
    history = AdviceHistory()
    for advice in advices:
        spent = history.add(advice)
    last = replace(advices[-1], spent=spent)
    shown = json.loads(json.dumps(page_document(asked(), last, history, clock)))
    assert shown["now"]["says"] == [list(line) for line in lines(asked(), last, clock)]
    assert shown["now"]["spent"]["replica_hours"] == round(spent.had, 4)
    assert [one["title"] for one in shown["charts"]] == ["Replicas", "Traffic", "Cost"]
    for one in shown["charts"]:
        assert len({len(series["points"]) for series in one["series"]}) == 1
        assert all(series["points"][-1][0] == clock(last.at_s).timestamp() for series in one["series"])
    _, has, wants = shown["charts"][0]["series"]
    assert (has["points"][-1][1], wants["points"][-1][1]) == (8, last.wanted)
    assert wants["points"][0][1] is None  # no advice yet is a gap
