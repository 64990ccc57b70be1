"""`advise --plan`: the traffic that was watched as a trace, and the plan for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path

from tokenfleet.advise.advice import Advice, AdviceSettings
from tokenfleet.advise.decide import ORIGIN_S
from tokenfleet.cli.advise.flags import AdviseFlags
from tokenfleet.cli.advise.shown import ShownAdvice
from tokenfleet.cli.flags import OutputFormat
from tokenfleet.cli.terminal import answer, console, progress_bar, warn
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


def planned_files(output_dir: Path | None) -> list[Path]:
    """The plan's files, refused before the watch where they cannot be written. Raises BadInput."""
    from tokenfleet.files import refuse_unwritable

    files = [] if output_dir is None else [output_dir / "plan.json", output_dir / "report.html"]
    refuse_unwritable(files)
    return files


def planned_for(seen: WatchedTraffic, flags: AdviseFlags, files: Sequence[Path]) -> int:
    """Print the plan for the traffic that was seen, on every GPU of the library or the given profile."""
    from tokenfleet.api.plan import answered, plan_texts
    from tokenfleet.cli.plan import plan_answer
    from tokenfleet.files import write_files
    from tokenfleet.planning.inputs import gather
    from tokenfleet.planning.request import PlanRequest

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
    with progress_bar() as bar:
        plan = answered(gathered, request, None, bar)
    texts = plan_texts(plan)
    write_files({path: texts[path.name] for path in files})
    if flags.output_format == OutputFormat.TABLE:
        print()
    answer(flags.output_format, texts["plan.json"], lambda: plan_answer(plan, flags.output_dir, False))
    return 0 if plan.feasible else 1
