"""Families of models, each on two real workers: do they start, and is their text the same moved or replayed?

    python experiments/serving/model_families.py [--quick]

Tiny models with random weights (examples/tiny_models.py), in float32. For each family four requests
are read undisturbed, twice (`again`: what other batches alone change), again while each is moved to the other
worker, and again while one worker's engine is killed. A row says what `fleet status` says of moves, the mode
of the moves, and how many texts were others.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from experiments.lib.public_data import ROOT
from experiments.lib.results import bar, flags, show
from harness.served import Server, Stream, about_image, begun, fleet, session, stream

FAMILIES = (
    "gemma3",
    "gpt-oss",
    "llama4",
    "qwen3-moe",
    "deepseek",
    "lfm2",
    "blip2",
    "gemma3 in groups",
    "llama uncached",
)
FLAGS = ("--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(96 << 20))
MORE = {
    "gemma3 in groups": ("--no-disable-hybrid-kv-cache-manager",),
    "deepseek": ("--attention-backend", "CPU_MLA"),  # that for AMX refuses float32
    "llama uncached": ("--no-enable-prefix-caching",),
}
TOKENS = 600


def make(family: str, folder: Path) -> Path:
    """Write the family's tiny model."""
    name = family.split()[0]
    model = folder / name
    script = ["tiny_llama.py"] if name == "llama" else ["tiny_models.py", name]
    command = [sys.executable, str(ROOT / "examples" / script[0]), *script[1:], str(model)]
    subprocess.run(command, check=True, capture_output=True)
    return model


def body(model: Path, i: int) -> dict[str, Any]:
    if model.name == "blip2":
        return {"model": model.name, "messages": about_image(i, f"What is number {i}?"), "max_tokens": TOKENS}
    prompt = [(7 * i + k) % 2000 + 5 for k in range(60 + 20 * i)]
    return {"model": model.name, "prompt": prompt, "max_tokens": TOKENS}


async def read(server: Server, model: Path, streams: int, disturb: Callable[[], Any] | None) -> list[Stream]:
    async with session() as http:
        running = [asyncio.create_task(stream(http, server.gateway, body(model, i))) for i in range(streams)]
        if disturb is not None:
            await begun(server, streams, running)
            await asyncio.to_thread(disturb)
        return await asyncio.gather(*running)


def move_all(server: Server, modes: Counter[str]) -> None:
    """Move every running request to the other worker, and count the moves by mode and outcome."""
    for request in server.ask("GET", "/v1/requests")["requests"]:
        try:
            asked = server.ask("POST", "/v1/migrations", {"request_id": request["request_id"]})
        except urllib.error.HTTPError:
            continue  # it has ended
        while (move := server.ask("GET", f"/v1/migrations/{asked['id']}"))["open"]:
            pass
        modes[f"{move['mode']} {move['outcome']}"] += 1


def kill_one(server: Server) -> None:
    children = psutil.Process(server.workers()[0]["pid"]).children(recursive=True)
    os.kill(next(child.pid for child in children if "EngineCore" in child.name()), signal.SIGKILL)


def row(family: str, streams: int) -> dict[str, Any]:
    """Serve one family and say how it went."""
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as folder:
        model = make(family, Path(folder))
        engine_flags = (*FLAGS, *MORE.get(family, ()))
        with fleet(model, "--workers", "2", engine_flags=engine_flags) as server:
            fixed = server.workers()[0]["fixed"]
            modes: Counter[str] = Counter()
            expected = asyncio.run(read(server, model, streams, None))
            again = asyncio.run(read(server, model, streams, None))
            moved = asyncio.run(read(server, model, streams, lambda: move_all(server, modes)))
            killed = asyncio.run(read(server, model, streams, lambda: kill_one(server)))
    told = ", ".join(f"{n} {mode}" for mode, n in modes.items())
    changed = {"again": differing(expected, again), "moved": differing(expected, moved)}
    changed["replayed"] = differing(expected, killed)
    return {"family": family, "not moved, since": fixed, "moves": told} | changed


def differing(expected: list[Stream], got: list[Stream]) -> int:
    """Streams that are broken, or whose text is another."""
    return sum(not (b.is_done and a.content == b.content) for a, b in zip(expected, got, strict=True))


def main() -> int:
    parser = flags(__doc__, resumes=True)
    asked = parser.parse_args()
    families = FAMILIES[:1] if asked.quick else FAMILIES
    rows = [asked.resume.part(f"{family}-4", partial(row, family, 4)) for family in families]
    bars = {f"texts changed, {how}": bar(sum(r[how] for r in rows), 0) for how in ("moved", "replayed")}
    return show("model_families", rows, bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
