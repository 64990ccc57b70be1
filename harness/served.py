"""The gateway experiments' helpers: servers as processes, and streams as an OpenAI client has them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import numpy as np
import psutil

from harness import ROOT

MODEL = "tiny-llama"
# The same engine for a plain server and for a worker of the fleet.
ENGINE_FLAGS = (
    "--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", "256",
    "--kv-cache-memory-bytes", str(256 << 20),
)  # fmt: skip
PLAIN_FLAGS = (
    "--enforce-eager", "--block-size", "32",
    "--uvicorn-log-level", "warning", "--disable-uvicorn-access-log",
)  # fmt: skip
START_S, SILENT_S = 300.0, 600.0


@dataclass
class Server:
    """A running server, its addresses, and its process."""

    process: subprocess.Popen[str]
    gateway: str
    control: str = ""

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The control API's JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.control + path, data, method=method)
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)

    def workers(self, state: str = "serving") -> list[dict[str, Any]]:
        return [w for w in self.ask("GET", "/v1/fleet")["workers"] if w["state"] == state]


@dataclass
class Stream:
    """What a client got: the text, why it ended, its usage, and when each chunk came (seconds)."""

    text: str = ""
    finish: str = ""
    tokens: int = 0
    is_done: bool = False
    error: str = ""
    is_broken: bool = False  # the connection ended, and not the stream
    begun_s: float = 0.0
    chunks_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # where they were asked for,
    cached: int = 0  # and prompt tokens that the engine had cached

    @property
    def content(self) -> tuple[str, str, int]:
        return self.text, self.finish, self.tokens

    @property
    def ttft_s(self) -> float:
        return self.chunks_s[0] - self.begun_s

    @property
    def worst_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.chunks_s, self.chunks_s[1:], strict=False)), default=0.0)

    @property
    def is_silently_cut(self) -> bool:
        """Ended as if it were complete, without a finish reason or with fewer tokens than were made."""
        return self.is_done and not self.error and not self.finish


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Roles by a part of the command line, the first that matches; what is forked has its role as its name.
ROLES = {
    "control.supervisor": "supervisor",
    "control.controller": "controller",
    "pool.own_ray": "own Ray",
    "VLLM::": "engine",
    "DashboardAgent": "Ray's daemons",
    "RuntimeEnvAgent": "Ray's daemons",
    "ray::": "actor",
    "/ray/": "Ray's daemons",
    "resource_tracker": "Python's trackers",
}
FORKED = ("core", "gateway")


def role(process: psutil.Process) -> str:
    """What a process of a fleet is."""
    words = " ".join(process.cmdline())
    if " serve " in words:
        return process.name() if process.name() in FORKED else "fork server"
    return next((role for part, role in ROLES.items() if part in words), process.name())


def by_role(server: Server) -> dict[str, list[psutil.Process]]:
    """The processes of a fleet."""
    root, found = psutil.Process(server.process.pid), dict[str, list[psutil.Process]]()
    for process in (root, *root.children(recursive=True)):
        found.setdefault(role(process), []).append(process)
    return found


@contextmanager
def tiny_model(*flags: str) -> Iterator[Path]:
    """A folder with the tiny Llama, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as folder:
        model = Path(folder) / MODEL
        make = [sys.executable, str(ROOT / "examples" / "tiny_llama.py"), str(model), *flags]
        subprocess.run(make, check=True, capture_output=True)
        yield model


@contextmanager
def cleaning_up() -> Iterator[None]:
    """SIGTERM, as `timeout` sends it, ends the script by its `finally`s: else what it started would stay."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def fleet(
    model: Path,
    *flags: str,
    engine_flags: Sequence[str] = ENGINE_FLAGS,
    program: Sequence[str] = ("-m", "tokenfleet"),
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    names: Sequence[str] = (),
) -> Iterator[Server]:
    """A `tokenfleet serve`, ready, and stopped afterwards.

    `program` is what runs it, `prefix` the command that does so elsewhere. `names` are those of a portfolio's
    models; each is `model`.
    """
    gateway, control = free_port(), free_port()
    run = [sys.executable, *program]
    ports = ["--port", str(gateway), "--control-port", str(control)]
    models = [word for at in names or [""] for word in ("--model", f"{at}={model}" if at else str(model))]
    command = [*prefix, *run, "serve", *models, *ports, *flags, "--", *engine_flags]
    said = model.parent / f"served-{gateway}.log"
    process = _spawn(command, said, **{"TOKENFLEET_DATA": str(model.parent / "data")} | dict(environment))
    assert process.stdout is not None
    with cleaning_up():
        try:
            line = process.stdout.readline()
            if not line.startswith("ready "):
                raise SystemExit(f"tokenfleet serve did not start: {said.read_text()[-2000:]}")
            _, gateway_url, _, control_url = line.split()
            yield Server(process, gateway_url, control_url)
        finally:
            _stop(process)


@contextmanager
def plain_server(
    model: Path, core: int, is_one_process: bool = False, port: int = 0, flags: Sequence[str] = ()
) -> Iterator[Server]:
    """vLLM's own server with the same engine, pinned to a core, ready, and stopped afterwards.

    `is_one_process`: with the rank inside the engine's process, as our workers have it on a CPU too. Not
    vLLM's default there, and it then leaves the pinning to the kernel.
    """
    port = port or free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--port", str(port), "--host", "127.0.0.1", "--served-model-name", MODEL, *ENGINE_FLAGS, *PLAIN_FLAGS,
        *flags,
    ]  # fmt: skip
    if is_one_process:
        from dataplane.live.engine_api.vllm_surface import ONE_PROCESS_EXECUTOR  # vLLM is slow to import

        command += ["--distributed-executor-backend", ONE_PROCESS_EXECUTOR]
        process = _spawn(command, Path(os.devnull), OMP_NUM_THREADS="1")
    else:
        process = _spawn(command, Path(os.devnull), VLLM_CPU_OMP_THREADS_BIND=str(core))
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + START_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit("the plain vLLM server did not start")
            time.sleep(0.2)
        yield Server(process, url)
    finally:
        _stop(process)


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    headers: Mapping[str, str] | None = None,
    into: Stream | None = None,
) -> Stream:
    """One streamed completion, of a chat where `body` has messages; what goes wrong is in its `error`.

    It is written `into` a stream as it comes.
    """
    got = Stream() if into is None else into
    got.begun_s = time.perf_counter()
    path = "chat/completions" if "messages" in body else "completions"
    settings = {"model": MODEL, "temperature": 0, "ignore_eos": True, "stream": True} | body
    settings["stream_options"] = {"include_usage": True}
    try:
        async with session.post(f"{url}/v1/{path}", json=settings, headers=headers) as reply:
            if reply.status != 200:
                got.error = f"HTTP {reply.status}: {(await reply.text())[:200]}"
                return got
            async for line in reply.content:
                _take(got, line)
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        got.error, got.is_broken = got.error or repr(error), True
    return got


def _take(got: Stream, line: bytes) -> None:
    if not line.startswith(b"data: "):
        return
    if line.startswith(b"data: [DONE]"):
        got.is_done = True
        return
    chunk = json.loads(line[6:])
    if "error" in chunk:
        got.error = chunk["error"]["message"]
    elif chunk["choices"]:
        got.chunks_s.append(time.perf_counter())
        choice = chunk["choices"][0]
        got.text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        got.token_ids += choice.get("token_ids") or []
        got.finish = choice["finish_reason"] or got.finish
    if chunk.get("usage"):
        got.tokens = chunk["usage"]["completion_tokens"]
        got.cached = (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def session() -> aiohttp.ClientSession:
    """A client that gives a stream up only after SILENT_S without a byte."""
    quiet = aiohttp.ClientTimeout(total=None, sock_read=SILENT_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=quiet)


async def begun(server: Server, streams: int, running: Sequence[asyncio.Task[Any]]) -> None:
    """Return once this many requests of a fleet decode, or fewer than before do: some have ended already.

    Raises what a stream of `running` failed with.
    """
    most = 0
    while not any(task.done() for task in running):
        requests = (await asyncio.to_thread(server.ask, "GET", "/v1/requests"))["requests"]
        decoding = sum(r["output_tokens"] > 0 for r in requests)
        if decoding >= streams or decoding < most:
            return
        most = decoding
        await asyncio.sleep(0.01)
    for task in running:
        if task.done():
            task.result()


def _spawn(command: Sequence[str], said: Path, **environment: str) -> subprocess.Popen[str]:
    quiet = {
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    }  # fmt: skip
    with said.open("w") as errors:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,
            env=os.environ | quiet | environment,
        )


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        # `nsenter` waits for what it has started, and does not pass signals on.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        is_elsewhere = Path(f"/proc/{process.pid}/comm").read_text() == "nsenter\n"
        os.kill(int(children[0]) if is_elsewhere else process.pid, signal.SIGTERM)
    process.wait(timeout=90)
    if process.stdout is not None:
        process.stdout.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def about_image(i: int, question: str) -> list[dict[str, Any]]:
    """A question about an image, of noise of its own."""
    from PIL import Image

    pixels = np.random.default_rng(i).integers(0, 256, (48, 64, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    asked = [
        {"type": "text", "text": question},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    return [{"role": "user", "content": asked}]
