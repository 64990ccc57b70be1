"""A `tokenfleet api` process, as the tests drive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from checkout import ROOT
from served_fleet import free_port

# Few requests and one kind of worker: a plan in a second or two, once its process is up.
SMALL: dict[str, Any] = {
    "trace": {
        "inline_csv": "arrival_s,prompt_tokens,output_tokens\n"
        + "".join(f"{i * 0.7:.1f},{200 + i % 90},{20 + i % 30}\n" for i in range(300))
    },
    "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
    "model": "llama-3.1-8b",
    "gpu": ["h100"],
    "tp": [1],
    "attainment": 0.9,
    "confidence": 0.6,
}
# Two models that share GPUs, one of them with prices of its own.
PORTFOLIO: dict[str, Any] = {
    "portfolio": """
schema: tokenfleet.portfolio/1
limits: {gpus: {h100: 8}}
defaults: {model: llama-3.1-8b, gpu: [h100], tp: [1], attainment: 0.9, confidence: 0.6}
models:
- {name: chat, trace: chat.csv, slo: {ttft: 1s, tpot: 50ms}}
- {name: code, trace: [more/code.csv], slo: "ttft=2s,tpot=80ms", rate-scale: 2, prices: own.yaml}
""",
    "traces": {"chat.csv": SMALL["trace"], "more/code.csv": SMALL["trace"]},
    "files": {
        "own.yaml": "schema: tokenfleet.prices/1\nprices:\n"
        "- {gpu: h100-sxm, on_demand: 1.25, date: 2026-01-01, source: ours}\n"
    },
}
# Every kind of worker over an hour of requests: nobody waits for this one.
LARGE: dict[str, Any] = {"trace": {"sample": True}, "slo": SMALL["slo"], "model": "llama-3.1-70b"}


@dataclass
class ServedApi:
    """A `tokenfleet api` process, and how to reach it."""

    process: subprocess.Popen[str]
    url: str
    data: Path

    def ask(self, method: str, path: str, **how: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, timeout=30, **how)

    def job(self, name: str, of: str = "plans") -> dict[str, Any]:
        reply = self.ask("GET", f"/v1/{of}/{name}")
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def order(self, order: dict[str, Any], of: str = "plans", **headers: str) -> str:
        reply = self.ask("POST", f"/v1/{of}", json=order, headers=headers)
        assert reply.status_code == 202, reply.text
        return str(reply.json()["id"])

    def until(self, name: str, *states: str, seconds: float = 300.0, of: str = "plans") -> dict[str, Any]:
        """Wait until a job is in one of these states, and return it; it runs elsewhere, so this looks."""
        deadline = time.monotonic() + seconds
        while (job := self.job(name, of))["state"] not in states:
            assert time.monotonic() < deadline, job
            time.sleep(0.05)
        return job

    def stop(self, sign: int = signal.SIGTERM) -> int:
        """End it, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sign)
        code = self.process.wait(timeout=60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


def serve_api(data: Path, *flags: str, port: int | None = None) -> ServedApi:
    """Start `tokenfleet api` and return once it says that it is ready."""
    command = [
        sys.executable, "-m", "tokenfleet", "api",
        "--port", str(port or free_port()), "--data", str(data), *flags,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready "), f"api said {line!r}"
    return ServedApi(process, line.split()[1], data)


def planners_of(pid: int) -> list[int]:
    """The job processes that a service has started and that still live."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"job_process" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (OSError, IndexError):
            continue
    return found
