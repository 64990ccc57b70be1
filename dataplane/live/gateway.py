"""The gateway: vLLM's OpenAI server on one port, FleetCore beneath it, our front door before it."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.live.fleet_core import FleetCore
from dataplane.live.front_door import DoorPolicy
from dataplane.live.vllm_serving import FRONT_DOOR, FleetLLM, engine_config, parse_flags, serve_http


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """`model` is a folder or a Hugging Face name; `engine_flags` are vLLM's own, as after `--`."""

    model: str
    host: str
    port: int
    engine_flags: tuple[str, ...] = ()
    shutdown_s: int = 20

    def server_flags(self) -> list[str]:
        """vLLM's flags for the server: ours first, so that the operator's own win."""
        flags = [
            "--model", self.model, "--host", self.host, "--port", str(self.port),
            "--middleware", FRONT_DOOR, "--shutdown-timeout", str(self.shutdown_s),
            "--uvicorn-log-level", "warning", "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if "--served-model-name" not in self.engine_flags:
            folder = Path(self.model)
            names = [folder.resolve().name, self.model] if folder.is_dir() else [self.model]
            flags += ["--served-model-name", *dict.fromkeys(names)]
        return [*flags, *self.engine_flags]


class Gateway:
    """Flags and configuration read and checked, the port not yet answering."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.arguments: argparse.Namespace = parse_flags(settings.server_flags())
        self.config: Any = engine_config(self.arguments)

    def prepare(self, kv_blocks: int) -> None:
        """Take over what only a started engine knows: its KV blocks, for vLLM's metrics."""
        self.config.cache_config.num_gpu_blocks = kv_blocks

    async def serve(self, core: FleetCore, door: DoorPolicy, listening: socket.socket) -> None:
        """Answer until SIGTERM or SIGINT, then end every stream and return."""
        address = f"http://{self.settings.host}:{self.settings.port}"
        await serve_http(FleetLLM(self.config, core, door), listening, address, self.arguments)


def clean_environment(flags: Sequence[str]) -> dict[str, str]:
    """Environment for vLLM in every process of the fleet; what the operator has set stays."""
    wanted = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    if not any(flag.startswith("--logging") for flag in flags):
        wanted["VLLM_LOGGING_LEVEL"] = "WARNING"
    return {name: os.environ.get(name, value) for name, value in wanted.items()}
