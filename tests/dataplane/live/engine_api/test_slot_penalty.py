"""Penalties that a moved request carries: their sum, and that a step does not wait for them."""

from collections import Counter

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (requirements/live-cpu.txt)")

from no_sync import NoSync  # noqa: E402

from dataplane.live.engine_api.slot_penalty import charge_drafted, charge_row, slot_penalty  # noqa: E402

VOCABULARY, PRESENCE, FREQUENCY = 50, 0.7, 0.3


def due(prior, new):
    """What vLLM's own penalty of `new` lacks of that of all outputs."""
    row = torch.zeros(VOCABULARY)
    for token, count in Counter(prior).items():
        row[token] -= FREQUENCY * count + PRESENCE * (token not in new)
    return row


def carried_by(prior):
    return slot_penalty(prior, PRESENCE, FREQUENCY, "cpu")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [0, 5, 400])
def test_a_row_is_charged_without_waiting_for_the_device(tokens, dtype):
    made = torch.Generator().manual_seed(tokens)
    prior = torch.randint(VOCABULARY, (30,), generator=made).tolist()
    new = torch.randint(VOCABULARY, (tokens,), dtype=dtype, generator=made)
    logits = torch.zeros(3, VOCABULARY)
    with NoSync():
        charge_row(logits[1], carried_by(prior), new)
    assert torch.allclose(logits[1], due(prior, new.tolist()))
    assert not logits[[0, 2]].any()


@pytest.mark.parametrize("drafts", [1, 3])
def test_rows_with_drafts_are_charged_without_waiting_for_the_device(drafts):
    prior, new, drafted = [3, 3, 4, 9, 11], [9, 4], [3, 11, 5][:drafts]
    prompt, rows = 20, drafts + 1
    history = torch.full((len(new) + drafts,), -1)  # what was not written yet may be anything
    history[: len(new)] = torch.tensor(new)
    is_own = torch.tensor([False] + rows * [True] + [False])
    at = prompt + len(new) - 1
    pos = torch.tensor([7, *range(at, at + rows), 90])
    fed = torch.tensor([3, new[-1], *drafted, 3])
    logits = torch.zeros(rows + 2, VOCABULARY)
    with NoSync():
        charge_drafted(logits, is_own, carried_by(prior), history, prompt, (pos, fed))
    for row in range(rows):
        assert torch.allclose(logits[1 + row], due(prior, new + drafted[:row]))
    assert not logits[[0, -1]].any()


def test_what_waits_is_refused():
    some = torch.arange(40)
    for wait in (
        lambda: torch.isin(some, some),
        lambda: some[some > 3],
        lambda: int(some[2]),
        lambda: some.unique(),
    ):
        with pytest.raises(AssertionError, match="waits"), NoSync():
            wait()
