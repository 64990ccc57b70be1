"""Live migration in a plan: the answer with moves, and what they save.

A search sizes fleets without moves. That takes a fraction of the time and is a safe bound: in nearly all
cases a fleet that holds without them holds with them too. Its answer is then judged with moves, on the
recorded trace and in the same resampled traces. One worker fewer is judged as well, and is the answer where
it holds. Where the fleet fails with moves, the plan leaves them out. What-ifs and portfolios make many plans,
and take the answer of the search.
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.placement.policies import MIGRATE, Policy
from controlplane.workload import Workload
from dataplane.simulated.simulate import is_still, prepare
from tokenfleet.planning.estimate import Estimate, Trial, look, verdict_on
from tokenfleet.planning.fleet import Fleet, of_one_kind
from tokenfleet.planning.plan_file import PlannedMoves, ReplayedFleet
from tokenfleet.planning.search import Search, missed
from tokenfleet.planning.sizing import Sizing

MOST_FEWER = 3  # workers that moves may save; each takes replays with moves of a fleet near its limit


@dataclass(frozen=True)
class Settled:
    """The fleet of the answer, its estimate, the search on its terms, and the worth of moves."""

    search: Search
    fleet: Fleet
    estimate: Estimate
    worth: PlannedMoves | None = None

    @property
    def is_smaller(self) -> bool:
        """Whether moves saved a worker."""
        return self.worth is not None and self.worth.workers_without > self.fleet.workers

    def explains(self, still: Search) -> Search:
        """The search that explains the answer: without moves (`still`), but where the fleet fails so."""
        return self.search if self.is_smaller else still


def unmovable(fleet: Fleet, workload: Workload) -> str:
    """The reason why moves on this fleet are not simulated; empty where they are."""
    types = [group.worker_type for group in fleet.groups]
    if any(kind.is_split or group.role != "any" for kind, group in zip(types, fleet.groups, strict=True)):
        return "Requests do not move between split prefill and decode workers"
    if any(kind.ranks is not None and kind.ranks.count > 1 for kind in types):
        return "Requests do not move between data- or pipeline-parallel workers"
    if workload.prefixes is not None and any(kind.profile.host_bytes for kind in types):
        return "Moves are not simulated together with KV offload"
    return ""


def refuse_policy(search: Search) -> None:
    """Raise BadInput where a policy asked for by name does not cover a kind of worker; `exact`: their mix."""
    if search.request.policy is None:
        return
    first = search.workload.take(slice(0, 1))
    fleets = [of_one_kind(kind, 2, 0.5).specs() for kind in search.types]
    is_exact = search.request.placement == Policy.EXACT
    for specs in [[spec for fleet in fleets for spec in fleet]] if is_exact else fleets:
        prepare(first, specs, search.terms.slos, search.request.policy)


def settled(search: Search, winner: Sizing, fleet: Fleet, estimate: Estimate, *, is_judged: bool) -> Settled:
    """The answer of `winner` with moves where they were asked for; sets the sizing's counts and estimates.

    Where it is not judged with moves, it has them on the strength of holding without.
    """
    if not search.request.moves:
        return Settled(search, fleet, estimate)
    untried = PlannedMoves(
        kept=True,
        workers_without=fleet.workers,
        usd_per_hour_without=fleet.usd_per_hour,
        with_moves=None,
        without_moves=None,
        why_not=None,
    )
    moving, why_not = search.on(policy=search.terms.policy + MIGRATE), unmovable(fleet, search.workload)
    if why_not or (why_still := _why_still(moving, fleet, is_judged=is_judged)):
        worth = untried.model_copy(update={"kept": not why_not, "why_not": why_not or why_still})
        return Settled(search, fleet, estimate, worth)
    trial = Trial(moving, fleet)
    holds = moving.meets(moving.replay(fleet)) and trial.holds()
    off = _replayed(search, fleet, estimate)
    on = _replayed(moving, fleet, trial.verdict() if trial.is_told else estimate)
    worth = untried.model_copy(update={"kept": holds, "with_moves": on, "without_moves": off})
    if not holds:
        return Settled(search, fleet, estimate, worth)
    smallest = fleet, trial.verdict()
    _note(winner, moving, *smallest)
    for _ in range(MOST_FEWER if search.traffic.sampler is None else 0):
        fewer = _one_fewer(search, moving, winner, smallest[0])
        if fewer is None:
            break
        smallest = fewer
        _note(winner, moving, *smallest)
    if smallest[0] is fleet:
        return Settled(moving, fleet, smallest[1], worth)
    seen = look(search, smallest[0], range(1, trial.numbers[-1] + 1))
    alone = verdict_on(seen, search.request, search.terms.asked)
    on, off = _replayed(moving, *smallest), _replayed(search, smallest[0], alone)
    return Settled(moving, *smallest, worth.model_copy(update={"with_moves": on, "without_moves": off}))


def _why_still(moving: Search, fleet: Fleet, *, is_judged: bool) -> str:
    """Why moves are not judged on a fleet that may have them; empty where they are."""
    if fleet.workers == 1:
        return "One worker carries this traffic, so moves save no worker"
    if not is_judged:
        return "Not judged: the fleet holds without moves, and a plan of its own judges it with them"
    one, specs = moving.workload.take(slice(0, 1)), fleet.specs()
    if is_still(prepare(one, specs, moving.terms.slos, moving.terms.policy), specs):
        return "Requests move between workers of one type, and here each type has one"
    return ""


def _one_fewer(search: Search, moving: Search, winner: Sizing, fleet: Fleet) -> tuple[Fleet, Estimate] | None:
    """One worker fewer with its estimate, where it holds with moves and does not without them."""
    count = fleet.workers - 1
    if count < max(winner.fewest, 2):
        return None
    smaller = winner.fleet(count)
    if not smaller.cost < fleet.cost or not moving.meets(moving.replay(smaller)):
        return None
    # A mix need not be the smallest in its proportions: moves save nothing that is saved without them.
    if winner.mix is not None and search.meets(search.replay(smaller)) and Trial(search, smaller).holds():
        return None
    trial = Trial(moving, smaller)
    holds = trial.holds(screening=search.is_slow) and trial.holds()
    if not holds:
        if trial.is_told:
            winner.sure[count] = trial.verdict()
        return None
    return smaller, trial.verdict()


def _note(winner: Sizing, moving: Search, fleet: Fleet, estimate: Estimate) -> None:
    """Make a fleet that holds with moves the sizing's answer."""
    count = fleet.workers
    winner.confirmed, winner.workers = count, min(winner.workers or count, count)
    winner.sure[count], winner.on_trace[count] = estimate, moving.replay(fleet).attainment
    if count > 2:  # one fewer was judged without moves; a single worker has none
        winner.sure.pop(count - 1, None)


def _replayed(search: Search, fleet: Fleet, estimate: Estimate) -> ReplayedFleet:
    outcome = search.replay(fleet)
    return ReplayedFleet(
        late=missed(outcome),
        preemptions=int(outcome.preemptions.sum()),
        migrations=int(outcome.migrations.sum()),
        expected=estimate.expected,
    )
