"""The pages of docs/reference, made from the code: commands, files, Python, metrics, HTTP, plan.json, models.

python -m harness.reference          writes the pages
"""

from __future__ import annotations

import inspect
import re
import shutil
import typing
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pydantic import BaseModel

from controlplane.perfmodel.profile import Profile
from dataplane.http.keys import KeyRing
from dataplane.http.server import Extension
from dataplane.live.control.api import control_app
from dataplane.live.control.step_times import StepTimes
from dataplane.live.gateway.metrics import Metrics
from tokenfleet.advise.published import AdviceGauges
from tokenfleet.cli import flags
from tokenfleet.cli.main import VERBS, command_of
from tokenfleet.pick.fleet import decision_times
from tokenfleet.pick.server import PickGauges
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
Pages = dict[str, str]  # the text of each, by its path in the folder

BODIES = {
    "http/fleet.md": (
        "HTTP: bodies of the control API",
        "The bodies that change a running fleet, and the refusals of both servers.",
        "EvacuationOrder MoveOrder NeedOrder RestartOrder RoleOrder ScaleOrder ShareOrder UpdateOrder"
        " MoveDecision NoteDecision ScaleDecision ErrorReply ErrorBody",
    ),
    "http/orders.md": (
        "HTTP: orders of plans",
        "The bodies that ask the plan service for a plan.",
        "PlanOrder Targets InlineTrace SampleTrace UploadedTrace HistoryTrace UsageTrace PortfolioOrder",
    ),
    "http/jobs.md": (
        "HTTP: jobs",
        "The plan service's answers about plan jobs, portfolio jobs and traces.",
        "JobList JobBrief Job PortfolioJobList PortfolioJobBrief PortfolioJob PortfolioBrief TraceSummary",
    ),
    "http/catalogue.md": (
        "HTTP: catalogue and scorecard",
        "The plan service's answers about what it knows, and about how kept plans did.",
        "Catalogue KnownModel KnownKind KnownGpu QuotedPrice KnownOption KnownHistory JobLimits Scorecard"
        " ServedPeriod Compared",
    ),
}
PARTS = {
    "plan-json.md": (
        "plan.json",
        "The fields of `tokenfleet.plan/1`. Names end in their unit. A newer version only adds fields.",
        "PlanFile",
    ),
    "plan-json/fleet.md": (
        "plan.json: fleets",
        "The parts of plan.json that have workers, their cost and the targets.",
        "FleetPart LatencyTargets PlannedClass RunsOn MixesReplayed Considered FleetCost ReplayedFleet"
        " PassedOver OtherPolicy",
    ),
    "plan-json/attainment.md": (
        "plan.json: attainment",
        "The parts of plan.json that say how well the fleet meets its targets, and what would change that.",
        "Attainment Quantiles BindingDetail OneFewer Headroom Plateau TraceSample Uncertainty AloneShares"
        " AloneNeeds Nearest",
    ),
    "plan-json/scaling.md": (
        "plan.json: scaling",
        "The parts of plan.json about the number of workers over time.",
        "ScalingRule AgentsLine Stretch ScheduleDetail Paid PlannedOrder ExpectedLoop Spares PlannedPhase",
    ),
    "plan-json/caches.md": (
        "plan.json: caches and moves",
        "The parts of plan.json about prefix caches, sessions, KV offload and moves.",
        "Affinity Reuse SessionCost Cliff Grown KvOffload PlannedMoves PlannedLink",
    ),
    "plan-json/inputs.md": (
        "plan.json: inputs, tables and plots",
        "The parts of plan.json that record its inputs, and the data of its tables and plots.",
        "PlanInputs PlannedProfile Shown Curves Counted Costed",
    ),
}


def table(head: Iterable[str], rows: Rows) -> str:
    """A Markdown table; a cell is one line, and its bars are escaped."""
    names = list(head)
    lines = [names, ["---"] * len(names), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def page(title: str, says: str, parts: Iterable[tuple[str, str]], up: str = "") -> str:
    """A page of headed parts; `up` leads from its folder to the reference's."""
    body = [f"# {title}", NAVIGATION.replace("](", f"]({up}"), f"{says} {MADE}"]
    for head, text in parts:
        body += [f"## {head}", text] if head else [text]
    return "\n\n".join(body) + "\n"


def command_line() -> Pages:
    """Every verb with its options: a page each, and a list of them."""
    parts: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, verb in VERBS.items():
        parts[name.split()[0]] += _command(name, command_of(verb))
    pages = {
        f"cli/{name}.md": page(f"tokenfleet {name}", _first(command_of(VERBS[name])), parts[name], "../")
        for name in parts
    }
    rows = [(f"[`{name}`](cli/{name}.md)", _first(command_of(VERBS[name]))) for name in parts]
    says = "Every verb of `tokenfleet`. Each also takes `--config FILE.yaml`, with the same names."
    pages["cli.md"] = page("Command line", says, [("", table(("verb", "purpose"), rows))])
    return pages


def _first(command: Any) -> str:
    """The first paragraph of a command's help, a sentence."""
    told = _cell((command.help or "").split("\n\n")[0])
    return told if told.endswith(".") else f"{told}."


def _command(name: str, command: Any) -> Iterator[tuple[str, str]]:
    context = command.make_context(name, [], resilient_parsing=True)
    shown = (one.get_help_record(context) for one in command.params if one.name != "help")
    rows = [(f"`{flags}`", says) for flags, says in filter(None, shown)]
    options = table(("option", "meaning"), rows) if rows else ""
    if " " in name:
        yield f"tokenfleet {name}", f"{_first(command)}\n\n{options}".strip()
    elif options:
        yield "", options
    for inner in getattr(command, "commands", {}).values():
        yield from _command(f"{name} {inner.name}", inner)


def metrics() -> Pages:
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
    tables = [(name, table(head, sorted(of))) for name, of in parts.items()]
    return {"metrics.md": page("Metrics", says, tables)}


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
    priced = SimpleNamespace(name="", usd_per_h=1.0)
    known = SimpleNamespace(worker_type=priced, published=1, has=1, arrivals=0, likely=(1, 1), wanted=1)
    gauges, advice = AdviceGauges(""), SimpleNamespace(held="", of_types=[known])
    gauges.advice = cast("Any", advice)
    return gauges


def _pick_gauges() -> PickGauges:
    """Those of a picker that follows KV events."""
    fleet: Any = SimpleNamespace(
        counts=Counter(),
        times=decision_times(),
        lengths=SimpleNamespace(counts={}, bytes_a_token=0.0),
        servers=(),
        admission=(),
    )
    unseen: Any = SimpleNamespace(counts={})
    return PickGauges(fleet, unseen, Counter())


def http() -> Pages:
    """The routes of the control API and of the plan service, and the fields of their bodies."""
    nothing: Any = SimpleNamespace()
    apps = {
        "Control API of a fleet (`--control-port`)": control_app(nothing, KeyRing([])),
        "Plan service (`tokenfleet api`)": plan_app(KeyRing([]), [Extension(routers=[plan_router(nothing)])]),
    }
    says = (
        "The routes, and what they answer. Each server's `/openapi.json` has the same for programs. The"
        " gateway's own port is vLLM's OpenAI API."
    )
    schemas = {name: app.openapi() for name, app in apps.items()}
    bodies = dict(pair for schema in schemas.values() for pair in _bodies(schema))
    rows = [
        (f"[{title.removeprefix('HTTP: ')}]({path})", names.replace(" ", ", "))
        for path, (title, _, names) in BODIES.items()
    ]
    parts = [(name, _routes(schema)) for name, schema in schemas.items()]
    parts.append(("Bodies", table(("page", "bodies"), rows)))
    return {"http.md": page("HTTP", says, parts), **_divided(BODIES, bodies)}


def _divided(division: dict[str, tuple[str, str, str]], parts: dict[str, str]) -> Pages:
    """Every part on its page; a part that the division lacks, or only it has, is an error."""
    named = [name for _, _, names in division.values() for name in names.split()]
    if sorted(named) != sorted(parts):
        raise KeyError(f"no page has, or has in vain: {', '.join(sorted({*named} ^ {*parts}))}")
    return {
        path: page(title, says, [(name, parts[name]) for name in names.split()], "../" * path.count("/"))
        for path, (title, says, names) in division.items()
    }


def _bodies(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields of every body; those of plan.json have pages of their own."""
    of_plans = {name for name, value in vars(plan_file).items() if inspect.isclass(value)}
    for name, body in schema["components"]["schemas"].items():
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
        yield name, f"{told}\n\n{table(('field', 'type', 'meaning', ''), rows)}".strip()


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


def plan_document() -> Pages:
    """The fields of plan.json: the document's, and its parts' on pages by subject."""
    place = {name: path for path, (_, _, names) in PARTS.items() for name in names.split()}
    left: list[type[BaseModel]] = [PlanFile]
    parts: dict[str, str] = {}
    while left:
        part = left.pop(0)
        if part.__name__ in parts:
            continue
        up = "../" * place.get(part.__name__, "").count("/")
        rows = []
        for name, field in part.model_fields.items():
            held = list(_parts_in(field.annotation))
            left += held
            links = ", ".join(
                f"[{one}]({up}{place.get(one)}#{one.lower()})" for one in (inner.__name__ for inner in held)
            )
            rows.append(
                (
                    f"`{field.alias or name}`",
                    links or _type(field.annotation),
                    field.description or "",
                    "" if field.is_required() else "may be absent",
                )
            )
        told = " ".join((part.__doc__ or "").split())
        parts[part.__name__] = f"{told}\n\n{table(('field', 'type', 'meaning', ''), rows)}"
    return _divided(PARTS, parts)


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


def files() -> Pages:
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

    return {
        "files.md": page("Files", "[Profiles](../../profiles/README.md) have a page of their own.", parts())
    }


def python() -> Pages:
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

    says = "`import tokenfleet as tf`. [Python](../python.md) is the guide."
    return {"python.md": page("Python", says, parts())}


def _is_of(member: Any) -> bool:
    """Whether a member of a class is a method or a property, and no plain value."""
    return isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)


def profiles() -> Pages:
    """The models of the profile library by family, with the TP degrees on each GPU."""
    families: defaultdict[str, list[Profile]] = defaultdict(list)
    for one in library():
        families[re.split(r"[-\d]", one.model)[0]].append(one)

    def parts() -> Iterator[tuple[str, str]]:
        for family, held in sorted(families.items()):
            gpus = sorted({one.gpu for one in held})
            rows = []
            for model in sorted({one.model for one in held}):
                degrees = {(one.gpu, one.tp_degree) for one in held if one.model == model}
                rows.append(
                    (model, *(",".join(str(n) for on, n in sorted(degrees) if on == gpu) for gpu in gpus))
                )
            yield family, table(("model", *gpus), rows)

    says = (
        "The library has step times for these models, at these TP degrees of each GPU."
        " [Profiles](../../profiles/README.md) has their sources."
    )
    return {"models.md": page("Models and GPUs", says, parts())}


AREAS = {
    "cli": command_line,
    "files": files,
    "python": python,
    "metrics": metrics,
    "http": http,
    "plan-json": plan_document,
    "models": profiles,
}


def main() -> None:
    """Write the pages of each area: one of its name, and others in a folder of its name."""
    for area, made in AREAS.items():
        shutil.rmtree(FOLDER / area, ignore_errors=True)
        for name, text in made().items():
            (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
            (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
