"""The scheduler of an emulated engine: batch composition, admission, preemption and KV block ownership.

It follows vLLM V1's rules, which the simulated plane calls `chunked`. A step takes one token for each
decoding segment, the next chunk of each running prefill, then waiting segments in order of (priority,
arrival). All are within `max_batched_tokens`. Admission is by free blocks. When a block is missing, the
newest admitted segment is preempted and recomputed later.

KV is counted in blocks. Holds are those of the real connector (`Holds`): a loader whose KV has arrived stays
in the batch with its blocks pinned and is not computed.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from controlplane.perfmodel.profile import Profile
from dataplane.live.emulated.segment import Noise, Segment, state_after
from dataplane.live.engine_api.kv_messages import Control, message_of
from dataplane.live.engine_api.link import ENDS_AT
from dataplane.live.engine_api.messages import EngineRequest, Finish, Moment, MomentKind
from dataplane.live.engine_api.step_trace import no_load
from dataplane.live.kv.holds import Holds, LoadJob


@dataclass(slots=True)
class PlannedStep:
    """What a step will do: chunks in order, the loads to start with it, and what it carries."""

    chunks: list[tuple[Segment, int]] = field(default_factory=list)
    jobs: list[LoadJob] = field(default_factory=list)
    load: dict[str, int] = field(default_factory=no_load)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One output: a token (None when a segment ends without), and why it ended."""

    segment: Segment
    token: int | None
    finish: Finish | None
    is_first: bool


class EmulatedBatch:
    """Requests of one emulated engine. Times are the caller's monotonic clock, in seconds."""

    def __init__(self, profile: Profile, max_model_len: int, noise: Noise) -> None:
        self._limits = profile.engine
        self._block_tokens = profile.kv.block_tokens
        self.total_blocks = profile.kv.capacity_tokens // profile.kv.block_tokens
        self._max_model_len = max_model_len
        self._noise = noise
        self._holds = Holds(self._block_tokens)
        self._waiting: list[Segment] = []
        self._running: list[Segment] = []
        self._loading: dict[str, Segment] = {}
        self._held_blocks: dict[str, int] = {}
        self._segments: dict[str, Segment] = {}
        self.free_blocks = self.total_blocks

    def __len__(self) -> int:
        """Segments that have not ended."""
        return len(self._segments)

    def __contains__(self, segment: Segment) -> bool:
        return self._segments.get(segment.id) is segment

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Segments that wait to be computed or for KV on its way; loaders do not count."""
        return len(self._waiting) + sum(not s.transfer.hold for s in self._loading.values())

    @property
    def is_idle(self) -> bool:
        """Nothing to compute now; loads or holds may still be under way."""
        return not self._running and not self._waiting

    def readable_tokens(self, name: str) -> int:
        """Tokens whose KV another engine may take from this segment now."""
        if name in self._held_blocks:
            return self._held_blocks[name] * self._block_tokens
        segment = self._segments.get(name)
        return segment.computed if segment is not None and self._holds.is_leased(name) else 0

    def is_prefilling(self, name: str, tokens: int) -> bool:
        """Whether a leased segment has still to compute some of its first `tokens`."""
        segment = self._segments.get(name)
        return segment is not None and self._holds.is_leased(name) and segment.computed < tokens

    def add(self, request: EngineRequest, now_s: float) -> bool | None:
        """Queue a segment; for a begin, return whether its segment is leased, else None."""
        message = message_of(request)
        if isinstance(message, Control):
            if message.verb == "begin":
                return self._holds.begin(message.segment, message.segment in self._segments, now_s)
            self._holds.release(message.segment)
            self._let_go()
            return None
        prompt = request.prompt_token_ids
        segment = Segment(request, message, state_after(prompt), len(prompt))
        segment.events.append(Moment(MomentKind.QUEUED, now_s))
        self._segments[segment.id] = segment
        bisect.insort(self._waiting, segment, key=lambda s: s.rank)
        return None

    def abort(self, name: str, now_s: float) -> None:
        """End a segment without an output; unknown ones are ignored."""
        segment = self._segments.get(name)
        if segment is not None and name not in self._loading:
            self._end(segment, now_s, aborted=True)
        elif segment is not None:
            segment.doomed = True  # its blocks are being written to; it ends when the load does

    def plan(self, now_s: float) -> PlannedStep:
        """Schedule the next step."""
        step = PlannedStep()
        budget = self._limits.max_batched_tokens
        for segment in list(self._running):
            if segment not in self._running or budget == 0:
                continue  # preempted by one before it
            chunk = min(segment.tokens - segment.computed, budget)
            while not self._grow(segment, segment.computed + chunk):
                victim = self._running[-1]
                self._preempt(victim)
                step.load["preemptions"] += 1
                if victim is segment:
                    break
            else:
                budget -= chunk
                self._carry(step, segment, chunk)
        while budget and self._waiting and len(self._running) < self._limits.max_seqs:
            segment = self._waiting[0]
            load = segment.transfer.load
            cached = max(segment.computed, self._inherited_tokens(segment))
            to_load = self._holds.tokens_to_load(segment.id, segment.transfer, cached)
            computed = min(cached + to_load, segment.tokens - 1)
            between_steps = bool(to_load and load is not None and not load.inline)
            chunk = 0 if between_steps else min(segment.tokens - computed, budget)
            if not self._admit(segment, computed + chunk, to_load, computed):
                break
            del self._waiting[0]
            if between_steps:
                self._loading[segment.id] = segment
                continue
            segment.events.append(Moment(MomentKind.SCHEDULED, now_s))
            self._running.append(segment)
            budget -= chunk
            self._carry(step, segment, chunk)
        orders = self._holds.orders({}, (), now_s)
        self._free(orders.freed + orders.dropped)
        step.jobs, step.load["kv_blocks"] = orders.jobs, self.total_blocks - self.free_blocks
        return step

    def finish(self, step: PlannedStep, now_s: float) -> list[StepOutput]:
        """Advance every segment that the step carried; those aborted meanwhile get no token."""
        outputs = []
        for segment, chunk in step.chunks:
            if segment not in self._running:
                continue
            segment.computed += chunk
            if segment.computed == segment.tokens:
                outputs.append(self._produce(segment, now_s))
        return outputs

    def loaded(self, name: str, now_s: float) -> bool:
        """A load between steps has arrived: its segment goes to the head of its rank, unless it is a loader,
        whose KV stays pinned (True)."""
        segment = self._loading.pop(name, None)
        if segment is None:
            return False
        if segment.doomed:
            self._end(segment, now_s, aborted=True)
            return False
        if self._holds.arrived(name, now_s):
            return True
        bisect.insort(self._waiting, segment, key=lambda s: s.rank)
        return False

    def failed(self, name: str, now_s: float) -> StepOutput | None:
        """A load failed: its segment ends in an error, as vLLM's does under `kv_load_failure_policy=fail`."""
        segment = self._loading.pop(name, None) or self._segments.get(name)
        if segment is None:
            return None
        self._end(segment, now_s, failed=True)
        return StepOutput(segment, None, Finish.ERROR, segment.produced == 0)

    def _carry(self, step: PlannedStep, segment: Segment, chunk: int) -> None:
        step.chunks.append((segment, chunk))
        if segment.decodes:
            step.load["sequences"] += 1
            step.load["context_tokens"] += segment.computed
        else:
            step.load["prefill_tokens"] += chunk
            step.load["prefill_sequences"] += 1
            step.load["prefill_sum_sq"] += (segment.computed + chunk) ** 2 - segment.computed**2

    def _produce(self, segment: Segment, now_s: float) -> StepOutput:
        params = segment.params
        token = self._noise.token(segment.state)
        produced = segment.produced + 1
        end = (params.extra_args or {}).get(ENDS_AT)
        ends = segment.tokens + 1 >= end if isinstance(end, int) else self._noise.ends(segment.state)
        stops = produced > params.min_tokens and not params.ignore_eos and ends
        if stops and params.eos_token_id is not None:
            token = params.eos_token_id
        is_first = segment.produced == 0
        segment.produced, segment.tokens = produced, segment.tokens + 1
        segment.state = state_after([token], segment.state)
        finish = None
        if stops or (produced > params.min_tokens and token in params.all_stop_token_ids):
            finish = Finish.STOP
        elif produced >= params.max_tokens or segment.tokens >= self._max_model_len:
            finish = Finish.LENGTH
        if finish is not None:
            self._end(segment, now_s)
        return StepOutput(segment, token, finish, is_first)

    # KV

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _inherited_blocks(self, segment: Segment) -> int:
        """Blocks of the loaders that this segment takes over from."""
        drop = segment.transfer.drop
        pinned = sum(self._segments[loader].blocks for loader in drop if self._holds.is_pinned(loader))
        return pinned + sum(self._held_blocks.get(loader, 0) for loader in drop)

    def _inherited_tokens(self, segment: Segment) -> int:
        """Their tokens that are a prefix of this segment: whole blocks, and at least one token to compute."""
        blocks = min(self._inherited_blocks(segment), (segment.tokens - 1) // self._block_tokens)
        return blocks * self._block_tokens

    def _grow(self, segment: Segment, tokens: int) -> bool:
        missing = self._blocks(tokens) - segment.blocks
        if missing > self.free_blocks:
            return False
        if missing > 0:
            self.free_blocks -= missing
            segment.blocks += missing
        return True

    def _admit(self, segment: Segment, tokens: int, to_load: int, computed: int) -> bool:
        missing = self._blocks(tokens) - segment.blocks
        if missing > self.free_blocks + self._inherited_blocks(segment):
            return False
        # The held blocks pass to this segment, so they are free for just this moment.
        self._holds.admitted(segment.id, segment.transfer, range(self._blocks(tokens)), to_load)
        self._let_go()
        self._grow(segment, tokens)
        if segment.computed < computed:
            segment.computed = segment.cached = computed
        return True

    def _preempt(self, segment: Segment) -> None:
        self._running.remove(segment)
        self.free_blocks += segment.blocks
        segment.blocks = segment.computed = 0
        bisect.insort_left(self._waiting, segment, key=lambda s: s.rank)

    def _end(self, segment: Segment, now_s: float, *, aborted: bool = False, failed: bool = False) -> None:
        for queue in (self._running, self._waiting):
            if segment in queue:
                queue.remove(segment)
        self._loading.pop(segment.id, None)
        del self._segments[segment.id]
        keeps_blocks = self._holds.ended(
            segment.id,
            segment.transfer,
            range(segment.blocks),
            aborted=aborted,
            failed=failed,
            now_s=now_s,
        )
        if keeps_blocks:
            self._held_blocks[segment.id] = segment.blocks
        else:
            self.free_blocks += segment.blocks
        segment.blocks = 0

    def _let_go(self) -> None:
        """Free what a release or a drop has let go, at once rather than with the next step's orders."""
        self._free(self._holds.take_freed())

    def _free(self, names: list[str]) -> None:
        for name in names:
            self.free_blocks += self._held_blocks.pop(name, 0)
            pinned = self._segments.pop(name, None)
            if pinned is not None:
                self.free_blocks += pinned.blocks
