"""Measure the house: its lines, files, floors and arrows. `make house` holds each to its budget.

    python tools/house.py             every measure beside its budget, and lines by room
    python tools/house.py --check     every measure, and what is over; exit code 1 if any is
    python tools/house.py --slivers   files that one other file of their room imports
    python tools/house.py --arrows    floors, places that import each other, arrows up

A line of code bears a token: imports count, docstrings, comments and blanks do not. A *place* is a
room (a folder of the package) or a file beside the rooms. An *arrow* leads from a place to another
that it imports: also in a function, under `TYPE_CHECKING`, or by a dotted name in a string. A
place's *floor* is the length of the longest chain of run-time imports that begins there; places of
a circle share one. An arrow is *up* if it does not lead to a lower floor. A *sliver* has less than
120 lines of code and one importer, which is of the same room; a string is no importer.

Budgets and add-ons stand in house.toml beside this file. Whoever needs more raises a budget there,
and says why in the commit.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

PACKAGE = "async_grpo"
SLIVER_LINES = 120
RUN_TIME, TYPE, STRING = "run time", "type", "string"
WAYS = frozenset({RUN_TIME, TYPE, STRING})
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER),
    *(tokenize.INDENT, tokenize.DEDENT),
}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
Graph = dict[str, set[str]]
Pairs = dict[tuple[str, str], list[tuple[str, str]]]


@dataclass
class Module:
    """One file of the package."""

    name: str
    path: Path
    tree: ast.Module
    code: int = 0
    """lines that bear a token"""
    attribute_docs: int = 0
    """those of them that are strings which stand alone, below a field"""
    imports: int = 0
    """those of them that import"""
    tokens: int = 0
    """a docstring is one"""
    to: dict[str, set[str]] = field(default_factory=dict)
    """{module of the package: how it is imported}"""

    @property
    def place(self) -> str:
        return self.name.split(".")[1] if "." in self.name else self.name

    @property
    def is_init(self) -> bool:
        return self.path.name == "__init__.py"


def read(root: Path) -> dict[str, Module]:
    """{dotted name: module} of the package below `root`."""
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, ast.parse(text))
        _count_lines(modules[name], text)
    for module in modules.values():
        for name, way in _imported(module, module.tree, RUN_TIME, modules):
            if name != module.name:
                module.to.setdefault(name, set()).add(way)
    return modules


def _count_lines(module: Module, text: str) -> None:
    docs, alone, imports, bearing = set[int](), set[int](), set[int](), set[int]()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(_lines(node))
        elif isinstance(node, ast.Expr) and _is_text(node):
            alone.update(_lines(node))
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTION) and node.body:
            docs.update(_lines(node.body[0]) if _is_text(node.body[0]) else ())
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            bearing.update(range(token.start[0], token.end[0] + 1))
            module.tokens += 1
    module.code, module.imports = len(bearing - docs), len(imports)
    module.attribute_docs = len(alone - docs)


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def _imported(
    module: Module, node: ast.AST, way: str, modules: Collection[str]
) -> Iterator[tuple[str, str]]:
    """(module of the package, how it is imported), of all that stands below `node`."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((name, way) for name in _targets(module, node, modules))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        name = node.value.replace(":", ".")
        while name.startswith(f"{PACKAGE}.") and name not in modules:
            name = name.rpartition(".")[0]
        if name.startswith(f"{PACKAGE}."):
            yield name, STRING
    else:
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            only_type = guarded and child in getattr(node, "body", ())
            yield from _imported(module, child, TYPE if only_type else way, modules)


def _targets(
    module: Module, node: ast.Import | ast.ImportFrom, modules: Collection[str]
) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
        return
    above = module.name.split(".")
    above = above[: len(above) - node.level + module.is_init] if node.level else []
    base = ".".join([*above, *([node.module] if node.module else [])])
    for alias in node.names:
        name = f"{base}.{alias.name}"
        yield from (one for one in ([name] if name in modules else [base]) if one in modules)


def arrows(modules: dict[str, Module], ways: Collection[str] = WAYS) -> Pairs:
    """{(place, place that it imports): modules that do and are}."""
    found = defaultdict(list)
    for module in modules.values():
        for name, used in module.to.items():
            if used.intersection(ways) and modules[name].place != module.place:
                found[module.place, modules[name].place].append((module.name, name))
    return dict(found)


def circles(graph: Graph) -> list[list[str]]:
    """Nodes that lead to each other."""
    below = {node: _reached(graph, node) for node in graph}
    found = {frozenset(b for b in below[a] if a in below[b]) for a in graph if a in below[a]}
    return sorted(map(sorted, found))


def _reached(graph: Graph, start: str) -> set[str]:
    seen, waiting = set[str](), [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting.extend(new)
    return seen


def floors(graph: Graph) -> dict[str, int]:
    """{place: the length of the longest chain that it begins}; a circle is one link."""
    link = {node: frozenset({node}) for node in graph}
    link |= {node: frozenset(circle) for circle in circles(graph) for node in circle}
    height: dict[frozenset[str], int] = {}

    def climb(nodes: frozenset[str]) -> int:
        if nodes not in height:
            below = {link[to] for node in nodes for to in graph[node]} - {nodes}
            height[nodes] = 1 + max(map(climb, below), default=0)
        return height[nodes]

    return {node: climb(link[node]) for node in graph}


def places(modules: dict[str, Module]) -> Graph:
    """{place: places that it imports at run time}."""
    graph: Graph = {module.place: set() for module in modules.values()}
    for place, to in arrows(modules, {RUN_TIME}):
        graph[place].add(to)
    return graph


def upward(modules: dict[str, Module]) -> Pairs:
    """The arrows that do not lead to a lower floor."""
    floor = floors(places(modules))
    return {(a, b): files for (a, b), files in arrows(modules).items() if floor[a] <= floor[b]}


def slivers(modules: dict[str, Module]) -> list[tuple[Module, Module]]:
    """(sliver, its importer), by name."""
    importers = defaultdict(list)
    for module in modules.values():
        for name in (name for name, ways in module.to.items() if ways != {STRING}):
            importers[name].append(module)
    small = (m for m in modules.values() if m.code < SLIVER_LINES and not m.is_init)
    alone = ((module, *importers[module.name]) for module in small)
    return [(ms[0], ms[1]) for ms in alone if len(ms) == 2 and ms[0].place == ms[1].place]


def measured(
    modules: dict[str, Module], tests: Iterable[Path], add_ons: Collection[Path]
) -> dict[str, float]:
    """{measure: its value}, in the order in which they are printed.

    add_ons: files and folders that are none of the core
    """
    every = modules.values()
    code = sum(module.code for module in every)
    core = sum(m.code for m in every if not {m.path, *m.path.parents}.intersection(add_ons))
    undocumented = code - sum(module.attribute_docs for module in every)
    return {
        "lines of code": code,
        "lines of the core": core,
        "files": len(modules),
        "slivers": len(slivers(modules)),
        "% imports": round(100 * sum(module.imports for module in every) / code, 1),
        "tokens a line": round(sum(module.tokens for module in every) / undocumented, 2),
        **_shape(modules),
        **_habits(modules),
        "patches of tests": sum(map(_patches, tests)),
    }


def _shape(modules: dict[str, Module]) -> dict[str, float]:
    graph = places(modules)
    files = {
        module.name: {name for name, ways in module.to.items() if RUN_TIME in ways}
        for module in modules.values()
    }
    return {
        "places": len(graph) - 1,  # the package's own __init__ has arrows, but is no place
        "floors": max(floors(graph).values()),
        "arrows": len(arrows(modules)),
        "arrows up": len(upward(modules)),
        "circles of places": len(circles(graph)),
        "circles of files": len(circles(files)),
    }


def _habits(modules: dict[str, Module]) -> dict[str, float]:
    nodes = [(module, node) for module in modules.values() for node in ast.walk(module.tree)]
    imported = ((m, alias) for m, n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names)
    stems = [module.path.stem for module in modules.values() if not module.is_init]
    statements = [node for module in modules.values() for node in module.tree.body]
    classes = [node.name for node in statements if isinstance(node, ast.ClassDef)]
    lengths = sorted(len(_lines(node)) for _, node in nodes if isinstance(node, FUNCTION)) or [0]
    return {
        "modules that import TrainConfig": len(
            {module.name for module, alias in imported if alias.name == "TrainConfig"}
        ),
        "Any": sum(isinstance(node, ast.Name) and node.id == "Any" for _, node in nodes),
        "file names used twice": _used_twice(stems),
        "class names used twice": _used_twice(c for c in classes if not c.startswith("_")),
        "function lines, median": median(lengths),
        "function lines, p90": lengths[int(0.9 * len(lengths))],
        "function lines, max": lengths[-1],
    }


def _used_twice(names: Iterable[str]) -> int:
    return sum(times > 1 for times in Counter(names).values())


def _patches(path: Path) -> int:
    """Calls of `monkeypatch.setattr`, `mock.patch` and `mock.patch.object`, by whatever name."""
    calls = (n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call))
    called = [ast.unparse(call.func) for call in calls]
    return sum(name.endswith((".setattr", ".patch", "patch.object")) for name in called) + (
        called.count("patch")
    )


def over(measures: dict[str, float], budgets: dict[str, list[float]]) -> list[str]:
    """A sentence for each measure that is above its budget, or has none, and the reverse."""
    unpaired = sorted(measures.keys() ^ budgets.keys())
    return [f"{name}: is a measure or has a budget, but not both" for name in unpaired] + [
        f"{name}: {measures[name]:g}, the budget is {allowed:g}"
        for name, (_, allowed, _) in budgets.items()
        if measures.get(name, 0) > allowed
    ]


def table(measures: dict[str, float], budgets: dict[str, list[float]]) -> Iterator[str]:
    """The measures beside their budgets."""
    yield f"{'':32}{'now':>8}{'start':>8}{'budget':>8}{'goal':>8}"
    for name, value in measures.items():
        yield f"{name:32}{value:8g}" + "".join(f"{number:8g}" for number in budgets.get(name, []))
    yield f"{'lines of add-ons':32}{measures['lines of code'] - measures['lines of the core']:8g}"


def rooms(modules: dict[str, Module]) -> Iterator[str]:
    """Lines of code and files of each place, the largest first."""
    code, files = Counter[str](), Counter(module.place for module in modules.values())
    for module in modules.values():
        code[module.place] += module.code
    yield f"\n{'room':32}{'code':>8}{'files':>8}"
    yield from (f"{place:32}{lines:8}{files[place]:8}" for place, lines in code.most_common())


def sliver_lines(modules: dict[str, Module]) -> Iterator[str]:
    for module, importer in slivers(modules):
        yield f"{module.code:4}  {module.name}  <-  {importer.name} ({importer.code})"


def arrow_lines(modules: dict[str, Module]) -> Iterator[str]:
    standing = defaultdict(list)
    for place, floor in floors(places(modules)).items():
        standing[floor].append(place)
    for floor in sorted(standing, reverse=True):
        yield f"floor {floor}: {', '.join(standing[floor])}"
    for (place, to), files in sorted(arrows(modules).items()):
        yield f"{place} -> {to}: {len(files)}"
    for name, to in (pair for files in upward(modules).values() for pair in files):
        yield f"up: {name} -> {to} ({', '.join(sorted(modules[name].to[to]))})"


def main() -> int:
    parser = ArgumentParser(description="how large the house is")
    for name in ("--check", "--slivers", "--arrows"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    given = parser.parse_args()
    modules = read(given.root)
    table_of = given.root / "tools" / "house.toml"
    house: dict[str, Any] = {"add_ons": [], "budgets": {}}
    if table_of.exists():
        house = tomllib.loads(table_of.read_text(encoding="utf-8"))
    add_ons = {given.root / PACKAGE / path for path in house["add_ons"]}
    wrong: list[str] = []
    if given.slivers or given.arrows:
        said = [*(sliver_lines(modules) if given.slivers else arrow_lines(modules))]
    else:
        measures = measured(modules, (given.root / "tests").rglob("*.py"), add_ons)
        wrong = [f"{path}: no such add-on" for path in sorted(add_ons) if not path.exists()]
        wrong += over(measures, house["budgets"])
        said = [*table(measures, house["budgets"]), *(wrong if given.check else rooms(modules))]
    sys.stdout.writelines(f"{line}\n" for line in said)
    return int(given.check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
