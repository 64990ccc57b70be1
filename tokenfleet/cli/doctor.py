"""`tokenfleet doctor`: says what on this host, or on the nodes of a Ray cluster, would stop a fleet.

`--engine` tries two real engines. It starts a `tokenfleet serve` of its own, at ports of its own, so that it
tries what will serve. It moves one request between the engines while it decodes. The request's tokens must be
those that it has when it stays where it is.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from controlplane.errors import BadInput
from controlplane.figures import counted, duration_text
from dataplane.live.worker.host_checks import (
    HostFinding,
    compare_ways,
    first_stop,
    hosts_of_cluster,
    look_at_host,
)
from tokenfleet.cli.flags import Format, OutputFormat, Verbose, flag, takes_flags
from tokenfleet.cli.fleet import ControlClient
from tokenfleet.cli.terminal import answer

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny_llama.py"
TINY_FLAGS = ("--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20))
PROMPT_TOKENS, OUTPUT_TOKENS, MOVES = 1500, 400, 6
FIRST_ID, LAST_ID = 3, 1000  # token ids that any vocabulary has
START_S, STREAM_S, MOVE_S = 1800.0, 300.0, 60.0
LOOK_S = 0.02
NEAR_TIE = 0.1  # log probability: nearer than this, bf16 sums in another order may choose the other token


@dataclass(frozen=True, slots=True)
class DoctorFlags:
    """The flags of `tokenfleet doctor`."""

    model: str = flag("", "model to serve; check that its weights are there")
    host: str = flag("127.0.0.1", "address of the OpenAI endpoint")
    port: int = flag(8000, "port of the OpenAI endpoint", min=1, max=65535)
    control_port: int = flag(8001, "port of the control API", min=1, max=65535)
    cluster: str = flag("", "address of a Ray cluster; check each of its nodes", envvar="RAY_ADDRESS")
    nic: str = flag("", "network interface by which workers are reached")
    engine: bool = flag(False, "also start two engines and move a request between them", "--engine")
    tp: int = flag(1, "GPUs of each of those engines", min=1)
    verbose: Verbose = False
    output_format: Format = OutputFormat.TABLE
    engine_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- [VLLM FLAGS]", help="vLLM flags of those engines, after --"),
    ] = None


@takes_flags()
def doctor_command(flags: DoctorFlags) -> int:
    """Check vLLM, Ray, GPUs, memory, network, ports and the model before a fleet starts.

    The check loads nothing and touches no GPU. With --engine, two real engines also serve (a tiny model
    without --model). A request moves between them, and its tokens are compared with an unmoved run's. Exit
    code 1: something would stop a fleet. `serve` makes the same checks before it starts.

    tokenfleet doctor --model ./tiny

    tokenfleet doctor --cluster 10.0.0.1:6379 --nic eth1 --model /models/llama --format json

    tokenfleet doctor --engine --model /models/llama --tp 2 -- --max-model-len 8192
    """
    ports = [(flags.host, flags.port), ("127.0.0.1", flags.control_port)]
    found = _looked_at(flags.cluster, flags.model, flags.nic, ports)
    if flags.engine and not any(finding.state == "stops" for _, finding in found):
        tried = [*_tried(flags.model, flags.tp, flags.engine_flags or []), compare_ways()]
        found += [("engines", finding) for finding in tried]
    text = json.dumps([{"host": name} | asdict(finding) for name, finding in found], indent=1)
    answer(flags.output_format, text, lambda: _lines(found, flags.verbose))
    return 1 if any(finding.state == "stops" for _, finding in found) else 0


def _looked_at(
    cluster: str, model: str, nic: str, ports: Sequence[tuple[str, int]]
) -> list[tuple[str, HostFinding]]:
    """Findings by host: of this one, or of the nodes of a cluster and of this one what nodes do not tell."""
    # On a cluster a NIC is looked for at each node, which has an address to be held against.
    here = look_at_host(model, ports, "" if cluster else nic)
    if not cluster:
        return [(here.host, finding) for finding in here.findings]
    first_stop(here.findings[:2])  # without vLLM or Ray there is no cluster to look at
    nodes, of_all = hosts_of_cluster(cluster, model, nic)
    os.environ["RAY_ADDRESS"] = cluster  # of the engines to be tried
    told = {finding.check for node in nodes if node.host == here.host for finding in node.findings}
    found = [(here.host, finding) for finding in here.findings if finding.check not in told]
    found += [(node.host, finding) for node in nodes for finding in node.findings]
    return [*found, *(("all", finding) for finding in of_all)]


def _tried(model: str, tp: int, flags: list[str]) -> list[HostFinding]:
    """What two engines of the model do, or of a tiny one that is made for it."""
    if model:
        return try_engines(model, tp, flags)
    with tempfile.TemporaryDirectory(prefix="tokenfleet-doctor-") as folder:
        return try_engines(make_tiny_model(Path(folder) / "tiny-llama"), tp, flags or list(TINY_FLAGS))


def _lines(found: list[tuple[str, HostFinding]], verbose: bool) -> Iterator[RenderableType]:
    """Whether a fleet can start, then what hinders it and what trial engines did; `verbose`: every check."""
    stops, warns = (sum(finding.state == state for _, finding in found) for state in ("stops", "warns"))
    can = f"cannot start here: {counted(stops, 'error')}" if stops else "can start here: no errors"
    yield f"A fleet {can}, {counted(warns, 'warning')}, {counted(len(found), 'check')}"
    told = [one for one in found if verbose or one[1].state != "fine" or one[0] == "engines"]
    if told:
        yield _table(told)


def _table(found: list[tuple[str, HostFinding]]) -> Table:
    words = {"fine": "ok", "warns": "warning", "stops": "error"}
    table = Table(box=None, pad_edge=False)
    for name in ("host", "check", "", "found"):
        table.add_column(name, no_wrap=name != "found")
    for name, finding in found:
        table.add_row(name, finding.check, words[finding.state], finding.says)
    return table


# Two engines


@dataclass
class _Stream:
    """A streamed completion's tokens as they come, and how far each was from the next likeliest.

    `margins`: differences of log probabilities; none where the engine does not report them.
    """

    tokens: list[int] = field(default_factory=list)
    fault: str = ""
    margins: list[float] = field(default_factory=list)


def make_tiny_model(folder: Path) -> str:
    """Make the example's tiny model there. Raises BadInput where there is no checkout to make it from."""
    if not TINY.is_file():
        raise BadInput("--model: missing; the tiny model for a trial is made by examples/ of a checkout")
    done = subprocess.run([sys.executable, str(TINY), str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise BadInput(f"--engine: the tiny model was not made: {_last_line(done.stderr)}")
    return str(folder)


def try_engines(model: str, tp: int, flags: Sequence[str]) -> list[HostFinding]:
    """What two engines of the model do. Raises BadInput with serve's own reason where they do not start."""
    words = ["--model", model, "--workers", "2", "--max-workers", "2", "--tp", str(tp), "--no-history"]
    # Nothing need be measured, and no move held back.
    words += ["--policy", "jsq", "--move-bandwidth", "0", "--", *flags]
    with _serving(words) as (url, control):
        fleet = control.ask("GET", "/v1/fleet")
        name = ControlClient(url, None).ask("GET", "/v1/models", timeout_s=START_S)["data"][0]["id"]
        longest = int(fleet["workers"][0].get("max_model_len") or PROMPT_TOKENS + OUTPUT_TOKENS)
        prompt_tokens = max(1, min(PROMPT_TOKENS, longest - OUTPUT_TOKENS))
        span = LAST_ID - FIRST_ID
        prompt = [FIRST_ID + (37 * i * i + 11 * i) % span for i in range(prompt_tokens)]
        body = {"model": name, "prompt": prompt, "max_tokens": min(OUTPUT_TOKENS, longest - prompt_tokens)}
        plain = _Stream()
        _read(url, body, "trial-plain", plain)
        if plain.fault:
            raise BadInput(f"--engine: a request failed: {plain.fault}")
        moved, moves = _Stream(), list[dict[str, Any]]()
        reader = threading.Thread(target=_read, args=(url, body, "trial-moved", moved), daemon=True)
        reader.start()
        while len(moves) < MOVES and (move := _move(control, "trial-moved", moved, reader)):
            moves.append(move)
        reader.join(STREAM_S)
        shown = control.ask("GET", "/v1/fleet")
        return [*_findings(shown["workers"], plain, moved, moves), _way(shown["transport"])]


@contextmanager
def _serving(words: Sequence[str]) -> Iterator[tuple[str, ControlClient]]:
    """A fleet, from its answer to its end. Raises BadInput with the last it said if it does not answer."""
    port, control_port = _free_ports(2)
    ports = ["--port", str(port), "--control-port", str(control_port)]
    command = [sys.executable, "-m", "tokenfleet", "serve", *ports, *words]
    # Doors on loopback need no key, and a key of the environment would be asked of us.
    own = {k: v for k, v in os.environ.items() if k not in ("VLLM_API_KEY", "TOKENFLEET_CONTROL_KEY")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own, process_group=0
    )
    said: list[str] = []

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if line[:4].strip().isdigit():  # what serve tells of its start
                print(line, end="", file=sys.stderr, flush=True)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    giving_up = threading.Timer(START_S, process.kill)
    giving_up.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        giving_up.cancel()
        if not line.startswith("ready "):
            process.wait()
            listener.join()
            raise BadInput(f"--engine: {_last_line(''.join(said)).removeprefix('error: ')}")
        _, url, _, control = line.split()
        yield url, ControlClient(control, None)
    finally:
        giving_up.cancel()
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        listener.join()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _move(
    control: ControlClient, request: str, stream: _Stream, reader: threading.Thread
) -> dict[str, Any] | None:
    """Move the request once more while it decodes, and return the move when it has ended; None at its end."""
    seen, until_s = len(stream.tokens), time.monotonic() + MOVE_S
    while len(stream.tokens) < seen + 5:
        if not reader.is_alive() or time.monotonic() > until_s:
            return None
        time.sleep(LOOK_S)
    try:
        move: dict[str, Any] = control.ask("POST", "/v1/migrations", {"request_id": request})
        while move["open"] and time.monotonic() < until_s:
            time.sleep(LOOK_S)
            move = control.ask("GET", f"/v1/migrations/{move['id']}")
    except BadInput:
        if reader.is_alive():
            raise
        return None
    return move


def _findings(
    workers: Sequence[dict[str, Any]], plain: _Stream, moved: _Stream, moves: Sequence[dict[str, Any]]
) -> Iterator[HostFinding]:
    steps = [w["telemetry"]["step_s"] for w in workers if w.get("telemetry")]
    hosts = " and ".join(dict.fromkeys(str(w.get("host")) for w in workers))
    step = f", step time {duration_text(max(steps))}" if steps else ""
    yield HostFinding("engines", "fine", f"2 started on {hosts}{step}")
    done = [move for move in moves if move["outcome"] == "done"]
    if len(done) < max(len(moves), 1):
        why = next((m["reason"] or m["outcome"] for m in moves if m not in done), "it ended first")
        yield HostFinding("moves", "stops", f"{len(done)} of {len(moves)} done: {why}")
    if done:
        pauses = sorted(move["downtime_s"] for move in done)
        size = sum(move["bytes"] for move in done) / len(done)
        said = f"{len(done)}, downtime {duration_text(pauses[len(pauses) // 2])}"
        said += f", at most {duration_text(pauses[-1])}; {size / 1e6:.1f} MB each"
        yield HostFinding("moves", "fine", said)
    yield _compared(plain, moved)


def _compared(plain: _Stream, moved: _Stream) -> HostFinding:
    """Whether a moved request's tokens are those of the one that stayed."""
    if plain.tokens == moved.tokens and not moved.fault:
        return HostFinding("tokens", "fine", f"all {len(plain.tokens)} equal those without a move")
    alike = 0
    for one, other in zip(plain.tokens, moved.tokens, strict=False):
        if one != other:
            break
        alike += 1
    if not moved.fault and alike < len(plain.margins) and plain.margins[alike] < NEAR_TIE:
        says = (
            f"token {alike} of {len(plain.tokens)} differs from that without a move, and was a near tie: the"
            f" likeliest two were {plain.margins[alike]:.2g} apart in log probability. Rounding decides there"
            " on GPUs; VLLM_BATCH_INVARIANT=1 makes batches alike"
        )
        return HostFinding("tokens", "fine", says)
    why = moved.fault or f"token {alike} of {len(plain.tokens)} differs from that without a move"
    return HostFinding("tokens", "stops", why)


def _way(transport: dict[str, Any]) -> HostFinding:
    by = ", ".join(transport["ways"]) or "nothing yet"
    return HostFinding("KV transport", "fine", f"by {by}: {transport['bytes_per_s'] / 1e9:.2f} GB/s")


def _read(url: str, body: dict[str, Any], name: str, into: _Stream) -> None:
    """Stream a greedy completion into `into`."""
    asked = body | {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    asked |= {"logprobs": 2}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode())
    request.add_header("content-type", "application/json")
    request.add_header("x-request-id", name)
    try:
        with urllib.request.urlopen(request, timeout=STREAM_S) as reply:
            for line in reply:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    into.fault = str(chunk["error"].get("message"))
                for choice in chunk.get("choices", ()):
                    into.tokens += choice.get("token_ids") or ()
                    into.margins += map(_margin, (choice.get("logprobs") or {}).get("top_logprobs") or ())
    except (OSError, ValueError) as error:
        into.fault = str(error)


def _margin(likeliest: dict[str, float]) -> float:
    """How far the likeliest token is from the next, in log probability; infinite where one alone is known."""
    best, *others = sorted(likeliest.values(), reverse=True) or [0.0]
    return best - others[0] if others else float("inf")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
