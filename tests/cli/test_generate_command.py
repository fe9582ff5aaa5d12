"""What can be wrong with `async-grpo generate` is one sentence, before anything is loaded."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from async_grpo.cli.main import main

MODEL = str(Path(__file__).parents[2] / "sample-data" / "tiny-countdown")


@pytest.fixture
def generate(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"input": "use 1 2 to make 3\\n"}\n')

    def generate(**changes):
        options = {
            "model_path": MODEL,
            "data_path": str(tmp_path / "q.jsonl"),
            "output": str(tmp_path / "pairs.jsonl"),
        }
        given = [
            f"--{name.replace('_', '-')}={value}" for name, value in (options | changes).items()
        ]
        result = CliRunner().invoke(main, ["generate", *given])
        assert result.exit_code == 1, result.output
        (line,) = result.stderr.splitlines()
        assert not (tmp_path / "pairs.jsonl").exists()
        return line.removeprefix("error: ")

    return generate


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_path": "/no/model"}, "the model must be a Hugging Face folder"),
        ({"data_path": "/no.jsonl"}, "--data-path must be an existing file or folder, got"),
        ({"output": "/no/folder/pairs.jsonl"}, "--output must be a file in a folder that can be"),
        ({"output": "/tmp"}, "--output must be a file in a folder that can be written, got '/tmp'"),
        (
            {"data_path": "a.jsonl", "output": "a.jsonl"},
            "--output must be another file than --data-path, got 'a.jsonl'",
        ),
        (
            {"temperature": 0, "samples_per_question": 2},
            "--samples-per-question must be 1 at --temperature 0, where every output is the same",
        ),
        ({"temperature": -1}, "--temperature must not be negative, got -1.0"),
        ({"max_generation_tokens": 0}, "--max-generation-tokens must be positive, got 0"),
        ({"column_mapping": "input=q"}, "{data} line 1, column 'q': expected what --column-mappin"),
    ],
)
def test_a_mistake_is_one_sentence(generate, changes, sentence, tmp_path):
    assert generate(**changes).startswith(sentence.format(data=tmp_path / "q.jsonl"))
