"""The flags of a verb: a record with a field for each, and `--config FILE.yaml`.

The file holds flags without their dashes, as a mapping. Flags on the line win.

trace: [monday.csv, tuesday.csv]
slo: {ttft: 400ms, tpot: 30ms}
max-gpus: 16
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from controlplane.errors import BadInput
from tokenfleet.field_errors import nearest

Flags = TypeVar("Flags")


def takes(record: type[Flags]) -> Callable[[Callable[[Flags], Any]], Callable[..., Any]]:
    """A Typer command of one argument: a dataclass whose annotated fields are its flags."""
    hints = get_type_hints(record, include_extras=True)
    flags = inspect.signature(record).parameters.values()
    signature = inspect.Signature([flag.replace(annotation=hints[flag.name]) for flag in flags])

    def decorated(command: Callable[[Flags], Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(**given: Any) -> Any:
            return command(record(**given))

        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = hints
        return run

    return decorated


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
            raise BadInput(f"{path}: {key}: no such setting{nearest(flag, flags)}")
        if not taken.intersection((*flags[flag].opts, *flags[flag].secondary_opts)):
            words += _as_words(path, flag, value)
    return [*words, *arguments]


def _read(path: str) -> dict[str, Any]:
    import yaml

    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: is not YAML: {error}") from None
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
