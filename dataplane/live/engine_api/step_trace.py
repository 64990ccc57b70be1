"""A worker's executed steps: the newest ones travel as telemetry, the last many are kept for refitting.

Rows are those of `tokenfleet fit`. A step's time runs from the end of the previous step to its own end if
work was left in between. So it holds everything that a client waits for: scheduling, the model, sampling and
output. The first step after a pause runs from its own begin. With asynchronous scheduling the engine begins a
step while the last one still runs, so that begin counts only if it is later than the last end. Both are the
GPU's own where it tells them (kv/connector.py): the engine may see an end late.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import TYPE_CHECKING, Any

from controlplane.types import WorkerId
from dataplane.live.engine_api.link import Step, Telemetry

if TYPE_CHECKING:
    from dataplane.live.engine_api.messages import StepOutputs

PREFILLED = "prefill_tokens"
# What a `Step` counts.
COUNTS = (PREFILLED, "prefill_sequences", "prefill_sum_sq", "sequences", "context_tokens", "kv_blocks")
REMEMBERED_STEPS = 65536
MOST_TOLD = 256  # executed steps in one telemetry


def no_load() -> dict[str, int]:
    """The load of a step that carries nothing yet: its counts, and those preempted for it."""
    return dict.fromkeys((*COUNTS, "preemptions"), 0)


def step_stats(load: Mapping[str, int]) -> dict[str, int] | None:
    """The statistics of a step for a gateway, added to vLLM's own in their `kv_connector_stats`.

    The tokens of prompts that it computed; None for a step that computed nothing.
    """
    is_step = load.get(PREFILLED, 0) or load.get("sequences", 0)
    return {PREFILLED: load[PREFILLED]} if is_step else None


def take_prefilled(batch: StepOutputs) -> int | None:
    """What `step_stats` has said of the step that these outputs are of, taken out of its statistics."""
    stats = batch.scheduler_stats
    if stats is None or stats.kv_connector_stats is None:
        return None
    said, stats.kv_connector_stats = stats.kv_connector_stats, None  # no business of vLLM's loggers
    return int(said[PREFILLED])


class StepTrace:
    """The steps of one worker. `kv_total_blocks` as the engine counts them."""

    def __init__(self, worker: WorkerId, kv_total_blocks: int) -> None:
        self._worker = worker
        self._kv_total_blocks = kv_total_blocks
        self._steps: deque[Step] = deque(maxlen=REMEMBERED_STEPS)
        self._ends_s: deque[float] = deque(maxlen=MOST_TOLD)
        self._reported = (0, 0)  # how many steps there were at the last telemetry but one, and at the last
        self._count = 0
        self._preemptions = 0
        self._ended_s = float("-inf")  # of the last step
        self._left_work = False
        self._running = self._waiting = self._used_blocks = 0
        self._fetched: Counter[str] = Counter()
        self._host_loaded_bytes, self._host_loading_s = 0, 0.0

    def take(self, stats: Any, ended_s: float) -> bool:
        """Take in vLLM's statistics of a step, with those of our connector (kv/connector.py); as `add`."""
        told = stats.kv_connector_stats or {}
        self._fetched.update(told.get("fetched", {}))
        from_host = told.get("host_loads", {})
        self._host_loaded_bytes += int(from_host.get("bytes", 0))
        self._host_loading_s += from_host.get("seconds", 0.0)
        return self.add(
            told.get("load", {}),
            told.get("gpu_s", ended_s - told.get("began_s", ended_s)),
            ended_s,
            stats.num_running_reqs,
            stats.num_waiting_reqs + stats.num_skipped_waiting_reqs - told.get("loaders", 0),
            stats.kv_cache_usage,
            told.get("since_last_s"),
        )

    def add(
        self,
        load: Mapping[str, int],
        engine_s: float,
        ended_s: float,
        running: int,
        waiting: int,
        kv_usage: float,
        since_last_s: float | None = None,
    ) -> bool:
        """Take in a step that ended at `ended_s` and left `running` and `waiting` requests.

        `load` as `no_load` begins it, `engine_s` the time since the engine began it, `kv_usage` in [0, 1],
        `since_last_s` the GPU's own time since the last step's end. Return whether anything was computed, or
        anything changed.
        """
        state = (running, waiting, round(kv_usage * self._kv_total_blocks))
        changed = state != (self._running, self._waiting, self._used_blocks)
        self._running, self._waiting, self._used_blocks = state
        self._preemptions += load.get("preemptions", 0)
        computed = bool(load.get("prefill_tokens", 0) or load.get("sequences", 0))
        if computed:
            if since_last_s is None:
                since_last_s = ended_s - self._ended_s
            step_s = since_last_s if self._left_work else min(engine_s, since_last_s)
            self._count += 1
            self._ends_s.append(ended_s)
            self._steps.append(Step(step_s=step_s, **{count: load[count] for count in COUNTS}))
        # Between this step and the next nothing but the engine's own work passes, if something still runs;
        # what waits may wait for KV to arrive.
        self._left_work = bool(computed and running)
        self._ended_s = ended_s
        return computed or changed

    @property
    def ordinary_s(self) -> float:
        """The longest median step time of steps of one size; infinite before the first step.

        Sizes are powers of two of the tokens computed. Of two steps of a size the shorter is the median.
        """
        by_size: defaultdict[int, list[float]] = defaultdict(list)
        for step in self._steps:
            by_size[(step.prefill_tokens + step.sequences).bit_length()].append(step.step_s)
        return max(map(median_low, by_size.values()), default=float("inf"))

    def telemetry(self, now_s: float) -> Telemetry:
        """The load after the last step."""
        step = self._steps[-1] if self._steps else Step(0, 0, 0, 0.0, 0, 0)
        executed = self._executed(self._reported[0], now_s)
        self._reported = (self._reported[1], self._count)
        return Telemetry(
            worker=self._worker,
            steps=self._count,
            running=self._running,
            waiting=self._waiting,
            sequences=step.sequences,
            context_tokens=step.context_tokens,
            prefill_tokens=step.prefill_tokens,
            step_s=step.step_s,
            kv_used_blocks=self._used_blocks,
            kv_total_blocks=self._kv_total_blocks,
            preemptions=self._preemptions,
            prefill_sum_sq=step.prefill_sum_sq,
            executed=executed,
            kv_fetched=dict(self._fetched),
            host_loaded_bytes=self._host_loaded_bytes,
            host_loading_s=self._host_loading_s,
        )

    def _executed(self, since: int, now_s: float) -> tuple[Step, ...]:
        new = min(self._count - since, len(self._ends_s))
        return tuple(self._steps[i]._replace(age_s=now_s - self._ends_s[i]) for i in range(-new, 0))

    def steps(self, since: int = 0) -> tuple[int, Sequence[Step]]:
        """Steps from number `since` on, as far as they are remembered, and the number to ask from next."""
        first = self._count - len(self._steps)
        return self._count, list(self._steps)[max(0, since - first) :]
