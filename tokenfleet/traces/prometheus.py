"""The traffic that a Prometheus server has counted: vLLM's rates and length histograms over a range of time.

Rates are those of requests that had a first token, step by step. A step in which Prometheus has no samples
has no rate, which is not a rate of 0. Steps are a minute where samples are that close, else longer.

API: https://prometheus.io/docs/prometheus/latest/querying/api/
"""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from controlplane.errors import BadInput
from controlplane.figures import duration_text
from tokenfleet.texts import parse_duration_s
from tokenfleet.traces.from_metrics import CountedTraffic, LengthHistogram, trace_of_metrics
from tokenfleet.traces.trace import Trace

FIRST_TOKENS = "vllm:time_to_first_token_seconds"  # also of requests whose clients leave, unlike lengths
PROMPTS, OUTPUTS = "vllm:request_prompt_tokens", "vllm:request_generation_tokens"
SINCE = "24h"
STEPS_S = (60.0, 300.0, 900.0)  # the next one where most steps have no rate
MOST_STEPS = 10_000  # a range query has at most 11,000
FEWEST_STEPS = 3
TIMEOUT_S = 30.0
Series = list[tuple[dict[str, str], list[tuple[float, float]]]]  # labels, and values by Unix time


def results_of(body: bytes) -> Series:
    """The series in an answer of Prometheus. Raises BadInput."""
    try:
        told = json.loads(body)
        if told["status"] != "success":
            raise BadInput(f"refuses the query: {told.get('error', 'no reason given')}")
        rows = [(one["metric"], one.get("values") or [one["value"]]) for one in told["data"]["result"]]
        return [(labels, [(float(at), float(value)) for at, value in values]) for labels, values in rows]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise BadInput("answers with something else than Prometheus' API") from None


def matchers_of(url: str, selector: str) -> str:
    """What a selector holds between its braces. Raises BadInput for it, or for an address that is none."""
    if not url.startswith(("http://", "https://")):
        raise BadInput(f"--prometheus: expected an http:// or https:// address, got {url!r}")
    inner = re.fullmatch(r"\{\s*(.*?)\s*,?\s*\}", selector.strip(), re.S)
    if inner is None:
        raise BadInput(f'--selector: expected {{label="value"}}, got {selector!r}')
    return inner[1]


@dataclass(frozen=True, slots=True)
class MetricsRange:
    """The last `since` of the servers that `selector` matches, at the Prometheus server `url`."""

    url: str
    selector: str = "{}"
    since: str = SINCE

    def __post_init__(self) -> None:
        matchers_of(self.url, self.selector)
        if self.since_s < FEWEST_STEPS * STEPS_S[0]:
            least = duration_text(FEWEST_STEPS * STEPS_S[0])
            raise BadInput(f"--since: {self.since}: expected at least {least} of metrics")

    @property
    def since_s(self) -> float:
        return parse_duration_s(self.since, "--since")

    @property
    def name(self) -> str:
        """`prometheus:9090, last 24h`."""
        return f"{urllib.parse.urlsplit(self.url).netloc}, last {self.since}"

    def trace(self, now_s: float, seed: int = 0) -> Trace:
        """A trace drawn from what was counted until `now_s`. Raises BadInput."""
        return trace_of_metrics(self.counted(now_s), seed, self.name)

    def counted(self, now_s: float) -> CountedTraffic:
        """What was counted until `now_s`, Unix time. Raises BadInput."""
        among = matchers_of(self.url, self.selector)
        models = self._asked(f"group by (model_name) ({PROMPTS}_count{{{among}}})", now_s)
        if not models:
            raise BadInput(f"--selector: no metric {PROMPTS} matches {self.selector} at {self.url}")
        if len(models) > 1:
            names = ", ".join(sorted(labels.get("model_name", "-") for labels, _ in models)[:4])
            raise BadInput(
                f"--selector: {len(models)} models match ({names}); plan one at a time, with model_name"
            )
        times_s, rates_rps = self._rates(among, now_s)
        prompts, outputs = (self._lengths(metric, among, now_s) for metric in (PROMPTS, OUTPUTS))
        return CountedTraffic(times_s, rates_rps, prompts, outputs, f"vLLM's metrics at {self.url}")

    def _rates(self, among: str, now_s: float) -> tuple[list[float], list[float]]:
        """The edges of the steps, and the rate in each; NaN where there is none."""
        for step_s in STEPS_S:
            step_s = max(step_s, math.ceil(self.since_s / MOST_STEPS))
            steps = max(int(self.since_s // step_s), 1)
            ends_s = [now_s - (steps - 1 - i) * step_s for i in range(steps)]
            query = f"sum(rate({FIRST_TOKENS}_count{{{among}}}[{step_s:.0f}s]))"
            found = self._asked(query, ends_s[-1], (ends_s[0], step_s))
            seen = {
                round((at_s - ends_s[0]) / step_s): value for _, values in found for at_s, value in values
            }
            rates_rps = [seen.get(i, math.nan) for i in range(steps)]
            if sum(map(math.isnan, rates_rps)) <= steps / 2:
                break
        if all(map(math.isnan, rates_rps)):
            raise BadInput(f"--prometheus: {self.url}: no samples in the last {self.since}")
        return [ends_s[0] - step_s, *ends_s], rates_rps

    def _lengths(self, metric: str, among: str, now_s: float) -> LengthHistogram:
        """The histogram of a length over the whole range, with the mean that its sum gives."""
        over = f"{{{among}}}[{self.since_s:.0f}s]"
        found = self._asked(f"sum by (le) (increase({metric}_bucket{over}))", now_s)
        up_to = {float(labels.get("le", "nan")): values[-1][1] for labels, values in found}
        up_to = {edge: count for edge, count in up_to.items() if not math.isnan(edge + count)}
        if len(up_to) < 3:
            raise BadInput(f"--prometheus: {metric}: {len(up_to)} buckets, expected several to draw lengths")
        mean = self._asked(f"sum(increase({metric}_sum{over})) / sum(increase({metric}_count{over}))", now_s)
        tokens = mean[0][1][-1][1] if mean else math.nan
        return LengthHistogram.of_buckets(up_to, tokens if math.isfinite(tokens) else None, metric)

    def _asked(self, query: str, at_s: float, steps: tuple[float, float] | None = None) -> Series:
        """The series of a query at a time, or at `steps`: the first, and how far apart. Raises BadInput."""
        asked: dict[str, Any] = {"query": query, "time": at_s}
        if steps is not None:
            asked = {"query": query, "start": steps[0], "end": at_s, "step": steps[1]}
        url = f"{self.url.rstrip('/')}/api/v1/query{'_range' if steps else ''}"
        try:
            try:
                with urllib.request.urlopen(url, urllib.parse.urlencode(asked).encode(), TIMEOUT_S) as reply:
                    return results_of(reply.read())
            except urllib.error.HTTPError as refused:  # Prometheus says why in the body
                return results_of(refused.read())
        except BadInput as error:
            why = str(error)
        except TimeoutError:
            why = f"does not answer within {TIMEOUT_S:g} s"
        except OSError as error:
            reason = getattr(error, "reason", None) or error
            why = f"does not answer: {getattr(reason, 'strerror', None) or reason}"
        raise BadInput(f"--prometheus: {self.url}: {why}")
