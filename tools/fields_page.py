"""Writes the tables of docs/fields.md out of the types: `python tools/fields_page.py`.

A field's type is its annotation, what it says the comment beside it or above it; a property's or
method's is its docstring's first paragraph. The sentences around the tables are written by hand. A
test compares the page with the types.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Literal, get_args, get_origin

from async_grpo.algorithms.base import LossSums, ScoreNeed
from async_grpo.environments.base import Policy, Services
from async_grpo.model.logprobs import TokenLogprobs
from async_grpo.types import Episode, Group, PackedMinibatch, Question, Row, Sample, Turn, Verdict
from async_grpo.types.metrics import Metric

PAGE = Path(__file__).parents[1] / "docs" / "fields.md"
SEEN = (
    Question, Turn, Episode, Row, Verdict, Policy, Services, Group, Sample, PackedMinibatch,
    TokenLogprobs, LossSums, Metric, ScoreNeed,
)  # fmt: skip
HEADER = ("| field | type | what |", "|---|---|---|")
LIBRARIES = re.compile(r"\b(?:torch|np)\.|\bNDArray\[np\.generic\]|NDArray\[np\.(\w+)\]")


def rewritten(page: str) -> str:
    """The page with the tables of the types as they are now."""
    introduction, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    texts = {
        each.split()[1]: re.sub(r"^\|.*\n", "", each, flags=re.M).rstrip() for each in sections
    }
    found = (texts.get(cls.__name__, f"## {cls.__name__}") for cls in SEEN)
    tables = ("\n".join([*HEADER, *rows(cls)]) for cls in SEEN)
    return introduction + "\n".join(
        f"{text}\n\n{table}\n" for text, table in zip(found, tables, strict=True)
    )


def rows(cls: type) -> Iterator[str]:
    """A row of each field, property and method that a user may read."""
    source = dedent(inspect.getsource(cls))
    comments = comments_of(source)
    [tree] = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(name)):
                yield row(name, kind_of(node.annotation, cls), said_of(node, comments))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if (
                name[0] != "_" or name == "__getitem__"
            ):
                yield row(called(node), kind_of(node.returns, cls), doc_of(node))


def row(name: str, kind: str, what: str) -> str:
    """One row of a table; a shape at the beginning of what it says is set as code."""
    what = (what[:1].lower() + what[1:]).rstrip(".")
    what = re.sub(r"^((?:, | or )?\[[\w, +]*\])+", lambda match: f"`{match[0]}`", what)
    cells = (f"`{name}`", f"`{kind}`", what)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def kind_of(annotation: ast.expr | None, cls: type) -> str:
    """The annotation as people read it: a name that stands for texts as these."""
    kind = ast.unparse(annotation) if annotation else ""
    if values := [*texts_in(vars(sys.modules[cls.__module__]).get(kind))]:
        return ", ".join(f'"{value}"' for value in values)
    return LIBRARIES.sub(lambda match: f"{match[1]} array" if match[1] else "", kind)


def texts_in(kind: object) -> Iterator[object]:
    """The values of a `Literal`, or of several."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        yield from (value for each in get_args(kind) for value in texts_in(each))


def called(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """How a method is called, or a property read."""
    if node.name == "__getitem__":
        return 'await services["name"](request)'
    decorators = {ast.unparse(each) for each in node.decorator_list}
    call = node.name if "property" in decorators else f"{node.name}({arguments(node.args)})"
    return f"await {call}" if isinstance(node, ast.AsyncFunctionDef) else call


def arguments(args: ast.arguments) -> str:
    """The arguments of a call, without their annotations."""
    for each in (*args.args, *args.kwonlyargs):
        each.annotation = None
    args.args = [each for each in args.args if each.arg not in ("self", "cls")]
    return ast.unparse(args)


def doc_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The first paragraph of its docstring."""
    return " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())


def comments_of(source: str) -> dict[int, tuple[bool, str]]:
    """{line: whether it is nothing else, its comment}."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = (token for token in tokens if token.type == tokenize.COMMENT)
    return {
        each.start[0]: (each.line.lstrip().startswith("#"), each.string.lstrip("# "))
        for each in found
    }


def said_of(node: ast.AnnAssign, comments: dict[int, tuple[bool, str]]) -> str:
    """The comment at the end of a field's line, or those above it."""
    if found := comments.get(node.end_lineno or node.lineno):
        return found[1]
    above: list[str] = []
    while (found := comments.get(node.lineno - 1 - len(above))) and found[0]:
        above.insert(0, found[1])
    return " ".join(above)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
