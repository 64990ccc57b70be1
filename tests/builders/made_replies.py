"""The control API's replies, made up: a worker, a request and the answer with both."""

from itertools import count

from made_types import profile_of

from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.snapshot import Pace
from controlplane.types import ClassArrivals, EngineMode, Slo
from dataplane.live.control.changes import Changes, Mirror, PaceRow, RequestRow, StepRow, WorkerRow

STEP = StepModel(0.01, 1e-4, 1e-3, 1e-6, hinges=(Hinge("sequences", 8.0, 1e-4),))


VERSIONS = count(1)
USUAL = PaceRow.of(Pace())
PROFILE = profile_of(STEP, 16_000, 32, prefill=PrefillModel(0.01, 1e-4), mode=EngineMode.PREFILL_FIRST)


def worker(name, steps=100, waiting=0, state="serving", kind="a", **load):
    last = StepRow(**{"prefill_tokens": 0, "sequences": 2, "context_tokens": 500, "step_s": 0.02, **load},
                   steps=steps, waiting=waiting)  # fmt: skip
    return WorkerRow(name, kind, state, 16_000, 32, 1000, last)


def request(name, at="a", output=10, expected=100, prompt=50, number=None):
    """A request's row, its output tokens and what is expected of it; its name says its number, if nothing."""
    number = int.from_bytes(name.encode()) if number is None else number
    return RequestRow(number, name, at, prompt, 0, 0.1), output, expected


def counted(requests, ttft_s=1.0):
    return ClassArrivals(Slo(ttft_s, 0.1), requests, 50 * requests, 100 * requests)


def fleet(
    *workers,
    requests=(),
    arrivals=(),
    wanted=2,
    auto=True,
    moving=(),
    cold_start_s=30.0,
    outcomes=(),
    refits=(),
    held=(),
    usual=USUAL,
    paces=(),
):
    """All there is, newer than any before it."""
    rows = sorted(requests, key=lambda row: row[0].number)
    return Changes(
        "book", 0, next(VERSIONS), [row.number for row, _, _ in rows], [made for _, made, _ in rows],
        [expected for _, _, expected in rows], [row for row, _, _ in rows], list(workers), list(moving),
        list(arrivals), wanted, {"a": wanted}, auto, cold_start_s, 4.0, list(outcomes), list(refits),
        list(held), usual, list(paces),
    )  # fmt: skip


def seen(*workers, **told):
    """A mirror that has taken all there is."""
    mirror = Mirror()
    assert mirror.take(fleet(*workers, **told))
    return mirror
