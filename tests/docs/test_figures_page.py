import runpy
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import Figure

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools/figures_page.py"))
PAGES = [page for page in TOOL["PAGES"] if "<!-- figures: " in page.read_text(encoding="utf-8")]
NAMES = [*TOOL["TABLES"], *(template.stem for template in TOOL["TEMPLATES"].glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_of_pages_are_those_of_the_files(page):
    text = page.read_text(encoding="utf-8")
    assert TOOL["rewritten"](text) == text, "run python tools/figures_page.py"


@pytest.mark.parametrize("name", NAMES)
def test_all_that_is_made_stands_on_a_page(name):
    assert any(f"<!-- figures: {name} -->" in page.read_text(encoding="utf-8") for page in PAGES)


def test_a_template_leaves_no_placeholder():
    assert not [page.name for page in PAGES if TOOL["CELL"].search(page.read_text())]
    texts = [template.read_text() for template in TOOL["TEMPLATES"].glob("*.md")]
    assert all("{" not in TOOL["CELL"].sub("", text) for text in texts)


def test_a_missed_goal_is_bold_and_what_no_file_holds_is_a_dash(tmp_path):
    figures = [
        Figure("natural, samples, ours / TRL's best", 1.5, "x", "higher", 2.0, (1.4, 1.6)),
        Figure("fixed, samples, ours / TRL's best", 1.5, "x", "higher"),
    ]
    results.write("end_to_end", figures, folder=tmp_path)
    page = "before\n<!-- figures: trl -->\nold\n<!-- end of figures -->\nafter\n"
    found = TOOL["rewritten"](page, tmp_path)
    assert "| samples a second | **1.50** (1.40 to 1.60) | – | 1.50 |" in found
    assert found.startswith("before\n<!-- figures: trl -->\n") and found.endswith("-->\nafter\n")
    assert "old" not in found and TOOL["rewritten"](found, tmp_path) == found


def test_what_rounds_to_nothing_has_no_sign_and_what_does_not_vary_no_spread(tmp_path):
    results.write("some", [Figure("idle", -0.001, "", spread=(-0.001, -0.001))], folder=tmp_path)
    assert TOOL["Files"](tmp_path)("some", "idle", ".0%", spread=True) == "0%"
