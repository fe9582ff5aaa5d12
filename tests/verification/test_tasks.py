import datetime
import json
from decimal import Decimal

import numpy as np
import pytest

from async_grpo.verification.tasks import (
    FrameError,
    Outcome,
    decode,
    encode_answer,
    encode_request,
    portable,
    read_answer,
    read_answers,
)

GOOD = {
    "id": "7",
    "status": "scored",
    "reward": 0.5,
    "format_reward": None,
    "reason": "",
    "max_reward": 1.0,
    "cause": "",
    "place": "",
}


def test_an_outcome_comes_back_as_it_was_sent():
    outcome = Outcome("mine", "error", 0.0, 0.25, "no", 2.0, "connection", "OSError mine.py:3")
    said = encode_answer("7", outcome).decode()
    assert read_answers(said, task_ids=["7"], adapter="mine") == [outcome]


@pytest.mark.parametrize(
    "forged",
    [
        GOOD | {"id": "8"},
        GOOD | {"id": None},
        GOOD | {"status": "lost"},
        GOOD | {"status": ["scored"]},
        GOOD | {"reward": float("nan")},
        GOOD | {"reward": float("inf")},
        GOOD | {"reward": 10**400},
        GOOD | {"reward": True},
        GOOD | {"reward": "1"},
        GOOD | {"reward": None},
        GOOD | {"format_reward": float("-inf")},
        GOOD | {"max_reward": []},
        GOOD | {"reason": "x" * 501},
        GOOD | {"reason": 3},
        GOOD | {"cause": "lost"},
        GOOD | {"place": "x" * 501},
        GOOD | {"adapter": "another"},
        {key: value for key, value in GOOD.items() if key != "reason"},
        [],
        None,
        1.0,
    ],
)
def test_anything_but_a_plain_answer_to_this_task_is_refused(forged):
    assert read_answer(GOOD, task_id="7", adapter="mine").reward == 0.5
    with pytest.raises(FrameError):
        read_answer(forged, task_id="7", adapter="mine")


def test_what_a_reward_says_is_one_line_that_steers_no_terminal():
    said = {"reason": "no\x1b[2J\r\nINFO all is well \u202e\ud800 für ü", "place": "a\nb.py:3"}
    for _ in range(2):  # it stays as it is when it is escaped again
        outcome = read_answer(GOOD | said, task_id="7", adapter="mine")
        assert (outcome.reason + outcome.place).isprintable()
        said = {"reason": outcome.reason, "place": outcome.place}
    assert outcome.reason == r"no\x1b[2J\r\nINFO all is well \u202e\ud800 für ü"
    assert outcome.place == r"a\nb.py:3"


def test_columns_reach_adapters_as_plain_values():
    columns = {
        "nums": np.arange(3),
        "share": np.float32(0.5),
        "nested": {"day": datetime.date(2026, 1, 2), "price": Decimal("1.10")},
        "picture": object(),
        "digits": 10**5000,
        "fine": [1, "a", None],
    }
    plain, left_out = portable(columns)
    assert plain == {
        "nums": [0, 1, 2],
        "share": 0.5,
        "nested": {"day": "2026-01-02", "price": "1.10"},
        "fine": [1, "a", None],
    }
    assert left_out == {"picture": "object", "digits": "int"}
    sent = decode(encode_request("mine", {"7": columns, "8": {"a": 1}})[4:])
    assert sent["tasks"] == [["7", plain, left_out], ["8", {"a": 1}, {}]]


def lines(*answers):
    return "".join(json.dumps(one) + "\n" for one in answers)


@pytest.mark.parametrize(
    ("said", "statuses"),
    [
        (lines(GOOD, GOOD | {"id": "8"}), ["scored", "scored"]),
        (lines(GOOD), ["scored"]),
        ("", []),
        (lines(GOOD, GOOD), ["scored", "error"]),  # the second task's answer has another id
        (lines(GOOD | {"id": "8"}, GOOD), ["error"]),  # nothing after it counts
        (lines(GOOD, {}, GOOD | {"id": "8"}), ["scored", "error"]),
        (lines(GOOD, GOOD | {"id": "8"}, GOOD | {"id": "9"}), ["scored", "error"]),
        (lines(GOOD, GOOD | {"id": "8"}) + "x", ["scored", "error"]),
    ],
)
def test_answers_count_in_the_order_of_the_tasks_until_one_is_no_answer(said, statuses):
    outcomes = read_answers(said, task_ids=["7", "8"], adapter="mine")
    assert [outcome.status for outcome in outcomes] == statuses
