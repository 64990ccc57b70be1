"""The settings of a gateway: the model, the address, and its flags for vLLM's server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dataplane.live.gateway.middleware import FrontDoor

FRONT_DOOR = f"{FrontDoor.__module__}.{FrontDoor.__qualname__}"


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """`model` is a folder or a Hugging Face name; `engine_flags` are vLLM's own, as after `--`.

    `certificate` and its key, and `keys_file`, are followed while it serves.
    """

    model: str
    host: str
    port: int
    engine_flags: tuple[str, ...] = ()
    shutdown_s: int = 20
    certificate: tuple[Path, Path] | None = None
    keys_file: Path | None = None

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
