"""The counts of a watched fleet, look by look: what a trace for `plan` is drawn from."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime

from controlplane.errors import BadInput
from controlplane.figures import duration_text
from tokenfleet.advise.look import Buckets, FleetTraffic
from tokenfleet.profiles.engine_metrics import LENGTHS
from tokenfleet.traces.from_metrics import CountedTraffic, LengthHistogram

ENOUGH = 500.0  # requests that ended while watched; with fewer, the servers' whole lives give the lengths


class TrafficRecord:
    """Arrivals between looks, and the lengths of the requests that ended: while watched, and before."""

    def __init__(self) -> None:
        self._at_s: list[float] = []
        self._rates_rps: list[float] = []
        self._watched, self._lives = _Lengths(), _Lengths()

    def add(self, traffic: FleetTraffic) -> None:
        """Count a look. The first begins the record; one that was held leaves a step without counts."""
        if self._at_s:
            passed_s = traffic.at_s - self._at_s[-1]
            self._rates_rps.append(math.nan if traffic.arrivals is None else traffic.arrivals / passed_s)
        self._at_s.append(traffic.at_s)
        if not traffic.held:
            (self._lives if traffic.arrivals is None else self._watched).add(traffic)

    def counted(self, clock: Callable[[float], datetime]) -> CountedTraffic:
        """What the record says about the traffic. Raises BadInput where it has too little."""
        span_s = self._at_s[-1] - self._at_s[0] if self._at_s else 0.0
        lengths, whose = self._watched, "while watched"
        if lengths.ended < ENOUGH:
            lengths, whose = lengths.with_those_of(self._lives), "since the servers started"
        if not any(rate > 0 for rate in self._rates_rps):
            raise BadInput(f"advise: no request arrived in {duration_text(span_s)}; watch for longer")
        if not all(lengths.buckets.get(name, {}).get(math.inf, 0.0) > 0 for name in LENGTHS):
            raise BadInput(f"advise: the servers have no vllm:{LENGTHS['prompt']}; no lengths to plan for")
        prompts, outputs = (
            LengthHistogram.of_buckets(lengths.buckets[name], tokens / lengths.ended, f"{name}s")
            for name, tokens in (("prompt", lengths.prompt_tokens), ("output", lengths.output_tokens))
        )
        times_s = tuple(clock(at_s).timestamp() for at_s in self._at_s)
        return CountedTraffic(times_s, self._rates_rps, prompts, outputs, f"vLLM's metrics, lengths {whose}")


class _Lengths:
    """Requests that ended, their tokens, and their histograms."""

    def __init__(self) -> None:
        self.ended = self.prompt_tokens = self.output_tokens = 0.0
        self.buckets: dict[str, dict[float, float]] = {name: {} for name in LENGTHS}

    def add(self, traffic: FleetTraffic) -> None:
        self.ended += traffic.ended
        self.prompt_tokens += traffic.prompt_tokens
        self.output_tokens += traffic.output_tokens
        self._add(traffic.buckets)

    def with_those_of(self, other: _Lengths) -> _Lengths:
        both = _Lengths()
        for one in (self, other):
            both.ended += one.ended
            both.prompt_tokens += one.prompt_tokens
            both.output_tokens += one.output_tokens
            both._add(one.buckets)
        return both

    def _add(self, buckets: Buckets) -> None:
        for name in LENGTHS:
            for edge, count in buckets.get(name, {}).items():
                self.buckets[name][edge] = self.buckets[name].get(edge, 0.0) + count
