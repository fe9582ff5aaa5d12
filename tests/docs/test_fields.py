"""docs/fields.md names every field that user code sees, and none that is not there."""

import re
from dataclasses import fields, is_dataclass

import pytest
from pages import ROOT

from async_grpo.algorithms.base import LossSums, ScoreNeed
from async_grpo.environments.base import Policy, Services
from async_grpo.model.logprobs import TokenLogprobs
from async_grpo.types import Episode, Group, PackedMinibatch, Question, Row, Sample, Turn, Verdict
from async_grpo.types.metrics import UNITS, Metric

SEEN = (
    Question, Turn, Episode, Row, Verdict, Policy, Services, Group, Sample, PackedMinibatch,
    TokenLogprobs, LossSums, Metric, ScoreNeed,
)  # fmt: skip
PAGE = (ROOT / "docs/fields.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def public(cls):
    """What a user may read of it: fields, properties, methods."""
    named = [each.name for each in fields(cls)] if is_dataclass(cls) else []
    return {*named, *(name for name in vars(cls) if not name.startswith("_"))}


def test_the_page_is_of_the_classes_that_user_code_sees():
    assert [*SECTIONS] == [cls.__name__ for cls in SEEN]


@pytest.mark.parametrize("cls", SEEN, ids=lambda cls: cls.__name__)
def test_every_field_has_its_line_and_no_line_is_of_another(cls):
    cells = re.findall(r"^\| (`.*?) \|", SECTIONS[cls.__name__], re.MULTILINE)
    told = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(told) == len({*told})
    assert {*told} == public(cls)


def test_the_units_of_a_metric_are_those_that_it_takes():
    (line,) = (line for line in SECTIONS["Metric"].splitlines() if line.startswith("| `unit`"))
    assert {*re.findall(r"`([^`]+)`", line)} == {"unit", *UNITS} - {""}
