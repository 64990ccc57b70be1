"""A trial of real engines: a fleet of two, and one request that is moved between them while it decodes.

The fleet is a `tokenfleet serve` of its own, at ports of its own, so that what is tried is what will serve.
The request's tokens must be those that it has when it stays where it is.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controlplane.errors import BadInput
from dataplane.live.worker.host_checks import Finding
from tokenfleet.cli.fleet import ControlClient
from tokenfleet.durations import duration_text

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny_llama.py"
TINY_FLAGS = ("--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20))
PROMPT_TOKENS, OUTPUT_TOKENS, MOVES = 1500, 400, 6
FIRST_ID, LAST_ID = 3, 1000  # token ids that any vocabulary has
START_S, STREAM_S, MOVE_S = 1800.0, 300.0, 60.0
LOOK_S = 0.02


@dataclass
class _Stream:
    """A streamed completion's tokens as they come."""

    tokens: list[int] = field(default_factory=list)
    fault: str = ""


def make_tiny_model(folder: Path) -> str:
    """Make the example's tiny model there. Raises BadInput where there is no checkout to make it from."""
    if not TINY.is_file():
        raise BadInput("--model: missing; the tiny model for a trial is made by examples/ of a checkout")
    done = subprocess.run([sys.executable, str(TINY), str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise BadInput(f"--engine: the tiny model was not made: {_last_line(done.stderr)}")
    return str(folder)


def try_engines(model: str, tp: int, flags: Sequence[str]) -> list[Finding]:
    """What two engines of the model do. Raises BadInput with serve's own reason where they do not start."""
    words = ["--model", model, "--workers", "2", "--max-workers", "2", "--tp", str(tp), "--no-history"]
    # Nothing need be measured, and no move held back.
    words += ["--policy", "jsq", "--move-bandwidth", "0", "--", *flags]
    with _serving(words) as (url, control):
        fleet = control.ask("GET", "/v1/fleet")
        name = _ask(f"{url}/v1/models")["data"][0]["id"]
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
) -> Iterator[Finding]:
    steps = [w["telemetry"]["step_s"] for w in workers if w.get("telemetry")]
    hosts = " and ".join(dict.fromkeys(str(w.get("host")) for w in workers))
    step = f", a step of {duration_text(max(steps))}" if steps else ""
    yield Finding("engines", "fine", f"two at {hosts}{step}")
    done = [move for move in moves if move["outcome"] == "done"]
    if len(done) < max(len(moves), 1):
        why = next((m["reason"] or m["outcome"] for m in moves if m not in done), "it ended too soon")
        yield Finding("moves", "stops", f"{len(done)} of {len(moves)} done: {why}")
    if done:
        pauses = sorted(move["downtime_s"] for move in done)
        size = sum(move["bytes"] for move in done) / len(done)
        said = f"{len(done)}, downtime {duration_text(pauses[len(pauses) // 2])}"
        said += f", at most {duration_text(pauses[-1])}; {size / 1e6:.1f} MB each"
        yield Finding("moves", "fine", said)
    same = next((i for i, (a, b) in enumerate(zip(plain.tokens, moved.tokens, strict=False)) if a != b), None)
    if moved.fault or same is not None or len(plain.tokens) != len(moved.tokens):
        at = len(moved.tokens) if same is None else same
        why = moved.fault or f"token {at} of {len(plain.tokens)} is another than without moves"
        yield Finding("tokens", "stops", why)
    else:
        yield Finding("tokens", "fine", f"all {len(plain.tokens)} as without moves")


def _way(transport: dict[str, Any]) -> Finding:
    by = ", ".join(transport["ways"]) or "nothing yet"
    return Finding("KV transport", "fine", f"by {by}: {transport['bytes_per_s'] / 1e9:.2f} GB/s")


def _read(url: str, body: dict[str, Any], name: str, into: _Stream) -> None:
    """Stream a greedy completion into `into`."""
    asked = body | {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
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
    except (OSError, ValueError) as error:
        into.fault = str(error)


def _ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=START_S) as reply:
        return json.load(reply)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
