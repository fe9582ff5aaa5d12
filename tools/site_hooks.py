"""What mkdocs must be told of this repository: pages outside of docs/, and links that leave it.

README.md, CONTRIBUTING.md and CHANGELOG.md are pages of the site as they are. A link to another
file of the repository, which the site does not hold, becomes its text.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

TOP = Path(__file__).parents[1]
OF_TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^][]*\])*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages that lie in the top folder."""
    for name, page in OF_TOP.items():
        text = (TOP / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=with_links_of_site(text, folder="")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turns links of a page of docs/ to pages of the top folder."""
    is_generated = page.file.src_uri in OF_TOP.values()
    return markdown if is_generated else with_links_of_site(markdown, folder="docs")


def with_links_of_site(text: str, *, folder: str) -> str:
    """The text of a page that lies in `folder` with links to what the site has.

    >>> with_links_of_site("[a](docs/a.md#b), [c](CONTRIBUTING.md) and [`d`](d.py)", folder="")
    '[a](a.md#b), [c](contributing.md) and `d`'
    >>> with_links_of_site("[a](a.md), [c](../CONTRIBUTING.md)", folder="docs")
    '[a](a.md), [c](contributing.md)'
    """

    def turned(match: re.Match[str]) -> str:
        image, label, target, anchor = match.groups(default="")
        path = _normal(PurePosixPath(folder) / target)
        if path in OF_TOP:
            return f"{image}[{label}]({OF_TOP[path]}{anchor})"
        if path.startswith("docs/"):
            return f"{image}[{label}]({path.removeprefix('docs/')}{anchor})"
        return label

    return LINK.sub(turned, text)


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)
