"""An autoscaling policy for Ray Serve that asks the advice: replicas by targets instead of by requests.

    AutoscalingConfig(policy={"policy_function": AdvicePolicy, "policy_kwargs": {"model": …, "slo": …}})

Ray passes on the numbers that each replica's `record_autoscaling_stats` returns. They must be those of
`COUNTS`, which `counts_of` reads from vLLM's own metrics. A replica whose numbers are missing holds the
advice. Ray's delays come on top of the advice's window: set them to 0.
"""

from __future__ import annotations

import math
from typing import Any

from controlplane.scaler.bounds import Autoscale
from controlplane.worker_type import WorkerType
from tokenfleet.advise.advice import AdviceSettings, AdviceState
from tokenfleet.advise.decide import ORIGIN_S, advise, looked_at
from tokenfleet.advise.look import NoCounts, Page, Watched, look
from tokenfleet.profiles.engine_metrics import EngineCounts, engine_counts
from tokenfleet.profiles.library import find_profiles
from tokenfleet.texts import parse_duration_s, parse_slo

EVERY_S = 5.0
COUNTS = ("ended", "ended_prompt_tokens", "ended_output_tokens", "first_tokens", "running", "waiting")


class AdvicePolicy:
    """The replicas that the advice wants. Ray's controller makes one for each deployment, and calls it."""

    def __init__(
        self, model: str, gpu: str, slo: str, tp: int = 1, attainment: float = 0.99, cold_start: str = "2m"
    ) -> None:
        worker_type = WorkerType.of(find_profiles(model, [gpu], [tp])[0])
        scaling = Autoscale(1, 100_000, attainment=attainment).settings((worker_type,))
        cold_start_s = parse_duration_s(cold_start, "cold_start")
        settings = AdviceSettings(parse_slo(slo, "slo"), attainment, scaling, cold_start_s)
        self._settings = looked_at(settings, EVERY_S)
        self._watched, self._state = Watched(), AdviceState()
        self._began_s: float | None = None
        self._looked_s = 0.0
        self._wanted: int | None = None

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The replicas to have, within the deployment's own bounds. A look every EVERY_S."""
        now_s = float(context.current_time)
        if self._began_s is None:
            self._began_s = now_s
        at_s = ORIGIN_S + EVERY_S * math.floor((now_s - self._began_s) / EVERY_S)
        if at_s > self._looked_s:
            self._looked_s = at_s
            self._watched, traffic = look(self._watched, pages_of(context, at_s), at_s)
            self._state, advice = advise(self._settings, self._state, traffic)
            self._wanted = advice.published
        wanted = context.target_num_replicas if self._wanted is None else self._wanted
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(wanted, low), high), {}


def pages_of(context: Any, at_s: float) -> dict[str, Page]:
    """The last numbers of each running replica. One without them has yet to answer."""
    raw = context.raw_metrics or {}
    pages: dict[str, Page] = {}
    for replica in context.running_replicas:
        series = {name: raw.get(name, {}).get(replica) for name in COUNTS}
        values = {name: float(found[-1].value) for name, found in series.items() if found}
        is_known = len(values) == len(COUNTS)
        pages[str(replica)] = EngineCounts(at_s, values) if is_known else NoCounts("sends no numbers")
    return pages


def counts_of(page: str) -> dict[str, float]:
    """The numbers of `COUNTS` in vLLM's metrics page, for `record_autoscaling_stats`. Raises BadInput."""
    (one, *_) = engine_counts(page, 0.0).values()
    return {name: one.values.get(name, 0.0) for name in COUNTS}
