"""A line that is written of an output is read again as exactly these tokens, or is not written."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_questions import LetterTokenizer

from async_grpo.data.questions import LineReader
from async_grpo.run.written_pairs import PairCount, PairRules
from async_grpo.types import Question, Turn, Verdict


def turn(text="cd", ids=(12, 13, 2), finish_reason="stop"):
    return Turn(np.array(ids, np.int32), np.zeros(0, np.float32), (), finish_reason, text)


def verdict(reward, status="scored"):
    return Verdict(status, reward, None, "scripted", "", 0.1)


def question(**columns):
    line = {"input": "ab", **columns}
    return Question(np.array([10, 11], np.int32), "ab", None, line)


RULES = PairRules(min_reward=0.5, has_token_ids=True)
READER = LineReader(tokenizer=LetterTokenizer(), vocab_size=100, max_tokens=100)


@pytest.mark.parametrize(
    ("output", "graded", "why"),
    [
        (turn(), None, ""),
        (turn(), verdict(0.5), ""),
        (turn(), verdict(0.4), "reward below 0.5"),
        (turn(), verdict(0.0, "unscorable"), "reward below 0.5"),
        (turn(), verdict(9.0, "error"), "not graded, for the reward failed"),
        (turn(finish_reason="length"), verdict(1.0), "cut at --max-generation-tokens"),
        (turn(text=" \n", ids=(2,)), None, "empty"),
    ],
)
def test_an_output_is_kept_or_left_out_for_one_reason(output, graded, why):
    assert RULES.why_rejected(output, graded) == why
    count = PairCount()
    assert count.see(why) == (not why)
    assert (count.num_kept, dict(count.rejected)) == ((0, {why: 1}) if why else (1, {}))


@given(text=st.text(st.characters()), ids=st.lists(st.integers(0, 99), min_size=1), kind=st.text())
def test_whatever_a_model_says_training_reads_the_very_tokens(text, ids, kind):
    written = RULES.line(question(dataset_type=kind), turn(text, ids), verdict(1.0))
    assert written.endswith(b"\n") and written.count(b"\n") == 1
    row = json.loads(written)
    assert row["completion"] == text
    pair, given_pair = READER.pair(row), READER.given({**row, "completion": "c"})
    assert pair.prompt_token_ids.tolist() == [10, 11]
    assert pair.completion_token_ids.tolist() == ids
    assert given_pair.question.columns["dataset_type"] == kind
    assert row["reward"] == 1.0


def test_without_token_ids_the_student_s_tokenizer_reads_the_text():
    rules = PairRules(min_reward=0, has_token_ids=False)
    old = question(completion="zz", completion_token_ids=[35, 35])
    row = json.loads(rules.line(old, turn("cd", (77, 78)), None))
    assert row == {"input": "ab", "completion": "cd"}
    assert READER.pair(row).completion_token_ids.tolist() == [12, 13, 2]


def test_a_mapped_completion_is_written_where_the_mapping_reads_it():
    mapping = {"completion": "solution"}
    rules = PairRules(min_reward=0, has_token_ids=False, mapping=mapping)
    row = json.loads(rules.line(question(solution="old"), turn("cd"), None))
    assert row == {"input": "ab", "solution": "cd"}
