"""The flags of a verb, on the command line and in a `--config FILE.yaml`.

A config file has a verb's flags, without their dashes, as a mapping. Flags on the command line win.

    trace: [monday.csv, tuesday.csv]
    slo: {ttft: 400ms, tpot: 30ms}
    max-gpus: 16
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from enum import StrEnum
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from controlplane.errors import BadInput
from tokenfleet.field_errors import load_yaml, nearest, read_text
from tokenfleet.planning.request import Option, PlanRequest, options, read_targets
from tokenfleet.profiles.library import has_model

T = TypeVar("T")
OPTION = "option"  # where the fields of a record have what Typer makes a flag of


class OutputFormat(StrEnum):
    """How a result is printed on stdout."""

    TABLE = "table"
    JSON = "json"


Format = Annotated[OutputFormat, typer.Option("--format", help="output format on stdout")]
Verbose = Annotated[bool, typer.Option("--verbose", help="print the details too")]
TlsCert = Annotated[
    Path | None,
    typer.Option(help="PEM certificate with its chain, to serve HTTPS; reloaded when it changes"),
]
TlsKey = Annotated[Path | None, typer.Option(help="private key of the certificate")]
ControlKey = Annotated[
    str | None, typer.Option(envvar="TOKENFLEET_CONTROL_KEY", help="key of the control API")
]
ControlKeys = Annotated[
    Path | None, typer.Option(help="YAML list of further control keys (name, key), reloaded when it changes")
]
EndpointKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key of the endpoint")]
EngineFlags = Annotated[
    list[str] | None, typer.Argument(metavar="-- [VLLM FLAGS]", help="any vLLM engine flag, after --")
]
Processes = Annotated[
    int | None, typer.Option(min=1, help="processes at the same time (default: one per core)")
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="plan everything again and keep nothing")]
FleetFolder = Annotated[Path | None, typer.Option(help="the fleet's folder (default: $TOKENFLEET_DATA)")]
_OF_PROFILE = "vLLM's setting of that name (default: the profile's)"
MaxSeqs = Annotated[int | None, typer.Option("--max-num-seqs", min=1, help=_OF_PROFILE)]
MaxBatchedTokens = Annotated[int | None, typer.Option("--max-num-batched-tokens", min=1, help=_OF_PROFILE)]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="allow plain HTTP beyond loopback; for fleets behind a proxy or on a private network",
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        help="PEM file of the authority that signed the certificate (default: the system's, or SSL_CERT_FILE)"
    ),
]


def flag(default: T, help: str, *names: str, **settings: Any) -> T:
    """An optional flag of a record: its default, its line in the help, and Typer's further settings of it."""
    return field(default=default, metadata={OPTION: typer.Option(*names, help=help, **settings)})


# Options by their old names, which still work, and by their new ones: vLLM's, and one for one thing.
RENAMED = {
    "--max-seqs": "--max-num-seqs",
    "--max-batched-tokens": "--max-num-batched-tokens",
    "--out": "--output",
}


def takes_flags(without: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A Typer command of a function: a parameter that is a dataclass is made of a flag for each field.

    A field is a `flag`, or is annotated for Typer. A PlanRequest is made of the options of a plan but those
    `without`. With one, the flags that are needed come first, the others where their parameter stands.
    """

    def made_of_flags(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True).parameters
        records: dict[str, Any] = {p.name: p.annotation for p in own.values() if is_dataclass(p.annotation)}
        has_request = records.pop("request", None) is not None
        taken = [o for o in options() if has_request and o.field not in (*without, "classes")]

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            made = {
                name: record(**{field.name: values.pop(field.name) for field in fields(record)})
                for name, record in records.items()
            }
            if has_request:
                given = {option.field: _value(option, values.pop(option.field)) for option in taken}
                given |= given.pop("slo")
                made["request"] = PlanRequest(**{k: value for k, value in given.items() if value is not None})
            return command(**made, **values)

        order: list[Parameter] = []
        for name, parameter in own.items():
            order += (
                map(_parameter, taken) if name == "request" else _of_record(records.get(name)) or [parameter]
            )
        if has_request:
            order.sort(key=lambda p: (p.default is not p.empty, p.name != "slo" and p.default is p.empty))
        order = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in order]
        run.__signature__ = Signature(order)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in order}
        return run

    return made_of_flags


def _of_record(record: Any) -> list[Parameter]:
    """The fields of a record as parameters; nothing where there is no record."""
    if record is None:
        return []
    hints = get_type_hints(record, include_extras=True)
    hints |= {f.name: Annotated[hints[f.name], f.metadata[OPTION]] for f in fields(record) if f.metadata}
    of_record = inspect.signature(record).parameters.values()
    return [p.replace(annotation=hints[p.name]) for p in of_record]


def _parameter(option: Option) -> Parameter:
    """An option as a parameter that Typer makes a flag of."""
    plain: Any = str if option.kind in ("slo", "duration") or option.codec else option.item
    annotation = plain
    if option.kind == "slo":
        annotation = list[str]
    elif option.is_list:
        annotation = list[plain] | None
    elif option.default is None:
        annotation = plain | None
    default = Parameter.empty if option.default is MISSING else None if option.is_list else option.default
    flag = typer.Option(f"--{option.flag}", help=option.about.help)
    return Parameter(
        option.field, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, flag]
    )


def _value(option: Option, value: Any) -> Any:
    """What a flag was given, as the option has it; None where it was not given."""
    if option.kind == "slo":
        return read_targets(value)
    if option.is_list:
        return tuple(value or ())
    return option.read(value) if option.kind == "duration" and value is not None else value


def take_option(arguments: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The value of `--name VALUE` or `--name=VALUE`, and the arguments without it.

    Nothing after `--` is looked at. Raises BadInput when it is given twice or has no value.
    """
    value: str | None = None
    rest: list[str] = []
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        if word == "--":
            return value, [*rest, word, *queue]
        if word != name and not word.startswith(f"{name}="):
            rest.append(word)
            continue
        if value is not None:
            raise BadInput(f"{name}: given twice")
        if word != name:
            value = word.partition("=")[2]
        elif queue:
            value = queue.pop(0)
        else:
            raise BadInput(f"{name}: needs a file")
    return value, rest


def with_new_names(command: Any, arguments: Sequence[str]) -> list[str]:
    """`arguments` with the names that options have now, for a version; stderr names the new ones.

    `command` is a Typer command, or a group whose sub-commands may have the options.
    """
    under = (command, *getattr(command, "commands", {}).values())
    known = {name for one in under for param in one.params for name in param.opts}
    words = list(arguments)
    for i, word in enumerate(words):
        if word == "--":
            break
        old, equals, value = word.partition("=")
        new = RENAMED.get(old)
        if new is not None and new in known and old not in known:
            print(f"note: {old} is now {new}", file=sys.stderr)
            words[i] = f"{new}{equals}{value}"
    return words


def with_config(command: Any, path: str, arguments: Sequence[str]) -> list[str]:
    """`arguments` with the flags of the file at `path` put in, for what the line itself does not set.

    `command` is a Typer command, or a group whose sub-command is the first of `arguments`.
    Raises BadInput for a file that is no mapping, or that has a key which is no flag of the command.
    """
    settings = _read(path)
    words: list[str] = []
    arguments = list(arguments)
    while hasattr(command, "commands") and arguments and arguments[0] in command.commands:
        command = command.commands[arguments[0]]
        words.append(arguments.pop(0))
    flags = {
        name.removeprefix("--"): param
        for param in command.params
        for name in (*param.opts, *param.secondary_opts)
        if name.startswith("--") and name != "--help"
    }
    taken = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    for key, value in settings.items():
        flag = str(key).replace("_", "-")
        if flag not in flags:
            flag = RENAMED.get(f"--{flag}", flag).removeprefix("--")
        if flag not in flags:
            raise BadInput(f"{path}: {key}: no such setting{nearest(flag, flags)}")
        if not taken.intersection((*flags[flag].opts, *flags[flag].secondary_opts)):
            words += _as_words(path, flag, value)
    return [*words, *arguments]


def _read(path: str) -> dict[str, Any]:
    settings = load_yaml(read_text(Path(path)), path)
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise BadInput(f"{path}: expected a mapping of flags to values, got {type(settings).__name__}")
    return settings


def _as_words(path: str, flag: str, value: Any) -> list[str]:
    """One setting as the words of a command line."""
    if isinstance(value, bool):
        return [f"--{flag}"] if value else []
    if isinstance(value, dict):
        return [f"--{flag}", ",".join(f"{k}={v}" for k, v in value.items())]
    if isinstance(value, list):
        return [word for item in value for word in _as_words(path, flag, item)]
    if value is None:
        raise BadInput(f"{path}: {flag}: has no value")
    return [f"--{flag}", str(value)]


def model_at(name: str) -> str:
    """A model folder's whole path, or a Hugging Face name unchanged. Raises BadInput for no such folder."""
    if "/" not in name and not Path(name).is_dir() and has_model(name):
        raise BadInput(
            f"--model: {name} names profiles; expected a folder or a Hugging Face name, OWNER/MODEL"
        )
    return _folder_at(name, "config.json", "a model folder")


def adapter_at(name: str) -> str:
    """The same of a LoRA adapter."""
    return _folder_at(name, "adapter_config.json", "an adapter's folder")


def _folder_at(name: str, config: str, what: str) -> str:
    folder = Path(name).expanduser()
    has_config = (folder / config).is_file()
    if not (has_config or name.startswith((".", "/", "~")) or name.count("/") > 1):
        return name
    if not folder.is_dir():
        raise BadInput(f"--model: {name}: no such folder")
    if not has_config:
        raise BadInput(f"--model: {name}: has no {config}, so it is not {what}")
    return str(folder.resolve())
