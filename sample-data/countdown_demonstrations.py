"""Worked answers to compact countdown questions, right and wrong: what warms the tiny model up.

An answer is one to three attempts, a line each, of which the last one counts:

    use 2 9 8 to make 15
    8+2-9=1
    8-2+9=15

    python sample-data/countdown_demonstrations.py --output runs/demonstrations.jsonl

writes pairs for `--objective sft`: each a right answer in one line.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import click
from atomic_files import write_jsonl
from create_count_down import OPERATORS, CountDownRange, CountDownTask, generate_split, prompt_of

PUZZLES = {
    "add": CountDownRange(min_numbers=3, max_numbers=3, max_number=9, operators="+-"),
    # Few small numbers have a product or quotient in the target's range.
    "mul": CountDownRange(min_numbers=3, max_numbers=3, max_number=20, operators="*/"),
}
NUM_TASKS = 2000
NUM_HELD_OUT = 100
EXACT: dict[str, Callable[[Fraction, int], Fraction]] = {**OPERATORS, "/": operator.truediv}
QUICKSTART_SEED = 0  # its held-out questions are in no demonstration


def split_tasks(
    puzzles: str = "add", *, count: int = NUM_TASKS
) -> tuple[list[CountDownTask], list[CountDownTask]]:
    """`count` puzzles to demonstrate, and those that the examples hold out."""
    limits = PUZZLES[puzzles]
    return generate_split(limits, count=count, held_out=NUM_HELD_OUT, seed=QUICKSTART_SEED)


def compact_prompt(task: CountDownTask) -> str:
    """It does not say which operators solve it."""
    return prompt_of(task, style="compact", operators="")


def demonstrations(
    tasks: Sequence[CountDownTask],
    *,
    count: int,
    share_right: float,
    num_lines: Sequence[float],
    rng: random.Random,
) -> Iterator[dict[str, str]]:
    """`count` pairs of a sum's prompt and an answer; `share_right` of the answers are right.

    `num_lines` are the chances of 1, 2, ... lines; those before the last are wrong.
    """
    for _ in range(count):
        task = rng.choice(tasks)
        (num_wrong,) = rng.choices(range(len(num_lines)), num_lines)
        lines = [attempt(task, is_right=False, rng=rng) for _ in range(num_wrong)]
        lines.append(attempt(task, is_right=rng.random() < share_right, rng=rng))
        yield {"input": compact_prompt(task), "completion": "\n".join(lines)}


def first_answers(
    tasks: Sequence[CountDownTask], *, count: int, operators: str, rng: random.Random
) -> Iterator[dict[str, str]]:
    """`count` pairs of a prompt, its numbers in any order, and the puzzle's first answer."""
    for _ in range(count):
        task = rng.choice(tasks)
        shuffled = replace(task, nums=tuple(rng.sample(task.nums, len(task.nums))))
        yield {
            "input": compact_prompt(shuffled),
            "completion": first_answer(shuffled, operators=operators),
        }


def first_answer(task: CountDownTask, *, operators: str) -> str:
    """The right equation whose numbers come most nearly in the puzzle's own order.

    Of + and - alone, or of * and / alone, expressions without parentheses reach whatever others do.

    >>> first_answer(CountDownTask((2, 9, 8), 15, "8-2+9"), operators="+-")
    '9-2+8=15'
    """
    for numbers in itertools.permutations(task.nums):
        for signs in itertools.product(operators, repeat=len(numbers) - 1):
            pairs = list(zip(signs, numbers[1:], strict=True))
            value = Fraction(numbers[0])
            for sign, number in pairs:
                value = EXACT[sign](value, number)
            if value == task.target:
                tail = "".join(f"{sign}{number}" for sign, number in pairs)
                return f"{numbers[0]}{tail}={task.target}"
    raise ValueError(f"{task} has no answer of {operators} without parentheses")


def attempt(task: CountDownTask, *, is_right: bool, rng: random.Random) -> str:
    """A true sum of all numbers, drawn evenly from those that hit the target or miss it.

    >>> attempt(CountDownTask((1, 1, 1), 3, "1+1+1"), is_right=True, rng=random.Random(0))
    '1+1+1=3'
    """
    while True:
        numbers = rng.sample(task.nums, len(task.nums))
        signs = [1, *(rng.choice((1, -1)) for _ in numbers[1:])]
        value = sum(sign * number for sign, number in zip(signs, numbers, strict=True))
        if (value == task.target) == is_right:
            terms = zip(signs[1:], numbers[1:], strict=True)
            tail = "".join(f"{'+' if sign > 0 else '-'}{number}" for sign, number in terms)
            return f"{numbers[0]}{tail}={value}"


@click.command(help=__doc__)
@click.option("--count", default=600, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True, help="Of the choice of puzzles and answers.")
@click.option("--output", required=True, type=click.Path(path_type=Path, dir_okay=False))
def main(count: int, seed: int, output: Path) -> None:
    tasks, _ = split_tasks()
    rng = random.Random(seed)
    pairs = demonstrations(tasks, count=count, share_right=1.0, num_lines=(1.0,), rng=rng)
    write_jsonl(output, rows=pairs)
    click.echo(f"wrote {count} pairs to {output}")


if __name__ == "__main__":
    main()
