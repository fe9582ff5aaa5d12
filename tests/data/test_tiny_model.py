"""The tiny model: its demonstrations, its tokenizer, the way it is made, and the shipped one."""

import functools
import importlib
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_grpo.data.questions import completion_token_ids, prompt_token_ids
from async_grpo.verification.graders.countdown import grade_countdown

SAMPLE_DATA = Path(__file__).parents[2] / "sample-data"
sys.path.insert(0, str(SAMPLE_DATA))
demonstrations = importlib.import_module("countdown_demonstrations")
measure_countdown = importlib.import_module("measure_countdown")
tiny_model = importlib.import_module("create_tiny_model")

SHIPPED = SAMPLE_DATA / "tiny-countdown"
split = functools.cache(demonstrations.split_tasks)
made_tokenizer = functools.cache(tiny_model.make_tokenizer)
# On a busy machine examples are slow, and the first makes the puzzles or the tokenizer.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
STUDENT = tiny_model.KINDS["student"]
TASK = demonstrations.CountDownTask((2, 9, 8), 15, "8-2+9")


def demonstrate(tasks, *, count, share_right, seed=0):
    rng = random.Random(seed)
    return list(
        demonstrations.demonstrations(
            tasks, count=count, share_right=share_right, num_lines=(0.5, 0.3, 0.2), rng=rng
        )
    )


@PATIENT
@given(seed=st.integers(0, 10_000))
def test_a_right_attempt_solves_the_puzzle_and_a_wrong_one_is_a_true_miss(seed):
    rng = random.Random(seed)
    task = rng.choice(split()[0])
    right = demonstrations.attempt(task, is_right=True, rng=rng)
    wrong = demonstrations.attempt(task, is_right=False, rng=rng)
    assert grade_countdown(right, numbers=task.nums, target=task.target).reward == 1.0
    assert grade_countdown(wrong, numbers=task.nums, target=task.target).reward == 0.1
    claim = int(wrong.rpartition("=")[2])
    assert grade_countdown(wrong, numbers=task.nums, target=claim).reward == 1.0


def test_only_the_last_line_of_an_answer_may_be_right():
    for row in demonstrate([TASK], count=200, share_right=0.5):
        *first, _ = row["completion"].split("\n")
        assert not [line for line in first if line.endswith("=15")]


def test_the_share_of_right_answers_is_the_one_asked_for():
    rows = demonstrate([TASK], count=2000, share_right=0.25)
    right = sum(row["completion"].endswith("=15") for row in rows)
    assert right / 2000 == pytest.approx(0.25, abs=0.03)


def test_answers_have_one_to_three_lines_with_the_chances_asked_for():
    rows = demonstrate([TASK], count=2000, share_right=1.0)
    counts = Counter(len(row["completion"].split("\n")) for row in rows)
    assert [counts[n] / 2000 for n in (1, 2, 3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.04)


def test_demonstrations_depend_on_the_seed_alone():
    tasks, _ = split()
    first, again, other = (
        demonstrate(tasks, count=50, share_right=0.5, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


@PATIENT
@given(seed=st.integers(0, 10_000), puzzles=st.sampled_from(["add", "mul"]))
def test_a_first_answer_solves_the_puzzle_whatever_the_order_of_its_numbers(seed, puzzles):
    operators, rng = demonstrations.PUZZLES[puzzles].operators, random.Random(seed)
    task = rng.choice(split(puzzles)[0])
    (pair,) = demonstrations.first_answers([task], count=1, operators=operators, rng=rng)
    grade = grade_countdown(pair["completion"], numbers=task.nums, target=task.target)
    assert grade.reward == 1.0
    assert set(pair["completion"]) <= set("0123456789=" + operators)
    assert pair["input"].endswith(f" to make {task.target}\n")


def test_a_first_answer_keeps_the_order_of_the_puzzle_where_that_solves_it():
    answers = {
        demonstrations.first_answer(replace(TASK, nums=nums), operators="+-")
        for nums in ((8, 2, 9), (2, 8, 9), (2, 9, 8))
    }
    assert answers == {"8-2+9=15", "9-2+8=15"}
    with pytest.raises(ValueError, match="no answer"):
        demonstrations.first_answer(TASK, operators="*/")


@pytest.mark.parametrize("puzzles", ["add", "mul"])
def test_no_demonstration_shows_a_puzzle_that_is_held_out_in_whatever_order(puzzles):
    tasks, held_out = split(puzzles)
    assert len(held_out) == demonstrations.NUM_HELD_OUT
    assert not {task.key for task in tasks} & {task.key for task in held_out}


@PATIENT
@given(st.text(alphabet=tiny_model.CHARACTERS))
def test_tokens_give_the_text_back_exactly(text):
    tokenizer = made_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_the_same_seed_makes_the_same_untrained_model():
    first, again, other = (
        tiny_model.make_model(STUDENT, seed=seed).lm_head.weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_wrong_right_and_empty_answer_are_measured_as_the_reward_grades_them():
    texts = ["8-2+9=15", "8+2+9=19", ""]
    assert [measure_countdown.reward(text, TASK) for text in texts] == [1.0, 0.1, 0.0]


def test_the_shipped_tokenizer_is_the_made_one_and_keeps_spaces_and_newlines():
    shipped = AutoTokenizer.from_pretrained(SHIPPED)
    text = "use 2 9 8 to make 15\n 8 - 2 , it 's = 15 .\n\n"
    assert shipped.get_vocab() == tiny_model.make_tokenizer().get_vocab()
    assert shipped.decode(prompt_token_ids(shipped, text=text)) == text
    assert (shipped.pad_token_id, shipped.eos_token_id) == (0, 1)
    assert completion_token_ids(shipped, text="8-2+9=15")[-1] == 1


def test_the_shipped_model_is_small_float32_and_tied():
    weights = load_file(SHIPPED / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert sum(tensor.numel() for tensor in weights.values()) < 1_100_000
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 1)


def test_the_shipped_model_half_knows_held_out_puzzles():
    _, held_out = split()
    figures = measure_countdown.measure(SHIPPED, tasks=held_out[:40])
    assert 0.25 < figures.reward < 0.55
    assert figures.pass_at_8 > 0.8


def test_the_teacher_of_products_knows_these_and_no_sums():
    accuracy = {
        puzzles: measure_countdown.measure(
            SAMPLE_DATA / tiny_model.KINDS["mul-teacher"].folder, tasks=split(puzzles)[1][:40]
        ).accuracy
        for puzzles in ("add", "mul")
    }
    assert accuracy["mul"] > 0.85
    assert accuracy["add"] < 0.35  # those that a product or quotient solves too


def test_every_stage_starts_from_the_model_of_the_stage_before(tmp_path, monkeypatch):
    calls = []

    def fake_train(model, *, stage, data, **_):
        calls.append((model.name, stage.name, len(data.read_text().splitlines())))
        return model.with_name(f"after_{stage.name}")

    monkeypatch.setattr(tiny_model, "train", fake_train)
    kind = tiny_model.scaled(STUDENT, scale=0.01)
    trained = tiny_model.warm_start(tmp_path, kind=kind, tasks=[TASK], seed=0, num_processes=1)
    num_pairs = [stage.num_steps * stage.batch_size for stage in kind.stages]
    assert calls == [
        ("untrained", "form", num_pairs[0]),
        ("after_form", "task", num_pairs[1]),
        ("after_task", "spread", num_pairs[2]),
    ]
    assert trained.name == "after_spread"


@pytest.mark.integration
@pytest.mark.slow  # test_generate.py has the command train pairs
def test_the_script_warm_starts_a_model_with_the_trainer_itself(tmp_path, monkeypatch):
    short = replace(STUDENT, stages=STUDENT.stages[:1], dtype="bfloat16")
    monkeypatch.setitem(tiny_model.KINDS, "student", short)
    output = tmp_path / "tiny"
    result = CliRunner().invoke(tiny_model.main, ["--output", str(output), "--scale", "0.003"])
    assert result.exit_code == 0, result.output
    untrained = tiny_model.make_model(STUDENT, seed=0).state_dict()
    trained = load_file(output / "model.safetensors")
    assert all(not torch.equal(tensor, untrained[name]) for name, tensor in trained.items())
    assert {tensor.dtype for tensor in trained.values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(output, dtype="auto").dtype == torch.float32
    assert "--kind student --seed 0 --scale 0.003" in (output / "README.md").read_text()
    assert list(tmp_path.iterdir()) == [output]
