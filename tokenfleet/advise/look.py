"""The traffic of a fleet between two looks at its servers' metrics.

A server counts the requests that end and shows those that run or wait, so between two looks

    arrivals = Δ ended + Δ running + Δ waiting + Δ left

vLLM counts no end of a request whose client leaves, but its first token. So `left` is the most by which a
server's first tokens were more than its requests, at two looks in a row. It misses those that leave before
their first token, and counts others a look late, or later while requests wait.

A look counts nothing where it would have to guess: a server does not answer, its counters fell, it answers
again, or it left. Absence is no idleness. A server that never answered yet is starting, and one that is new
is counted from its first look on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from controlplane.types import ClassOutcomes, Slo
from tokenfleet.profiles.engine_metrics import HISTOGRAMS, EngineCounts

ARRIVED = ("ended", "running", "waiting", "left")
HALF_LIFE_S = 120.0  # of the latency histograms that are shown
Buckets = Mapping[str, Mapping[float, float]]


@dataclass(frozen=True, slots=True)
class NoCounts:
    """Why a server gave no counts. `answers`: it gave something else. `refuses`: nothing listens there.

    `kind`: the place of its worker type among those of the fleet.
    """

    why: str
    answers: bool = False
    refuses: bool = False
    kind: int = 0


Page = EngineCounts | NoCounts


@dataclass(frozen=True, slots=True)
class Watched:
    """The servers as last seen: `last` those of the last look, `known` all that ever answered.

    `debt`: arrivals that were counted too early, where a server shows its gauges before its counters.
    """

    last: Mapping[str, EngineCounts] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    debt: float = 0.0
    is_first: bool = True


@dataclass(frozen=True, slots=True)
class FleetTraffic:
    """What a fleet did between two looks, and what runs and waits at the second.

    `arrivals` None: not counted, for the reason `held`. `running`: by server that answers. `starting`:
    servers that have not answered yet. `ended`, with their tokens: of the same time, at the first look of the
    servers' whole lives. `buckets`: requests up to each edge of the latency histograms. `kinds`: the worker
    types of the servers that answer, then of those that start. `arrived`: arrivals by type.
    """

    at_s: float
    running: tuple[float, ...]
    waiting: float
    starting: int = 0
    arrivals: float | None = None
    ended: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    buckets: Buckets = field(default_factory=dict)
    held: str = ""
    kinds: tuple[int, ...] = ()
    arrived: Mapping[int, float] = field(default_factory=dict)

    @property
    def servers(self) -> int:
        return len(self.running)

    def has(self, kind: int) -> int:
        """The servers of a type that answer."""
        return self.kinds[: self.servers].count(kind)

    def starts(self, kind: int) -> int:
        """The servers of a type that have not answered yet."""
        return self.kinds[self.servers :].count(kind)


def look(
    watched: Watched, pages: Mapping[str, Page], at_s: float, model: str = ""
) -> tuple[Watched, FleetTraffic]:
    """The servers as they are now, and their traffic since the last look. `model`: what all must serve."""
    found = {server: checked(page, model) for server, page in pages.items()}
    counted = {server: page for server, page in found.items() if isinstance(page, EngineCounts)}
    now = {server: _with_left(page, watched.last.get(server)) for server, page in counted.items()}
    held, starting = _silent(watched, found)
    held += _changed(watched, pages, now)
    if not now and not held:
        held = ["no server answers" if pages else "no server is listed"]
    more = _risen(watched, now, bool(held))
    kinds = [page.kind for page in now.values()]
    counts_arrivals = not (held or watched.is_first)
    risen = more(*ARRIVED) + watched.debt if counts_arrivals else 0.0
    next_watched = Watched(
        now,
        (watched.known & pages.keys()) | now.keys(),
        min(risen, 0.0),
        is_first=watched.is_first and not now,
    )
    return next_watched, FleetTraffic(
        at_s,
        tuple(_total(page, "running") for page in now.values()),
        sum(_total(page, "waiting") for page in now.values()),
        len(starting),
        max(risen, 0.0) if counts_arrivals else None,
        more("ended"),
        more("ended_prompt_tokens"),
        more("ended_output_tokens"),
        more.buckets(),
        _told(held),
        (*kinds, *starting),
        _by_kind(more, set(kinds), max(risen, 0.0)),
    )


def _by_kind(more: _Sum, kinds: set[int], arrivals: float) -> dict[int, float]:
    """The arrivals of each type."""
    rose = {kind: max(more.of(kind)(*ARRIVED), 0.0) for kind in kinds}
    total = sum(rose.values())
    return {kind: arrivals * one / total for kind, one in rose.items()} if total else {}


def _silent(watched: Watched, pages: Mapping[str, Page]) -> tuple[list[str], list[int]]:
    """Why servers give no counts that should, and the types of those that have yet to answer."""
    silent = {server: page for server, page in pages.items() if isinstance(page, NoCounts)}
    lost = {s: f"{s}: {page.why}" for s, page in silent.items() if page.answers or s in watched.known}
    return list(lost.values()), [page.kind for s, page in silent.items() if s not in lost]


def _changed(watched: Watched, pages: Mapping[str, Page], now: Mapping[str, EngineCounts]) -> list[str]:
    """The servers whose counts do not go on from those of the last look, and why."""
    last = watched.last
    left = [f"{s}: is gone" for s in sorted(watched.known - pages.keys())]
    again = [f"{s}: answers again" for s in now if s in watched.known and s not in last]
    fell = [s for s in now if s in last and _fell(now[s], last[s])]
    return [*left, *(f"{s}: its counters fell, it was restarted" for s in fell), *again]


def _fell(now: EngineCounts, before: EngineCounts) -> bool:
    """Whether a server's counters began again."""
    return any(_total(now, name) < _total(before, name) for name in ("ended", "first_tokens"))


def _with_left(now: EngineCounts, before: EngineCounts | None) -> EngineCounts:
    """A page with the requests whose clients have left; before a server's first page they are not known."""
    left = _surely_left(now) + _total(now, "waiting")
    if before is not None and not _fell(now, before):  # at two looks: gauges may show before counters
        left = max(min(_surely_left(now), _surely_left(before)), _total(before, "left"))
    return replace(now, values={**now.values, "left": left})


def _surely_left(page: EngineCounts) -> float:
    """The fewest clients that can have left: as many as if all that wait had had a first token."""
    return _total(page, "first_tokens") - sum(_total(page, name) for name in ("ended", "running", "waiting"))


def _risen(watched: Watched, now: Mapping[str, EngineCounts], is_held: bool) -> _Sum:
    """What the counters rose by: since the last look, at the first one since they began."""
    if watched.is_first:
        return _Sum({}, now)
    both = [] if is_held else [server for server in now if server in watched.last]
    return _Sum({s: watched.last[s] for s in both}, {s: now[s] for s in both})


def share_within(buckets: Mapping[float, float], target_s: float) -> tuple[float, float] | None:
    """The share of requests within a target: at least, and at most, by the edges around it; None of none.

    Both are equal where the target is an edge.
    """
    total = buckets.get(math.inf, 0.0)
    if total <= 0:
        return None
    near = [edge for edge in buckets if math.isclose(edge, target_s, rel_tol=1e-9)]
    if near:
        return buckets[near[0]] / total, buckets[near[0]] / total
    low = max((count for edge, count in buckets.items() if edge < target_s), default=0.0)
    high = min((count for edge, count in buckets.items() if edge > target_s), default=total)
    return low / total, high / total


def nearest_edges(buckets: Mapping[float, float], target_s: float) -> tuple[float, ...]:
    """The edges next to a target, below and above; the target alone where it is one."""
    if any(math.isclose(edge, target_s, rel_tol=1e-9) for edge in buckets):
        return (target_s,)
    below = [edge for edge in buckets if edge < target_s]
    above = [edge for edge in buckets if target_s < edge < math.inf]
    return (*([max(below)] if below else []), *([min(above)] if above else []))


def blended(recent: Buckets, traffic: FleetTraffic, passed_s: float) -> Buckets:
    """Recent latency histograms: older requests fade. The first look is left out: it covers whole lives."""
    if traffic.arrivals is None:
        return recent
    kept = 0.5 ** (passed_s / HALF_LIFE_S)
    return {
        name: {
            edge: recent.get(name, {}).get(edge, 0.0) * kept + max(count, 0.0) for edge, count in new.items()
        }
        for name, new in traffic.buckets.items()
    }


def outcomes(slo: Slo, before: ClassOutcomes | None, traffic: FleetTraffic) -> ClassOutcomes | None:
    """What became of requests, where the histograms count it: both targets are edges of theirs.

    How many were within both lies between two numbers; the lower is taken.
    """
    if traffic.arrivals is None:
        return before
    counts = [traffic.buckets.get(name, {}) for name in ("ttft", "tpot")]
    shares = [share_within(c, t) for c, t in zip(counts, (slo.ttft_s, slo.tpot_s), strict=True)]
    if None in shares or any(share is not None and share[0] != share[1] for share in shares):
        return before
    ended = max(traffic.ended, 0.0)
    in_ttft, in_tpot = (min(max(share[0], 0.0), 1.0) * ended for share in shares if share is not None)
    was = before or ClassOutcomes(slo, 0, 0, 0, 0)
    return ClassOutcomes(
        slo,
        was.ended + round(ended),
        was.ttft_met + round(in_ttft),
        was.tpot_met + round(in_tpot),
        was.met + round(max(in_ttft + in_tpot - ended, 0.0)),
    )


class _Sum:
    """What counters rose by over several servers."""

    def __init__(self, before: Mapping[str, EngineCounts], now: Mapping[str, EngineCounts]) -> None:
        self._before, self._now = before, now

    def __call__(self, *names: str) -> float:
        total = sum(_total(page, name) for page in self._now.values() for name in names)
        return total - sum(_total(page, name) for page in self._before.values() for name in names)

    def of(self, kind: int) -> _Sum:
        """The same over the servers of a type."""
        both = (self._before, self._now)
        return _Sum(*({s: page for s, page in pages.items() if page.kind == kind} for pages in both))

    def buckets(self) -> Buckets:
        found: dict[str, dict[float, float]] = {name: {} for name in HISTOGRAMS}
        for pages, sign in ((self._now, 1.0), (self._before, -1.0)):
            for page in pages.values():
                for name, edges in page.buckets.items():
                    for edge, count in edges.items():
                        found[name][edge] = found[name].get(edge, 0.0) + sign * count
        return found


def _total(page: EngineCounts, name: str) -> float:
    return page.values.get(name, 0.0)


def checked(page: Page, model: str = "") -> Page:
    """The counts, or why a page is not counted."""
    if isinstance(page, NoCounts):
        return page
    if not all(map(math.isfinite, page.values.values())):
        return NoCounts("a counter is no number", answers=True)
    if "ended" not in page.values:
        return NoCounts("vllm:request_success_total is missing", answers=True)
    if model and page.model != model:
        return NoCounts(f"serves {page.model or 'no named model'}, expected {model}", answers=True)
    return page


def _told(held: list[str]) -> str:
    if len(held) < 2:
        return "".join(held)
    return f"{held[0]} (and {len(held) - 1} more)"
