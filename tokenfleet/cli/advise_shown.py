"""The advice on stdout, as `tokenfleet advise` shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from typing import TYPE_CHECKING

from controlplane.errors import Infeasible
from tokenfleet.cli.flags import OutputFormat
from tokenfleet.cli.terminal import console

if TYPE_CHECKING:
    from tokenfleet.advise.advice import Advice, AdviceSettings
    from tokenfleet.advise.gauges import AdviceGauges

FIRST_S = 60.0  # in which --once has an advice, or ends without


class ShownAdvice:
    """The advice on stdout: a table that follows it on a terminal, else changes alone; or JSON."""

    def __init__(
        self,
        once: bool,
        output_format: OutputFormat,
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
            from rich.live import Live

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
        from tokenfleet.report.tables import lines_table

        if self._output_format == OutputFormat.JSON:
            print(json.dumps(document(self._settings, advice, clock)), flush=True)
            return
        colour = "bold yellow" if advice.held or advice.wanted != advice.has else "bold green"
        table = lines_table(lines(self._settings, advice, clock), OPENS, colour)
        if self._live is not None:
            self._live.update(table, refresh=True)
            return
        news = (advice.wanted, advice.has, bool(advice.held))
        if news != self._said and (advice.wanted is None or self._said[:1] in ((), (None,))):
            self._console.print(table)
        elif news != self._said:
            self._console.print(
                f"{clock(advice.at_s):%H:%M:%S}  {verdict(self._settings, advice)}", soft_wrap=True
            )
        self._said = news
