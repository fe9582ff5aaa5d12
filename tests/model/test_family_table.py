"""The table of families that `async-grpo models` prints is what the loader's check finds."""

import pytest
from click.testing import CliRunner
from tiny_families import PAGE, TABLE, families, verdict, with_table

from async_grpo.cli.main import models

ROWS = {line.split("\t")[0]: line.split("\t") for line in TABLE.read_text().splitlines()}
REMEDY = "run python tests/model/tiny_families.py"


@pytest.mark.parametrize("family", ["lfm2", "granite_swa", "minicpm3", "stablelm", "qwen3_moe"])
def test_the_table_says_what_the_check_finds(family):
    assert trained(family) == verdict(family), REMEDY


@pytest.mark.slow
def test_the_whole_table_is_what_the_check_finds():
    known = dict(families())
    assert {kind: row[1] for kind, row in ROWS.items()} == known, REMEDY
    assert {kind: trained(kind) for kind in ROWS} == {kind: verdict(kind) for kind in known}, REMEDY


def trained(family):
    return ROWS[family][2], ROWS[family][4]


def test_fifty_families_train_and_are_served_by_the_same_numbers():
    assert sum(row[2:4] == ["yes", "yes"] for row in ROWS.values()) >= 50


def test_no_row_is_without_a_verdict_on_its_engine():
    said = {row[0]: row[3] for row in ROWS.values() if row[2] == "yes"}
    assert all(each.startswith(("yes", "bf16", "differs by ", "no: ")) for each in said.values())


def test_the_page_has_the_table():
    page = PAGE.read_text()
    assert page == with_table(page, TABLE.read_text()), REMEDY


def test_the_command_lists_those_of_a_name():
    done = CliRunner().invoke(models, ["gemma3"])
    assert [line.split()[:3] for line in done.output.splitlines()] == [
        ["gemma3_text", "yes", "yes"],
        ["gemma3n_text", "yes", "differs"],
    ]
