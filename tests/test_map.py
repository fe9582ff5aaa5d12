"""What the map and the pages for developers name exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "async_grpo"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
CALL = re.compile(rf"\b({'|'.join(ROOMS)})/(\w+)\.(\w+)")
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")))
FILE = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|toml|md)|(?:async_grpo|tests|benchmarks)/[\w/]*/)`")
LINK = re.compile(r"\]\((?!http)([^)#]+)\)")


def defined(path: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, functions)}


def test_every_arrow_of_the_map_is_a_function_of_the_file_it_names():
    named = CALL.findall((PACKAGE / "__init__.py").read_text())
    assert len(named) > 30
    wrong = [
        f"{room}/{file}.{name}"
        for room, file, name in named
        if name not in defined(PACKAGE / room / f"{file}.py")
    ]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_is_there(page):
    text = (ROOT / page).read_text()
    linked = [(ROOT / page).parent / name for name in LINK.findall(text)]
    placed = ("path", "runs")  # the reader's own files
    named = {
        n
        for n in FILE.findall(text)
        if n.split("/")[0] not in placed and not re.search("NAME|ROOM", n)
    }
    missing = [str(path) for path in linked if not path.exists()]
    missing += [n for n in named if not (ROOT / n).exists() and not (PACKAGE / n).exists()]
    assert missing == []
