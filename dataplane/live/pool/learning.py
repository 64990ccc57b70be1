"""Step times learned as a fleet starts: the workers of a kind are measured together before they serve.

A worker whose kind has no profile runs bursts of a short design (`samples.design`) over its link, once it has
warmed up. Each kind has one list of visits, from which its workers take. So the same batches are measured, by
all of them, however many there are and whenever each is ready. A worker that dies leaves its burst to the
others. After MEASURE_S at most what was measured is fitted; the last worker to end does it, and all of them
serve by the result. Workers of that kind that start later are not measured.

A kind that cannot be measured has a `reason`, placement uses load alone, and the next worker of the kind
that starts is measured again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import numpy as np

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.fit import fit_step
from controlplane.perfmodel.profile import Profile, Source
from controlplane.perfmodel.samples import Burst, StepSamples, by_point, design
from controlplane.types import WorkerId
from controlplane.worker_type import WorkerType
from dataplane.live.engine_api.link import EngineLink, Step
from dataplane.live.gateway.events import EventLog
from dataplane.live.worker.bursts import EngineDied, LinkedEngine, room_of, run_burst

log = logging.getLogger(__name__)
MEASURE_S = 20.0  # from the first worker of a kind that is warm; with the fit it is within 30 s
VISITS, LONG_VISITS = 5, 2  # to a point, and to one of more than LONG tokens, whose steps are less noisy
LONG, HUGE = 2048, 20_000  # a huge burst comes when all others are done
MOST_BURST_S = 4.0  # one that should take longer is left out; an H100 prefills 131,072 tokens of 8B in 3 s
UNSURE = 0.15  # the mean error from which step times are called uncertain
TELLING_PREFILL = 64  # tokens in a step that tell what one of them takes
NO_MATTER = ("model", "served_model_name", "shutdown_timeout")  # flags that change no step
Key = Mapping[str, Any]


class KeptProfiles(Protocol):
    """Profiles that were learned before, by what their step times depend on."""

    def read(self, key: Key) -> Profile | None:
        """The profile of this key, where there is one that can be read."""

    def keep(self, key: Key, profile: Profile) -> None:
        """Keep a profile; where that fails, it is only said."""


@dataclass(frozen=True, slots=True)
class Visit:
    """The steps of one visit to a point, and who made it."""

    worker: str
    point: str
    steps: Sequence[Step]


@dataclass
class _Course:
    """The measurement of one kind while it is under way."""

    until_s: float
    began_s: float
    to_visit: deque[Burst]
    visits: list[Visit] = field(default_factory=list)
    workers: int = 0  # that take part now
    took_part: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def per_token_s(self) -> float:
        """What a prompt's token has taken so far; 0 before any has told."""
        steps = [s for visit in self.visits for s in visit.steps if s.prefill_tokens >= TELLING_PREFILL]
        return float(np.median([s.step_s / s.prefill_tokens for s in steps])) if steps else 0.0


class Learning:
    """What is learned of the kinds of a fleet that have no profile.

    `model`: the model's name and the digest of its configuration; `flags`: the engine's settings;
    `vocabulary`: how many tokens the model knows. `measure_s`: from a kind's first warm worker. Called in the
    loop: `on_learnt(kind, profile)`, and `on_measured(worker, steps)` with how many a worker has executed.
    """

    def __init__(
        self,
        types: Mapping[str, WorkerType],
        model: tuple[str, str],
        flags: Mapping[str, Any],
        vocabulary: int,
        events: EventLog,
        kept: KeptProfiles | None = None,
        measure_s: float = MEASURE_S,
    ) -> None:
        self._types, self._model, self._flags, self._vocabulary = types, model, flags, vocabulary
        self._events, self._kept, self._measure_s = events, kept, measure_s
        self._courses: dict[str, _Course] = {}
        self.learnt: dict[str, Profile] = {}
        self.reasons: dict[str, str] = {}  # why a kind could not be measured
        self.on_learnt: list[Callable[[str, Profile], None]] = []
        self.on_measured: list[Callable[[WorkerId, int], None]] = []

    @property
    def why(self) -> str:
        """Why some kinds could not be measured, in one line."""
        return "; ".join(self.reasons.values()) or "no worker has started yet"

    async def measure(self, link: EngineLink, kind: str, serves: bool = False) -> None:
        """Take part in measuring a worker's kind; returns once its step times are known, or cannot be.

        One that `serves` already is not measured: what was learned of its kind is read, where it was kept.
        """
        if kind not in self._types or kind in self.learnt:
            return
        course = self._courses.get(kind)
        if course is None:
            kept = None if self._kept is None else self._kept.read(self._key(link, kind))
            if kept is not None:
                self._take(kind, kept, f"{kind}: step times learned on {kept.source.date} are used again")
                return
            if serves:
                self.reasons[kind] = "its workers were adopted, and what was learned of them was not kept"
                return
            course = self._courses[kind] = _course_of(link, self._measure_s)
        course.workers += 1
        course.took_part += 1
        try:
            await self._take_part(course, link)
        finally:
            course.workers -= 1
            if course.workers == 0:
                del self._courses[kind]  # a worker that comes now finds what was learned, or begins again
                conclusion = asyncio.ensure_future(self._conclude(course, link, kind))
                conclusion.add_done_callback(lambda _: course.over.set())
        await course.over.wait()

    async def _take_part(self, course: _Course, link: EngineLink) -> None:
        engine = LinkedEngine(link, self._vocabulary)
        rng, numbers = np.random.default_rng(course.took_part), itertools.count()
        while course.to_visit and time.monotonic() < course.until_s:
            burst, steps = course.to_visit.popleft(), list[Step]()
            if burst.tokens * course.per_token_s() > MOST_BURST_S:
                continue
            try:
                async with asyncio.timeout(course.until_s - time.monotonic()):
                    await run_burst(engine, burst, f"learn-{next(numbers)}", rng, steps)
                    await engine.settled(steps)
            except TimeoutError:
                await engine.abandon()
            except EngineDied:
                await engine.abandon()
                course.to_visit.append(burst)
                return
            finally:
                for tell in self.on_measured:
                    tell(link.info.worker, engine.steps)
            course.visits.append(Visit(link.info.worker, burst.name, steps))

    async def _conclude(self, course: _Course, link: EngineLink, kind: str) -> None:
        """Fit what was measured, or say why that cannot be done."""
        try:
            profile = await asyncio.to_thread(self._fitted, course, link, kind)
        except Exception as error:  # whatever broke, the workers serve
            if not isinstance(error, BadInput):
                log.exception("the fit of %s broke", kind)
            self.reasons[kind] = str(error)
            why = f"{kind}: step times could not be measured ({error}); placement uses load alone"
            self._events.record(time.time(), "unmeasured", why, worker_kind=kind)
            return
        if self._kept is not None:
            await asyncio.to_thread(self._kept.keep, self._key(link, kind), profile)
        self._take(kind, profile, f"{kind}: {profile.source.what}")

    def _fitted(self, course: _Course, link: EngineLink, kind: str) -> Profile:
        samples = samples_of(course.visits)
        fit = fit_step(samples, robust=True, quick=True)
        steps, seconds = sum(len(v.steps) for v in course.visits), time.monotonic() - course.began_s
        info, worker_type, error = link.info, self._types[kind], fit.residuals.mean_relative
        hint = " (uncertain: --profile FILE with a measured one is better)" if error > UNSURE else ""
        workers = "1 worker" if course.took_part == 1 else f"{course.took_part} workers"
        return Profile(
            model=self._model[0].rstrip("/").rsplit("/", 1)[-1],
            gpu=worker_type.gpu or info.device or info.engine,
            tp_degree=info.tp_degree,
            step=fit.model,
            kv=KvModel(info.kv_blocks * info.block_tokens, info.block_tokens, info.kv_bytes_per_token),
            engine=EngineLimits(
                info.engine,
                info.vllm_version,
                max_batched_tokens=info.max_batched_tokens,
                max_seqs=min(info.max_seqs, info.max_batched_tokens),
                steps_ahead=info.steps_ahead,
            ),
            residuals=fit.residuals,
            source=Source(
                "measured",
                f"learned from {steps} steps of {workers} in {seconds:.1f} s at the fleet's start"
                f" ({info.device or info.engine}); mean error {100 * error:.1f} %{hint}",
                "own measurement",
                f"{datetime.now(UTC):%Y-%m-%d}",
            ),
            context_limit_tokens=info.max_model_len,
            fitted=fit.fitted,
        )

    def _take(self, kind: str, profile: Profile, said: str) -> None:
        self.learnt[kind] = profile
        self.reasons.pop(kind, None)
        if (error := profile.residuals.mean_relative) > UNSURE:
            log.warning("%s: step times are %.0f %% uncertain; --profile FILE is surer", kind, 100 * error)
        self._events.record(time.time(), "learned", said, worker_kind=kind)
        for tell in self.on_learnt:
            tell(kind, profile)

    def _key(self, link: EngineLink, kind: str) -> Key:
        """Everything that a worker's step times depend on."""
        info = link.info
        return {
            "engine": info.engine,
            "version": info.vllm_version,
            "model": self._model[0],
            "model_config": self._model[1],
            "kind": kind,
            "device": info.device,
            "tp_degree": info.tp_degree,
            "dtype": info.dtype,
            "block_tokens": info.block_tokens,
            "max_seqs": info.max_seqs,
            "max_batched_tokens": info.max_batched_tokens,
            "max_model_len": info.max_model_len,
            "steps_ahead": info.steps_ahead,
            "flags": {
                name: repr(value)
                for name, value in sorted(self._flags.items())
                if value is not None and name not in NO_MATTER
            },
        }


def samples_of(visits: Sequence[Visit]) -> StepSamples:
    """The batches that were measured, each at the median of its visits.

    A worker's first visit to a point warms it up, and counts only where no other was made. Raises BadInput
    where nothing was measured.
    """
    seen: set[tuple[str, str]] = set()
    later = []
    for visit in visits:
        if (visit.worker, visit.point) in seen:
            later.append(visit)
        seen.add((visit.worker, visit.point))
    again = {visit.point for visit in later}
    kept = [*later, *(visit for visit in visits if visit.point not in again)]
    rows = [(visit.point, str(i), step) for i, visit in enumerate(kept) for step in visit.steps]
    rows = [row for row in rows if row[2].step_s > 0]
    if not rows:
        raise BadInput("no step was measured in time")
    columns = np.array([[s.prefill_tokens, s.sequences, s.context_tokens, s.step_s] for *_, s in rows], float)
    sum_sq = np.array([s.prefill_sum_sq for *_, s in rows], float)
    prefill, sequences, context, step_s = columns.T
    samples = StepSamples(prefill, sequences, context, step_s, sum_sq)
    return by_point(samples, [point for point, *_ in rows], [repeat for _, repeat, _ in rows])


def _course_of(link: EngineLink, measure_s: float) -> _Course:
    now_s = time.monotonic()
    bursts = design(room_of(link))
    rng = np.random.default_rng(0)
    # The first round is in order, for a design that is cut short. The later rounds are shuffled, so that a
    # slow spell of the machine does not fall on all visits to a point.
    huge = [burst for burst in bursts if burst.tokens > HUGE]
    usual = [burst for burst in bursts if burst.tokens <= HUGE]
    to_visit = list(usual)
    for turn in range(1, VISITS):
        due = [burst for burst in usual if turn < (VISITS if burst.tokens <= LONG else LONG_VISITS)]
        to_visit += [due[i] for i in rng.permutation(len(due))]
    to_visit += huge * LONG_VISITS
    return _Course(now_s + measure_s, now_s, deque(to_visit))
