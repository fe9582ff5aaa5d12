"""The tiny chat model: its dialogues are those that the environment of the example shows."""

import importlib
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_grpo.environments.chat.find import find_renderer
from async_grpo.environments.chat.template import TemplateRenderer
from async_grpo.verification.graders.countdown import grade_countdown

SAMPLE_DATA = Path(__file__).parents[2] / "sample-data"
sys.path.insert(0, str(SAMPLE_DATA))
demonstrations = importlib.import_module("countdown_demonstrations")
measure_chat = importlib.import_module("measure_countdown_chat")
tiny_chat = importlib.import_module("create_tiny_chat_model")
countdown_calculator = importlib.import_module("countdown_calculator")  # of examples/
SHIPPED = SAMPLE_DATA / tiny_chat.KIND.folder
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


@pytest.mark.parametrize("stage", tiny_chat.KIND.stages)
def test_calls_of_a_stages_dialogues_end_with_a_sum_that_hits_or_with_the_last_turn(stage):
    rng = random.Random(0)
    for _ in range(300):
        said = tiny_chat.dialogue(TASK, stage=stage, rng=rng)
        assert len(said) <= countdown_calculator.CountdownCalculator.max_turns
        *tried, answer = said
        wrong = tried[:-1] if grade_of(answer, TASK) == 1.0 else tried
        assert not [each for each in wrong if grade_of(f"{each}=15", TASK) == 1.0]


def test_the_habit_is_to_answer_at_once_and_wrongly():
    habit, rng = tiny_chat.KIND.stages[-1], random.Random(0)
    tasks, _ = demonstrations.split_tasks()
    picked = [rng.choice(tasks) for _ in range(2_000)]
    dialogues = [tiny_chat.dialogue(task, stage=habit, rng=rng) for task in picked]
    at_once = [
        (said[0], task) for said, task in zip(dialogues, picked, strict=True) if not said[1:]
    ]
    assert len(at_once) / len(dialogues) == pytest.approx(0.75, abs=0.03)
    right = [grade_of(answer, task) == 1.0 for answer, task in at_once]
    assert sum(right) / len(right) == pytest.approx(tiny_chat.SHARE_LUCKY, abs=0.03)


def test_what_is_learned_of_a_dialogue_begins_with_its_first_right_sum():
    tokenizer = tiny_chat.make_tokenizer()
    stage = replace(tiny_chat.KIND.stages[0], num_steps=2)
    pairs = list(tiny_chat.pairs([TASK], stage=stage, seed=0))
    num_tried = set()
    for pair in pairs:
        read, learned = (tokenizer.decode(ids) for ids in pair.values())
        results = re.findall(r"<tool_response>\n(.*?)\n", read)
        assert "15" not in results
        num_tried.add(len(results))
        if "<tool_call>" in learned:
            assert learned.count("<tool_call>") == 1
            assert "<tool_response>\n15\n" in learned
            assert learned.endswith("=15<|im_end|>")
    assert num_tried == {0, 1, 2, 3}


def test_pairs_depend_on_seed_and_stage_alone():
    short = [replace(stage, num_steps=1) for stage in tiny_chat.KIND.stages]
    first, again, other, later = (
        list(tiny_chat.pairs([TASK], stage=stage, seed=seed))
        for stage, seed in ((short[0], 0), (short[0], 0), (short[0], 1), (short[1], 0))
    )
    assert len(first) == short[0].batch_size
    assert first == again
    assert first != other and first != later


def test_before_its_dialogues_it_is_the_tiny_countdown_model_with_other_ids(tmp_path):
    tiny_chat.write_first(tmp_path, seed=0)
    logits = []
    for folder in (tmp_path, tiny_chat.STUDENT):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = tokenizer("use 2 9 8 to make 15\n8-2", return_tensors="pt")["input_ids"]
        columns = tokenizer.convert_tokens_to_ids([*"+-=", tokenizer.eos_token])
        logits.append(model(input_ids=ids).logits[0, -1, columns].tolist())
    assert logits[0] == pytest.approx(logits[1])


def test_the_shipped_one_is_small_and_its_renderer_is_found():
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 5_000_000
    assert (
        AutoTokenizer.from_pretrained(SHIPPED).get_vocab() == tiny_chat.make_tokenizer().get_vocab()
    )
    renderer = find_renderer(str(SHIPPED))
    assert isinstance(renderer, TemplateRenderer)
    (call, _) = tiny_chat.turns(TASK, ["8+2-9", "8-2+9=15"], renderer=renderer)
    assert renderer.parse(call[1], tools=[{}]).tool_calls[0].name == "calculate"


def test_the_shipped_one_rarely_calls_and_mostly_fails():
    _, held_out = demonstrations.split_tasks()
    measured = measure_chat.measure(SHIPPED, tasks=held_out[:40])
    assert 0.1 < measured.accuracy < 0.28
    assert 0.05 < measured.calls < 0.6


def grade_of(text, task):
    return grade_countdown(text, numbers=task.nums, target=task.target).reward
