"""Scaling by load, where no line says what demand needs: used and waiting KV tokens over wanted capacity.

Above `high` for `rise_s` without a break, as many workers are wanted as bring the load down to `high`. Below
`low` for `hold_s`, as few are wanted as would have kept it in the middle between the two all that time. Both
stay within `least` and `most`. Of several types the one cheapest for its KV capacity grows. The dearest
shrinks whose going leaves the load below `high`. A snapshot without load figures holds everything: no news is
not idleness. Nothing is given back while requests wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controlplane.errors import BadInput
from controlplane.scaler.mix import label, present
from controlplane.scaler.mix_changes import stepped
from controlplane.scaler.target import StabilizationWindow, Stabilized, stabilize
from controlplane.snapshot import SERVING, Scale, Snapshot
from controlplane.worker_type import WorkerType


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """`least` and `most` workers; `high` and `low` are shares of KV capacity (above 1: what waits may be as
    much more), to be crossed for `rise_s` and `hold_s`.
    """

    least: int
    most: int
    high: float = 0.75
    low: float = 0.3
    rise_s: float = 10.0
    hold_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise BadInput(f"load: need 0 <= low < high, got {self.low:g} and {self.high:g}")
        if not 0 <= self.least <= self.most:
            raise BadInput(f"load: need 0 <= least <= most, got {self.least} and {self.most}")

    def workers(self, wanted: int, used: int, each: float) -> int:
        """The number of workers of `each` capacity for `used` tokens, when `wanted` are wanted now."""
        load = used / (each * wanted) if wanted else math.inf
        needed = wanted
        if load > self.high:
            needed = math.ceil(used / (each * self.high))
        elif load < self.low:
            needed = min(math.ceil(used / (each * (self.low + self.high) / 2.0)), wanted - 1)
        return min(max(needed, self.least), self.most)


def scale_by_load(
    settings: LoadSettings,
    stable: Stabilized | None,
    snapshot: Snapshot,
    used_tokens: int,
    types: Sequence[WorkerType] = (),
) -> tuple[Stabilized | None, Scale | None]:
    """The new state, and the change to ask for, if any.

    `used_tokens`: KV that is held or waited for. `types`: what may be had, in a fleet of several.
    """
    measured = [w for w in snapshot.workers if w.state == SERVING and w.capacity_tokens > 0]
    if not measured:
        return stable, None
    wanted, low, high = snapshot.wanted, settings.least, settings.most
    if low <= wanted <= high:
        each = sum(w.capacity_tokens for w in measured) / len(measured)
        if stable is None or stable.wanted != wanted:
            stable = Stabilized(wanted)
        needed = settings.workers(wanted, used_tokens, each)
        window = StabilizationWindow(settings.rise_s, settings.hold_s)
        after = stabilize(window, stable, needed, snapshot.now_s)
        if after.wanted < wanted and snapshot.waiting_requests:
            return stable, None
        stable, workers = after, after.wanted
        if workers == wanted:
            return stable, None
        over, limit, for_s = "above", settings.high, settings.rise_s
        if workers < wanted:
            over, limit, for_s = "below", settings.low, settings.hold_s
        load = used_tokens / (each * wanted) if wanted else math.inf
        why = f"load {100 * load:.0f} % has been {over} {100 * limit:.0f} % for {for_s:g} s"
    else:
        stable, workers = None, min(max(wanted, low), high)
        why = f"{wanted} workers are outside {low}..{high}"
    if not types:
        return stable, Scale(workers, why)
    return stable, _of_types(settings, snapshot, used_tokens, types, workers, why)


def _of_types(
    settings: LoadSettings,
    snapshot: Snapshot,
    used_tokens: int,
    types: Sequence[WorkerType],
    workers: int,
    why: str,
) -> Scale | None:
    """`workers` of several types, as near to that number as limits and load let those come or go."""
    measured = [w for w in snapshot.workers if w.state == SERVING and w.capacity_tokens > 0]
    capacity = dict.fromkeys(
        (t.name for t in types), sum(w.capacity_tokens for w in measured) / len(measured)
    )
    capacity |= {t.name: float(t.profile.kv.capacity_tokens) for t in types if t.known_profile is not None}
    capacity |= {w.kind: float(w.capacity_tokens) for w in measured}

    def may_go(rest: Mapping[str, int]) -> bool:
        return used_tokens <= settings.high * sum(capacity.get(kind, 0.0) * n for kind, n in rest.items())

    there = present(snapshot.wanted_kinds)
    counts = stepped(types, capacity, there, workers, may_go)
    if counts == there:
        return None
    named = {t.name: 0 for t in types} | counts
    return Scale(sum(counts.values()), f"{why}: {label(counts)}", kinds=named)
