"""Requests whose tokens do not pass the picker: advanced, added and ended by what servers count.

Such are requests whose answers the gateway keeps to itself, answers that come in one piece, and requests that
another picker has placed. Between two scrapes of a server

    first tokens    Δ first_tokens, less those that passed here; the earliest requests get them
    tokens          Δ gaps / running, for each that decodes
    load            running + waiting: where the ledger has more, the oldest unseen ones have ended, and those
                    without an answer are elsewhere, as those of a server that refuses connections are; where
                    it has fewer, these are there; where it still has twice in a row, or at the first look,
                    others' requests of mean lengths are added
"""

from __future__ import annotations

from collections import Counter

from controlplane.types import Slo, WorkerId
from dataplane.live.engine_api.messages import EngineRequest
from dataplane.live.ledger.request import Ticket, Tracked
from tokenfleet.pick.call import Asker, Call
from tokenfleet.pick.fleet import PickedFleet
from tokenfleet.profiles.engine_metrics import EngineCounts

EASY = Slo(3600.0, 3600.0)  # of others' requests, whose targets are not known
MEAN_TOKENS = 500.0
ARRIVES_S = 0.1  # from the choice of a server until that server counts the request


def load_of(page: EngineCounts) -> int:
    """The requests that a server has."""
    return round(page.values.get("running", 0) + page.values.get("waiting", 0))


def _had_arrived(call: Call, asked_s: float) -> bool:
    """Whether a server has counted a call in a page asked for at `asked_s`: one that answers has it."""
    first_s = None if call.tracked is None else call.tracked.first_token_s
    return call.placed_s <= asked_s - ARRIVES_S or (first_s is not None and first_s <= asked_s)


class Unseen:
    """The requests whose ends no stream tells. `added`, `ended`: corrections so far."""

    def __init__(self, fleet: PickedFleet) -> None:
        self._fleet = fleet
        self._unseen: dict[Call, None] = {}  # the oldest first
        self._lost: list[Call] = []  # on no server that the ledger knows of
        # Each server's last page, and the requests that the ledger lacked then (below 0: had too many).
        self._last: dict[WorkerId, tuple[EngineCounts, int]] = {}
        self._number = 0
        self.counts: Counter[str] = Counter()
        fleet.on_unseen = self._add

    def __len__(self) -> int:
        return len(self._unseen)

    def _add(self, call: Call) -> None:
        self._unseen[call] = None

    def heard(self, server: WorkerId, page: EngineCounts, asked_s: float, had: int = 0) -> None:
        """A server's counters, asked for at `asked_s` by the picker's clock; it had `had` calls then.

        Calls that have ended since may be in the page: a server lacks what neither then nor now was known.
        """
        self._fleet.catch_up()
        seen = self._last.get(server)
        calls = self._fleet.running(server)
        self._unseen = {call: None for call in self._unseen if not call.is_over and not call.is_watched}
        count = load_of(page)
        self._find(server, count - max(len(calls), had))
        missing = count - max(len(calls := self._fleet.running(server)), had)
        before = missing if seen is None else seen[1]
        self._last[server] = page, missing
        if seen is not None:
            self._progress(server, calls, seen[0], page)
        arrived = [call for call in calls if _had_arrived(call, asked_s)]
        if len(arrived) > count:
            self._end(arrived, len(arrived) - count)
        elif missing > 0 and before > 0:
            self._others(server, page, min(missing, before))

    def refused(self, server: WorkerId, asked_s: float) -> None:
        """A server refused a connection at `asked_s`: what waits for its answer is tried elsewhere."""
        self._lose([call for call in self._fleet.running(server) if call.placed_s <= asked_s], None)

    def gone(self, server: WorkerId) -> None:
        """A server has left, and what ran there unseen with it."""
        self._last.pop(server, None)
        for call in self._fleet.running(server):
            if call in self._unseen:
                self._unseen.pop(call)
                self._fleet.drop(call)

    def _progress(self, server: WorkerId, calls: list[Call], before: EngineCounts, now: EngineCounts) -> None:
        """Tokens for those whose tokens do not pass here."""
        blind = [call.tracked for call in calls if not call.is_streamed or call in self._unseen]
        tracked = sorted((one for one in blind if one is not None), key=lambda one: one.arrival_s)
        if not tracked:
            return
        more = {name: max(now.values[name] - before.values[name], 0.0) for name in ("first_tokens", "gaps")}
        each = round(more["gaps"] / max(now.values.get("running", 0.0), 1.0))
        firsts, got = round(more["first_tokens"]), []
        for one in tracked:
            if one.output_token_ids:
                got.append((one, each))
            elif firsts > 0:
                firsts -= 1
                got.append((one, 1))
        self._fleet.placement.add_tokens(server, {one: n for one, n in got if n > 0}, self._fleet.clock())

    def _end(self, arrived: list[Call], count: int) -> None:
        """So many of these calls are not there: unseen ones have ended; others are retried elsewhere."""
        ended = [call for call in arrived if call in self._unseen][:count]
        for call in ended:
            self._unseen.pop(call)
            self._fleet.drop(call)
        self.counts["ended"] += len(ended)
        self._lose(arrived, count - len(ended))

    def _lose(self, calls: list[Call], most: int | None) -> None:
        """Calls without an answer are not on their server."""
        lost = [one for one in calls if not one.is_answered and not one.is_over][:most]
        for call in lost:
            self._fleet.take(call)
        self._lost += lost
        self.counts["lost"] += len(lost)

    def _find(self, server: WorkerId, most: int) -> None:
        """A server counts requests that the ledger lacks there: the lost ones, the longest lost first."""
        self._lost = [call for call in self._lost if call.worker is None and not call.is_over]
        for call in self._lost[: max(most, 0)]:
            self._fleet.put(call, server)

    def _others(self, server: WorkerId, page: EngineCounts, count: int) -> None:
        """Requests on a server that this picker has not placed."""
        ended = max(page.values.get("ended", 0.0), 1.0)
        prompt = page.values.get("ended_prompt_tokens", 0.0) / ended or MEAN_TOKENS
        output = page.values.get("ended_output_tokens", 0.0) / ended or MEAN_TOKENS
        for _ in range(count):
            self._number += 1
            name, tokens = f"other-{self._number}", [0] * max(round(prompt), 1)
            request = EngineRequest(name, tokens, [None], None, None, 0.0, None, None, None)
            ticket = Ticket(request.request_id, "", EASY, 0)
            tracked = Tracked(request, ticket, self._fleet.clock(), max(round(output), 2), [0])
            call = Call(Asker(), EASY, "", "", is_streamed=False, placed_s=self._fleet.clock())
            self._unseen[call] = None
            self._fleet.add(call, tracked, server)
        self.counts["added"] += count
