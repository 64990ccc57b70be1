"""The mix that is wanted, from one heartbeat to the next, and the change to ask for.

The program is solved only where the question changed: demand, weights, prices and limits, or counts that
somebody else set; and not for a demand that rose to what is there anyway, since what is cheapest for less and
enough for more is cheapest for more. What somebody else set is left alone until the demand changes, or until
it has stood as long as a fall must.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from controlplane.scaler.counts import (
    Asked,
    Counts,
    alone,
    bridged,
    choose,
    present,
    said,
    stepped,
    usd_per_h,
)
from controlplane.scaler.worker_types import KindSettings, MixingSettings, Weights, even, in_parts
from controlplane.snapshot import SERVING, Fact, Facts, Scale, Snapshot


@dataclass(frozen=True, slots=True)
class Mixed:
    """The counts last chosen for so many `units`, and `wanted` on the way there; kinds with none left out.

    `units`: PARTS of a reference worker. `kinds`: without their speeds, which count as weights. `due_s`: when
    to choose even if nothing changes. `solved`: the last question put to the program, and its answer.
    """

    units: int
    weights: Weights
    kinds: tuple[KindSettings, ...]
    chosen: Counts
    wanted: Counts
    due_s: float = math.inf
    solved: tuple[Asked, Counts] | None = None


def terms_of(kinds: Sequence[KindSettings]) -> tuple[KindSettings, ...]:
    """What of the kinds decides besides their weights."""
    return tuple(replace(k, speed=None) for k in kinds)


def taken_up(before: Mixed | None, asked: Asked, due_s: float) -> Mixed:
    """`before`, where what is there is what it wanted; else what is there, to be left alone until `due_s`."""
    if before is not None and before.wanted == asked.there and before.weights.known == asked.weights.known:
        return before
    solved = None if before is None else before.solved
    units = in_parts(asked.carries(asked.there))
    due_s = due_s if asked.weights.known else math.inf
    return Mixed(units, asked.weights, asked.kinds, asked.there, asked.there, due_s, solved)


def units_in(mixed: Mixed, asked: Asked) -> int:
    """The mix's units, of the reference worker as it is now."""
    old = mixed.weights.reference
    if old == asked.weights.reference:
        return mixed.units
    if old not in asked.weights.of:
        return in_parts(asked.carries(mixed.chosen))
    return math.ceil(mixed.units * asked.weights.of[old] - 1e-6)


def asked_of(
    kinds: Sequence[KindSettings],
    mixing: MixingSettings,
    weights: Weights | None,
    limits: tuple[int, int | None],
    snapshot: Snapshot,
) -> Asked:
    """The question, its units still open. `limits`: least and most workers. `weights` None: not known."""
    there, known = present(snapshot.wanted_kinds), weights or even(kinds)
    takes = snapshot.cold_start_s, snapshot.drain_s
    return Asked(terms_of(kinds), mixing, known, 0, there, *limits, *takes)


def next_mix(before: Mixed, asked: Asked, snapshot: Snapshot, is_news: bool = True) -> Mixed:
    """The mix for what is asked now: `before`'s where nothing changed. Without news nothing is due."""
    same = (before.weights, before.kinds) == (asked.weights, asked.kinds)
    if before.units != asked.units:
        carried = before.units < asked.units and asked.is_enough(before.chosen)
        same = same and carried and sum(before.chosen.values()) >= asked.least
    chosen, due_s, solved = before.chosen, before.due_s, before.solved
    if not same or (is_news and snapshot.now_s >= due_s):
        if solved is None or solved[0] != asked:
            solved = asked, choose(asked)
        chosen, due_s = solved[1], math.inf
    wanted = bridged(asked, chosen, Counter(w.kind for w in snapshot.workers if w.state == SERVING))
    return Mixed(asked.units, asked.weights, asked.kinds, chosen, wanted, due_s, solved)


def fixed_mix(asked: Asked, total: int) -> Mixed:
    """An operator's number: what is there, with as many more or fewer as that takes."""
    counts = stepped(asked.kinds, asked.weights.of, asked.there, total)
    return Mixed(in_parts(asked.carries(counts)), asked.weights, asked.kinds, counts, counts)


def change(before: Mixed, after: Mixed, asked: Asked, why: str, facts: Facts) -> Scale | None:
    """What to ask for, if anything. `why` asked for the units; `facts` besides those of the mix."""
    if after.wanted == asked.there:
        return None
    kinds = {k.kind: 0 for k in asked.kinds} | dict(after.wanted)
    mix = _mix_facts(after, asked)
    reason = _reason(before, after, asked, why)
    return Scale(sum(kinds.values()), reason, {**facts, **mix, "cost": _cost(after, asked)}, kinds)


def _reason(before: Mixed, after: Mixed, asked: Asked, why: str) -> str:
    if before.chosen == after.chosen and before.wanted == asked.there and before.units == after.units:
        return f"{said(after.chosen)} serve now, which is enough"
    if not asked.is_enough(after.chosen):
        most = asked.carries(after.chosen)
        return f"{why}, but all that is allowed, {said(after.chosen)}, carries {most:.3g}"
    cost = usd_per_h(asked.kinds, after.chosen)
    ranked = "fewest GPUs" if cost is None else "cheapest"
    reason = f"{why}; {ranked}: {said(after.chosen)}"
    if cost is not None:
        reason += f" at ${cost:.2f}/h"
    stay = present({kind: n - after.chosen.get(kind, 0) for kind, n in after.wanted.items()})
    return f"{reason}; {said(stay)} more until those serve" if stay else reason


def _mix_facts(after: Mixed, asked: Asked) -> Facts:
    facts: dict[Fact, dict[str, float]] = {
        "weights": dict(asked.weights.of),
        "chosen": {kind: float(n) for kind, n in after.chosen.items()},
        "alone": {kind: float(n) for kind, n in alone(asked).items()},
    }
    prices = {kind: usd_per_h(asked.kinds, {kind: n}) for kind, n in alone(asked).items()}
    known = {kind: round(usd, 4) for kind, usd in prices.items() if usd is not None}
    if known:
        facts["alone_usd_per_h"] = known
    return facts


def _cost(after: Mixed, asked: Asked) -> dict[str, float]:
    steps = {k: after.wanted.get(k, 0) - asked.there.get(k, 0) for k in {**asked.there, **after.wanted}}
    cost: dict[str, float] = {"workers": float(sum(steps.values()))}
    if any(n > 0 for n in steps.values()):
        cost["ready_after_s"] = asked.cold_start_s
    if any(n < 0 for n in steps.values()):
        cost["drained_after_s"] = asked.drain_s
    now, then = (usd_per_h(asked.kinds, counts) for counts in (asked.there, after.wanted))
    if now is not None and then is not None:
        cost |= {"usd_per_h": round(then - now, 4), "mix_usd_per_h": round(then, 4)}
    return cost
