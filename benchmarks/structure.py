"""Counts lines, modules, classes and functions, and what one more coefficient or option touches; holds BARS.

Product code is what stands in `controlplane`, `dataplane` and `tokenfleet`; `--tree` counts another checkout.

* Lines are those of every `.py` file, with docstrings and blanks. A long module has over 300. Those of
  experiments and benchmarks are counted apart.
* A class's lines are from `class` to its end. A name is taken twice when two modules have a class of it.
* A module is a `.py` file other than `__init__.py`; a folder's modules are those directly in it.
* A module is in a circle when its imports lead back to it: all of them, also those within functions and
  under TYPE_CHECKING.
* Two folders import each other when a module of each imports one of the other. A folder and the one that
  holds it are counted apart: that is a package and its own root nouns.
* A coefficient touches the modules that name COEFFICIENT, the step model's newest.
* An option with a noun of its own touches the modules that name OPTION, in any spelling.
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
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOTS = ("controlplane", "dataplane", "tokenfleet")
STUDIES = ("experiments", "benchmarks")
COEFFICIENT = re.compile("per_prefill_sequence_s")
OPTION = re.compile("host[_-]?kv", re.IGNORECASE)
OPTIONS = {
    *("attainment", "budget_usd_per_h", "confidence", "drop_too_long", "max_gpus"),
    *("output_scale", "price_scale", "prompt_scale", "rate_scale", "reclaims_per_h"),
}
MAX_LINES, MAX_PARAMETERS, MAX_COMPLEXITY = 60, 10, 15
LONG_LINES = 300  # of a module, and of a class
# The ratchet: the most that each figure may be. A change that needs more raises the number here, in its own
# diff, and its message says what the lines buy. A change that needs less lowers it.
BARS = {
    "product lines": 77_352,
    "product modules": 353,
    "lines of experiments and benchmarks": 11_856,
    "modules over 300 lines": 46,
    "modules in the fullest folder": 19,
    "modules in a circle of imports": 0,
    "folder pairs that import each other": 0,
    "modules that name a step coefficient": 2,
    "modules that name an option": 9,
    "modules that declare a plan's options": 2,
    "classes over 300 lines": 0,
    "class names taken twice": 0,
    "functions over 60 lines": 1,
    "functions over 10 parameters": 0,
    "functions over 15 in complexity": 1,
}
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class Row:
    """One figure: its value, and what it counts."""

    figure: str
    value: int
    counted: list[str]

    @property
    def bar(self) -> int | None:
        return BARS.get(self.figure)

    @property
    def ok(self) -> bool:
        return self.bar is None or self.value <= self.bar


def sources_of(tree: Path, roots: Iterable[str] = ROOTS) -> dict[str, str]:
    """The text of every module below `roots` by its dotted name; packages under their own."""
    paths = sorted(path for root in roots for path in (tree / root).rglob("*.py"))
    return {".".join(p.relative_to(tree).with_suffix("").parts): p.read_text() for p in paths}


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


def declared_in(content: ast.Module) -> set[str]:
    """Fields, parameters and keyword arguments of a module."""
    names = set()
    for node in ast.walk(content):
        if isinstance(node, ast.arg | ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


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
        for function in ast.walk(content):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            where, arguments = f"{module}.{function.name}", function.args
            measured = {
                "lines": (lines_of(function), MAX_LINES),
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


def lines_of(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def classes_of(modules: dict[str, ast.Module]) -> tuple[list[str], list[str]]:
    """Classes over 300 lines, the longest first, and names that classes of several modules have."""
    long, homes = [], defaultdict(list)
    for module, content in modules.items():
        for node in ast.walk(content):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module)
                if lines_of(node) > LONG_LINES:
                    long.append((lines_of(node), f"{module}.{node.name}"))
    twice = [f"{name}: {', '.join(of)}" for name, of in sorted(homes.items()) if len(set(of)) > 1]
    return [f"{lines} {where}" for lines, where in sorted(long)[::-1]], twice


def rows_of(tree: Path) -> list[Row]:
    """All figures of a checkout."""
    sources = sources_of(tree)
    lines = {module: text.count("\n") for module, text in sources.items()}
    packages_too = {module: ast.parse(text) for module, text in sources.items()}
    modules = {m: content for m, content in packages_too.items() if not m.endswith(".__init__")}
    studies = sum(text.count("\n") for text in sources_of(tree, STUDIES).values())
    per_folder = Counter(folder_of(m) for m in modules)
    fullest, most = per_folder.most_common(1)[0]
    coefficient, option = ([m for m in sources if name.search(sources[m])] for name in (COEFFICIENT, OPTION))
    declared = {m: OPTIONS & declared_in(content) for m, content in packages_too.items()}
    options = [m for m, some in declared.items() if 2 * len(some) >= len(OPTIONS)]
    beyond = sizes(packages_too)
    in_circles = circles(packages_too)
    pairs, nested = (both_ways(packages_too, nested) for nested in (False, True))
    long = [f"{n} {m}" for n, m in sorted(((n, m) for m, n in lines.items()), reverse=True) if n > LONG_LINES]
    large, twice = classes_of(packages_too)
    return [
        Row("product lines", sum(lines.values()), []),
        Row("product modules", len(modules), []),
        Row("lines of experiments and benchmarks", studies, []),
        Row(f"modules over {LONG_LINES} lines", len(long), long),
        Row("modules in the fullest folder", most, [fullest]),
        Row("modules in a circle of imports", len(in_circles), in_circles),
        Row("folder pairs that import each other", len(pairs), pairs),
        Row("packages and their own root that do", len(nested), nested),
        Row("modules that name a step coefficient", len(coefficient), coefficient),
        Row("modules that name an option", len(option), option),
        Row("modules that declare a plan's options", len(options), options),
        Row(f"classes over {LONG_LINES} lines", len(large), large),
        Row("class names taken twice", len(twice), twice),
        *(
            Row(f"functions over {limit} {kind}", len(beyond[kind]), beyond[kind])
            for kind, limit in (
                ("lines", MAX_LINES),
                ("parameters", MAX_PARAMETERS),
                ("in complexity", MAX_COMPLEXITY),
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
        print(json.dumps({"rows": [{**asdict(row), "bar": row.bar, "ok": row.ok} for row in rows]}))
    else:
        for row in rows:
            bar = "" if row.bar is None else f"at most {row.bar}" + ("" if row.ok else "  MISSED")
            print(f"{row.figure:42} {row.value:6}  {bar}")
            for line in row.counted if asked.list else ():
                print(f"    {line}")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
