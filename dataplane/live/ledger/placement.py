"""Placement as the gateway calls it: the control plane's `decide` on the gateway's account of the fleet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager

import numpy as np

from controlplane.compiled import compile_now
from controlplane.migration import loads
from controlplane.migration.drain import Text, next_off
from controlplane.migration.overload import ShedSettings
from controlplane.migration.usage import WorkerView
from controlplane.perfmodel import coefficients as speed
from controlplane.perfmodel.profile import Profile
from controlplane.placement import ledger as state
from controlplane.placement.assign import ASK, decide, decode_worker, has_seat
from controlplane.placement.exact import place_together
from controlplane.placement.ledger import Ints
from controlplane.placement.lengths import LengthTable
from controlplane.placement.outlook import remaining
from controlplane.placement.policies import BY_TARGETS, PATIENCE, POLICY_CODE, PlacementSettings, Policy
from controlplane.placement.table import cached_everywhere
from controlplane.snapshot import Cached, RunningRequest, WorkerLoad
from controlplane.types import RequestId, WorkerId
from dataplane.live.ledger.account import Account
from dataplane.live.ledger.request import Tracked

LEAN = 4  # requests more that a worker may have for holding a request's LoRA adapter
MOST_TOLD = 8  # workers reported to a controller as having a request cached
RETRY_S = 0.05  # a held request is asked for again as tokens pass, on a busy worker within a step


class Placement(Account):
    """The gateway's account of the fleet, and the choices made from it."""

    def __init__(
        self,
        profiles: Mapping[str, Profile],
        workers: int,
        lengths: LengthTable,
        rng: np.random.Generator,
        policy: Policy = Policy.SPREAD,
        settings: PlacementSettings | None = None,
    ) -> None:
        super().__init__(profiles, workers, lengths)
        self.policy = policy
        self._settings = settings or PlacementSettings()
        self._settings_row = self._settings.row()
        self._forecasts = ShedSettings(
            self._settings.theta, self._settings.gamma, headroom=self._settings.headroom
        )
        self._rng = rng
        self._silent: set[int] = set()
        self.holders: Callable[[int], Collection[WorkerId]] = lambda adapter: ()  # who holds a LoRA adapter
        # Compiled now rather than under the first client's request.
        self._choose(0, 0.0, policy)
        self._decode_worker(0, 0.0)
        compile_now(loads.loads, self.ledger)
        compile_now(loads.kept_everywhere, self.ledger, 0)
        compile_now(loads.kept_at, self.ledger, 0, 0)
        compile_now(remaining, self.ledger, 0, 0)
        compile_now(has_seat, self.ledger, 0)
        compile_now(loads.running_at, self.ledger, 0)
        compile_now(loads.queue_at, self.ledger, 0)
        compile_now(cached_everywhere, self.ledger.caches, self.ledger.caches.ids)

    @property
    def goes_by_targets(self) -> bool:
        """Whether requests are placed by their targets; else load alone counts."""
        return self.policy in BY_TARGETS and self.kinds.knows_step_times

    def detach(self, worker: WorkerId) -> None:
        self._silent.discard(self.worker_rows.get(worker, state.NONE))
        super().detach(worker)

    def suspect(self, worker: WorkerId, is_silent: bool) -> None:
        """Whether a worker is silent: it gets no requests then, as long as another could have them."""
        change = self._silent.add if is_silent else self._silent.discard
        change(self.worker_rows[worker])

    def choose(
        self, request: Tracked, now_s: float, exclude: Collection[WorkerId] = (), policy: Policy | None = None
    ) -> WorkerId | None:
        """The worker for a request, or None when it had better wait. `policy`: another than the fleet's."""
        r, policy = self.row(request), policy or self.policy
        barred = self._barred(request, exclude)
        with self._without(barred):
            w = self._choose(r, now_s, policy)
        holders = self._holders(request) - barred
        if w != state.NONE and holders and w not in holders:
            with self._without(self._workers.keys() - holders):
                h = self._choose(r, now_s, policy)
            busy = self.ledger.workers["decoding"] + self.ledger.workers["queued"]
            w = h if h != state.NONE and busy[h] <= busy[w] + LEAN else w
        return None if w == state.NONE else self._workers[w]

    def _choose(self, r: int, now_s: float, policy: Policy) -> int:
        # The exact policy places a heartbeat's requests together; a single one by its greedy form.
        code = POLICY_CODE[Policy.BEST_FIT if policy == Policy.EXACT else policy]
        led, draw = self.ledger, self._rng.random(2)
        by, role = self._settings_row, state.ANY_PHASE
        w = int(decide(led, code, by, r, now_s, RETRY_S, PATIENCE, role, draw, ASK))
        # Nor do the baselines overfill a worker here.
        return w if w == state.NONE or has_seat(led, w) else state.NONE

    def haven(self, request: Tracked, now_s: float) -> WorkerId | None:
        """Where a request goes that is to leave its worker: as off a draining one, or as a newcomer goes."""
        if request.worker is None or not self.is_decoding(request):
            return self.choose(request, now_s, () if request.worker is None else (request.worker,))
        went = self.next_off(request.worker, [request], frozenset(), now_s)
        return None if went is None else went[1]

    def next_off(
        self, worker: WorkerId, requests: Sequence[Tracked], busy: Set[WorkerId], now_s: float
    ) -> tuple[Tracked, WorkerId] | None:
        """Who of the `requests` on a draining worker leaves next, and where it goes.

        By the rule of both planes (migration.drain); off a prefill worker to a decode worker. `busy`: workers
        at an end of a copy.
        """
        here = self.worker_rows[worker]
        by_row = {RequestId(str(self.row(t))): t for t in requests if self.is_decoding(t)}
        if self.ledger.workers[here]["role"] == state.PREFILL_ONLY:
            havens = ((t, self.choose_decode(t, now_s)) for t in by_row.values())
            return next(((t, w) for t, w in havens if w is not None), None)
        views = self._views([w for w in self._serving() if w != here])

        def takers(r: RunningRequest) -> list[list[WorkerView]]:
            tracked = by_row[r.request]
            barred, holders = self._barred(tracked, ()), self._holders(tracked)
            there = {w: view for w, view in views.items() if w not in barred}
            return [
                [view for w, view in there.items() if w in holders],
                [view for w, view in there.items() if w not in holders],
            ]

        leaving = [loads.request_at(self.ledger, int(r), self.worker_rows.__getitem__) for r in by_row]
        source = WorkerLoad(worker, "draining", 0, kind=self.kinds.of[here])
        went = next_off(self._forecasts, source, leaving, takers, busy)
        return None if went is None else (by_row[went[0].request], went[1].id)

    def _views(self, rows: Sequence[int]) -> dict[int, WorkerView]:
        """These workers as rules of moves see them, with what is on its way to them."""
        steps = {k: p.step for k, p in self.kinds.profiles.items()} if self.kinds.knows_step_times else {}
        named = {w: (self._workers[w], self.kinds.of[w], steps.get(self.kinds.of[w])) for w in rows}
        coming = [
            (self.request_rows[name], w)
            for name, (w, _) in self._expected.items()
            if name in self.request_rows
        ]
        return dict(zip(rows, loads.views_of(self.ledger, named, coming), strict=True))

    def _holders(self, request: Tracked) -> set[int]:
        """The rows of workers that hold a request's LoRA adapter; none for a request without one."""
        adapter = request.request.lora_request
        return set() if adapter is None else {self.worker_rows[h] for h in self.holders(adapter.lora_int_id)}

    def cached_at(self, request: Tracked, worker: WorkerId) -> int:
        """Tokens of a request that a worker should have cached, which a move there need not send."""
        if worker not in self.worker_rows or request.id not in self.request_rows:
            return 0
        r, row_of = self.request_rows[request.id], self.worker_rows.__getitem__
        return loads.cached_at(self.ledger, r, row_of, worker).tokens

    def cached_elsewhere(self, request: Tracked) -> dict[WorkerId, int]:
        """The other workers that should have most of a request cached, and how many tokens."""
        r = self.request_rows.get(request.id)
        if r is None or self.ledger.caches.tokens == 0:
            return {}
        kept = loads.kept_everywhere(self.ledger, r)
        here = self.ledger.requests[r]["worker"]
        there = [(int(kept[w]), name) for w, name in self._workers.items() if kept[w] and w != here]
        return {name: tokens for tokens, name in sorted(there, reverse=True)[:MOST_TOLD]}

    # What workers have cached, as one of them leaves or comes.

    def texts(self) -> Iterator[Text]:
        """What has ended last, first; by its turn in that order."""
        caches, rows = self.ledger.caches, self.worker_rows
        for turn, ended in enumerate(self._mirrors.texts):
            blocks = cached_everywhere(caches, ended.ids) * caches.tokens

            def cached(worker: WorkerId, blocks: Ints = blocks) -> Cached:
                return Cached(int(blocks[rows[worker]]))

            yield Text(turn, caches.tokens, ended.ids.tolist(), cached, ended)

    def views(self, workers: Sequence[WorkerId]) -> list[WorkerView]:
        """These workers as rules of moves see them."""
        return list(self._views([self.worker_rows[name] for name in workers]).values())

    def brought(self, worker: WorkerId, ids: Ints) -> None:
        """The blocks of these ids have come to a worker's cache."""
        if worker in self.worker_rows and self._free and self.ledger.caches.tokens:
            self._mirrors.bring(self.ledger, self.worker_rows[worker], self._free[-1], ids)

    # Prefill and decode workers.

    def choose_decode(
        self, request: Tracked, now_s: float, exclude: Collection[WorkerId] = ()
    ) -> WorkerId | None:
        """The decode worker that a request is handed over to; None where the one chosen has no room."""
        with self._without(self._barred(request, exclude)):
            w = self._decode_worker(self.row(request), now_s)
        if w == state.NONE or not has_seat(self.ledger, w):
            return None
        at, k = self.ledger.workers[w], self.ledger.coefficients[w]
        here = at["decoding"] + at["queued"] + 1  # each may need a block more than its tokens say
        tokens = at["context"] + at["queued_context"] + request.context_tokens + here * k[speed.BLOCK_TOKENS]
        return None if tokens > k[speed.KV_BLOCKS] * k[speed.BLOCK_TOKENS] else self._workers[w]

    def _decode_worker(self, r: int, now_s: float) -> int:
        """The decode worker for a request that is on a worker, or NONE."""
        row, code = self.ledger.requests[r], POLICY_CODE[self.policy]
        if self.policy == Policy.EXACT:
            code = POLICY_CODE[Policy.BEST_FIT]
        key = int(row["key"])
        # Where it goes its tokens are not counted by this one's steps.
        row["key"] = state.generated(self.ledger, r)
        try:
            return int(decode_worker(self.ledger, code, self._settings_row, r, now_s, self._rng.random(2)))
        finally:
            row["key"] = key

    # Who may be chosen.

    def _barred(self, request: Tracked, exclude: Collection[WorkerId]) -> set[int]:
        """The rows of workers that are excluded, or could not go on with the request."""
        barred = {self.worker_rows[w] for w in exclude if w in self.worker_rows} | self._suspects()
        if request.output_token_ids:
            barred |= {w for w, weights in self._weights.items() if weights != request.weights}
        return barred

    @contextmanager
    def _without(self, rows: Collection[int]) -> Iterator[None]:
        """With these workers out of the choice."""
        if not rows:
            yield
            return
        status, at = self.ledger.workers["status"], list(rows)
        before = status[at].copy()
        status[at] = state.OFF
        try:
            yield
        finally:
            status[at] = before

    def can_take(self, worker: WorkerId, request: Tracked) -> bool:
        """Whether a worker is open, has a seat, and may go on with the request."""
        w = self.worker_rows.get(worker)
        if w is None or (request.output_token_ids and self._weights[w] != request.weights):
            return False
        return self.ledger.workers[w]["status"] == state.SERVING and bool(has_seat(self.ledger, w))

    def together(self, line: Ints, now_s: float) -> Callable[[], tuple[list[tuple[int, WorkerId]], bool]]:
        """The exact policy's placement of ledger rows, to be called on another thread: (row, worker) pairs,
        and whether it is proven best. The ledger is copied here and now.
        """
        suspects = self._suspects()
        serving = [w for w in self._serving() if w not in suspects]
        led, names = state.copied(self.ledger), dict(self._workers)
        (profile,) = self.kinds.profiles.values()

        def solved() -> tuple[list[tuple[int, WorkerId]], bool]:
            workers = np.array(serving, np.int64)
            placed, is_proven = place_together(led, line, workers, profile, self._settings, now_s)
            return [(r, names[w]) for r, w in placed], is_proven

        return solved

    def _serving(self) -> list[int]:
        return [w for w in self._workers if self.ledger.workers[w]["status"] == state.SERVING]

    def _suspects(self) -> set[int]:
        return self._silent if self._silent and not self._silent.issuperset(self._serving()) else set()
