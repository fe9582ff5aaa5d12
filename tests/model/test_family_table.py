"""The table of families that `async-grpo models` prints is what the loader's check finds."""

import pytest
from click.testing import CliRunner
from tiny_families import PAGE, TABLE, families, verdict, with_table

from async_grpo.cli.main import models

ROWS = {line.split("\t")[0]: line.split("\t") for line in TABLE.read_text().splitlines()}
REMEDY = "run python tests/model/tiny_families.py"


@pytest.mark.parametrize("family", ["lfm2", "granite_swa", "minicpm3", "stablelm", "qwen3_moe"])
def test_the_table_says_what_the_check_finds(family):
    assert ROWS[family][2:] == [*verdict(family)], REMEDY


@pytest.mark.slow
def test_the_whole_table_is_what_the_check_finds():
    assert {kind: [kind, name, *verdict(kind)] for kind, name in families()} == ROWS, REMEDY


def test_forty_families_train():
    assert sum(trains == "yes" for _, _, trains, _ in ROWS.values()) >= 40


def test_the_page_has_the_table():
    page = PAGE.read_text()
    assert page == with_table(page, TABLE.read_text()), REMEDY


def test_the_command_lists_those_of_a_name():
    done = CliRunner().invoke(models, ["lfm2"])
    assert [line.split()[:2] for line in done.output.splitlines()] == [
        ["lfm2", "yes"],
        ["lfm2_moe", "no"],
    ]
