"""`advise --plan`: the traffic that was watched as a trace, and the plan for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime

from tokenfleet.advise.advice import Advice, AdviceSettings
from tokenfleet.advise.decide import ORIGIN_S
from tokenfleet.cli.advise.flags import AdviseFlags
from tokenfleet.cli.advise.shown import ShownAdvice
from tokenfleet.cli.flags import OutputFormat
from tokenfleet.cli.terminal import console, warn
from tokenfleet.planning.request import PlanRequest
from tokenfleet.traces.from_metrics import CountedTraffic, trace_of_metrics


@dataclass(frozen=True, slots=True)
class WatchedTraffic:
    """What was watched: whose replicas for which targets, and the traffic."""

    settings: AdviceSettings
    traffic: CountedTraffic


class Until:
    """Shows each advice; with `watched_s`, asks for no more after that time."""

    def __init__(self, shown: ShownAdvice, watched_s: float | None) -> None:
        self._shown, self._watched_s = shown, watched_s
        self.is_over = False
        self.clock: Callable[[float], datetime] | None = None

    def __call__(self, advice: Advice, clock: Callable[[float], datetime]) -> bool:
        self.clock = clock
        if self._watched_s is not None and advice.at_s - ORIGIN_S >= self._watched_s:
            self.is_over = True
        return self._shown(advice, clock) and not self.is_over


def planned_for(seen: WatchedTraffic, flags: AdviseFlags) -> int:
    """Print the plan for the traffic that was seen, on every GPU of the library or the given profile."""
    from tokenfleet.cli.plan import answer_plan
    from tokenfleet.planning.inputs import gather

    settings = seen.settings
    request = PlanRequest(
        slo=settings.slo,
        model=settings.worker_type.profile.model if flags.profile is None else None,
        attainment=settings.attainment,
        profiles=() if flags.profile is None else (flags.profile,),
        prices=flags.prices,
        cold_start_s=settings.cold_start_s,
        drop_too_long=True,
    )
    with console(stderr=True).status("drawing the traffic"):
        trace = trace_of_metrics(seen.traffic, request.seed, f"traffic of {settings.served}")
        gathered = gather(trace, request, None, date.today())
    warn([w for w in gathered.inputs.warnings if w not in gathered.inputs.ages])
    if flags.output_format == OutputFormat.TABLE:
        print()
    return answer_plan(gathered, request, flags.output_dir, flags.output_format)
