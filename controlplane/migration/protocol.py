"""The protocol of a move: a table of legal stages and transitions for one request.

The source decodes on while its KV is copied (Llumnix's multi-stage pre-copy); only the last tokens are
copied with the request stopped. A stage says who owns the client's stream, and what is held for the move:

    stage         stream from     held                             when given up
    PENDING       source          nothing                          -
    COPYING       source          source: a lease; target: loader  release both
    CUTTING_OVER  target          source: a hold;  target: loader  replay the request; release both
    DONE          target          nothing
    ABORTED       source          nothing
    LOST          who replays it  nothing

ABORTED is before the cut-over: the client's stream never left the source. LOST is after it: the target could
not go on, and the request is replayed from its tokens. A request that still waits has no KV and cuts over at
once. Unlike in Llumnix the target pulls, so a source never waits for a push, and a request that ends by
itself during a move is not a failure.
"""

from __future__ import annotations

from enum import Enum, auto

from controlplane.errors import IllegalStep


class Stage(Enum):
    """The stage of a move."""

    PENDING = auto()
    COPYING = auto()
    CUTTING_OVER = auto()
    DONE = auto()
    ABORTED = auto()
    LOST = auto()


class Happened(Enum):
    """An event that the coordinator learns of."""

    WAITING = auto()  # the request has no token yet: nothing to copy
    ACCEPTED = auto()  # both sides are there; the source was told to keep the KV
    COPIED = auto()  # one pre-copy stage is on the target
    SWITCHED = auto()  # the gateway listens to the target
    RESUMED = auto()  # the target's first token arrived
    REFUSED = auto()  # cannot continue exactly, over budget, or a side is gone
    COPY_FAILED = auto()  # load error, target full until the time limit, either side lost
    RESUME_FAILED = auto()  # the target failed after the switch
    ENDED = auto()  # the request finished or its client left


NEXT: dict[tuple[Stage, Happened], Stage] = {
    (Stage.PENDING, Happened.REFUSED): Stage.ABORTED,
    (Stage.PENDING, Happened.ENDED): Stage.ABORTED,
    (Stage.PENDING, Happened.ACCEPTED): Stage.COPYING,
    (Stage.PENDING, Happened.WAITING): Stage.CUTTING_OVER,
    (Stage.COPYING, Happened.COPIED): Stage.COPYING,
    (Stage.COPYING, Happened.COPY_FAILED): Stage.ABORTED,
    (Stage.COPYING, Happened.ENDED): Stage.ABORTED,
    (Stage.COPYING, Happened.SWITCHED): Stage.CUTTING_OVER,
    (Stage.CUTTING_OVER, Happened.RESUMED): Stage.DONE,
    (Stage.CUTTING_OVER, Happened.RESUME_FAILED): Stage.LOST,
    (Stage.CUTTING_OVER, Happened.ENDED): Stage.DONE,
}

CLOSED = frozenset({Stage.DONE, Stage.ABORTED, Stage.LOST})


def step(stage: Stage, happened: Happened) -> Stage:
    """The stage after an event. Raises IllegalStep for what the table does not list."""
    try:
        return NEXT[stage, happened]
    except KeyError:
        raise IllegalStep(f"{happened.name} while {stage.name}") from None
