"""Mix changes: the mix that is wanted from one heartbeat to the next, and the change to ask for.

The program of scaler.mix is solved only where the need changed: demand, weights, prices and limits, or
counts that were set from outside. It is not solved for a demand that rose to what is there anyway: what is
cheapest for less and enough for more is cheapest for more. What was set from outside is left alone until the
demand changes, or until it has stood as long as a fall must. Where one type gives way to another, workers
that go stay until those that come serve, as far as demand needs them. Limits count both. Where they have no
room for both, those that come wait. Only where demand is not carried at all do the others go first.

No type shrinks while requests wait, without news of the demand, or within the stabilization window. Fewer of
it must be enough for that long, and no type may have grown in that time. What is missing meanwhile is added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from controlplane.scaler.line import HAIR, PARTS, Weights, even, in_parts
from controlplane.scaler.mix import Counts, MixNeed, MixSettings, choose, label, present
from controlplane.snapshot import SERVING, Fact, Facts, Scale, Snapshot
from controlplane.worker_type import WorkerType


@dataclass(frozen=True, slots=True)
class MixState:
    """The counts last chosen for `units`, and `wanted` on the way there; types with none left out.

    `units`: PARTS of a reference worker. `worker_types`: without their profiles, which count as weights.
    `due_s`: when to choose even if nothing changes. `solved`: the last need put to the program, and its
    answer. `grown_s`: when a type last grew. `fewer_since_s`: since when fewer of a type are enough; None
    while they are not.
    """

    units: int
    weights: Weights
    worker_types: tuple[WorkerType, ...]
    chosen: Counts
    wanted: Counts
    due_s: float = math.inf
    solved: tuple[MixNeed, Counts] | None = None
    grown_s: float = -math.inf
    fewer_since_s: float | None = None


def ask(
    worker_types: Sequence[WorkerType],
    settings: MixSettings,
    weights: Weights | None,
    limits: tuple[int, int | None],
    snapshot: Snapshot,
) -> MixNeed:
    """The need, its demand still open. `limits`: least and most workers. `weights` None: not known."""
    return MixNeed(
        tuple(replace(t, known_profile=None) for t in worker_types),
        weights or even(worker_types),
        0.0,
        settings,
        present(snapshot.wanted_kinds),
        *limits,
        cold_start_s=snapshot.cold_start_s,
        drain_s=snapshot.drain_s,
    )


def taken_up(before: MixState | None, need: MixNeed, now_s: float, down_s: float) -> MixState:
    """`before`, where what is there is what it wanted; else what is there, to be left alone for `down_s`."""
    there, weights = need.there, need.weights
    if before is not None and before.wanted == there and before.weights.known == weights.known:
        return before
    units = in_parts(need.carries(there))
    due_s = now_s + down_s if weights.known else math.inf
    mix = MixState(units, weights, need.worker_types, there, there, due_s)
    if before is None:
        return mix
    grown_s = now_s if _grows(before.wanted, there) else before.grown_s
    return replace(mix, solved=before.solved, grown_s=grown_s)


def _grows(before: Counts, after: Counts) -> bool:
    """Whether there are more of a type after than before."""
    return any(n > before.get(name, 0) for name, n in after.items())


def units_in(mix: MixState, need: MixNeed) -> int:
    """The mix's units, of the need's reference worker."""
    old = mix.weights.reference
    if old == need.weights.reference:
        return mix.units
    if old not in need.weights.of:
        return in_parts(need.carries(mix.chosen))
    return math.ceil(mix.units * need.weights.of[old] - HAIR)


def next_mix(
    before: MixState, need: MixNeed, units: int, snapshot: Snapshot, down_s: float = 0.0
) -> MixState:
    """The mix for `units` now, of news of the demand: `before`'s where nothing changed.

    `down_s`: the stabilization window. A fall of the units has waited for it already.
    """
    now_s, fell = snapshot.now_s, units < units_in(before, need)
    need = replace(need, demand=units / PARTS)
    same = (before.weights, before.worker_types) == (need.weights, need.worker_types)
    if before.units != units:
        carried = before.units < units and need.is_enough(before.chosen)
        same = same and carried
    same = same and sum(before.chosen.values()) >= need.least
    chosen, due_s, solved, is_due = before.chosen, before.due_s, before.solved, now_s >= before.due_s
    if not same or is_due:
        if solved is None or solved[0] != need:
            solved = need, choose(need)
        chosen, due_s = solved[1], math.inf
    wanted = bridged(need, chosen, Counter(w.kind for w in snapshot.workers if w.state == SERVING))
    mix = replace(
        before, units=units, weights=need.weights, worker_types=need.worker_types, chosen=chosen,
        due_s=due_s, solved=solved,
    )  # fmt: skip
    return _kept(mix, need, wanted, snapshot, down_s, has_waited=fell or is_due)


def _kept(
    mix: MixState, need: MixNeed, wanted: Counts, snapshot: Snapshot, down_s: float, has_waited: bool
) -> MixState:
    """The mix that wants these counts, but what is there of types that may not shrink yet."""
    now_s, there = snapshot.now_s, need.there
    since_s = mix.fewer_since_s
    if not _grows(wanted, there):
        since_s = None
    elif has_waited:
        since_s = -math.inf
    elif since_s is None:
        since_s = now_s
    has_lasted = since_s is not None and now_s - max(since_s, mix.grown_s) >= down_s
    if since_s is not None and not (has_lasted and snapshot.may_give_back):
        is_enough = need.is_enough(there) and sum(there.values()) >= need.least
        wanted = there if is_enough else _added(need, there, wanted)
    grown_s = now_s if _grows(there, wanted) else mix.grown_s
    return replace(mix, wanted=wanted, grown_s=grown_s, fewer_since_s=since_s)


def _added(need: MixNeed, counts: Counts, most: Mapping[str, float], is_all: bool = False) -> dict[str, int]:
    """These counts, and up to `most` of each type while limits allow and, unless `is_all`, demand needs."""
    counts, of = dict(counts), need.weights.of
    for name in sorted(of, key=lambda name: (-of[name], name)):
        while (
            counts.get(name, 0) < most.get(name, 0)
            and need.is_allowed(more := counts | {name: counts.get(name, 0) + 1})
            and (is_all or not need.is_enough(counts) or sum(counts.values()) < need.least)
        ):
            counts = more
    return counts


def fixed_mix(need: MixNeed, total: int) -> MixState:
    """An operator's number: what is there, with as many more or fewer as that takes."""
    counts = stepped(need.worker_types, need.weights.of, need.there, total)
    units = in_parts(need.carries(counts))
    return MixState(units, need.weights, need.worker_types, counts, counts)


def change(before: MixState, after: MixState, need: MixNeed, why: str, facts: Facts) -> Scale | None:
    """The change to ask for, if any. `why`: the reason for the units; `facts`: to go with the mix's own."""
    if after.wanted == need.there:
        return None
    need = replace(need, demand=after.units / PARTS)
    counts = {t.name: 0 for t in need.worker_types} | dict(after.wanted)
    reason = _reason(before, after, need, why)
    facts = {**facts, **_mix_facts(after, need), "cost": _cost(after, need)}
    return Scale(sum(counts.values()), reason, facts, counts)


def _reason(before: MixState, after: MixState, need: MixNeed, why: str) -> str:
    is_same = before.chosen == after.chosen and before.wanted == need.there and before.units == after.units
    if is_same and not _grows(need.there, after.wanted):
        return f"{label(after.chosen)} serve now, which is enough"
    if not need.is_enough(after.chosen):
        most = need.carries(after.chosen)
        return f"{why}, but all that is allowed, {label(after.chosen)}, carries {most:.3g}"
    cost = need.usd_per_h(after.chosen)
    ranked = "fewest GPUs" if cost is None else "cheapest"
    reason = f"{why}; {ranked}: {label(after.chosen)}"
    if cost is not None:
        reason += f" at ${cost:.2f}/h"
    chosen, wanted = Counter(after.chosen), Counter(after.wanted)
    if wanted - chosen:
        reason += f"; {label(wanted - chosen)} more until those serve"
    if chosen - wanted:
        reason += f"; the limits have no room yet for {label(chosen - wanted)}"
    return reason


def _mix_facts(after: MixState, need: MixNeed) -> Facts:
    alone = need.alone()
    facts: dict[Fact, dict[str, float]] = {
        "weights": dict(need.weights.of),
        "chosen": {name: float(n) for name, n in after.chosen.items()},
        "alone": {name: float(n) for name, n in alone.items()},
    }
    prices = {name: need.usd_per_h({name: n}) for name, n in alone.items()}
    stated = {name: round(usd, 4) for name, usd in prices.items() if usd is not None}
    if stated:
        facts["alone_usd_per_h"] = stated
    return facts


def _cost(after: MixState, need: MixNeed) -> dict[str, float]:
    there, wanted = need.there, after.wanted
    steps = [wanted.get(name, 0) - there.get(name, 0) for name in {**there, **wanted}]
    cost: dict[str, float] = {"workers": float(sum(steps))}
    if any(n > 0 for n in steps):
        cost["ready_after_s"] = need.cold_start_s
    if any(n < 0 for n in steps):
        cost["drained_after_s"] = need.drain_s
    now, then = need.usd_per_h(there), need.usd_per_h(wanted)
    if now is not None and then is not None:
        cost |= {"usd_per_h": round(then - now, 4), "mix_usd_per_h": round(then, 4)}
    return cost


def bridged(need: MixNeed, chosen: Counts, serving: Counts) -> dict[str, int]:
    """The chosen counts, and of types that shrink what demand needs until the others serve.

    Where limits have no room for both, fewer of the others come, and of any type what demand needs. If even
    so it is not carried, the chosen come first, and those that shrink stay as far as there is room.
    """
    there, to_come, serve = Counter(need.there), Counter(chosen), Counter(serving)
    if not there - to_come:
        return present(chosen)
    ready, unlimited = to_come & serve, replace(need, settings=MixSettings(), most=None, least=0)
    kept = Counter(_added(unlimited, ready, serve & (ready + (there - to_come)))) - ready
    both = to_come + kept
    if need.is_allowed(both):
        return present(both)
    fitting = _added(need, both & there, both, is_all=True)
    fitting = _added(need, fitting, dict.fromkeys(need.weights.of, math.inf))
    if need.is_allowed(fitting) and need.carries(fitting) >= min(need.demand, need.carries(chosen)) - HAIR:
        return present(fitting)
    return present(_added(need, to_come, both, is_all=True))


def stepped(
    worker_types: Sequence[WorkerType],
    capacity: Mapping[str, float],
    there: Counts,
    total: int,
    may_go: Callable[[Counts], bool] = lambda rest: True,
) -> dict[str, int]:
    """`there` brought to `total` workers one by one, within the types' limits; as near as they let it.

    More: of the type cheapest for its `capacity` (1 where it is not said). Fewer: of the dearest for it whose
    going leaves a `rest` that `may_go`.
    """
    counts = {t.name: 0 for t in worker_types} | dict(there)
    is_priced = all(t.usd_per_h is not None for t in worker_types)

    def price(t: WorkerType) -> tuple[float, str]:
        return ((t.usd_per_h or 0.0) if is_priced else t.gpus) / capacity.get(t.name, 1.0), t.name

    while (missing := total - sum(counts.values())) != 0:
        if missing > 0:
            able = [t for t in worker_types if t.limit is None or counts[t.name] < t.limit]
        else:
            able = [t for t in worker_types if counts[t.name] > t.low]
            able = [t for t in able if may_go(counts | {t.name: counts[t.name] - 1})]
        if not able:
            break
        chosen = min(able, key=price) if missing > 0 else max(able, key=price)
        counts[chosen.name] += 1 if missing > 0 else -1
    return present(counts)
