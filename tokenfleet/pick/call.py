"""`Call`: a request that a picker has been asked for, until its end, and its form in the ledger.

`PromptLengths` measures its prompt. Without a tokenizer a prompt has its bytes over the bytes that a token
had so far: 4 at the start, then as the servers' usage tells. A prompt of more than LONG_BYTES is tokenized
on another thread.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from controlplane.errors import BadInput
from controlplane.types import Slo, WorkerId
from dataplane.live.engine_api.messages import Adapter, EngineRequest, Sampling
from dataplane.live.ledger.request import Tracked
from tokenfleet.pick.asked import AskedBody

# Of the requests of this process: Envoy may name one to another picker.
OURS = f"pick-{secrets.token_hex(4)}"


class Asker:
    """Gets the choice. This one does nothing with it."""

    def picked(self, name: str, addresses: Sequence[str]) -> None:
        """The server of the request `name` is chosen, and those to try after it."""

    def refused(self, status: int, why: str, reason: str, retry_after_s: int | None = None) -> None:
        """No server gets it."""


@dataclass(slots=True, eq=False)
class Call:
    """A request, from its headers to its end.

    `allowed`: the addresses that the gateway lets it go to; None for all. `may_wait`: whether it can be held
    back. `is_streamed`: whether its tokens pass here one by one. `is_watched`: whether the gateway copies its
    answer to the picker. `estimated`: bytes of a prompt whose length is a guess. `is_generation`: others are
    placed, and leave no row. `placed_s`: when it got its server, by the picker's clock. `is_answered`: its
    answer has begun. `prompt_tokens` and `output_tokens`: as the server counted them, in the end.
    """

    asker: Asker
    slo: Slo
    slo_class: str
    tenant: str
    allowed: frozenset[str] | None = None
    may_wait: bool = True
    is_streamed: bool = True
    is_watched: bool = False
    estimated: int = 0
    is_generation: bool = True
    tracked: Tracked | None = None
    placed_s: float = 0.0
    is_answered: bool = False
    is_over: bool = False
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def worker(self) -> WorkerId | None:
        """The server that has it."""
        return None if self.tracked is None else self.tracked.worker


def request_of(
    call: Call, asked: AskedBody, ids: Sequence[int], adapter: str | None, number: int
) -> EngineRequest:
    """The request in the engines' form. Where its tokens are not known its blocks are like no other's."""
    call.is_generation = asked.is_generation
    is_text = call.estimated == 0 and not asked.has_media
    return EngineRequest(
        request_id=f"{OURS}-{number}",
        prompt_token_ids=list(ids),
        mm_features=None if is_text else [None],
        sampling_params=Sampling(max_tokens=asked.most_tokens, ignore_eos=asked.ignores_eos),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None if adapter is None else Adapter(adapter, 0),
        cache_salt=asked.salt,
        data_parallel_rank=None,
    )


BYTES_A_TOKEN, LEAST_BYTES, MOST_BYTES = 4.0, 1.0, 16.0
LEARN = 0.05  # the weight of one request
LONG_BYTES = 8192
Tokenize = Callable[[Mapping[str, Any]], Sequence[int]]


class PromptLengths:
    """How long prompts are. `counts`: prompts by how they were measured: tokens, bytes, none."""

    def __init__(self, tokenize: Tokenize | None = None) -> None:
        self._tokenize = tokenize
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self.bytes_a_token = BYTES_A_TOKEN
        self.adapters: frozenset[str] = frozenset()
        self.counts: Counter[str] = Counter()

    def adapter(self, model: str) -> str | None:
        """The LoRA adapter that a request names as its model."""
        return model if model in self.adapters else None

    def must_wait(self, asked: AskedBody) -> bool:
        """Whether the prompt is to be tokenized on another thread."""
        return self._tokenize is not None and asked.token_ids is None and asked.text_bytes > LONG_BYTES

    def ids(self, call: Call, asked: AskedBody) -> Sequence[int]:
        """The prompt's tokens; zeros where only their number is guessed, which `call.estimated` tells."""
        ids = self._tokens(asked) if asked.token_ids is None else asked.token_ids
        if ids is not None:
            self.counts["tokens"] += 1
            return ids
        self.counts["bytes" if asked.text_bytes else "none"] += 1
        call.estimated = max(asked.text_bytes, 1)
        return [0] * max(1, round(asked.text_bytes / self.bytes_a_token))

    async def tokenized(self, call: Call, asked: AskedBody) -> Sequence[int]:
        """As `ids`, on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.ids, call, asked)

    def _tokens(self, asked: AskedBody) -> Sequence[int] | None:
        if self._tokenize is None or asked.document is None or asked.has_media:
            return None
        try:
            return self._tokenize(asked.document) or None
        except Exception:  # what a chat template raises for a document that is no chat
            return None

    def learn(self, call: Call) -> None:
        """A server has told how long a prompt was."""
        if call.estimated and call.prompt_tokens:
            ratio = min(max(call.estimated / call.prompt_tokens, LEAST_BYTES), MOST_BYTES)
            self.bytes_a_token += LEARN * (ratio - self.bytes_a_token)


def tokenizer(folder: str) -> Tokenize:
    """The tokenizer and chat template of a model's folder. Raises BadInput where there is none."""
    try:
        of = import_module("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError:
        raise BadInput("--tokenizer: needs transformers, which vLLM brings") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"--tokenizer: {folder}: {str(error).splitlines()[0]}") from None

    def tokenize(document: Mapping[str, Any]) -> Sequence[int]:
        if "messages" not in document:
            prompt = document.get("prompt", "")
            text = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
            return [] if not isinstance(text, str) else list(of(text)["input_ids"])
        text = of.apply_chat_template(
            document["messages"], tools=document.get("tools"), tokenize=False, add_generation_prompt=True
        )
        return list(of(text, add_special_tokens=False)["input_ids"])

    return tokenize
