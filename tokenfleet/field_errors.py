"""One-line messages for faulty input: YAML, the first pydantic fault, and names near to an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from controlplane.errors import BadInput


class FilePart(BaseModel):
    """A part of a file that people write: unknown keys are refused, they are most likely typing errors."""

    model_config = ConfigDict(extra="forbid")


def no_bool(value: Any) -> Any:
    """YAML's `yes` is a bool, and Python would take it for the number 1."""
    if isinstance(value, bool):
        raise ValueError("a number is expected")
    return value


Model = TypeVar("Model", bound=BaseModel)
LONGEST = 80  # characters of a value that are worth repeating
SHORT = 10_000  # characters; the texts that libyaml reads, ten times as fast
DEEPEST = 50  # levels; to validate or print what nests deeper may end the interpreter's stack


def first_fault(error: ValidationError) -> tuple[str, str]:
    """The first field that is wrong, dotted (empty for the value as a whole), and what is wrong with it."""
    first = error.errors(include_url=False, include_context=False)[0]
    received = "" if first["type"] == "missing" else f", got {str(first['input'])[:LONGEST]!r}"
    return ".".join(str(part) for part in first["loc"]), f"{first['msg'].lower()}{received}"


def fault_line(where: str, error: ValidationError) -> str:
    """`where: field: what is wrong`, as a refusal of a file says it."""
    field, fault = first_fault(error)
    return f"{where}: {field or '(top)'}: {fault}"


def read_text(path: Path, most_bytes: int | None = None) -> str:
    """A file's text, without a byte order mark. Raises BadInput, also for one larger than `most_bytes`."""
    try:
        if most_bytes is not None and (size := path.stat().st_size) > most_bytes:
            raise BadInput(f"{path}: {size} bytes, at most {most_bytes} are read")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not a text file in UTF-8") from error


def load_yaml(text: str, where: str) -> Any:
    """What YAML says. Raises BadInput."""
    if len(text) < SHORT and yaml.__with_libyaml__:
        with suppress(yaml.YAMLError, ValueError):  # read again below, for the message
            content = yaml.load(text, yaml.CSafeLoader)
            if not _is_deep(content):
                return content
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise BadInput(f"{where}: is not YAML: {' '.join(str(error).split())[:200]}") from error


def _is_deep(content: Any) -> bool:
    """Whether lists and mappings nest deeper than DEEPEST. An alias within itself does."""
    level: dict[int, Any] = {0: [content]}
    for _ in range(DEEPEST):
        inner = (one.values() if isinstance(one, dict) else one for one in level.values())
        level = {id(x): x for one in inner for x in one if isinstance(x, list | dict)}
        if not level:
            return False
    return True


def parse_yaml(text: str, where: str, model: type[Model], is_no: str) -> Model:
    """The YAML in `text` as the model; `is_no` is the message for a text without fields. Raises BadInput."""
    content = load_yaml(text, where)
    if not isinstance(content, dict):
        raise BadInput(f"{where}: {is_no}")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise BadInput(fault_line(where, error)) from error


def nearest(name: str, names: Iterable[str]) -> str:
    """` (did you mean x or y?)` for the closest known names, or nothing when none is close."""
    close = difflib.get_close_matches(name.lower(), sorted(names), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
