"""Write the questions of DeepScaleR: competition mathematics, each with its final answer.

    python sample-data/create_deepscaler.py

The data is `agentica-org/DeepScaleR-Preview-Dataset` of the Hugging Face hub, 40,000 problems. A
question is one message of a user, as DeepScaleR asks it; the chat template of a model makes its
prompt. `--source` takes a file of the same columns, `problem` and `answer`, instead.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from atomic_files import write_jsonl

HUB_NAME = "agentica-org/DeepScaleR-Preview-Dataset"
HERE = Path(__file__).parent
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def to_question(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the source as a line for a run.

    >>> line = to_question({"problem": "What is 1+1?", "answer": 2, "solution": "..."})
    >>> line["messages"][0]["content"].partition("? ")[2] == INSTRUCTION, line["answer"]
    (True, '2')
    """
    content = f"{row['problem'].strip()} {INSTRUCTION}"
    return {"messages": [{"role": "user", "content": content}], "answer": str(row["answer"])}


def load(source: str) -> Iterable[Mapping[str, Any]]:
    """The rows of a file, or of a data set of a hub."""
    from datasets import load_dataset  # seconds

    if Path(source).exists():
        return load_dataset("json", data_files=source, split="train")
    return load_dataset(source, split="train")


@click.command(help=__doc__)
@click.option("--source", default=HUB_NAME, show_default=True, help="a hub's name, or a JSON file")
@click.option("--output", default=HERE / "deepscaler.jsonl", type=click.Path(path_type=Path))
@click.option("--held-out", default=0, show_default=True, type=click.IntRange(0))
@click.option(
    "--held-out-output",
    default=HERE / "deepscaler_held_out.jsonl",
    type=click.Path(path_type=Path),
)
@click.option("--seed", default=0, show_default=True, help="which are held out")
def main(source: str, output: Path, held_out: int, held_out_output: Path, seed: int) -> None:
    try:
        rows = [to_question(row) for row in load(source)]
    except (OSError, ValueError, KeyError) as error:
        raise click.ClickException(
            f"{source} cannot be read as problems and answers ({error}): check the network or name "
            "a file with --source"
        ) from error
    if held_out >= len(rows):
        raise click.ClickException(f"--held-out must be below the {len(rows)} rows, got {held_out}")
    random.Random(seed).shuffle(rows)
    for path, part in ((output, rows[held_out:]), (held_out_output, rows[:held_out])):
        if part:
            write_jsonl(path, rows=part)
            click.echo(f"wrote {len(part)} questions to {path}")


if __name__ == "__main__":
    main()
