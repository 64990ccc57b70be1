"""One plan job in a process of its own: a question on stdin, progress and the answer on stdout.

The question is one line of JSON; each line written is `{"says", "progress", "simulations"}`, the last one
`{"plan": …}` or `{"error": …}`. Stdin stays open as long as the asking process lives: when it closes, this
process ends at once, so that a killed service leaves no planner behind.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from contextlib import chdir
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, TextIO

from controlplane.errors import ControlPlaneError
from dataplane.processes.keeper import end_with_asker
from dataplane.startup import use_kernel_cache
from tokenfleet.files import write_files
from tokenfleet.planning.inputs import gather
from tokenfleet.planning.planner import make_plan
from tokenfleet.planning.threads import Watch, open_threads
from tokenfleet.portfolios.offers import tasks_of
from tokenfleet.portfolios.plan import plan_portfolio
from tokenfleet.portfolios.view import portfolio_json
from tokenfleet.report.plan_json import plan_json
from tokenfleet.service.forms import PortfolioOrder, UsageTrace, in_field_names, read_order
from tokenfleet.service.scorecard import kept_bias
from tokenfleet.traces import read_trace
from tokenfleet.traces.usage import trace_of_usage
from tokenfleet.whatifs.solve import Cache

TELL_EVERY_S = 0.2
NICENESS = 10  # a fleet served on the same host comes first


class Teller(Watch):
    """Writes how far the plan is, some times a second."""

    def __init__(self, to: TextIO) -> None:
        self._to, self._lock = to, threading.Lock()
        self._says, self._share, self._simulations = "starting", 0.0, 0
        self._told_s = 0.0

    def stage(self, text: str, share: float) -> None:
        with self._lock:
            self._says, self._share = text, share
            self._tell()

    def simulated(self) -> None:
        with self._lock:
            self._simulations += 1
            if time.monotonic() - self._told_s >= TELL_EVERY_S:
                self._tell()

    def _tell(self) -> None:
        self._told_s = time.monotonic()
        say(self._to, says=self._says, progress=self._share, simulations=self._simulations)


def say(to: TextIO, **what: Any) -> None:
    """One line of JSON."""
    to.write(json.dumps(what) + "\n")
    to.flush()


def answer(job: dict[str, Any], watch: Watch) -> dict[str, Any]:
    """The `tokenfleet.plan/1` to an order (forms.PlanOrder) whose trace lies at `trace_path`.

    Raises BadInput and its like, one line each.
    """
    # Read again: a job may have waited for a service that knows more fields.
    order = read_order(job["question"])
    if isinstance(order.trace, UsageTrace):
        trace = trace_of_usage(order.trace.usage(), order.seed)
    else:
        trace = replace(read_trace(job["trace_path"]), name=job["trace_name"])
    with tempfile.TemporaryDirectory() as scratch:
        write_files(order.files(Path(scratch)))
        request = order.request(Path(scratch))
        bias = None if request.bias_from is None else kept_bias(Path(job["data"]), request.bias_from)
        try:
            gathered = gather(trace, request, bias, date.today())
        except ControlPlaneError as refusal:
            raise type(refusal)(order.in_field_names(str(refusal), Path(scratch))) from None
    with open_threads(job["threads"]) as threads:
        return plan_json(
            make_plan(gathered.workload, gathered.worker_types, request, gathered.inputs, threads, watch)
        )


def portfolio_answer(job: dict[str, Any], watch: Watch) -> dict[str, Any]:
    """The `tokenfleet.portfolio-plan/1` to an order (forms.PortfolioOrder) whose traces lie at `traces`.

    Raises BadInput and its like, one line each.
    """
    order = PortfolioOrder.model_validate(job["question"])
    done = itertools.count(1)
    # As in the folder of its file: plans and refusals tell the names that stand there.
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch):
        for name, trace in job["traces"].items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).symlink_to(trace)
        write_files({Path(name): text for name, text in order.files.items()})
        portfolio = order.read()
        asked = tasks_of(portfolio, date.today())
    count = asked.count

    def told() -> None:
        number = next(done)
        watch.stage(f"{number} of {count} plans of a model on a type of GPU", number / count)

    cache = Cache(Path(job["data"], "whatif"))
    return portfolio_json(plan_portfolio(portfolio, asked, job["threads"], cache, told))


def main() -> int:
    """Answer the question on stdin; 0 whether the answer is a plan or an error."""
    os.nice(NICENESS)
    # What a library prints must not look like one of our lines.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    line = sys.stdin.buffer.readline()
    if not line:
        return 3
    end_with_asker()
    use_kernel_cache()
    try:
        job = json.loads(line)
        say(out, plan=(portfolio_answer if "traces" in job else answer)(job, Teller(out)))
    except (ControlPlaneError, OSError) as error:
        say(out, error=in_field_names(" ".join(str(error).split())))
    except Exception as error:
        traceback.print_exc()
        say(out, error=f"internal error ({type(error).__name__}); the service's log has more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
