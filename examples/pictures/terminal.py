"""Recordings of a terminal, from real runs: python examples/pictures/terminal.py [NAME ...]

Each types its commands into a shell of its own, at a fixed width. NAME.cast plays with `asciinema play`;
NAME.svg shows the whole session as it stands at the end. Both lie in docs/pictures/. Without names
all are made. Those of a fleet need ports 8000 and 8001.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fcntl import ioctl
from pathlib import Path
from struct import pack
from termios import TIOCSWINSZ

from screen import COLUMNS, Screen, svg

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/pictures"
ROWS = 60
PROMPT = r"\$ $"
STALE = re.compile(r"(?:\r\x1b\[2K[^\r\n]*)+(?=\r\x1b\[2K)")
TOGETHER_S, TYPING_S = 0.25, 0.02


@dataclass(frozen=True)
class Step:
    """A typed command, and the pattern that its output must match before the next."""

    typed: str
    until: str = PROMPT
    limit_s: float = 240
    terminal: int = 0


@contextmanager
def shell() -> Iterator[int]:
    """A shell in a terminal of our own; yields the terminal's handle, and ends all that it started."""
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        start.write_text("PS1='$ '; PS2=''\nset +m\nstty -echo\n")
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TERM": "xterm-256color",
            "HF_HUB_OFFLINE": "1",
            "TOKENFLEET_DATA": folder,
            "OUT": folder,
        }
        child, handle = pty.fork()
        if child == 0:
            os.chdir(ROOT)
            os.execvpe(
                "bash", ["bash", "--noprofile", "--rcfile", str(start), "--noediting", "-i"], environment
            )
        ioctl(handle, TIOCSWINSZ, pack("HHHH", ROWS, COLUMNS, 0, 0))
        try:
            yield handle
        finally:
            os.close(handle)
            os.kill(child, signal.SIGHUP)
            os.waitpid(child, 0)


@dataclass
class Session:
    """What a terminal has printed, with its times."""

    handles: tuple[int, ...]
    began_s: float = field(default_factory=time.monotonic)
    events: list[tuple[float, str]] = field(default_factory=list)

    def print(self, output: str) -> None:
        """Note output; what comes close together is one event, without lines that it overwrites."""
        at_s = round(time.monotonic() - self.began_s, 2)
        if self.events and at_s - self.events[-1][0] < TOGETHER_S:
            at_s, before = self.events.pop()
            output = STALE.sub("", before + output)
        self.events.append((at_s, output))

    def play(self, step: Step) -> str:
        """Type a step, and read until the output's end matches; the output."""
        for char in step.typed:
            self.print("\r\n" if char == "\n" else char)
            time.sleep(TYPING_S)
        if step.typed:
            self.print("\r\n")
            os.write(self.handles[step.terminal], f"{step.typed}\n".encode())
        handle = self.handles[step.terminal]
        if self.events and not step.typed:
            self.print("\r\n")
        fresh, until_s = "", time.monotonic() + step.limit_s
        while not re.search(step.until, fresh):
            if time.monotonic() > until_s:
                raise SystemExit(f"{step.typed}: no {step.until!r} in {step.limit_s:g} s: {fresh[-600:]}")
            if select.select([handle], [], [], 0.2)[0]:
                output = os.read(handle, 1 << 16).decode("utf-8", "replace").replace(f"{ROOT}/", "")
                fresh += output
                self.print(output)
        return fresh


def record(name: str, title: str, *steps: Step) -> None:
    """Write NAME.cast and NAME.svg of a session; a fleet in its first terminal is stopped after it."""
    with shell() as first, shell() as second:
        session = Session((first, second))
        for step in (Step(""), *steps):
            session.play(step)
        if any(step.terminal for step in steps):
            os.write(first, b"\x03")
            Session((first,)).play(Step(""))
    screen = Screen()
    for _, output in session.events:
        screen.write(output)
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": title}
    lines = [json.dumps(header), *(json.dumps([at_s, "o", output]) for at_s, output in session.events)]
    (FOLDER / f"{name}.cast").write_text("\n".join(lines) + "\n")
    (FOLDER / f"{name}.svg").write_text(svg(screen, title))


DAY = "python examples/log_to_trace.py examples/access.jsonl tokenfleet-out/day.csv"
TINY = "--model tokenfleet-out/tiny-llama"
READY = r"Ctrl-C stops the fleet\)\r\n"
PLAN = """tokenfleet plan --trace examples/sample_trace.csv --model llama-3.1-70b \\
    --gpu a100 --gpu h100 --gpu h200 --slo ttft=1.6s,tpot=75ms --output-dir tokenfleet-out/demo"""


def take_plan() -> None:
    """The demo's plan."""
    record("terminal-plan", "tokenfleet plan finds the cheapest fleet for a trace", Step(PLAN))


def take_whatif() -> None:
    """The lesson's question for more traffic."""
    record(
        "terminal-whatif",
        "tokenfleet whatif plans one, two and four times the traffic",
        Step(DAY),
        Step(
            "tokenfleet whatif --trace tokenfleet-out/day.csv --model qwen3-32b --gpu h100 \\\n"
            "    --slo ttft=1s,tpot=40ms --vary rate=1,2,4"
        ),
    )


def take_trace_check() -> None:
    """A check of the lesson's trace and of the demo's."""
    record(
        "terminal-trace-check",
        "tokenfleet trace check judges a trace before a plan",
        Step("tokenfleet trace check examples/sample_trace.csv"),
    )


def take_users() -> None:
    """A plan from users and a shape of use."""
    record(
        "terminal-users",
        "tokenfleet plan --users prints what it assumes, and the range of workers",
        Step(
            "tokenfleet plan --users 2000 --shape chat --model llama-3.1-8b --gpu h100 \\\n"
            "    --slo ttft=400ms,tpot=30ms --output-dir tokenfleet-out/users"
        ),
    )


def take_python() -> None:
    """The lesson's plan in Python."""
    record(
        "terminal-python",
        "A plan in Python prints the lines that the command prints",
        Step(DAY),
        Step(
            "python - <<END\n"
            "import tokenfleet as tf\n"
            'plan = tf.plan("tokenfleet-out/day.csv", "qwen3-32b", slo="ttft=1s,tpot=40ms", gpus=["h100"])\n'
            "print(plan.fleet, plan.usd_per_hour)\n"
            "print(plan)\n"
            "END"
        ),
    )


def take_advise() -> None:
    """The advice for a recorded hour, compared with other rules."""
    record(
        "terminal-advise",
        "tokenfleet advise --replay compares the advice with other rules on a recorded trace",
        Step(
            "tokenfleet advise --replay examples/sample_trace.csv --model llama-3.1-70b --gpu h100 \\\n"
            "    --tp 2 --slo ttft=1.6s,tpot=75ms"
        ),
    )


def take_portfolio() -> None:
    """The example's two models on shared GPUs."""
    record(
        "terminal-portfolio",
        "tokenfleet portfolio plans two models within shared limits",
        Step("cat examples/portfolio.yaml"),
        Step("tokenfleet portfolio examples/portfolio.yaml --output-dir tokenfleet-out/portfolio"),
    )


def take_call() -> None:
    """A request with targets of its own, and the headers of its reply."""
    record(
        "terminal-call",
        "A request with a TTFT target of its own; the reply names its worker",
        Step(f"tokenfleet serve --plan tokenfleet-out/demo/plan.json --engine emulated {TINY}", READY),
        Step("", terminal=1),
        Step(
            ask("max_tokens", 4).replace(
                " \\\n", " \\\n    -H 'x-slo-ttft-ms: 300' -D - -o /dev/null \\\n", 1
            ),
            terminal=1,
        ),
    )


def take_operate() -> None:
    """An order to a running fleet, and its reasons."""
    record(
        "terminal-operate",
        "fleet restart replaces a worker; fleet status and fleet explain show the fleet",
        Step(f"tokenfleet serve --plan tokenfleet-out/demo/plan.json --engine emulated {TINY}", READY),
        Step("", terminal=1),
        Step("tokenfleet fleet restart w0", terminal=1),
        Step("tokenfleet fleet status", terminal=1),
        Step("tokenfleet fleet explain", terminal=1),
    )


def take_serve() -> None:
    """The demo's plan on emulated workers, from the start to its status."""
    record(
        "terminal-serve",
        "tokenfleet serve runs a plan on emulated workers, and fleet status shows them",
        Step(f"tokenfleet serve --plan tokenfleet-out/demo/plan.json --engine emulated {TINY}", READY),
        Step("", terminal=1),
        Step(ask("max_tokens", 4) + " | jq -c .usage", terminal=1),
        Step("tokenfleet fleet status", terminal=1),
    )


def take_killed_worker() -> None:
    """A streamed request whose worker is killed: the stream ends whole, and another worker starts."""
    answer = "tokenfleet-out/answer.txt"
    busy = "jq '.workers[] | select(.requests > 0).pid'"
    record(
        "terminal-killed-worker",
        "A worker is killed; its request ends whole on the other, and a third starts",
        Step(f"tokenfleet serve --workers 2 {TINY}", READY, 400),
        Step("", terminal=1),
        Step(
            "("
            + ask(
                "stream",
                "true",
                '"max_tokens": 6000, "ignore_eos": true, "stream_options": {"include_usage": true}',
            )
            + f" \\\n    > {answer} &)",
            terminal=1,
        ),
        Step("tokenfleet fleet status", terminal=1),
        Step(f"kill -9 $(tokenfleet fleet status --format json | {busy})", terminal=1),
        Step("tokenfleet fleet status", terminal=1),
        Step(f"until grep DONE {answer}; do sleep 1; done", terminal=1),
        Step(f"grep -o '\"completion_tokens\":[0-9]*' {answer}", terminal=1),
        Step("until tokenfleet fleet status | grep '2 of 2'; do sleep 1; done", terminal=1, limit_s=400),
        Step("tokenfleet fleet status", terminal=1),
        Step("tokenfleet fleet explain", terminal=1),
        Step("# serve, in the first terminal, has printed:", "", terminal=1),
        Step("", r"serving: .*\r\n"),
    )


def take_pick() -> None:
    """Envoy with the picker over two small servers, who served four requests, and a refused one."""
    url = "http://127.0.0.1:10000/v1/completions"
    record(
        "terminal-pick",
        "tokenfleet pick chooses between two servers for an Envoy gateway",
        Step("(timeout 40 python -m harness.vllm_like 8001 8002 &); sleep 3"),
        Step("(timeout 40 envoy -c examples/envoy-pick.yaml -l off 2> /dev/null &)"),
        Step(
            "tokenfleet pick 127.0.0.1:8001 127.0.0.1:8002 \\\n"
            "    --model llama-3.1-8b --gpu h100 --slo ttft=1s,tpot=50ms \\\n"
            "    --metrics-listen 127.0.0.1:9003",
            r"picking at .*\r\n",
        ),
        Step("", terminal=1),
        Step(
            f"seq 4 | xargs -P 4 -I N curl -sD - -o /dev/null {url} \\\n"
            '    -d \'{"prompt": "hi", "max_tokens": 200}\' | grep x-port',
            terminal=1,
        ),
        Step("curl -s http://127.0.0.1:9003/metrics | grep '^tokenfleet_pick_[pe].*total{'", terminal=1),
        Step(f"curl -s {url} -H 'x-slo-ttft-ms: soon' \\\n    -d '{{\"prompt\": \"hi\"}}'; echo", terminal=1),
    )


def ask(name: str, value: object, more: str = "") -> str:
    """A curl of a completion with these fields."""
    body = f'{{"model": "tiny-llama", "prompt": "hi", "{name}": {value}'
    lines = [f"    -d '{body}" + ("," if more else "}'"), *([f"         {more}}}'"] if more else [])]
    url = "curl -sN http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\"
    return "\n".join([url, *lines])


TAKES = {
    "plan": take_plan,
    "whatif": take_whatif,
    "trace-check": take_trace_check,
    "users": take_users,
    "python": take_python,
    "advise": take_advise,
    "portfolio": take_portfolio,
    "serve": take_serve,
    "call": take_call,
    "operate": take_operate,
    "killed-worker": take_killed_worker,
    "pick": take_pick,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or TAKES:
        TAKES[name]()
        print(f"{name}: done")
