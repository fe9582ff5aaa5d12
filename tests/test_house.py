"""What `make house` measures, on a package of six files whose numbers can be counted by hand."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "house.py"
HOUSE = runpy.run_path(str(TOOL))

FILES = {
    "async_grpo/__init__.py": '"""The package."""\n',
    "async_grpo/low.py": '''"""On the ground."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_grpo.cellar import base  # up, for a type


class Twin:
    """A record."""

    size: int = 0
    """lines that nobody
    counts as tokens' lines"""


def told(value: Any) -> Any:
    # the comment is no code

    return value
''',
    "async_grpo/cellar/__init__.py": "",
    "async_grpo/cellar/base.py": """from async_grpo import low
from async_grpo.cellar.sliver import Twin

LATER = "async_grpo.roof.base:Roof"


def twice() -> None:
    low.told(1)
    low.told(2)
""",
    "async_grpo/cellar/sliver.py": "class Twin:\n    pass\n",
    "async_grpo/roof/base.py": """def trained() -> None:
    from async_grpo.cellar.base import twice
    from async_grpo.config import TrainConfig

    twice()
""",
    "tests/test_one.py": """def test_one(monkeypatch):
    monkeypatch.setattr("a.b", 1)
    setattr(object, "name", 1)
    with patch("a.b"), mock.patch.object(a, "b"):
        pass
""",
}
MEASURES = {
    "lines of code": 22,
    "lines of the core": 18,
    "files": 6,
    "slivers": 1,
    "% imports": 31.8,
    "tokens a line": 5.25,  # 105, on 20 lines: those of the string below `size` are none
    "places": 3,
    "floors": 3,
    "arrows": 4,
    "arrows up": 2,
    "circles of places": 0,
    "circles of files": 0,
    "modules that import TrainConfig": 1,
    "Any": 2,
    "file names used twice": 1,
    "class names used twice": 1,
    "function lines, median": 4,
    "function lines, p90": 5,
    "function lines, max": 5,
    "patches of tests": 3,
}


@pytest.fixture
def root(tmp_path):
    write(tmp_path, FILES)
    return tmp_path


def write(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def set_budgets(root, budgets, add_ons=("roof",)):
    lines = [f"add_ons = {list(add_ons)}\n[budgets]"]
    lines += [f'"{name}" = [0, {allowed}, 0]' for name, allowed in budgets.items()]
    write(root, {"tools/house.toml": "\n".join(lines)})


def run(root, *options):
    command = [sys.executable, TOOL, "--root", root, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def measured(root):
    tests, add_ons = (root / "tests").rglob("*.py"), {root / "async_grpo" / "roof"}
    return HOUSE["measured"](HOUSE["read"](root), tests, add_ons)


def test_every_measure_is_what_one_counts_by_hand(root):
    assert measured(root) == MEASURES


def test_a_house_within_its_budgets_passes(root):
    set_budgets(root, MEASURES)
    checked = run(root, "--check")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "lines of add-ons                       4" in checked.stdout


@pytest.mark.parametrize("name", MEASURES)
def test_what_is_over_its_budget_is_said(root, name):
    allowed = MEASURES | {name: MEASURES[name] - 1}
    budgets = {name: [0, most, 0] for name, most in allowed.items()}
    value = f"{MEASURES[name]:g}, the budget is {allowed[name]:g}"
    assert HOUSE["over"](measured(root), budgets) == [f"{name}: {value}"]


def test_a_check_fails_for_one_measure_over_its_budget(root):
    set_budgets(root, MEASURES | {"files": 5})
    checked = run(root, "--check")
    assert checked.returncode == 1
    assert checked.stdout.splitlines()[-1] == "files: 6, the budget is 5"


@pytest.mark.parametrize(
    ("budgets", "name"),
    [({"files": 9}, "slivers"), (MEASURES | {"storeys": 2}, "storeys")],
    ids=["a measure without a budget", "a budget without a measure"],
)
def test_a_check_fails_where_budgets_and_measures_differ(root, budgets, name):
    set_budgets(root, budgets)
    checked = run(root, "--check")
    assert checked.returncode == 1
    assert f"{name}: is a measure or has a budget, but not both\n" in checked.stdout


def test_a_check_without_a_table_of_budgets_fails(root):
    assert run(root, "--check").returncode == 1


def test_an_add_on_that_has_moved_away_is_said(root):
    set_budgets(root, MEASURES | {"lines of the core": 99}, add_ons=("attic",))
    checked = run(root, "--check")
    assert checked.returncode == 1
    assert "attic: no such add-on" in checked.stdout


def test_a_circle_is_one_link_and_its_arrows_lead_up(root):
    write(root, {"async_grpo/low.py": "def f():\n    from async_grpo.roof import base\n"})
    found = measured(root)
    # cellar -> low -> roof -> cellar, and as many files
    names = ("floors", "arrows", "arrows up", "circles of places", "circles of files")
    assert [found[name] for name in names] == [1, 4, 4, 1, 1]


def test_a_file_with_two_importers_or_one_of_another_room_is_no_sliver(root):
    write(root, {"async_grpo/cellar/other.py": "import async_grpo.cellar.sliver\n"})
    assert measured(root)["slivers"] == 0
    write(root, {"async_grpo/cellar/other.py": "", "async_grpo/cellar/base.py": ""})
    write(root, {"async_grpo/roof/base.py": "from async_grpo.cellar import sliver\n"})
    assert measured(root)["slivers"] == 0


def test_slivers_begin_below_120_lines(root):
    for lines, slivers in ((119, 1), (120, 0)):
        write(root, {"async_grpo/cellar/sliver.py": "A = 1\n" * lines})
        assert measured(root)["slivers"] == slivers


def test_who_names_a_file_in_a_string_is_no_importer_of_it(root):
    write(root, {"async_grpo/cellar/base.py": "NAMED = 'async_grpo.cellar.sliver'\n"})
    assert measured(root)["slivers"] == 0


def test_the_init_of_a_room_is_no_sliver(root):
    write(root, {"async_grpo/cellar/base.py": "from async_grpo.cellar import anything\n"})
    assert measured(root)["slivers"] == 0


def test_private_classes_may_share_a_name(root):
    write(root, {"async_grpo/cellar/sliver.py": "class _Own: ...\n"})
    write(root, {"async_grpo/roof/base.py": "class _Own: ...\n"})
    assert measured(root)["class names used twice"] == 0


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("base.py", "from .sliver import Twin\nfrom .. import low\n"),
        ("__init__.py", "from . import sliver\nfrom ..low import Twin\n"),
    ],
)
def test_a_relative_import_is_an_import(root, path, text):
    write(root, {"async_grpo/cellar/base.py": "", f"async_grpo/cellar/{path}": text})
    found = measured(root)
    assert (found["slivers"], found["floors"]) == (1, 3)


def test_the_listings_name_files(root):
    set_budgets(root, MEASURES)
    assert run(root, "--slivers").stdout == (
        "   2  async_grpo.cellar.sliver  <-  async_grpo.cellar.base (6)\n"
    )
    drawn = run(root, "--arrows").stdout.splitlines()
    assert drawn[:2] == ["floor 3: roof", "floor 2: cellar"]
    assert "up: async_grpo.low -> async_grpo.cellar.base (type)" in drawn
    assert "up: async_grpo.cellar.base -> async_grpo.roof.base (string)" in drawn
