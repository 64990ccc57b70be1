"""The gateway's HTTP server: vLLM's OpenAI server, with FleetCore beneath it and the middleware before it.

It holds the server's half of vLLM's private surface: front end and launch functions. It is apart from
vllm_surface.py, since importing it loads vLLM's whole HTTP stack, which a worker does not need. The same
version check and the same contract tests cover both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from controlplane.errors import BadInput
from dataplane.http.keys import KeyRing
from dataplane.http.server import follow, server_options
from dataplane.http.tls import ServerCertificate, is_loopback
from dataplane.live.engine_api import vllm_surface as vllm
from dataplane.live.gateway.connections import FrontEndClient
from dataplane.live.gateway.middleware import DoorPolicy
from dataplane.live.gateway.settings import GatewaySettings


class Gateway:
    """Flags and configuration read and checked, the port not yet answering."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.arguments: argparse.Namespace = parse_flags(settings.server_flags())
        self.config: Any = engine_config(self.arguments)
        self.certificate: ServerCertificate | None = None
        if settings.certificate is not None:
            self.certificate = ServerCertificate(*settings.certificate, (settings.host,))

    async def follow(self, keys: KeyRing, say: Callable[[str, str], None]) -> None:
        """Reload certificate and keys when their files change; `say(kind, line)` reports the result."""
        following = []
        if self.certificate is not None:
            told = partial(say, "certificate")
            following.append(follow(self.certificate.files, self.certificate.reload, told))
        if (file := self.settings.keys_file) is not None:
            following.append(follow((file,), partial(keys.reload, file), partial(say, "keys")))
        await asyncio.gather(*following)

    @property
    def reasons(self) -> bool:
        """Whether grammars begin to hold only where the model's reasoning has ended."""
        outputs = self.config.structured_outputs_config
        return bool(outputs.reasoning_parser) and not outputs.enable_in_reasoning

    def revised(self, model: str, flags: Sequence[str]) -> dict[str, Any]:
        """The engine settings of workers with another model or other flags, beneath this unchanged server.

        Raises BadInput for what vLLM refuses, and for settings that would change the server itself.
        """
        names = () if "--served-model-name" in flags else ("--served-model-name", *self._names)
        asked = replace(self.settings, model=model, engine_flags=(*flags, *names))
        arguments = parse_flags(asked.server_flags())
        beneath = {field.name for field in fields(vllm.AsyncEngineArgs)} - set(SERVERS_TOO)
        for name in sorted(vars(arguments).keys() - beneath - {"model_tag"}):
            ours, theirs = (getattr(a, name, None) for a in (self.arguments, arguments))
            if ours != theirs:
                flag = f"--{name.replace('_', '-')}"
                raise BadInput(
                    f"update: {flag}: cannot change while the fleet serves, is {ours!r}: {theirs!r}"
                )
        _check_model(self.config.model_config, engine_config(arguments).model_config)
        return engine_settings_of(arguments)

    @property
    def _names(self) -> Sequence[str]:
        names = self.arguments.served_model_name
        return [names] if isinstance(names, str) else names

    def prepare(self, kv_blocks: int) -> None:
        """Take over what only a started engine knows: its KV blocks, for vLLM's metrics."""
        self.config.cache_config.num_gpu_blocks = kv_blocks

    async def serve(
        self,
        core: FrontEndClient,
        door: DoorPolicy,
        listening: socket.socket,
        loads: tuple[Any, int] | None = None,
    ) -> None:
        """Answer until SIGTERM or SIGINT, then end every stream and return.

        `loads`: the connections of each gateway on this socket, and which of them this one is; the least
        loaded accepts.
        """
        if self.config.lora_config is not None and is_loopback(self.settings.host) and loads is None:
            # vLLM's own switch: beyond this machine the operator must set it.
            os.environ.setdefault("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        llm = FleetLLM(self.config, core, door)
        address = f"{self.settings.host}:{self.settings.port}"  # for its log
        options = server_options(self.certificate)
        try:
            closing = await build_and_serve(llm, address, listening, self.arguments, loads, **options)
        except ValueError as error:
            if not str(error).startswith("Loading lora"):
                raise
            raise RuntimeError(f"--lora-modules: {_first_line(error)}") from error
        await asyncio.wait_for(closing, timeout=10.0)


# Engine arguments that the server reads as well; of a worker's TP degree its kind decides.
SERVERS_TOO = (
    "served_model_name", "tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init",
    "generation_config", "override_generation_config", "max_logprobs", "logprobs_mode", "enable_lora",
    "enable_prompt_embeds", "limit_mm_per_prompt", "runner", "convert", "hf_overrides",
    "tensor_parallel_size",
)  # fmt: skip


class FleetLLM(AsyncLLM):  # type: ignore[misc]  # vLLM is not typed here
    """vLLM's own front end, kept whole; only the engine client beneath it is ours."""

    def __init__(self, config: Any, core: FrontEndClient, door: DoorPolicy) -> None:
        self.door = door
        beneath = vllm.EngineClient(core)
        with _engine_client(lambda **_: beneath):
            # No executor: should vLLM ever bypass the factory, it fails here and starts no engine.
            super().__init__(config, executor_class=None, log_stats=True, log_requests=False)
        if self.engine_core is not beneath:
            raise RuntimeError("vLLM's front end did not take FleetCore as its engine")

    def shutdown(self, timeout: float | None = None) -> None:
        """vLLM's own, once the core has let requests finish: it ends the tokenizer's threads first."""
        if (core := getattr(self, "engine_core", None)) is not None:
            core.shutdown(timeout)
        super().shutdown(timeout)

    async def add_request(self, request_id: str, prompt: Any, params: Any, *more: Any, **named: Any) -> Any:
        """vLLM's own, but that it turns away, with a 400, what its engine would die of."""
        if getattr(params, "prompt_logprobs", None) is not None and not vllm.has_prompt_logprobs(
            self.vllm_config
        ):
            raise VLLMValidationError("prompt_logprobs: not computed by CPU engines with --enable-lora")
        return await super().add_request(request_id, prompt, params, *more, **named)


@contextmanager
def _engine_client(make: Callable[..., vllm.EngineCoreClient]) -> Iterator[None]:
    """AsyncLLM has no argument for its engine client, only a factory that it looks up on a class."""
    original = vllm.EngineCoreClient.__dict__["make_async_mp_client"]
    vllm.EngineCoreClient.make_async_mp_client = staticmethod(make)
    try:
        yield
    finally:
        vllm.EngineCoreClient.make_async_mp_client = original


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
    if arguments.ssl_certfile or arguments.ssl_keyfile:
        raise BadInput("engine flags: --ssl-certfile, --ssl-keyfile: give --tls-cert and --tls-key before --")
    return arguments


def engine_settings_of(arguments: Any) -> dict[str, Any]:
    """The engine arguments that differ from vLLM's defaults: what the operator has asked for."""
    args = vllm.AsyncEngineArgs.from_cli_args(arguments)
    # vLLM looks a model up when it is named, and its default one is not the operator's.
    plain = vllm.AsyncEngineArgs(model=args.model)
    settings: dict[str, Any] = {"model": args.model}
    for field in fields(vllm.AsyncEngineArgs):
        value = getattr(args, field.name)
        if value != getattr(plain, field.name):
            settings[field.name] = value
    return settings


def engine_config(arguments: argparse.Namespace) -> Any:
    """vLLM's configuration of an engine with these flags; starts nothing.

    Raises BadInput where vLLM cannot serve this model with these flags.
    """
    try:
        args = vllm.AsyncEngineArgs.from_cli_args(arguments)
        args.kv_offloading_size = None  # the engines' alone: here it would only be a connector of its own
        config = args.create_engine_config(vllm.UsageContext.OPENAI_API_SERVER)
    except (ValueError, OSError, NotImplementedError, RuntimeError) as error:
        raise BadInput(f"model {arguments.model}: {_first_line(error)}") from error
    vllm.check_served(config)
    # Engines keep no images: each is sent whole, and vLLM's cache here only saves its processing.
    config.parallel_config._api_process_count = 2
    return config


def stop_accepting(server: Any) -> None:
    """Let a vLLM server that shares its socket take no more connections; those that are open stay."""
    for task in tuple(server._accept_tasks):
        if task.get_coro().__qualname__ == NoSignalServer._accept.__qualname__:
            task.cancel()


def _check_model(ours: Any, theirs: Any) -> None:
    """Raise BadInput unless requests that the server made for one model suit the other as well."""
    for what, read in (
        ("vocabulary", lambda m: m.get_vocab_size()),
        ("generation config", lambda m: m.try_get_generation_config()),
        ("images and the like", lambda m: m.is_multimodal_model),
        ("tokenizer", _tokenizer),
    ):
        if (ours.model, ours.tokenizer) != (theirs.model, theirs.tokenizer) and read(ours) != read(theirs):
            raise BadInput(
                f"update: model {theirs.model}: another {what} than {ours.model}; start another fleet"
            )
    if theirs.max_model_len < ours.max_model_len:
        needed = f"expected at least {ours.max_model_len}, which the endpoint admits"
        raise BadInput(f"update: --max-model-len: {needed}, got {theirs.max_model_len}")


def _tokenizer(model: Any) -> tuple[Any, ...]:
    """Whatever of a model's tokenizer a prompt's tokens depend on."""
    tokenizer = cached_tokenizer_from_config(model)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    return words, tuple(tokenizer.all_special_ids), getattr(tokenizer, "chat_template", None)


def _first_line(error: BaseException) -> str:
    """The telling line of an error: pydantic puts a heading before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "error, " in line or "Error:" in line]
    return (telling or lines or [type(error).__name__])[0]
