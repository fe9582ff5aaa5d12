"""Write one-digit sums, questions on which a small pretrained model has something to learn.

    python sample-data/create_one_digit_sums.py

A number anywhere in the output that equals the answer is right. The sums are shuffled by `--seed`;
`--held-out` of them go to a second file.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import click
from atomic_files import write_jsonl

HERE = Path(__file__).parent
PROMPT = "What is {left}+{right}? Answer with just the number."


def generate_sums(*, seed: int) -> list[dict[str, str]]:
    """All 81 sums of two numbers from 1 to 9, in a seeded order."""
    pairs = list(itertools.product(range(1, 10), repeat=2))
    random.Random(seed).shuffle(pairs)
    return [
        {"input": PROMPT.format(left=left, right=right), "answer": str(left + right)}
        for left, right in pairs
    ]


@click.command(help=__doc__)
@click.option("--seed", default=37, show_default=True)
@click.option("--held-out", default=16, show_default=True, type=click.IntRange(0, 80))
@click.option("--output", default=HERE / "one_digit_sums.jsonl", type=click.Path(path_type=Path))
@click.option(
    "--held-out-output",
    default=HERE / "one_digit_sums_held_out.jsonl",
    type=click.Path(path_type=Path),
)
def main(seed: int, held_out: int, output: Path, held_out_output: Path) -> None:
    sums = generate_sums(seed=seed)
    for path, rows in ((output, sums[held_out:]), (held_out_output, sums[:held_out])):
        if rows:
            write_jsonl(path, rows=rows)
            click.echo(f"wrote {len(rows)} questions to {path}")


if __name__ == "__main__":
    main()
