"""docs/fields.md is what the types say, and they say something of every field."""

import re
import runpy
from dataclasses import fields, is_dataclass

import pytest
from pages import ROOT

TOOL = runpy.run_path(str(ROOT / "tools/fields_page.py"))
PAGE = TOOL["PAGE"].read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def public(cls):
    """What a user may read of it: fields, properties, methods."""
    named = [each.name for each in fields(cls)] if is_dataclass(cls) else []
    return {*named, *(name for name in vars(cls) if not name.startswith("_"))}


def test_the_page_is_what_the_types_say():
    assert TOOL["rewritten"](PAGE) == PAGE, "run python tools/fields_page.py"


@pytest.mark.parametrize("cls", TOOL["SEEN"], ids=lambda cls: cls.__name__)
def test_every_field_has_one_line_with_its_type_and_what_it_is(cls):
    rows = re.findall(
        r"^\| `(?:await )?(\w+).*?` \| `.+?` \| (.*) \|$", SECTIONS[cls.__name__], re.MULTILINE
    )
    assert sorted({name for name, _ in rows} - {"services"}) == sorted(public(cls))
    assert len({name for name, _ in rows}) == len(rows)
    assert [name for name, what in rows if not what] == []


def test_the_units_of_a_metric_are_listed():
    assert '"nats", "1/s"` |' in SECTIONS["Metric"]
