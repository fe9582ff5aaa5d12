import datetime
import pickle

import numpy as np
import pytest

from async_grpo.checkpoint.resume import hash_data
from async_grpo.data.table import GivenTable, PairTable, QuestionTable
from async_grpo.types import GivenPair, Question, TrainingPair

ROW = {"input": "lone \ud800 é", "n": [1, {"x": None}], "when": datetime.date(2026, 1, 2)}
QUESTIONS = [
    Question(np.array([5, 2**31 - 1, 0], np.int32), "lone \ud800 é", "4", ROW),
    Question(np.array([], np.int32), "", None, {}),
    Question(np.array([7], np.int32), "a", "", {"input": "a"}),
]


def same(first, second):
    values = [(q.input_token_ids.tolist(), q.input, q.answer, q.columns) for q in (first, second)]
    return values[0] == values[1] and first.input_token_ids.dtype == np.int32


def carried(table):
    """As Ray carries it: the arrays beside the pickle, read-only and not copied."""
    buffers = []
    content = pickle.dumps(table, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(content, buffers=[bytes(buffer.raw()) for buffer in buffers]), content


def test_a_question_comes_back_as_it_was_whatever_its_line_holds():
    table = QuestionTable.of(iter(QUESTIONS))
    assert len(table) == 3
    assert all(map(same, table, QUESTIONS))
    assert table.longest_prompt == 3 and QuestionTable.of(()).longest_prompt == 0


def test_the_hash_of_a_table_is_that_of_its_records():
    assert hash_data(QuestionTable.of(QUESTIONS)) == hash_data(QUESTIONS)


@pytest.mark.parametrize("index", [3, -1])
def test_an_index_outside_is_an_error(index):
    with pytest.raises(IndexError, match=f"a table of 3 records has none at {index}"):
        QuestionTable.of(QUESTIONS)[index]


def test_what_is_pickled_of_a_table_does_not_grow_with_it():
    table, content = carried(QuestionTable.of(QUESTIONS * 1000))
    assert len(content) < 1000
    assert same(table[2999], QUESTIONS[2])


def test_pairs_come_back_as_they_were():
    pairs = [([1, 2], [3]), ([4], [5, 6, 7])]
    table = PairTable.of(
        TrainingPair(np.array(prompt, np.int32), np.array(completion, np.int32))
        for prompt, completion in pairs
    )
    found = [(p.prompt_token_ids.tolist(), p.completion_token_ids.tolist()) for p in table]
    assert found == pairs and hash_data(table) == hash_data(list(table))


def test_given_pairs_come_back_as_they_were():
    pairs = [
        GivenPair(question, np.array(ids, np.int32), text)
        for question, ids, text in zip(QUESTIONS, ([3], [], [4, 5, 6]), "abc", strict=True)
    ]
    table, _ = carried(GivenTable.of(pairs))
    for found, pair in zip(table, pairs, strict=True):
        assert same(found.question, pair.question) and found.completion == pair.completion
        assert found.completion_token_ids.tolist() == pair.completion_token_ids.tolist()
    assert (table.longest_prompt, table.longest) == (3, 4) and GivenTable.of(()).longest == 0


def test_the_hash_of_given_pairs_is_of_prompts_completions_and_columns():
    def hashed(prompt=(1, 2), completion=(3,), kind="sums"):
        question = Question(np.array(prompt, np.int32), "", None, {"dataset_type": kind})
        return hash_data([GivenPair(question, np.array(completion, np.int32), "")])

    others = {hashed((1, 3)), hashed(completion=(4,)), hashed(kind="products")}
    assert len(others) == 3 and hashed() not in others
