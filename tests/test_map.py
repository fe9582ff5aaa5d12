"""What the map and the pages for developers name exists."""

import ast
import re
from pathlib import Path

import pytest
from pages import LANGUAGES, PAGES, ROOT, blocks, nav

PACKAGE = ROOT / "async_grpo"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
CALL = re.compile(rf"\b({'|'.join(ROOMS)})/(\w+)\.(\w+)")
FILE = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|toml|md)|(?:async_grpo|tests|benchmarks)/[\w/]*/)`")
LINK = re.compile(r"(?<!\")\]\((?!http)([^)#]+)\)")


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
    placed = ("path", "runs", "mine")  # the reader's own files
    named = {
        n
        for n in FILE.findall(text)
        if n.split("/")[0] not in placed and not re.search("NAME|ROOM", n)
    }
    missing = [str(path) for path in linked if not path.exists()]
    missing += [n for n in named if not (ROOT / n).exists() and not (PACKAGE / n).exists()]
    assert missing == []


def test_every_page_stands_in_the_site_once():
    made = {"index.md", "contributing.md", "changelog.md"}  # of the top folder, tools/site_hooks.py
    written = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert sorted(nav()) == sorted([*written, *made]), "put the page into nav of mkdocs.yml"


def test_the_readme_leads_to_every_page():
    linked = {name.partition("#")[0] for name in LINK.findall((ROOT / "README.md").read_text())}
    assert [page for page in PAGES if page.startswith("docs/") and page not in linked] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_says_what_it_is(page):
    wrong = [
        f"{block.place}: {block.language or 'indented'}"
        for block in blocks(page)
        if block.language not in LANGUAGES
    ]
    assert wrong == [], f"fence it, as one of {LANGUAGES}; text is what nobody runs"
