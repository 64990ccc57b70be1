"""From what there is to what is wanted: launch, drain and stop, one action a worker, each with its reason.

A starting worker counts, so it is not launched twice; one that never gets ready is given up. Draining ones
serve again before any is launched. Scaling in gives up those still starting first (they hold nothing), then
drains the ones with least to move. A draining worker is stopped only when it is empty, however long its
streams are. Where one type has too many workers and another of the same hardware too few, a worker takes the
other's role instead.

A rolling step from one fleet to another starts one worker, and stops its share of the old ones. Of n workers
to start and m to stop, step j stops old ones until m * j // n have stopped. So the fleet's capacity lies
between that of the two fleets at every step, where a worker starts before others stop.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from controlplane.errors import BadInput
from controlplane.snapshot import DRAINING, SERVING, STARTING
from controlplane.types import WorkerId


@dataclass(frozen=True, slots=True)
class Standing:
    """A worker as the scaler sees it: its state since when, and the requests it holds."""

    worker: WorkerId
    state: str
    since_s: float
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a number of workers."""

    workers: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Admit nothing more; move or finish what is there."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class Undrain:
    """Let a draining worker serve again."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End a worker that holds nothing."""

    worker: WorkerId
    reason: str


Step = Launch | Drain | Undrain | Stop


def steps_to(
    wanted: int, standing: Sequence[Standing], now_s: float, start_limit_s: float, reason: str
) -> list[Step]:
    """The actions that bring the fleet to `wanted` workers; `reason` is the target's.

    `start_limit_s`: a worker that has been starting for longer is given up (and replaced if still wanted).
    """
    if wanted < 0 or not start_limit_s > 0:
        raise BadInput(f"scaling: need wanted >= 0 and a start limit, got {wanted} and {start_limit_s:g} s")
    starting, serving, draining = (_those(standing, state) for state in (STARTING, SERVING, DRAINING))
    stuck = [s for s in starting if now_s - s.since_s > start_limit_s]
    coming = [s for s in starting if s not in stuck]
    missing = wanted - len(serving) - len(coming)
    # The fullest first: it has least of its way out behind it.
    back = sorted(draining, key=lambda s: (-s.requests, s.worker))[: max(missing, 0)]
    return [
        *(
            Stop(s.worker, f"still not ready after {now_s - s.since_s:.0f} s, given {start_limit_s:g} s")
            for s in stuck
        ),
        *(Undrain(s.worker, f"{reason}; it was still draining") for s in back),
        *([Launch(missing - len(back), reason)] if missing > len(back) else []),
        *_fewer(-missing, coming, serving, reason),
        *(Stop(s.worker, "it is drained") for s in draining if s.requests == 0 and s not in back),
    ]


def _those(standing: Sequence[Standing], state: str) -> list[Standing]:
    return [s for s in standing if s.state == state]


def _fewer(surplus: int, coming: Sequence[Standing], serving: Sequence[Standing], reason: str) -> list[Step]:
    """Give up `surplus` workers: those that start before those that serve."""
    # The youngest start has cost least; of those that serve, the emptiest is soonest done.
    given_up = sorted(coming, key=lambda s: (-s.since_s, s.worker))[: max(surplus, 0)]
    least = sorted(serving, key=lambda s: (s.requests, s.worker))[: max(surplus - len(given_up), 0)]
    return [
        *(Stop(s.worker, f"{reason}; it was not ready yet") for s in given_up),
        *(Drain(s.worker, f"{reason}; it holds {s.requests} requests, the fewest") for s in least),
    ]


def role_changes(
    wanted: Mapping[str, int], standing: Mapping[str, Sequence[Standing]], hardware: Mapping[str, Hashable]
) -> list[tuple[WorkerId, str]]:
    """The serving workers that take another role, and the type that each becomes.

    `wanted`, `standing`: of each type. A type that lacks workers takes those that one on the same `hardware`
    has too many of: nothing is started or drained. Each type keeps a serving worker. The emptiest change.
    """
    lacks = {kind: wanted[kind] - len(_there(of)) for kind, of in standing.items()}
    serving = {
        kind: sorted(_those(of, SERVING), key=lambda s: (s.requests, s.worker))
        for kind, of in standing.items()
    }
    changes: list[tuple[WorkerId, str]] = []
    for taker, giver in permutations(standing, 2):
        most = max(min(lacks[taker], -lacks[giver], len(serving[giver]) - 1), 0)
        if hardware[taker] == hardware[giver]:
            changes += [(s.worker, taker) for s in serving[giver][:most]]
            del serving[giver][:most]
            lacks[taker] -= most
            lacks[giver] += most
    return changes


def _there(standing: Sequence[Standing]) -> list[Standing]:
    """Those that start or serve."""
    return [s for s in standing if s.state in (STARTING, SERVING)]


@dataclass(frozen=True, slots=True)
class RollingStep:
    """Start a worker of one type (None: start none), then stop one of each of these, by type."""

    start: str | None
    stops: tuple[str, ...] = ()


def rolling_steps(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[RollingStep, ...]:
    """The steps between two fleets, workers by type; none where they are the same."""
    kinds = list(dict.fromkeys((*before, *after)))
    more = {kind: after.get(kind, 0) - before.get(kind, 0) for kind in kinds}
    starts = [kind for kind in kinds for _ in range(max(more[kind], 0))]
    stops = [kind for kind in kinds for _ in range(max(-more[kind], 0))]
    if not starts:
        return tuple(RollingStep(None, (kind,)) for kind in stops)
    ends = [len(stops) * (j + 1) // len(starts) for j in range(len(starts))]
    return tuple(
        RollingStep(kind, tuple(stops[begin:end]))
        for kind, begin, end in zip(starts, (0, *ends), ends, strict=False)
    )
