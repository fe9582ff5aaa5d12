"""The scripts of sample-data, which is a folder of scripts and no package."""

import importlib
import itertools
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner

from async_grpo.config.data_files import DataSource
from async_grpo.data.lines import load_records
from async_grpo.data.questions import LineReader

SAMPLE_DATA = Path(__file__).parents[2] / "sample-data"
sys.path.insert(0, str(SAMPLE_DATA))
atomic_files = importlib.import_module("atomic_files")
count_down = importlib.import_module("create_count_down")
countdown_demonstrations = importlib.import_module("countdown_demonstrations")
two_kinds = importlib.import_module("create_two_kinds")
deepscaler = importlib.import_module("create_deepscaler")
one_digit_sums = importlib.import_module("create_one_digit_sums")
small_gpt2 = importlib.import_module("create_small_gpt2")

THREE = count_down.CountDownRange(max_numbers=3)
TINY = count_down.CountDownRange(max_numbers=3, max_number=9, operators="+-")


def reachable(numbers):
    """Every value that the numbers give, each used once, with + - * / and any parentheses."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}
    values = set()
    for left, right in itertools.permutations(range(len(numbers)), 2):
        rest = [n for i, n in enumerate(numbers) if i not in (left, right)]
        a, b = Fraction(numbers[left]), Fraction(numbers[right])
        for value in (a + b, a - b, a * b, *([a / b] if b else [])):
            values |= reachable([*rest, value])
    return values


def run(script, *arguments):
    return CliRunner().invoke(script.main, [str(argument) for argument in arguments])


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_puzzle_of_three_numbers_is_solvable_by_brute_force():
    for limits in (THREE, TINY):
        for task in count_down.generate_tasks(limits, count=200, seed=1):
            assert task.target in reachable(task.nums)


@pytest.mark.parametrize("operators", ["+-", "+-*/", "*/", "-", "/"])
def test_the_solution_uses_each_number_once_and_hits_the_target(operators):
    limits = count_down.CountDownRange(max_numbers=5, operators=operators)
    for task in count_down.generate_tasks(limits, count=100, seed=2):
        # Our own text, so it may be evaluated: the graders never do.
        assert eval(task.solution) == task.target
        parts = task.solution.translate(str.maketrans("+-*/()", "      ")).split()
        assert sorted(map(int, parts)) == sorted(task.nums)
        assert set(task.solution) <= set("0123456789()" + operators)


def test_every_order_of_operations_is_written_with_the_parentheses_it_needs():
    terms = [count_down.Term(n, str(n)) for n in (36, 12, 3)]
    pairs = [count_down.join_terms(*terms[:2], sign=sign) for sign in "+-*/"]
    for pair, sign in itertools.product(pairs, "+-*/"):
        for left, right in ((pair, terms[2]), (terms[2], pair)):
            joined = count_down.join_terms(left, right, sign=sign)
            if joined is not None:
                assert eval(joined.text) == joined.value, joined.text


def test_numbers_and_targets_stay_in_their_range():
    limits = count_down.CountDownRange(max_number=20, max_target=30)
    tasks = count_down.generate_tasks(limits, count=300, seed=3)
    assert {len(task.nums) for task in tasks} == {3, 4}
    assert all(1 <= number <= 20 for task in tasks for number in task.nums)
    assert all(1 <= task.target <= 30 for task in tasks)


def test_sums_and_differences_are_written_without_parentheses():
    assert all("(" not in t.solution for t in count_down.generate_tasks(TINY, count=300, seed=4))


def test_questions_differ_and_depend_on_the_seed_alone():
    first = count_down.generate_tasks(TINY, count=400, seed=5)
    assert first == count_down.generate_tasks(TINY, count=400, seed=5)
    assert first != count_down.generate_tasks(TINY, count=400, seed=6)
    assert len({(task.nums, task.target) for task in first}) == 400


def test_held_out_puzzles_are_in_no_order_among_the_others():
    tasks, held_out = count_down.generate_split(TINY, count=1000, held_out=80, seed=7)
    assert not {task.key for task in tasks} & {task.key for task in held_out}
    assert (len(tasks), len(held_out)) == (1000, 80)
    _, same = count_down.generate_split(TINY, count=10, held_out=80, seed=7)
    assert same == held_out


def test_an_exhausted_range_is_told_and_writes_nothing(tmp_path):
    output = tmp_path / "q.jsonl"
    result = run(count_down, "--max-number", 2, "--max-numbers", 3, "--output", output)
    assert result.exit_code == 1
    assert "10000 different questions were asked for" in result.output
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--operators", "+^"], "must be some of + - * /, got '+^'"),
        (["--min-numbers", 4, "--max-numbers", 3], "must be at most --max-numbers"),
        (["--held-out", 5], "go together"),
        (["--model-path", "none/here"], "does not exist"),
        (["--model-path", str(Path(__file__).parent)], "has no tokenizer"),
    ],
)
def test_unusable_options_are_told_without_a_traceback(tmp_path, arguments, expected):
    result = run(count_down, *arguments, "--output", tmp_path / "q.jsonl")
    assert result.exit_code == 2 and expected in result.output


def questions_of(path):
    reader = LineReader(tokenizer=BytesTokenizer(), vocab_size=256, max_tokens=1000)
    return list(load_records(DataSource(str(path)), reader.question))


def test_the_written_file_is_what_the_data_room_reads(tmp_path):
    output, held_out = tmp_path / "q.jsonl", tmp_path / "h.jsonl"
    arguments = ["--num-questions", 20, "--style", "compact", "--output", output]
    result = run(count_down, *arguments, "--held-out", 5, "--held-out-output", held_out)
    assert result.exit_code == 0, result.output
    assert (len(read(output)), len(read(held_out))) == (20, 5)
    row = read(output)[0]
    assert row["input"] == f"use {' '.join(map(str, row['nums']))} to make {row['target']}\n"
    questions = questions_of(output)
    assert [question.columns["target"] for question in questions] == [
        int(question.answer) for question in questions
    ]


def test_the_bare_command_makes_ten_thousand_questions_that_a_trainer_takes(monkeypatch, tmp_path):
    assert Path(count_down.DEFAULT_OUTPUT).name == "count_down_tasks_3to4.jsonl"
    here = tmp_path / "sample-data"
    here.mkdir()
    script = here / "create_count_down.py"
    script.symlink_to(SAMPLE_DATA / script.name)
    # From where nothing is installed of ours, as a user types it: no tokenizer, no hub.
    done = subprocess.run(
        [sys.executable, "sample-data/create_count_down.py"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    file = here / "count_down_tasks_3to4.jsonl"
    assert done.stdout == f"wrote 10000 questions to {file}\n"
    questions = questions_of(file)
    assert len({question.input for question in questions}) == 10_000


def test_token_ids_are_written_for_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(count_down, "load_tokenizer", lambda path: BytesTokenizer())
    output = tmp_path / "q.jsonl"
    run(count_down, "--num-questions", 3, "--model-path", tmp_path, "--output", output)
    for row in read(output):
        assert bytes(row["input_token_ids"]).decode() == row["input"]


class BytesTokenizer:
    eos_token = "\x00"
    eos_token_id = 0
    chat_template = None

    def __len__(self):
        return 256

    def __call__(self, text):
        return {"input_ids": list(text.encode())}


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "q.jsonl"
    atomic_files.write_jsonl(path, rows=[{"a": 1}])
    with pytest.raises(TypeError):
        atomic_files.write_jsonl(path, rows=[{"a": 2}, {"a": object()}])
    assert read(path) == [{"a": 1}]
    assert list(tmp_path.iterdir()) == [path]


def test_one_digit_sums_are_all_there_once_and_right(tmp_path):
    train, held_out = tmp_path / "t.jsonl", tmp_path / "h.jsonl"
    run(one_digit_sums, "--output", train, "--held-out-output", held_out)
    rows = read(train) + read(held_out)
    assert len({row["input"] for row in rows}) == 81
    for row in rows:
        left, right = row["input"].removeprefix("What is ").split("?")[0].split("+")
        assert int(left) + int(right) == int(row["answer"])


def test_demonstrations_are_right_answers_to_puzzles_that_are_not_held_out(tmp_path):
    file = tmp_path / "new" / "pairs.jsonl"
    result = run(countdown_demonstrations, "--count", 40, "--output", file)
    assert result.exit_code == 0, result.output
    held_out = {
        count_down.prompt_of(task, style="compact", operators="+-")
        for task in countdown_demonstrations.split_tasks()[1]
    }
    pairs = read(file)
    assert len(pairs) == 40
    for pair in pairs:
        assert pair["input"] not in held_out
        asked = set(pair["input"].removeprefix("use ").split(" to make ")[0].split())
        sum_, value = pair["completion"].split("=")
        assert set(sum_.replace("-", "+").split("+")) == asked
        assert eval(sum_) == int(value) == int(pair["input"].split()[-1])


def test_questions_of_two_kinds_keep_the_held_out_ones_of_both_apart(tmp_path):
    signs, asked, held_out = {"add": "+-", "mul": "*/"}, set(), set()
    for kind, operators in signs.items():
        files = tmp_path / f"{kind}.jsonl", tmp_path / f"held_out_{kind}.jsonl"
        arguments = ("--kind", kind, "--output", files[0], "--held-out-output", files[1])
        assert run(two_kinds, *arguments).exit_code == 0
        for path, least, puzzles in zip(files, (1900, 100), (asked, held_out), strict=True):
            rows = read(path)
            assert least <= len(rows) <= two_kinds.NUM_QUESTIONS[kind]
            assert all(set(row["solution"]) <= set("0123456789()" + operators) for row in rows)
            puzzles |= {(*sorted(row["nums"]), row["target"]) for row in rows}
    assert not asked & held_out


def test_deepscaler_s_problems_become_chats_with_their_answers(tmp_path):
    rows = [{"problem": f" What is {n}+1? ", "answer": n + 1, "solution": "-"} for n in range(9)]
    (tmp_path / "source.json").write_text(json.dumps(rows))
    output, held_out = tmp_path / "out" / "questions.jsonl", tmp_path / "held_out.jsonl"
    options = ("--source", tmp_path / "source.json", "--output", output, "--held-out", 3)
    done = run(deepscaler, *options, "--held-out-output", held_out)
    assert done.exit_code == 0, done.output
    lines = [*read(output), *read(held_out)]
    assert (len(read(output)), len(read(held_out))) == (6, 3)
    for line in lines:
        [message] = line["messages"]
        n = int(line["answer"]) - 1
        assert message == {
            "role": "user",
            "content": f"What is {n}+1? Let's think step by step and output the final answer "
            "within \\boxed{}.",
        }
    assert {line["answer"] for line in lines} == {str(n + 1) for n in range(9)}


def test_a_source_without_problems_is_named(tmp_path):
    (tmp_path / "source.json").write_text('[{"question": "1+1"}]')
    done = run(deepscaler, "--source", tmp_path / "source.json", "--output", tmp_path / "o")
    assert done.exit_code == 1 and "cannot be read as problems and answers" in done.output


def test_the_small_gpt2_reads_every_text_as_its_bytes():
    tokenizer = small_gpt2.byte_tokenizer()
    texts = ["naïve  ✓\n\n\tx ", *itertools.islice(small_gpt2.docstrings(), 5)]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text and len(ids) == len(text.encode())
    assert len(tokenizer) == 257 and tokenizer.eos_token_id == 0
