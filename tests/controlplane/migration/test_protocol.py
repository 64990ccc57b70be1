"""The table of a move: what it lists happens, all else is refused, and every move can end."""

from itertools import product

import pytest

from controlplane.errors import IllegalStep
from controlplane.migration.move import CLOSED, NEXT, Happened, Stage, step


def walk(*happened: Happened) -> Stage:
    stage = Stage.PENDING
    for event in happened:
        stage = step(stage, event)
    return stage


@pytest.mark.parametrize(("stage", "happened"), sorted(NEXT, key=str))
def test_what_the_table_lists_leads_to_its_stage(stage, happened):
    assert step(stage, happened) is NEXT[stage, happened]


@pytest.mark.parametrize(("stage", "happened"), [p for p in product(Stage, Happened) if p not in NEXT])
def test_what_the_table_does_not_list_raises(stage, happened):
    with pytest.raises(IllegalStep, match=f"{happened.name} while {stage.name}"):
        step(stage, happened)


def test_a_closed_move_takes_no_further_step():
    assert not [pair for pair in NEXT if pair[0] in CLOSED]


def test_every_open_stage_can_reach_an_end():
    reaches = set(CLOSED)
    for _ in Stage:
        reaches |= {stage for (stage, _), after in NEXT.items() if after in reaches}
    assert reaches == set(Stage)


def test_a_running_request_is_copied_in_stages_and_resumes_on_the_target():
    copied = [Happened.COPIED] * 3
    assert walk(Happened.ACCEPTED, *copied, Happened.SWITCHED, Happened.RESUMED) is Stage.DONE


def test_a_waiting_request_moves_without_a_copy():
    assert walk(Happened.WAITING, Happened.RESUMED) is Stage.DONE


def test_before_the_switch_a_failure_leaves_the_stream_at_the_source():
    assert walk(Happened.ACCEPTED, Happened.COPIED, Happened.COPY_FAILED) is Stage.ABORTED


def test_after_the_switch_a_failure_is_a_loss_to_replay():
    assert walk(Happened.ACCEPTED, Happened.SWITCHED, Happened.RESUME_FAILED) is Stage.LOST


def test_nothing_resumes_that_was_not_switched():
    with pytest.raises(IllegalStep):
        walk(Happened.ACCEPTED, Happened.COPIED, Happened.RESUMED)
