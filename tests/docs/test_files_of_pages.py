"""Every run that a page writes as TOML is read by `launch` itself, every line of data as data."""

import json
import tomllib

import pytest
from pages import ROOT, all_blocks
from transformers import AutoTokenizer

from async_grpo.cli.launch_file import launch
from async_grpo.cli.local_run import RUN_OPTIONS, planned
from async_grpo.config.data_files import DataSource
from async_grpo.data.lines import load_records
from async_grpo.data.questions import LineReader

# What a block that shows some tables leaves to the reader.
USUAL = {
    "worker": '[[worker]]\nmodel_path = "sample-data/tiny-countdown"\n',
    "train": '[train]\nmodel_name_or_path = "sample-data/tiny-countdown"\n',
}


@pytest.mark.parametrize("block", all_blocks("toml"), ids=lambda block: block.place)
def test_every_file_of_a_page_is_a_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    given = tomllib.loads(block.text)
    rest = "".join(text for name, text in USUAL.items() if name not in given)
    if "data" not in given and "data_path" not in given.get("train", {}):
        rest = rest.replace("[train]", '[train]\ndata_path = "d.jsonl"')
    file = tmp_path / "run.toml"
    file.write_text(block.text + rest)
    options = launch.make_context("launch", [str(file)]).params
    run = planned(trust=True, **{name: options[name] for name in RUN_OPTIONS})
    assert run.train.places.model_name_or_path


@pytest.mark.parametrize("block", all_blocks("json"), ids=lambda block: block.place)
def test_every_line_of_data_of_a_page_is_a_question(block, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(block.text)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "sample-data/tiny-countdown")
    reader = LineReader(tokenizer=tokenizer, vocab_size=128, max_tokens=512)
    questions = list(load_records(DataSource(str(file)), reader.question))
    assert [q.input for q in questions] == [json.loads(line)["input"] for line in file.open()]
