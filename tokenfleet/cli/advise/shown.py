"""The advice on stdout: as it changes, and what it would have done on a recorded day."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.live import Live
from rich.text import Text

from controlplane.errors import BadInput, Infeasible
from controlplane.figures import duration_text
from controlplane.perfmodel.profile import Profile
from tokenfleet.cli.flags import OutputFormat
from tokenfleet.cli.terminal import answer, console, warn
from tokenfleet.report.progress import tell_compiling
from tokenfleet.report.tables import asked_text, lines_table, share_text, table

if TYPE_CHECKING:
    from controlplane.workload import Workload
    from tokenfleet.advise.advice import Advice, AdviceSettings
    from tokenfleet.advise.published import AdviceGauges
    from tokenfleet.advise.replay import ReplayRow

FIRST_S = 60.0  # in which --once has an advice, or ends without
SCHEMA = "tokenfleet.advice-replay/1"
COLUMNS = ("Rule", "In SLO", "Replica-hours", "Times optimum", "Changes", "Peak", "Cost")


class ShownAdvice:
    """The advice on stdout: a table that follows it on a terminal, else changes alone; JSON; or nothing."""

    def __init__(
        self,
        once: bool,
        output_format: OutputFormat | None,
        settings: AdviceSettings,
        gauges: AdviceGauges,
        cleanup: ExitStack,
    ) -> None:
        self._once, self._output_format = once, output_format
        self._settings, self._gauges = settings, gauges
        self._console = console()
        self._said: tuple[object, ...] = ()
        self._first_s: float | None = None
        self._live = None
        is_live = self._console.is_terminal and not once and output_format == OutputFormat.TABLE
        if is_live:
            self._live = cleanup.enter_context(Live(console=self._console, auto_refresh=False))

    def __call__(self, advice: Advice, clock: Callable[[float], datetime]) -> bool:
        """Show one; whether another is to come. Raises Infeasible where --once waited too long."""
        self._gauges.advice = advice
        if self._first_s is None:
            self._first_s = advice.at_s
        if not self._once:
            self._show(advice, clock)
            return True
        if advice.wanted is None and advice.at_s - self._first_s < FIRST_S:
            return True
        if advice.wanted is None:
            from tokenfleet.advise.view import verdict

            raise Infeasible(f"advise: no advice within {FIRST_S:g} s: {verdict(self._settings, advice)}")
        self._show(advice, clock)
        return False

    def _show(self, advice: Advice, clock: Callable[[float], datetime]) -> None:
        from tokenfleet.advise.view import OPENS, document, lines, verdict

        if self._output_format is None:
            return
        if self._output_format == OutputFormat.JSON:
            print(json.dumps(document(self._settings, advice, clock)), flush=True)
            return
        counts = tuple((one.wanted, one.has) for one in advice.of_types)
        is_kept = not advice.held and all(wanted == has for wanted, has in counts)
        colour = "bold green" if is_kept else "bold yellow"
        table = lines_table(lines(self._settings, advice, clock), OPENS, colour)
        if self._live is not None:
            self._live.update(table, refresh=True)
            return
        news = (advice.wanted, counts, bool(advice.held))
        if news != self._said and (advice.wanted is None or self._said[:1] in ((), (None,))):
            self._console.print(table)
        elif news != self._said:
            self._console.print(
                f"{clock(advice.at_s):%H:%M:%S}  {verdict(self._settings, advice)}", soft_wrap=True
            )
        self._said = news


def replay_day(
    paths: Sequence[Path], settings: AdviceSettings, bounds: tuple[int, int], output: OutputFormat
) -> None:
    """Replay the day and show each rule's row. Raises BadInput for a trace that cannot be replayed."""
    from tokenfleet.advise.replay import ReplayedDay, best

    with console(stderr=True).status("reading"):
        load, name, notes = _read(paths, [one.profile for one in settings.types])
    tell_compiling()
    day = ReplayedDay(load, settings, *bounds)
    with console(stderr=True).status("replaying") as status:
        tried = list(day.rows(tell=lambda said: status.update(f"replaying {len(load):,} requests: {said}")))
    rows = [best(of_rule, settings.attainment) for of_rule in tried]
    document = _document(name, load, settings, rows)
    answer(output, json.dumps(document, indent=1), lambda: _lines(name, load, settings, rows))
    warn(notes)


def _read(paths: Sequence[Path], profiles: Sequence[Profile]) -> tuple[Workload, str, list[str]]:
    """The requests, at their recorded times and of one class; their name, and what there is to know."""
    from tokenfleet.planning.inputs import within_context
    from tokenfleet.traces import read_traces
    from tokenfleet.traces.check import doctor_warnings

    trace = read_traces(paths)
    notes = [*trace.warnings, *doctor_warnings(trace)]
    load = trace.workload
    if load.sessions is not None:
        notes.append(f"{trace.name}: requests of a session are sent at their recorded times")
    load = replace(load, sessions=None, slo_class=np.zeros(len(load), np.int64), slo_classes=("default",))
    load, dropped = within_context(load, profiles, True, trace.name)
    longest = int((load.prompt_tokens + load.output_tokens).max()) if len(load) else 0
    for profile in profiles:
        if profile.kv.held(longest) > profile.kv.capacity_tokens:
            raise BadInput(
                f"{trace.name}: the longest request has {longest} tokens,"
                f" the KV of {profile.type_name} holds {profile.kv.capacity_tokens}"
            )
    return load, trace.name, [*notes, *dropped]


def _document(
    name: str, load: Workload, settings: AdviceSettings, rows: Sequence[ReplayRow]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "trace": name,
        "requests": len(load),
        "hours": round(float(load.arrival_s[-1]) / 3600.0, 4),
        "target": settings.attainment,
        "slo": {"ttft_s": settings.slo.ttft_s, "tpot_s": settings.slo.tpot_s},
        "cold_start_s": settings.cold_start_s,
        "rules": [
            {
                "rule": row.rule,
                "target": row.target or None,
                "attainment": round(row.attainment, 6),
                "replica_hours": round(row.worker_s / 3600.0, 4),
                "of_hindsight": round(row.cost / rows[0].cost, 4),
                "changes": row.changes,
                "most_replicas": row.most,
                "usd": None if row.usd is None else round(row.usd, 2),
                "replica_hours_of": {
                    one.name: round(row.hours.get(one.name, 0.0), 4) for one in settings.types
                },
            }
            for row in rows
        ],
    }


def _lines(name: str, load: Workload, settings: AdviceSettings, rows: Sequence[ReplayRow]) -> Iterable[Any]:
    """The verdict, a row for each rule, and what the figures mean."""
    from tokenfleet.advise.replay import ADVICE, HINDSIGHT

    slo, optimum = settings.slo, rows[0].rule.replace(HINDSIGHT, HINDSIGHT.lower())
    advice = next(row for row in rows if row.rule == ADVICE)
    meets = advice.attainment >= settings.attainment
    verb = "meets" if meets else "misses"
    yield Text(
        f"On this trace the advice {verb} the target: {share_text(advice.attainment)}"
        f" of requests in SLO, at {advice.cost / rows[0].cost:.2f} times the {optimum}",
        style="bold green" if meets else "bold red",
    )
    yield Text(
        f"{name}: {len(load):,} requests in {duration_text(float(load.arrival_s[-1]))}; target"
        f" {asked_text(settings.attainment)} within TTFT {duration_text(slo.ttft_s)} and TPOT"
        f" {duration_text(slo.tpot_s)}; a replica starts in {duration_text(settings.cold_start_s)}"
    )
    yield ""
    cells = (
        (
            f"{row.rule}, {row.target}" if row.target else row.rule,
            share_text(row.attainment),
            " + ".join(f"{row.hours[one.name]:.2f}" for one in settings.types if one.name in row.hours),
            f"{row.cost / rows[0].cost:.2f}",
            str(row.changes),
            str(row.most),
            "" if row.usd is None else f"${row.usd:,.2f}",
        )
        for row in rows
    )
    yield table(COLUMNS, cells, left=COLUMNS[:1])
    yield ""
    if settings.scaling.is_mix:
        yield f"Replica-hours of {' + '.join(one.name for one in settings.types)}; HPA scales each by itself."
    yield ("HPA has the best of three targets for this trace. The advice has seen nothing of it before.")
