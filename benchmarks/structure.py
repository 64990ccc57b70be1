"""Counts modules, folders and circles, what one more coefficient or option touches, and long functions.

Product code is what stands in `controlplane`, `dataplane` and `tokenfleet`; `--tree` counts another checkout.

* A module is a `.py` file other than `__init__.py`; a folder's modules are those directly in it.
* A module is in a circle when its imports lead back to it: all of them, also those within functions and
  under TYPE_CHECKING.
* Two folders import each other when a module of each imports one of the other. A folder and the one that
  holds it are counted apart: that is a package and its own root nouns.
* A coefficient touches the modules that name COEFFICIENT, the step model's newest, as a name or a string.
* A plan's option touches the modules that declare options: those in which at least half of OPTIONS are a
  field, a parameter or a keyword argument. (The console's form, in JavaScript, is not counted.)
* A function's lines are from `def` to its end; its parameters include `self`, but not `*args` nor `**kwargs`.
* Its cyclomatic complexity is 1, one for each if, loop, handler, case, conditional expression and
  comprehension, one for each condition of a comprehension, and one for each further operand of `and` or
  `or`. A nested function counts for itself.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOTS = ("controlplane", "dataplane", "tokenfleet")
COEFFICIENT = "per_prefill_step_s"
OPTIONS = {
    *("attainment", "budget_usd_per_h", "confidence", "drop_too_long", "max_gpus"),
    *("output_scale", "price_scale", "prompt_scale", "rate_scale", "reclaims_per_h"),
}
MAX_LINES, MAX_PARAMETERS, MAX_COMPLEXITY = 60, 10, 15
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class Row:
    """One figure: its value, the most it may be, and what it counts."""

    figure: str
    value: int
    bar: int | None
    counted: list[str]

    @property
    def ok(self) -> bool:
        return self.bar is None or self.value <= self.bar


def modules_of(tree: Path) -> dict[str, ast.Module]:
    """Every module of the product by its dotted name; packages under their own."""
    found = {}
    for path in sorted(p for root in ROOTS for p in (tree / root).rglob("*.py")):
        parts = path.relative_to(tree).with_suffix("").parts
        found[".".join(parts)] = ast.parse(path.read_text())
    return found


def is_package(module: str) -> bool:
    return module.endswith(".__init__")


def folder_of(module: str) -> str:
    return module.rpartition(".")[0]


def module_imports(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """For each module those of the product that it imports."""
    known = {m.removesuffix(".__init__"): m for m in modules}
    imports: dict[str, set[str]] = {}
    for module, content in modules.items():
        imports[module] = set()
        for target in imported(content):
            while target and target not in known:
                target = folder_of(target)
            if target:
                imports[module].add(known[target])
    return imports


def circles(modules: dict[str, ast.Module]) -> list[str]:
    """Modules whose imports lead back to them."""
    imports = module_imports(modules)

    def reaches(module: str) -> set[str]:
        reached: set[str] = set()
        ahead = list(imports[module])
        while ahead:
            if (one := ahead.pop()) not in reached:
                reached.add(one)
                ahead += imports[one]
        return reached

    return [module for module in imports if module in reaches(module)]


def folder_imports(modules: dict[str, ast.Module]) -> dict[tuple[str, str], list[str]]:
    """For each pair of folders (importing, imported), who imports whom."""
    pairs = defaultdict(list)
    for module, targets in module_imports(modules).items():
        for target in sorted(targets):
            if folder_of(target) != folder_of(module):
                pairs[folder_of(module), folder_of(target)].append(f"{module} -> {target}")
    return pairs


def imported(content: ast.Module) -> Iterator[str]:
    """Dotted names that a module imports, wherever in it."""
    for node in ast.walk(content):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def both_ways(modules: dict[str, ast.Module], nested: bool) -> list[str]:
    """Pairs of folders that import each other; `nested` ones are those of which one holds the other."""
    pairs = folder_imports(modules)
    mutual = sorted((a, b) for a, b in pairs if a < b and (b, a) in pairs)
    return [f"{a} <-> {b}" for a, b in mutual if b.startswith(f"{a}.") == nested]


def names_in(content: ast.Module) -> set[str]:
    """Every identifier and string of a module."""
    names = set()
    for node in ast.walk(content):
        for field in ("id", "attr", "arg", "value"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                names.add(value)
    return names


def declared_in(content: ast.Module) -> set[str]:
    """Fields, parameters and keyword arguments of a module."""
    names = set()
    for node in ast.walk(content):
        if isinstance(node, ast.arg | ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def functions_of(content: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(content) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def complexity(function: ast.AST) -> int:
    """Cyclomatic complexity as the module's docstring counts it."""
    total, open_nodes = 1, list(ast.iter_child_nodes(function))
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, SCOPES):
            continue
        total += isinstance(node, BRANCHES)
        if isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        open_nodes += ast.iter_child_nodes(node)
    return total


def sizes(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Functions beyond each limit, the furthest first."""
    beyond: dict[str, list[tuple[int, str]]] = {"lines": [], "parameters": [], "in complexity": []}
    for module, content in modules.items():
        for function in functions_of(content):
            where, arguments = f"{module}.{function.name}", function.args
            assert function.end_lineno is not None
            measured = {
                "lines": (function.end_lineno - function.lineno + 1, MAX_LINES),
                "parameters": (
                    len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs),
                    MAX_PARAMETERS,
                ),
                "in complexity": (complexity(function), MAX_COMPLEXITY),
            }
            for kind, (value, limit) in measured.items():
                if value > limit:
                    beyond[kind].append((value, where))
    return {kind: [f"{v} {where}" for v, where in sorted(rows)[::-1]] for kind, rows in beyond.items()}


def rows_of(tree: Path) -> list[Row]:
    """All figures of a checkout."""
    packages_too = modules_of(tree)
    modules = {m: content for m, content in packages_too.items() if not is_package(m)}
    per_folder = Counter(folder_of(m) for m in modules)
    fullest, most = per_folder.most_common(1)[0]
    names = {m: names_in(content) for m, content in packages_too.items()}
    coefficient = [m for m in names if COEFFICIENT in names[m]]
    declared = {m: OPTIONS & declared_in(content) for m, content in packages_too.items()}
    options = [m for m, some in declared.items() if 2 * len(some) >= len(OPTIONS)]
    beyond = sizes(packages_too)
    in_circles = circles(packages_too)
    pairs, nested = (both_ways(packages_too, nested) for nested in (False, True))
    return [
        Row("product modules", len(modules), 254, []),
        Row("modules in the fullest folder", most, 18, [fullest]),
        Row("modules in a circle of imports", len(in_circles), 0, in_circles),
        Row("folder pairs that import each other", len(pairs), 0, pairs),
        Row("packages and their own root that do", len(nested), None, nested),
        Row("modules that name a step coefficient", len(coefficient), 4, coefficient),
        Row("modules that declare a plan's options", len(options), 2, options),
        *(
            Row(f"functions over {limit} {kind}", len(beyond[kind]), bar, beyond[kind])
            for kind, limit, bar in (
                ("lines", MAX_LINES, 1),
                ("parameters", MAX_PARAMETERS, 0),
                ("in complexity", MAX_COMPLEXITY, 1),
            )
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=Path(__file__).parent.parent, help="checkout to count")
    parser.add_argument("--list", action="store_true", help="also print what each figure counts")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    asked = parser.parse_args()
    rows = rows_of(asked.tree)
    if asked.format == "json":
        print(json.dumps({"rows": [{**asdict(row), "ok": row.ok} for row in rows]}))
    else:
        for row in rows:
            bar = "" if row.bar is None else f"at most {row.bar}" + ("" if row.ok else "  MISSED")
            print(f"{row.figure:42} {row.value:4}  {bar}")
            for line in row.counted if asked.list else ():
                print(f"    {line}")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
