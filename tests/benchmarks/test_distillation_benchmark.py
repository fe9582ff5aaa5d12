"""What the benchmark of distillation makes of recipes, and of what runs have reached."""

from pathlib import Path

import pytest

from async_grpo.cli.run_file import read_tables
from benchmarks.distillation import recipes
from benchmarks.distillation.recipes import EXAMPLES, Outcome, task_of, teachers_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _from_the_top(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_every_recipe_names_teachers_that_are_there_for_each_kind_of_its_puzzles():
    found = {name: teachers_of(example) for name, example in EXAMPLES.items()}
    assert {name: set(teachers) for name, teachers in found.items()} == {
        "one teacher": {"add"},
        "two": {"add", "mul"},
    }
    for teachers in found.values():
        assert all((path / "model.safetensors").exists() for path in teachers.values())


def test_trl_is_asked_for_what_the_recipe_asks_of_us(tmp_path):
    (train,) = read_tables(EXAMPLES["one teacher"])[1]["train"]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"input": "{n}"}}\n' for n in range(100)))
    task = task_of({**train, "data_path": str(questions)}, teacher=Path("t"), seed=3)
    assert task.batch_size == train["batch_size"] * train["samples_per_question"]
    asked = [line["input"] for line in task.asked()]
    assert len(asked) == task.num_steps * task.batch_size
    each = train["samples_per_question"]
    assert asked == [asked[n - n % each] for n in range(len(asked))]
    assert len(set(asked[: 100 * each])) == 100  # whole epochs, as ours


def test_accuracies_are_divided_by_the_teacher_s_of_the_same_kind():
    runs = [Outcome(100.0, {"add": 0.8, "mul": 0.6}), Outcome(120.0, {"add": 0.4, "mul": 0.9})]
    figures = {f.name: f for f in recipes._figures("two", runs, {"add": 0.8, "mul": 0.9})}
    ratio = figures["two, add, held-out accuracy / teacher's"]
    assert ratio.spread == (0.5, 1.0) and ratio.goal == 0.90
    assert figures["two, mul, held-out accuracy"].value == pytest.approx(0.75)
    assert figures["two, whole run"].goal == 600
