"""The site of docs/: it builds without a warning, asks nobody else, and shows what GitHub shows."""

import doctest
import logging
import re
from collections import Counter
from html.parser import HTMLParser

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from pages import PAGES, ROOT, nav, tokens

SHOWN = {"table": "table_open", "li": "list_item_open", "ol": "ordered_list_open"}


class Tags(HTMLParser):
    """Counts the elements of a page's article."""

    def __init__(self, text):
        super().__init__()
        self.counts = Counter()
        self.feed(text.partition("<article")[2].partition("</article>")[0])

    def handle_starttag(self, tag, attrs):
        self.counts[tag] += 1


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("mkdocs").addHandler(handler)
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=False)
    build(config)
    logging.getLogger("mkdocs").removeHandler(handler)
    return folder, warnings


def test_links_that_leave_the_folder_of_the_pages_are_turned(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import site_hooks

    assert doctest.testmod(site_hooks) == (0, 2)


def html(folder, page):
    name = page.removesuffix(".md")
    return (folder / ("index.html" if name == "index" else f"{name}/index.html")).read_text()


def source_of(page):
    of_top = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
    return of_top.get(page, f"docs/{page}")


def test_the_site_builds_without_a_warning(site):
    assert site[1] == []


@pytest.mark.parametrize("page", [page for page in nav() if source_of(page) in PAGES])
def test_a_page_of_the_site_has_the_blocks_tables_and_lists_of_its_source(page, site):
    counts = Tags(html(site[0], page)).counts
    parsed = Counter(token.type for token in tokens(source_of(page)))
    wanted = {tag: parsed[name] for tag, name in SHOWN.items()}
    assert {tag: counts[tag] for tag in wanted} == wanted
    assert counts["pre"] == parsed["fence"] + parsed["code_block"]


def test_no_page_asks_another_host_for_anything(site):
    for file in site[0].glob("**/*.html"):
        asked = re.findall(
            r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?:[^\" >]+)", file.read_text()
        )
        assert [url for url in asked if "squidfunk" not in url] == [], file
