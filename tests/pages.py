"""What README, CONTRIBUTING and the pages of docs/ say, taken apart as GitHub does it."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")))
LANGUAGES = ("bash", "toml", "python", "json", "text")  # text: shown, never run


@dataclass(frozen=True)
class Block:
    """A code block of a page: `title="run.toml"` behind its language names the file that it is."""

    page: str
    line: int  # of its first line of code
    language: str  # empty: it is indented, which says none
    title: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def tokens(page: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text("utf-8"))


def blocks(page: str) -> list[Block]:
    """The page's code blocks, in their order."""
    found = []
    for token in tokens(page):
        if token.type in ("fence", "code_block"):
            language, _, title = token.info.partition(" ")
            title = title.removeprefix('title="').removesuffix('"')
            line = token.map[0] + (2 if token.type == "fence" else 1)
            found.append(Block(page, line, language, title, token.content))
    return found


def all_blocks(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def nav() -> list[str]:
    """The pages of the site, in its order."""

    def leaves(item: object) -> list[str]:
        if isinstance(item, str):
            return [item]
        values = item.values() if isinstance(item, dict) else item
        return [page for value in values for page in leaves(value)]

    return leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
