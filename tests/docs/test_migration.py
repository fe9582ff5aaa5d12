"""The table of TRL's options beside ours, against both sources; who types theirs is told ours."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from pages import ROOT

from async_grpo.cli.run_file import THEIRS, same_here
from async_grpo.config.option import flag, option_fields
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig

KEEP_THEIR_NAME = {"clip_ratio_c", "top_p"}  # an alias here, and an option of other commands
HEADER = "| TRL | its default | here | our default | beware |"


def rows():
    text = (ROOT / "docs/migration.md").read_text()
    lines = text.partition(HEADER)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def source_of(package, file):
    """Its text, unread by Python: both would import torch."""
    spec = importlib.util.find_spec(package)
    return ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())


def defaults_of(tree, name):
    """{field: default, or None} of a config class of theirs."""
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    defaults = {}
    for node in found.body:
        if isinstance(node, ast.AnnAssign):
            given = {k.arg: k.value for k in getattr(node.value, "keywords", ())}
            value = given.get("default")
            is_constant = value is not None and not isinstance(
                value, ast.Name | ast.Attribute | ast.Call
            )
            defaults[node.target.id] = ast.literal_eval(value) if is_constant else None
    return defaults


@pytest.fixture(scope="module")
def theirs():
    return {
        **defaults_of(source_of("transformers", "training_args.py"), "TrainingArguments"),
        **defaults_of(source_of("trl", "trainer/base_config.py"), "_BaseConfig"),
        **defaults_of(source_of("trl", "trainer/grpo_config.py"), "GRPOConfig"),
    }


@pytest.fixture(scope="module")
def ours():
    known = option_fields(WorkerConfig) | option_fields(TrainConfig)
    several = {name: each.metadata["several"] for name, each in known.items()}
    return {
        flag(name): several[name].text(each.default) if several[name] else each.default
        for name, each in known.items()
    }


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_of_the_table_is_what_both_sources_say(row, theirs, ours):
    names = [name.strip(" `") for name in row[0].split(",")]
    assert [name for name in names if name not in theirs] == []
    if row[1]:
        assert ast.literal_eval(row[1].strip("`")) == theirs[names[0]]
    if row[3]:
        option = row[2].rpartition("--")[2].strip("`")
        assert ast.literal_eval(row[3].strip("`")) == ours[f"--{option}"]


def test_the_page_names_the_release_that_is_compared():
    assert "trl==1.16.0" in (ROOT / "requirements/dev.txt").read_text()
    assert "TRL 1.16.0" in (ROOT / "docs/migration.md").read_text()


def named_rows():
    """(their names, our options in the other cells) of each row of both tables."""
    text = (ROOT / "docs/migration.md").read_text()
    lines = text.partition("## From TRL")[2].splitlines()
    cells = [line.strip("|").partition("|") for line in lines if line.startswith("| `")]
    for theirs, _, here in cells:
        names = [name.partition("=")[0] for name in re.findall(r"`([\w.]+(?:=\w+)?)`", theirs)]
        yield names, {each.replace("-", "_") for each in re.findall(r"`--([a-z0-9-]+)", here)}


def test_every_name_of_the_page_is_told_by_an_option_of_its_row():
    for names, ours_there in named_rows():
        for name in names:
            own = same_here(name)
            if own is None:
                assert name.rpartition(".")[2] in ours_there | KEEP_THEIR_NAME, name
            else:
                assert own in ours_there or not own, (name, own)


def test_every_name_that_is_told_stands_on_the_page_and_is_none_of_ours():
    there = {end for names, _ in named_rows() for name in names for end in ends_of(name)}
    assert {*THEIRS} - there == set()
    known = {*option_fields(WorkerConfig), *option_fields(TrainConfig), "nproc_per_node", ""}
    assert {*THEIRS.values()} <= known
    assert {*THEIRS} & known == set()


def ends_of(name):
    parts = name.split(".")
    return {".".join(parts[number:]) for number in range(len(parts))}
