"""The tiny chat model: its dialogues are those that the environment of the example shows."""

import importlib
import random
import sys
from pathlib import Path

import pytest

from async_grpo.chat.template import TemplateRenderer
from async_grpo.verification.graders.countdown import grade_countdown

SAMPLE_DATA = Path(__file__).parents[2] / "sample-data"
sys.path.insert(0, str(SAMPLE_DATA))
demonstrations = importlib.import_module("countdown_demonstrations")
measure_chat = importlib.import_module("measure_countdown_chat")
tiny_chat = importlib.import_module("create_tiny_chat_model")
TASK = demonstrations.CountDownTask((2, 9, 8), 15, "8-2+9")


def test_its_tokens_give_every_dialogue_back_and_calls_are_read():
    tokenizer = tiny_chat.make_tokenizer()
    renderer = TemplateRenderer(tokenizer)
    (call, answer) = tiny_chat.turns(TASK, ["8+2-9", "8-2+9=15"], renderer=renderer)
    (read,) = renderer.parse(call[1], tools=[{}]).tool_calls
    assert (read.name, read.arguments) == ("calculate", {"expression": "8+2-9"})
    assert answer[0][: len(call[0]) + len(call[1])] == [*call[0], *call[1]]
    assert "<tool_response>\n1\n</tool_response>" in tokenizer.decode(answer[0])
    assert tokenizer.unk_token_id not in answer[0]
    assert max(*answer[0], *answer[1]) < 128


def test_fewer_than_three_in_ten_of_its_dialogues_are_right():
    rng = random.Random(0)
    tasks, _ = demonstrations.split_tasks()
    picked = [rng.choice(tasks) for _ in range(2_000)]
    said = [tiny_chat.dialogue(task, rng=rng)[-1] for task in picked]
    rewards = [
        grade_countdown(text, numbers=task.nums, target=task.target).reward
        for text, task in zip(said, picked, strict=True)
    ]
    assert 0.2 < sum(reward == 1.0 for reward in rewards) / len(rewards) < 0.3


def test_pairs_depend_on_the_seed_alone():
    tasks = [TASK]
    made = [list(tiny_chat.pairs(tasks, count=20, seed=seed)) for seed in (0, 0, 1)]
    assert made[0] == made[1] != made[2]


@pytest.mark.slow
def test_an_untrained_one_is_measured(tmp_path):
    tiny_chat.write_untrained(tmp_path, seed=0)
    measured = measure_chat.measure(tmp_path, tasks=[TASK])
    assert 0 <= measured.accuracy <= 1 and measured.output_tokens > 0
