import datetime
from decimal import Decimal

import numpy as np
import pytest

from async_grpo.verification.frames import FrameError, decode
from async_grpo.verification.tasks import answer, encode_request, portable, read_answer
from async_grpo.verification.verdict import Outcome

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
    assert read_answer(answer("7", outcome), task_id="7", adapter="mine") == outcome


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
    sent = decode(encode_request("7", "mine", columns, wall_s=1.0)[4:])
    assert (sent["sample"], sent["left_out"]) == (plain, left_out)
