"""The pages of docs/reference, made from the code: commands, files, Python, metrics, HTTP, plan.json, models.

python -m harness.reference          writes the pages
"""

from __future__ import annotations

import inspect
import re
import typing
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

from dataplane.http.keys import KeyRing
from dataplane.http.server import Extension
from dataplane.live.control.api import control_app
from dataplane.live.control.step_times import StepTimes
from dataplane.live.gateway.metrics import Metrics
from tokenfleet.advise.gauges import AdviceGauges
from tokenfleet.cli import flags
from tokenfleet.cli.main import VERBS, command_of
from tokenfleet.pick.gauges import PickGauges
from tokenfleet.pick.times import DecisionTimes
from tokenfleet.planning import plan_file
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.portfolios import request as portfolio_file
from tokenfleet.profiles import prices
from tokenfleet.profiles.library import library
from tokenfleet.service.app import plan_app
from tokenfleet.service.routes import GapCollector, JobCollector, plan_router
from tokenfleet.traces.formats import FORMATS

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NAVIGATION = (
    "[Commands](cli.md) · [files](files.md) · [Python](python.md) · [metrics](metrics.md) · [HTTP](http.md) ·"
    " [plan.json](plan-json.md) · [models and GPUs](models.md)"
)
MADE = "This page is made from the code by `make reference`."
Rows = Iterable[Iterable[object]]


def table(head: Iterable[str], rows: Rows) -> str:
    """A Markdown table; a cell is one line, and its bars are escaped."""
    names = list(head)
    lines = [names, ["---"] * len(names), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def page(title: str, says: str, parts: Iterable[tuple[str, str]]) -> str:
    """A page of headed parts."""
    body = [f"# {title}", NAVIGATION, f"{says} {MADE}"]
    for head, text in parts:
        body += [f"## {head}", text] if head else [text]
    return "\n\n".join(body) + "\n"


def command_line() -> str:
    """Every verb with its options."""

    def parts() -> Iterator[tuple[str, str]]:
        for name, verb in VERBS.items():
            yield from _command(name, command_of(verb))

    says = "Every verb and option of `tokenfleet`. Each also takes `--config FILE.yaml`, with the same names."
    return page("Command line", says, parts())


def _command(name: str, command: Any) -> Iterator[tuple[str, str]]:
    context = command.make_context(name, [], resilient_parsing=True)
    shown = (one.get_help_record(context) for one in command.params if one.name != "help")
    rows = [(f"`{flags}`", says) for flags, says in filter(None, shown)]
    first = _cell((command.help or "").split("\n\n")[0])
    yield f"tokenfleet {name}", first + ("\n\n" + table(("option", "meaning"), rows) if rows else "")
    for inner in getattr(command, "commands", {}).values():
        yield from _command(f"{name} {inner.name}", inner)


def metrics() -> str:
    """Every family of `/metrics`, with its labels."""
    counters = [one for one in vars(Metrics()).values() if hasattr(one, "_labelnames")]
    rows = [(f"`{one.describe()[0].name}`", one._type, ", ".join(one._labelnames), one._documentation)
            for one in counters]  # fmt: skip
    nothing: Any = SimpleNamespace(_here=list, kinds={}, counts=dict)
    collected = [*StepTimes.collect(nothing), *JobCollector(nothing).collect()]
    collected += GapCollector(lambda: None).collect()
    rows += _families(collected)
    says = (
        "Counters end in `_total`, histograms have `_bucket`, `_sum` and `_count`. At the control API's"
        " `/metrics` vLLM's own `vllm:` metrics pass through, with a `worker` label."
    )
    parts = {
        "A fleet and its plan service (`--control-port`)": rows,
        "`tokenfleet advise --listen`": _families(_advice_gauges().collect()),
        "`tokenfleet pick --metrics-listen`": _families(_pick_gauges().collect()),
    }
    head = "name", "type", "labels", "meaning"
    return page("Metrics", says, [(name, table(head, sorted(of))) for name, of in parts.items()])


def _families(collected: Iterable[Any]) -> list[tuple[str, ...]]:
    """A row for each family that a collector yields."""
    return [
        (
            f"`{one.name}`",
            one.type,
            ", ".join(getattr(one, "_labelnames", ())),
            one.documentation,
        )
        for one in collected
    ]


def _advice_gauges() -> AdviceGauges:
    """Those of an advice that knows everything."""
    priced: Any = SimpleNamespace(worker_type=SimpleNamespace(name="", usd_per_h=1.0))
    gauges = AdviceGauges("", priced)
    known: Any = SimpleNamespace(published=1, has=1, held="", arrivals=0, likely=(1, 1), wanted=1)
    gauges.advice = known
    return gauges


def _pick_gauges() -> PickGauges:
    """Those of a picker that follows KV events."""
    fleet: Any = SimpleNamespace(
        counts=Counter(),
        times=DecisionTimes(),
        lengths=SimpleNamespace(counts={}, bytes_a_token=0.0),
        servers=(),
        admission=(),
    )
    unseen: Any = SimpleNamespace(counts={})
    return PickGauges(fleet, unseen, Counter())


def http() -> str:
    """The routes of the control API and of the plan service, and the fields of their bodies."""
    nothing: Any = SimpleNamespace()
    apps = {
        "Control API of a fleet (`--control-port`)": control_app(nothing, KeyRing([])),
        "Plan service (`tokenfleet api`)": plan_app(KeyRing([]), [Extension(routers=[plan_router(nothing)])]),
    }
    says = (
        "Routes, what they answer, and the fields of their bodies. Each server's `/openapi.json` has the"
        " same for programs. The gateway's own port is vLLM's OpenAI API."
    )
    schemas = {name: app.openapi() for name, app in apps.items()}
    parts = [(name, _routes(schema)) for name, schema in schemas.items()]
    return page("HTTP", says, [*parts, *_bodies(schemas.values())])


def _bodies(schemas: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The fields of every body; those of plan.json have a page of their own."""
    of_plans = {name for name, value in vars(plan_file).items() if inspect.isclass(value)}
    bodies = {name: body for schema in schemas for name, body in schema["components"]["schemas"].items()}
    for name, body in sorted(bodies.items()):
        if name in of_plans or "properties" not in body:
            continue
        needed = body.get("required", ())
        rows = [
            (
                f"`{field}`",
                _json_type(of),
                of.get("description", ""),
                "" if field in needed else "may be absent",
            )
            for field, of in body["properties"].items()
        ]
        told = " ".join(body.get("description", "").split("\n\n")[0].split())
        yield f"Body: {name}", f"{told}\n\n{table(('field', 'type', 'meaning', ''), rows)}".strip()


def _json_type(of: dict[str, Any]) -> str:
    """A JSON schema's type in words."""
    if "$ref" in of:
        return f"`{of['$ref'].rsplit('/', 1)[-1]}`"
    if "enum" in of or "const" in of:
        return " or ".join(str(one) for one in of.get("enum", [of.get("const")]))
    for several in ("anyOf", "oneOf", "allOf"):
        if several in of:
            return " or ".join(dict.fromkeys(_json_type(one) for one in of[several]))
    kind = of.get("type", "any")
    if kind == "array":
        return f"list of {_json_type(of.get('items', {}))}"
    if kind == "object" and isinstance(of.get("additionalProperties"), dict):
        return f"object of {_json_type(of['additionalProperties'])}"
    names = {"string": "text", "integer": "whole number", "boolean": "true or false", "null": "null"}
    return names.get(kind, kind)


def _routes(schema: dict[str, Any]) -> str:
    rows = [
        (f"`{method.upper()} {path}`", (one.get("description") or one.get("summary", "")).split("\n\n")[0])
        for path, methods in schema["paths"].items()
        for method, one in methods.items()
    ]
    return table(("route", "answers"), rows)


def plan_document() -> str:
    """The fields of plan.json."""
    left, seen, parts = [PlanFile], set(), []
    while left:
        part = left.pop(0)
        if part in seen:
            continue
        seen.add(part)
        rows = []
        for name, field in part.model_fields.items():
            held = list(_parts_in(field.annotation))
            left += held
            links = ", ".join(f"[{one.__name__}](#{one.__name__.lower()})" for one in held)
            rows.append(
                (
                    f"`{field.alias or name}`",
                    links or _type(field.annotation),
                    field.description or "",
                    "" if field.is_required() else "may be absent",
                )
            )
        told = " ".join((part.__doc__ or "").split())
        parts.append((part.__name__, f"{told}\n\n{table(('field', 'type', 'meaning', ''), rows)}"))
    says = "The fields of `tokenfleet.plan/1`. Names end in their unit. A newer version only adds fields."
    return page("plan.json", says, parts)


def _parts_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _parts_in(inner)


def _type(annotation: Any) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(inner[0])
    if origin in (list, tuple):
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return f"object of {_type(inner[1])}"
    if origin is typing.Literal:
        return " or ".join(str(one) for one in inner)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(one.value for one in annotation)
    if inner:
        return " or ".join(_type(one) for one in inner if one is not type(None))
    names = {str: "text", float: "number", int: "whole number", bool: "true or false", Any: "any"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def files() -> str:
    """The files that people write, and the columns of the traces that are read."""

    def parts() -> Iterator[tuple[str, str]]:
        yield "Flags in a file: --config", inspect.cleandoc(flags.__doc__ or "")
        yield "Portfolio", inspect.cleandoc(portfolio_file.__doc__ or "")
        yield "Prices", inspect.cleandoc(prices.__doc__ or "")
        rows = [(one.name, f"`{one.arrival}`", f"`{one.prompt}`", f"`{one.output}`") for one in FORMATS]
        also = (
            "Readers of tools' own files turn them into these. [Traces](../traces.md) has an example of each."
        )
        yield "Traces", f"{table(('format', 'arrival', 'prompt tokens', 'output tokens'), rows)}\n\n{also}"

    return page("Files", "[Profiles](../../profiles/README.md) have a page of their own.", parts())


def python() -> str:
    """The public names of the library: signatures and docstrings."""
    import tokenfleet

    public = {name: getattr(tokenfleet, name) for name in tokenfleet.__all__ if name != "__version__"}
    own = {one.__name__: name for name, one in public.items()}

    def told(docstring: str | None) -> str:
        """A docstring with public names, and its examples as blocks."""
        parts = inspect.cleandoc(docstring or "").split("\n\n")
        text = "\n\n".join(f"```pycon\n{one}\n```" if one.startswith(">>>") else one for one in parts)
        for inner, name in own.items():
            text = re.sub(rf"\b{inner}\b", name, text)
        return text

    def parts() -> Iterator[tuple[str, str]]:
        for name, one in sorted(public.items(), key=lambda item: (item[0].lower(), item[0])):
            if not inspect.isclass(one):
                lines = str(inspect.signature(one)).partition(") ->")[0][1:].split(", ")
                call = "\n".join([f"tf.{name}(", *(f"    {line}," for line in lines), ")"]).replace("'", "")
                yield f"tf.{name}", f"```python\n{told(call)}\n```\n\n{told(one.__doc__)}"
                continue
            rows = [
                (f"`{member}`", told(inspect.getdoc(value)).split("\n\n")[0])
                for member, value in sorted(vars(one).items())
                if not member.startswith("_") and inspect.getdoc(value) and _is_of(value)
            ]
            members = f"\n\n{table(('member', 'is'), rows)}" if rows else ""
            yield f"tf.{name}", f"{told(inspect.getdoc(one))}{members}"

    return page("Python", "`import tokenfleet as tf`. [Python](../python.md) is the guide.", parts())


def _is_of(member: Any) -> bool:
    """Whether a member of a class is a method or a property, and no plain value."""
    return isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)


def profiles() -> str:
    """The models, GPUs and TP degrees of the profile library."""
    held: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for one in library():
        held[one.model][one.gpu].add(one.tp_degree)

    def parts() -> Iterator[tuple[str, str]]:
        for model, gpus in sorted(held.items()):
            rows = [(gpu, ", ".join(map(str, sorted(degrees)))) for gpu, degrees in sorted(gpus.items())]
            yield model, table(("GPU", "TP degrees"), rows)

    says = "The library has step times for these. [Profiles](../../profiles/README.md) has their sources."
    return page("Models and GPUs", says, parts())


PAGES = {
    "cli.md": command_line,
    "files.md": files,
    "python.md": python,
    "metrics.md": metrics,
    "http.md": http,
    "plan-json.md": plan_document,
    "models.md": profiles,
}


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, made in PAGES.items():
        (FOLDER / name).write_text(made(), encoding="utf-8")


if __name__ == "__main__":
    main()
