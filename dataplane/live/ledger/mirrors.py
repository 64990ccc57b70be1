"""The gateway's account of what each worker has cached: told by its engine, or predicted from tokens.

A request's blocks are named by hashes of its tokens; a cache salt or a LoRA adapter makes another tree. A
request with more than text in its prompt, or whose prompt's log probabilities are asked for, is a tree of its
own. The gateway asks an engine for its whole cache; from then on the engine sends numbered changes. Where
numbers are missing the gateway asks for all of it again, and believes nothing else until that has come. The
cache of an engine that tells nothing is taken to be one of vLLM's, with what it was given here.

Workers whose engine caches no prefixes, or in blocks that the first one's do not divide into, have no mirror.
The KV offload's contents are known only where engines report them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compile_now
from controlplane.placement.caches import (
    LINK,
    Caches,
    HostMemory,
    chain,
    forget,
    new_host_mirrors,
    new_mirrors,
)
from controlplane.placement.ledger import DECODING, Ledger
from controlplane.placement.memory import begin, end, hold, learn, let_go
from dataplane.live.engine_api.cache_events import ROOT, CacheChange, is_shared, root_of
from dataplane.live.engine_api.link import WorkerInfo
from dataplane.live.ledger.request import Ended, Texts, Tracked

LEAST_BLOCK = 16  # tokens
ROOM = 2
ASK_AGAIN = 64  # changes after which what was asked for is taken to be lost
SEEN_BLOCKS = 1 << 19  # some 60 MB


class Found(NamedTuple):
    """Tokens of a prompt that an engine did not compute: cached in its KV, and loaded from host memory."""

    cached: int
    loaded: int = 0


@dataclass(slots=True)
class Hits:
    """Tokens of the prompts that a worker was given, since it came.

    - `hit`: those that its engine found.
    - `loaded`: those of the hits that it loaded from host memory.
    - `expected`: the hits expected when the requests were placed.
    - `off`: by how much `hit` and `expected` differ, request by request.
    - `ideal`: those that any worker had computed before, as an unlimited cache of all workers would hit.
    """

    queried: int = 0
    hit: int = 0
    loaded: int = 0
    expected: int = 0
    off: int = 0
    ideal: int = 0


class Seen:
    """Ids of blocks that any worker has computed: the last SEEN_BLOCKS at least, twice as many at most."""

    def __init__(self) -> None:
        self._late: set[int] = set()
        self._early: set[int] = set()

    def leading(self, ids: NDArray[np.int64]) -> int:
        """How many of a request's blocks, from the first on, have been computed."""
        for n, block in enumerate(ids.tolist()):
            if block not in self._late and block not in self._early:
                return n
        return len(ids)

    def add(self, ids: NDArray[np.int64]) -> None:
        self._late.update(ids.tolist())
        if len(self._late) >= SEEN_BLOCKS:
            self._early, self._late = self._late, set()


class Mirrors:
    """The mirrors of a ledger's workers, by the rows of its workers and requests.

    They are laid out for the first worker that caches, with room for others twice as large.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._requests: dict[int, Tracked] = {}  # those whose blocks are listed, or that hold memory
        self._engine_block = self._most_tokens = 0
        self.hits: dict[int, Hits] = {}
        self._seen = Seen()
        self._room: dict[int, int] = {}  # tokens, by worker
        self._host_room: dict[int, int] = {}  # blocks of host memory, by worker that has some
        self._told: dict[int, int] = {}  # the last change, by worker that tells
        self._asked: dict[int, int] = {}  # the change at which all was asked for, until it comes
        self.texts = Texts()

    def compile(self, caches: Caches) -> None:
        """Compile all that mirrors go through."""
        compile_now(chain, np.zeros(1, np.int64), LEAST_BLOCK, ROOT, caches.ids)
        compile_now(forget, caches, 0, 0)
        compile_now(begin, caches, 0, 0, LEAST_BLOCK, 0)
        compile_now(end, caches, 0, 0, LEAST_BLOCK, 0)
        compile_now(learn, caches, 0, *CacheChange(0, b"").ids())
        compile_now(hold, caches, 0, 0, 0)
        compile_now(let_go, caches, 0, 0)

    def attach(self, led: Ledger, w: int, info: WorkerInfo) -> Ledger:
        """A worker is in row `w` and has cached nothing yet; return the ledger, its caches laid out."""
        self.hits[w], caches = Hits(), led.caches
        block = max(info.block_tokens, LEAST_BLOCK)
        if not info.caches_prefixes or info.engine == "emulated" or block % info.block_tokens:
            return led
        if caches.tokens == 0:
            self._engine_block, self._most_tokens = info.block_tokens, info.max_model_len
            room, rows = ROOM * info.kv_blocks, len(led.requests)
            caches = new_mirrors(self._workers, room, info.block_tokens, rows, info.max_model_len, block)
        if info.block_tokens == self._engine_block:
            forget(caches, w, min(info.kv_blocks, caches.copies.shape[1]))
            self._room[w] = info.kv_blocks * info.block_tokens
            self.texts.most = sum(self._room.values())
        return led._replace(caches=caches, host=self._attach_host(led.host, caches, w, info))

    def _attach_host(self, host: HostMemory, caches: Caches, w: int, info: WorkerInfo) -> HostMemory:
        """Room for what a worker keeps in host memory; the host memory, laid out if it was not."""
        if (
            not info.host_blocks
            or info.block_tokens != self._engine_block
            or caches.tokens != info.block_tokens
        ):
            return host
        if host.chunks.tokens == 0:
            host = new_host_mirrors(caches, ROOM * info.host_blocks)
        self._host_room[w] = min(info.host_blocks, host.chunks.copies.shape[1])
        forget(host.chunks, w, self._host_room[w])
        host.links[w] = np.zeros(1, LINK)[0]
        return host

    def detach(self, led: Ledger, w: int) -> None:
        """A worker is gone; nothing is on it any more."""
        for book in (self.hits, self._told, self._asked):
            book.pop(w, None)
        if led.caches.tokens:
            forget(led.caches, w, 0)
            self._room.pop(w, None)
            self.texts.most = sum(self._room.values())
        if self._host_room.pop(w, None) is not None:
            forget(led.host.chunks, w, 0)

    def widen(self, led: Ledger) -> tuple[Caches, HostMemory]:
        """Room for twice as many requests."""
        caches, host = led.caches, led.host
        if caches.tokens == 0:
            return caches, host
        before = len(caches.requests)
        rows, slot = np.zeros(2 * before, caches.requests.dtype), len(caches.held) // before
        rows[:before] = caches.requests
        rows["begins"] = rows["at"] = np.arange(len(rows)) * slot
        ids, held = np.zeros(len(rows) * slot, np.int64), np.zeros(len(rows) * slot, np.int32)
        ids[: len(caches.ids)], held[: len(caches.held)] = caches.ids, caches.held
        caches = caches._replace(requests=rows, ids=ids, held=held)
        if host.chunks.tokens:
            loads = np.concatenate((host.loads, np.zeros_like(host.loads)))
            chunks = host.chunks._replace(requests=rows, ids=ids, held=held)
            host = host._replace(chunks=chunks, loads=loads)
        return caches, host

    def enter(self, caches: Caches, r: int, request: Tracked) -> None:
        """A request has row `r` from now on."""
        if caches.tokens == 0:
            return
        caches.requests[r]["listed"] = caches.requests[r]["copies"] = caches.requests[r]["own"] = 0
        self._requests[r] = request
        self._list(caches, r)

    def leave(self, caches: Caches, r: int) -> None:
        """A row's request is over."""
        tracked = self._requests.pop(r, None)
        if tracked is None or caches.tokens == 0 or not is_shared(tracked.request):
            return
        blocks = min(int(caches.requests[r]["listed"]), (tracked.context_tokens - 1) // caches.tokens)
        if blocks and tracked.output_token_ids:
            self.texts.add(Ended.of(tracked, self._ids(caches, r)[:blocks].copy()))

    def is_told(self, w: int) -> bool:
        """Whether a worker's engine tells what it has cached."""
        return w in self._told

    def take(self, led: Ledger, w: int, change: CacheChange) -> str:
        """An engine tells what it has cached; return why it must be asked for all of it, or nothing."""
        caches, last = led.caches, self._told.get(w, 0)
        if w not in self._room or caches.tokens != self._engine_block:
            return ""
        if change.is_all and change.number >= last:
            self._asked.pop(w, None)
            forget(caches, w, min(self._room[w] // caches.tokens, caches.copies.shape[1]))
            if w in self._host_room:
                forget(led.host.chunks, w, self._host_room[w])
            self._learn(led, w, change)
            for r in (r for r in self._requests if led.requests[r]["worker"] == w):
                caches.requests[r]["copies"] = caches.requests[r]["own"] = 0
                if led.requests[r]["phase"] == DECODING:
                    hold(caches, w, r, int(caches.requests[r]["listed"]))
        elif w in self._asked or w not in self._told:  # it is asked as it comes
            if change.number - self._asked.setdefault(w, change.number) >= ASK_AGAIN:
                self._asked[w] = change.number
                return "all that it has cached was asked for, and has not come"
        elif change.number == last + 1:
            self._learn(led, w, change)
        elif change.number > last:
            self._asked[w] = change.number
            return f"after change {last} of its cache came change {change.number}"
        return ""

    def _learn(self, led: Ledger, w: int, change: CacheChange) -> None:
        learn(led.caches, w, *change.ids())
        if w in self._host_room:
            learn(led.host.chunks, w, *change.host_ids())
        self._told[w] = change.number

    def bring(self, led: Ledger, w: int, r: int, ids: NDArray[np.int64]) -> None:
        """These blocks are cached at a worker from now on; `r` is a row that no request has."""
        if w in self._told:  # it says so itself
            return
        row, tokens = led.caches.requests[r], len(ids) * led.caches.tokens
        at = int(row["begins"])
        row["listed"], row["copies"], row["own"] = len(ids), 0, 0
        led.caches.ids[at : at + len(ids)] = ids
        if led.caches.workers[w]["keeps"]:
            begin(led.caches, w, r, self._engine_block, tokens)
            end(led.caches, w, r, self._engine_block, tokens)

    def _list(self, caches: Caches, r: int) -> None:
        """List the ids of all blocks that a request fills by now."""
        request, row = self._requests[r], caches.requests[r]
        listed = int(row["listed"])
        full = min(request.context_tokens, self._most_tokens) // caches.tokens
        if full <= listed:
            return
        prompt: list[int] = request.request.prompt_token_ids or []
        first = listed * caches.tokens
        tokens = prompt[first:] + request.output_token_ids[max(first - len(prompt), 0) :]
        at = int(row["begins"])
        before = int(caches.ids[at + listed - 1]) if listed else root_of(request.request)
        chain(np.array(tokens, np.int64), caches.tokens, before, caches.ids[at + listed : at + full])
        row["listed"] = full

    def _ids(self, caches: Caches, r: int) -> NDArray[np.int64]:
        """The ids of the blocks that are listed of a request."""
        at = int(caches.requests[r]["begins"])
        return caches.ids[at : at + int(caches.requests[r]["listed"])]

    def begin(self, led: Ledger, w: int, r: int, tokens: int, found: Found | None) -> None:
        """A request's first `tokens` are on a worker, whose engine had `found` of them, where it says so."""
        if led.caches.tokens == 0 or r not in self._requests or not led.caches.workers[w]["keeps"]:
            return
        listed, block = self._ids(led.caches, r), led.caches.tokens
        if found is not None:
            counted, expected = self.hits[w], int(led.requests[r]["cached"])
            counted.queried += tokens
            counted.hit += sum(found)
            counted.loaded += found.loaded
            counted.expected += expected
            counted.off += abs(sum(found) - expected)
            # The last token is computed in any case. Blocks that this very step stores are not seen yet.
            counted.ideal += max(self._seen.leading(listed[: (tokens - 1) // block]) * block, sum(found))
        tokens = min(tokens, self._most_tokens)
        self._seen.add(listed[: tokens // block])
        if w in self._told:
            hold(led.caches, w, r, tokens // led.caches.tokens)
        else:
            begin(led.caches, w, r, self._engine_block, tokens)

    def end(self, led: Ledger, w: int, r: int) -> None:
        """A request leaves a worker on which it decoded."""
        if led.caches.tokens == 0 or r not in self._requests or not led.caches.workers[w]["keeps"]:
            return
        self._list(led.caches, r)
        tokens = min(self._requests[r].context_tokens - 1, self._most_tokens)
        self._seen.add(self._ids(led.caches, r)[: tokens // led.caches.tokens])
        if w in self._told:
            let_go(led.caches, w, r)
        else:
            end(led.caches, w, r, self._engine_block, tokens)
