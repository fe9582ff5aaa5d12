"""Texts end to end, cut into blocks: nothing is lost but what is told, and nothing is refused."""

import importlib
import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_run import make_config

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.train_config import FIXED
from async_grpo.data.table import PairTable, blocks_of
from async_grpo.model.model_folder import ModelFacts
from async_grpo.run import data
from async_grpo.types import TrainingPair
from async_grpo.util.errors import ConfigError, DataError

sys.path.insert(0, str(Path(__file__).parents[2] / "sample-data"))
small_gpt2 = importlib.import_module("create_small_gpt2")
FACTS = ModelFacts("m", 257, 64, (0,), "hash")
END, A, B, C = 0, 65, 66, 67  # of its tokenizer


def tokens(pair):
    return [*pair.prompt_token_ids.tolist(), *pair.completion_token_ids.tolist()]


def document(ids):
    ids = np.asarray(ids, np.int32)
    return TrainingPair(ids[:1], ids[1:])


@given(
    texts=st.lists(st.lists(st.integers(0, 99), max_size=30), max_size=9), size=st.integers(2, 9)
)
def test_blocks_hold_all_tokens_in_order_but_a_lone_last_one(texts, size):
    whole = [token for text in texts for token in text]
    lone = len(whole) % size == 1
    blocks = list(PairTable.of(blocks_of(map(document, texts), size=size)))
    assert [token for block in blocks for token in tokens(block)] == whole[: len(whole) - lone]
    assert [len(tokens(block)) for block in blocks[:-1]] == [size] * (len(blocks) - 1)
    assert all(len(block.prompt_token_ids) == 1 for block in blocks)
    assert all(1 <= len(block.completion_token_ids) < size for block in blocks)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    small_gpt2.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def load(tmp_path, model):
    """The blocks of lines, or of the text of a file, of a supervised run with these options."""

    def load(lines, *, name="data.jsonl", held_out=False, **options):
        text = lines if isinstance(lines, str) else "\n".join(map(json.dumps, lines))
        (tmp_path / name).write_text(text)
        options = {"data_path": str(tmp_path / name), "block_size": 4} | options
        places = {"model_name_or_path": str(model), "eval_data_path": options["data_path"]}
        config = make_config(algorithm="sft", max_tokens_per_gpu=64, **places, **options)
        return [tokens(pair) for pair in data.load_pairs(config, FACTS)[held_out]]

    return load


def test_texts_are_closed_by_the_end_token_and_cut_where_a_block_is_full(load, caplog):
    lines = [{"text": "abca"}, {"text": " "}, {"text": "bb"}, {"text": "c", "id": 7}]
    with caplog.at_level(logging.INFO, "async_grpo"):
        assert load(lines) == [[A, B, C, A], [END, B, B, END], [C, END]]
        assert load([{"text": "a" * 99}], block_size=50) == [[A] * 50, [A] * 49 + [END]]
        assert load([{"text": "a" * 15}], block_size=5) == [[A] * 5] * 3
    said = [record.getMessage() for record in caplog.records]
    lost = "left out: {} blank texts, the last {} tokens"
    assert said[0] == f"4 texts with 10 tokens, in blocks of 4; {lost.format(1, 0)}"
    assert said[-1] == f"1 texts with 16 tokens, in blocks of 5; {lost.format(0, 1)}"


def test_token_ids_are_a_stream_as_they_are(load):
    assert load([{"completion_token_ids": [1, 2, 3]}] * 2) == [[1, 2, 3, 1], [2, 3]]


def test_a_txt_file_is_one_text_and_a_pattern_one_for_each_file(load, tmp_path):
    assert load("ab\ncab", name="a.txt", column_mapping="text=text")[0][:2] == [A, B]
    (tmp_path / "b.txt").write_text("cc")
    whole = load("ab", name="a.txt", data_path=str(tmp_path / "*.txt"), block_size=16)
    assert whole == [[A, B, END, C, C, END]]
    (tmp_path / "c.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"c\.txt must be text in UTF-8"):
        load("ab", name="a.txt", data_path=str(tmp_path / "*.txt"))


def test_held_out_texts_are_cut_the_same_way(load):
    assert load([{"text": "abc"}], held_out=True, block_size=2) == [[A, B], [C, END]]


def test_a_line_with_a_prompt_is_refused(load):
    for line in ({"input": "a", "completion": "b"}, {"text": "a", "completion": "b"}):
        with pytest.raises(DataError, match="expected a text alone, which --block-size cuts, got"):
            load([line])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": 1}, "--block-size must be at least 2"),
        ({"block_size": 8, "data_order": "window"}, "--block-size must be 0 with --data-order"),
        ({"block_size": 65, "max_tokens_per_gpu": 99}, "--block-size must be at most 64"),
        ({"block_size": 33, "max_tokens_per_gpu": 32}, "--block-size must be at most 32"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options, said, model):
    with pytest.raises(ConfigError, match=said):
        config = make_config(algorithm="sft", model_name_or_path=str(model), **options)
        data.parts_of(config, FACTS)


def test_blocks_are_of_runs_without_questions_and_stay_when_one_goes_on():
    with pytest.raises(ConfigError, match="--block-size needs --algorithm sft"):
        find_algorithm(make_config(block_size=8))
    assert "block_size" in FIXED
