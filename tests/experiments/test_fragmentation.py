"""Fragmented memory as Llumnix's Figure 12 has it: by blocked requests that all free memory would hold."""

import pytest

from controlplane.snapshot import HeldRequest, Load, RunningRequest, Snapshot, WorkerLoad
from controlplane.types import RequestId, WorkerId
from harness.fragmentation import fragmentation


def fleet(*loads: tuple[int, int], in_line: int = 0) -> Snapshot:
    """Workers of 1,000 tokens by what they hold and what the head of their queue needs."""
    workers = tuple(
        WorkerLoad(WorkerId(f"w{i}"), "serving", 1000, load=Load(1, held, int(head > 0), head))
        for i, (held, head) in enumerate(loads)
    )
    held = (HeldRequest(RunningRequest(RequestId("r"), in_line), 1.0),) if in_line else ()
    return Snapshot(0.0, workers, len(workers), held=held)


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (fleet((700, 0), (700, 0)), (0.0, 0.3, 0)),
        (fleet((700, 300), (700, 0)), (0.0, 0.3, 0)),  # it begins with the next step
        (fleet((700, 500), (700, 0)), (0.25, 0.3, 1)),
        (fleet((700, 700), (700, 0)), (0.0, 0.3, 1)),  # too large for all of it: memory lacks
        (fleet((700, 500), (700, 400)), (0.2, 0.3, 2)),  # one of both fits
        (fleet((600, 401), (400, 0), (100, 901)), (1302 / 3000, 1900 / 3000, 2)),
        (fleet((700, 0), (700, 0), in_line=500), (0.25, 0.3, 1)),
        (fleet((700, 0), (400, 0), in_line=500), (0.0, 0.45, 0)),
    ],
)
def test_memory_is_fragmented_as_far_as_blocked_requests_fit_into_what_is_free(snapshot, expected):
    assert fragmentation(snapshot) == pytest.approx(expected)


def test_a_fleet_without_workers_has_no_memory():
    assert fragmentation(fleet()) == (0.0, 0.0, 0)
