"""The picker's fleet: servers that it did not start, what the ledger says they hold, and the choice.

The gateway's own placement, queue and history decide and remember. What differs is what is known:

    prompt      the client's token ids, a tokenizer's, else its bytes over the bytes of a token so far
    steps       pieces of answers that come in a row, within GATHER_S; else servers' counters (`unseen`)
    capacity    the servers' metrics; seats and the size of a step are flags, or the profile's
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from prometheus_client import Histogram

from controlplane.placement.queue import QueueSettings
from controlplane.types import RequestId, Slo, WorkerId
from dataplane.live.engine_api.cache_events import CacheChange
from dataplane.live.engine_api.link import WorkerInfo
from dataplane.live.gateway.history import History
from dataplane.live.ledger.admission import Admission
from dataplane.live.ledger.request import Ticket, Tracked, expected_tokens
from tokenfleet.pick.asked import AskedBody
from tokenfleet.pick.call import Asker, Call, PromptLengths, request_of
from tokenfleet.pick.subsets import GATHER_S, SubsetPlacement

PREFIX = "tokenfleet_pick_"
EDGES_S = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.25)  # of decision times
LIKELY_S = 30  # until a fleet without servers may have one again


def decision_times() -> Histogram:
    """Times to choose a server."""
    name = f"{PREFIX}decision_seconds"
    return Histogram(name, "time to choose a server", buckets=EDGES_S, registry=None)


class PickedFleet:
    """The servers, and the calls that are on them or wait.

    `fallbacks`: how many addresses a choice names. `lengths` says how long prompts are. `clock`: in seconds.
    """

    def __init__(
        self,
        placement: SubsetPlacement,
        history: History,
        queue: QueueSettings,
        lengths: PromptLengths,
        fallbacks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.placement, self.history, self.lengths = placement, history, lengths
        self._fallbacks, self.clock = fallbacks, clock
        self.admission = Admission(queue, placement, self._begin, self._turn_away, clock=clock)
        self.calls: dict[RequestId, Call] = {}
        self.on_unseen: Callable[[Call], None] = self.drop
        self.counts: Counter[tuple[str, str]] = Counter()  # by what, and which
        self.times = decision_times()
        self._infos: dict[WorkerId, WorkerInfo] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0
        history.on_learnt.append(placement.learn)
        placement.learn(history.lengths)

    @property
    def servers(self) -> Sequence[WorkerId]:
        """Those that may get requests, and those that are leaving."""
        return list(self._infos)

    def block_tokens(self, server: WorkerId) -> int:
        """The tokens of a block of its KV."""
        return self._infos[server].block_tokens

    def running(self, server: WorkerId) -> list[Call]:
        """The calls that are on a server."""
        return [call for call in self.calls.values() if call.worker == server]

    def attach(self, info: WorkerInfo, kind: str) -> bool:
        """A server takes requests from now on; False where the ledger has no room for another."""
        if len(self._infos) >= len(self.placement.ledger.workers):
            return False
        self._infos[info.worker] = info
        self.placement.attach(info, kind)
        self.admission.look()
        return True

    def detach(self, server: WorkerId) -> None:
        """A server has left. Answers that it still sends are passed on."""
        self.step(server)
        del self._infos[server]
        self.placement.detach(server)
        for call in self.running(server):
            assert call.tracked is not None
            call.tracked.worker = None

    def suspect(self, server: WorkerId, is_silent: bool) -> None:
        """Whether a server's metrics are missing; it is chosen last then."""
        self.placement.suspect(server, is_silent)
        self.admission.look()

    def take_cached(self, server: WorkerId, change: CacheChange) -> str:
        """A server tells what it has cached; return why all of it is needed, or nothing."""
        return self.placement.take_cached(server, change) if server in self._infos else ""

    def warm_up(self, slo: Slo) -> None:
        """Load the kernels that the first client would wait for. No request has come yet."""
        call = Call(Asker(), slo, "", "")
        self.ask(call, AskedBody(text_bytes=64, most_tokens=4))
        for _ in range(2):
            if call.worker is not None:
                self.got(call, 1)
                self.step(call.worker)
        if call.tracked is not None:
            self.drop(call)
        self.counts.clear()
        self.lengths.counts.clear()
        self.times = decision_times()

    def ask(self, call: Call, asked: AskedBody) -> None:
        """Place a request, now or later; `call.asker` gets the choice."""
        self._number += 1
        if self.lengths.must_wait(asked):
            task = asyncio.get_running_loop().create_task(self._ask_later(call, asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._ask(call, asked, self.lengths.ids(call, asked))

    async def _ask_later(self, call: Call, asked: AskedBody) -> None:
        ids = await self.lengths.tokenized(call, asked)
        if not call.is_over:
            self._ask(call, asked, ids)

    def _ask(self, call: Call, asked: AskedBody, ids: Sequence[int]) -> None:
        self.catch_up()
        began_s = self.clock()
        if not any(call.allowed is None or name in call.allowed for name in self._infos):
            self._refuse_without_servers(call)
            return
        longest = max(info.max_model_len for info in self._infos.values())
        request = request_of(call, asked, ids[: longest - 1], self.lengths.adapter(asked.model), self._number)
        ticket = Ticket(request.request_id, call.tenant, call.slo, 0, slo_class=call.slo_class)
        expected = expected_tokens(request, self.history.expected_tokens)
        tracked = call.tracked = Tracked(request, ticket, began_s, expected)
        self.calls[tracked.id] = call
        self.placement.allow(tracked.id, call.allowed)
        # It suspends nowhere: `_begin` is the one thing that it awaits.
        with suppress(StopIteration):
            self.admission.take_in(tracked).send(None)
        self.times.observe(self.clock() - began_s)
        if call.worker is None:
            asyncio.get_running_loop().call_later(GATHER_S, self.catch_up)
            if not call.is_over and not call.may_wait:
                self._turn_away(tracked, "no server has room, and the gateway's mode lets no request wait")

    def _refuse_without_servers(self, call: Call) -> None:
        call.is_over = True
        self.counts["refused", "no_server"] += 1
        why = "none of the servers that the gateway allows is one of this picker's"
        why = why if self._infos else "no server is ready"
        call.asker.refused(503, why, "no_server", LIKELY_S)

    async def _begin(self, tracked: Tracked, server: WorkerId) -> None:
        call = self.calls[tracked.id]
        self.put(call, server)
        tracked.begun_s = call.placed_s
        self.counts["picked", server] += 1
        call.asker.picked(tracked.id, [server, *self._others(call, server)][: self._fallbacks])

    def put(self, call: Call, server: WorkerId) -> None:
        """A call is on a server from now on."""
        assert call.tracked is not None
        call.tracked.worker, call.placed_s = server, self.clock()
        self.placement.put(call.tracked, server, False, call.placed_s)

    def _others(self, call: Call, server: WorkerId) -> list[WorkerId]:
        """Where a request may go instead, the least loaded first."""
        allowed = [s for s in self._infos if s != server and (call.allowed is None or s in call.allowed)]
        return sorted(allowed, key=self.placement.load)

    def _turn_away(self, tracked: Tracked, why: str) -> None:
        call = self.calls[tracked.id]
        retry_after_s = self.admission.rejection(why).retry_after_s
        self.over(call, "rejected")
        self.counts["refused", "no_room"] += 1
        call.asker.refused(429, why, "no_room", retry_after_s)

    def got(self, call: Call, tokens: int) -> None:
        """Tokens of its answer have passed."""
        tracked, server = call.tracked, call.worker
        if tracked is None or call.is_over:
            return
        now_s = self.clock()
        tracked.last_token_s, call.is_answered = now_s, True
        if tracked.first_token_s is None:
            tracked.first_token_s = now_s
        if server is None:  # it has left
            tracked.output_token_ids.extend([0] * tokens)
            return
        if self.placement.passed(server, call, tokens, now_s) and len(self.admission):
            asyncio.get_running_loop().call_later(GATHER_S, self.catch_up)

    def catch_up(self) -> None:
        """Count the steps that are over: whatever reads the ledger needs them."""
        for server in self._infos:
            self.step(server, self.clock())

    def step(self, server: WorkerId, until_s: float = math.inf) -> None:
        """Count what has come from a server as steps of its engine."""
        if self.placement.count(server, until_s):
            self.admission.look()

    def served(self, call: Call, address: str) -> None:
        """The gateway names the server that has served it."""
        server, call.is_answered = WorkerId(address), True
        if call.tracked is None or server == call.worker:
            return
        self.catch_up()
        self.counts["served_elsewhere", ""] += 1
        if server in self._infos:
            self.put(call, server)
        else:
            self.take(call)
        self.admission.look()

    def take(self, call: Call) -> None:
        """A call is not on its server. Where it is, its answer may tell."""
        assert call.tracked is not None
        self.placement.take(call.tracked)
        call.tracked.worker = None

    def over(self, call: Call, outcome: str) -> None:
        """A call has ended; only the first end counts."""
        if call.is_over:
            return
        if call.worker is not None:
            self.step(call.worker, self.clock())
        call.is_over, tracked = True, call.tracked
        if tracked is None:
            return
        self.counts["ended", outcome] += 1
        if tracked.worker is not None:
            self.step(tracked.worker)  # nothing of it, which is over, but of others
        elif tracked.id in self.calls:
            self.admission.discard(tracked)
        if call.output_tokens is not None:
            tracked.output_token_ids[:] = [0] * call.output_tokens
        self.lengths.learn(call)
        if call.is_generation:
            guessed = tracked.request.prompt_token_ids
            if call.estimated and call.prompt_tokens:
                tracked.request.prompt_token_ids = [0] * call.prompt_tokens
            self.history.add(tracked, outcome)
            tracked.request.prompt_token_ids = guessed  # what the ledger has counted
        self.drop(call)

    def watched(self, name: str) -> Call | None:
        """The request `name`, whose answer the gateway copies to the picker from now on; None for others'."""
        call = self.calls.get(RequestId(name))
        if call is not None:
            call.is_watched = call.is_streamed = True
        return call

    def unseen(self, call: Call) -> None:
        """Its answer will not pass here, unless a copy does; the servers' counters show its end."""
        if not call.is_over:
            self.on_unseen(call)

    def drop(self, call: Call) -> None:
        """A call is over, whether or not its end was seen."""
        tracked = call.tracked
        assert tracked is not None
        call.is_over = True
        tracked.output_token_ids.clear()  # unknown ids must name no blocks
        self.placement.forget(tracked)
        self.placement.allow(tracked.id, None)
        self.calls.pop(tracked.id, None)
        self.admission.look()

    def add(self, call: Call, tracked: Tracked, server: WorkerId) -> None:
        """A request that another has placed is on a server, and decodes."""
        call.tracked = tracked
        tracked.worker = server
        self.calls[tracked.id] = call
        self.placement.put(tracked, server, True, self.clock())

    def close(self) -> None:
        """Take no more requests, and write what is buffered."""
        self.admission.close()
        self.history.close()
