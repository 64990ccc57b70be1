"""KV events: the blocks that an engine has cached, by vLLM's own events, as changes of a set of ids.

vLLM names a block by a hash that only engines compute. A gateway names it by `caches.chain` over its tokens,
from the id of its tree (`tree`): that of its cache salt and LoRA adapter. What holds more than text has no
such id, and nor has what follows it. An engine that caches a block twice tells of both; it is there until
both are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compile_now
from controlplane.placement.caches import chain

if TYPE_CHECKING:
    from dataplane.live.engine_api.messages import EngineRequest

ROOT = 1  # the id before the first block of plain text


@dataclass(frozen=True, slots=True)
class CacheChange:
    """The `number`-th change of what a worker has cached; with `is_all`, all that it has after that one.

    `stored` and `removed` are ids, as the bytes of int64; `to_host` and `off_host` those of its host memory.
    """

    number: int
    stored: bytes
    removed: bytes = b""
    is_all: bool = False
    to_host: bytes = b""
    off_host: bytes = b""

    def ids(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Those stored, and those removed. Raises ValueError for bytes that are no ids."""
        return np.frombuffer(self.stored, np.int64).copy(), np.frombuffer(self.removed, np.int64).copy()

    def host_ids(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `ids`, of host memory."""
        return np.frombuffer(self.to_host, np.int64).copy(), np.frombuffer(self.off_host, np.int64).copy()


def tree(salt: str | None, adapter: str | None) -> int:
    """The id before the first block of requests with this cache salt and LoRA adapter."""
    return ROOT if salt is None and adapter is None else number_of(repr((salt, adapter)))


def number_of(text: str) -> int:
    """A number of 56 bits that stands for a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


def is_shared(request: EngineRequest) -> bool:
    """Whether another request may have the same text: its tree is not its own alone."""
    return root_of(request) != number_of(request.request_id)


def root_of(request: EngineRequest) -> int:
    """The id before a request's first block: its tree's, or its own where nothing is known of its blocks."""
    params = request.sampling_params
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.mm_features:
        return number_of(request.request_id)
    if params is None or params.prompt_logprobs is not None or params.skip_reading_prefix_cache:
        return number_of(request.request_id)
    return tree(request.cache_salt, None if request.lora_request is None else request.lora_request.lora_name)


class CachedBlocks:
    """The blocks that one engine has cached, each of `block_tokens` tokens. It begins with none."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: dict[int | bytes, tuple[int, int]] = {}  # by vLLM's hash: the id, and how many copies
        self._number = 0
        self._news: dict[int, bool] = {}  # of ids: stored or removed since the last change
        self._in_host: dict[int | bytes, int] = {}  # the ids of what host memory has, by vLLM's hash
        self._host_news: dict[int, bool] = {}
        compile_now(chain, np.zeros(1, np.int64), block_tokens, ROOT, np.zeros(1, np.int64))

    def take(
        self, events: Iterable[Mapping[str, Any]], in_host: Iterable[Mapping[str, Any]] = ()
    ) -> CacheChange | None:
        """The change that these events are, in vLLM's form; None where they change nothing.

        `in_host`: those of host memory, which name blocks by their hashes alone. They come first: what has
        just been copied there may leave KV in the same step.
        """
        is_cleared = False
        for event in in_host:
            self._take_host(event)
        for event in events:
            if event["type"] == "BlockStored":
                self._store(event)
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    self._remove(name)
            else:
                self._blocks.clear()
                is_cleared = True
        news, self._news = self._news, {}
        host_news, self._host_news = self._host_news, {}
        if not news and not host_news and not is_cleared:
            return None
        self._number += 1
        if is_cleared:
            return self.all()
        (stored, removed), (to_host, off_host) = map(_told, (news, host_news))
        return CacheChange(self._number, stored, removed, to_host=to_host, off_host=off_host)

    def all(self) -> CacheChange:
        """All that is cached now."""
        ids = np.fromiter((i for i, _ in self._blocks.values()), np.int64, len(self._blocks))
        in_host = np.fromiter(self._in_host.values(), np.int64, len(self._in_host))
        return CacheChange(self._number, ids.tobytes(), is_all=True, to_host=in_host.tobytes())

    def _store(self, event: Mapping[str, Any]) -> None:
        names, adapter = event["block_hashes"], event.get("lora_name")
        # Of each block: what enters its hash in addition to its tokens and its adapter.
        keys = [[key for key in of or () if key != adapter] for of in event.get("extra_keys") or [None]]
        before = self._before(event, keys[0])
        if before is None or event["block_size"] != self._block_tokens:
            return
        text = next((b for b, of in enumerate(keys) if of), len(names))  # blocks of text alone
        ids = np.zeros(text, np.int64)
        chain(np.array(event["token_ids"], np.int64), self._block_tokens, before, ids)
        for name, key in zip(names, ids.tolist(), strict=False):
            copies = self._blocks.get(name, (key, 0))[1]
            self._blocks[name] = key, copies + 1
            if copies == 0:
                self._note(key, True)

    def _before(self, event: Mapping[str, Any], keys: list[Any]) -> int | None:
        """The id before an event's first block, whose salt is taken out of its keys; None where unknown."""
        parent = event.get("parent_block_hash")
        if parent is not None:
            return self._blocks.get(parent, (None, 0))[0]
        salt = keys.pop() if len(keys) == 1 and isinstance(keys[0], str) else None
        return tree(salt, event.get("lora_name"))

    def _remove(self, name: int | bytes) -> None:
        key, copies = self._blocks.get(name, (0, 0))
        if copies > 1:
            self._blocks[name] = key, copies - 1
        elif copies == 1:
            del self._blocks[name]
            self._note(key, False)

    def _take_host(self, event: Mapping[str, Any]) -> None:
        is_stored = event["type"] == "BlockStored"
        cleared = tuple(self._in_host) if event["type"] == "AllBlocksCleared" else ()
        for name in cleared or event.get("block_hashes", ()):
            if is_stored and name in self._blocks:
                self._in_host[name] = self._blocks[name][0]
            if name in self._in_host:
                _note(self._host_news, self._in_host[name], is_stored)
            if not is_stored:
                self._in_host.pop(name, None)

    def _note(self, key: int, is_stored: bool) -> None:
        _note(self._news, key, is_stored)


def _note(news: dict[int, bool], key: int, is_stored: bool) -> None:
    """What goes and comes back between two changes has not changed."""
    if news.pop(key, is_stored) is is_stored:
        news[key] = is_stored


def _told(news: dict[int, bool]) -> tuple[bytes, bytes]:
    """The ids that were stored, and those that were removed."""
    more = np.array([i for i, is_stored in news.items() if is_stored], np.int64)
    fewer = np.array([i for i, is_stored in news.items() if not is_stored], np.int64)
    return more.tobytes(), fewer.tobytes()
