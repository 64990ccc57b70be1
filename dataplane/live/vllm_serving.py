"""The server's half of vLLM's private surface: its front end over our FleetCore, and its launch functions.

Kept apart from vllm_surface.py since importing it loads vLLM's whole HTTP stack, which a worker has no use
for. The same version check and the same contract tests cover both.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from controlplane.errors import BadInput
from dataplane.live.fleet_core import FleetCore
from dataplane.live.front_door import DoorPolicy, FrontDoor
from dataplane.live.vllm_surface import AsyncEngineArgs, EngineCoreClient, UsageContext

FRONT_DOOR = f"{FrontDoor.__module__}.{FrontDoor.__qualname__}"


class FleetLLM(AsyncLLM):  # type: ignore[misc]  # vLLM is not typed here
    """vLLM's own front end, kept whole; only the engine client beneath it is ours."""

    def __init__(self, config: Any, core: FleetCore, door: DoorPolicy) -> None:
        self.door = door
        with _engine_client(lambda **_: core):
            # No executor: should vLLM ever bypass the factory, it fails here and starts no engine.
            super().__init__(config, executor_class=None, log_stats=True, log_requests=False)
        if self.engine_core is not core:
            raise RuntimeError("vLLM's front end did not take FleetCore as its engine")


@contextmanager
def _engine_client(make: Callable[..., FleetCore]) -> Iterator[None]:
    """AsyncLLM has no argument for its engine client, only a factory that it looks up on a class."""
    original = EngineCoreClient.__dict__["make_async_mp_client"]
    EngineCoreClient.make_async_mp_client = staticmethod(make)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = original


class _OneLineParser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser, raising BadInput where argparse would print its usage and exit."""

    def error(self, message: str) -> Any:
        raise BadInput(f"engine flags: {message}")


def parse_flags(flags: Sequence[str]) -> argparse.Namespace:
    """vLLM's `serve` flags, checked. Raises BadInput with vLLM's own words."""
    arguments: argparse.Namespace = make_arg_parser(_OneLineParser()).parse_args(list(flags))
    try:
        validate_parsed_serve_args(arguments)
    except (TypeError, ValueError, KeyError) as error:
        raise BadInput(f"engine flags: {_first_line(error)}") from error
    return arguments


def engine_config(arguments: argparse.Namespace) -> Any:
    """vLLM's configuration of an engine with these flags; starts nothing.

    Raises BadInput where vLLM cannot serve this model with these flags.
    """
    try:
        return AsyncEngineArgs.from_cli_args(arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ValueError, OSError, NotImplementedError, RuntimeError) as error:
        raise BadInput(f"model {arguments.model}: {_first_line(error)}") from error


async def serve_http(llm: FleetLLM, listening: socket.socket, address: str, arguments: Any) -> None:
    """vLLM's OpenAI server until SIGTERM or SIGINT; returns when its streams are over."""
    closing = await build_and_serve(llm, address, listening, arguments)
    await asyncio.wait_for(closing, timeout=10.0)


def _first_line(error: BaseException) -> str:
    """The telling line of an error: pydantic puts a heading before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "error, " in line or "Error:" in line]
    return (telling or lines or [type(error).__name__])[0]
