"""Write countdown questions: make a target from some numbers, each used exactly once.

    python sample-data/create_count_down.py --num-questions 10000 --model-path sample-data/smollm2

Every question is made from a solution, so it has one; the order, the numbers and the targets
depend on `--seed` alone. `--held-out` writes questions of the same kind that the main file lacks.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from atomic_files import write_jsonl

HERE = Path(__file__).parent
DEFAULT_OUTPUT = HERE / "count_down_tasks_3to4.jsonl"
MAX_FAILED_DRAWS = 20_000  # in a row: then the range is taken to be exhausted

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}
PROMPTS = {
    "plain": (
        "Using each of the numbers {numbers} exactly once, with the operations {operators} and "
        "parentheses, write an expression that equals {target}. Think it through, then give only "
        "the expression between <answer> and </answer>."
    ),
    "compact": "use {spaced} to make {target}\n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CountDownRange:
    """Which questions can be drawn; numbers are from 1 to `max_number`, targets to `max_target`."""

    min_numbers: int = 3
    max_numbers: int = 4
    max_number: int = 99
    max_target: int = 99
    operators: str = "+-*/"


@dataclass(frozen=True, slots=True)
class CountDownTask:
    """One puzzle and one of its solutions."""

    nums: tuple[int, ...]
    target: int
    solution: str  # such as "8-2+9"

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Equal for puzzles that differ in the order of their numbers only."""
        return tuple(sorted(self.nums)), self.target


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a solution."""

    value: int
    text: str
    operator: str = ""  # the outermost one; empty for a number


def generate_tasks(
    limits: CountDownRange, *, count: int, seed: int, avoid: Iterable[CountDownTask] = ()
) -> list[CountDownTask]:
    """`count` different questions, none of them a puzzle of `avoid` in whatever order.

    Raises ValueError when the range holds too few.
    """
    rng = random.Random(seed)
    avoided = {task.key for task in avoid}
    tasks: dict[tuple[tuple[int, ...], int], CountDownTask] = {}
    failed_draws = 0
    while len(tasks) < count:
        task = draw_task(limits, rng=rng)
        if task and task.key not in avoided and (task.nums, task.target) not in tasks:
            tasks[task.nums, task.target] = task
            failed_draws = 0
            continue
        failed_draws += 1
        if failed_draws == MAX_FAILED_DRAWS:
            raise ValueError(
                f"{count} different questions were asked for, only {len(tasks)} were found in "
                "this range: ask for fewer, or raise --max-number or --max-target"
            )
    return list(tasks.values())


def generate_split(
    limits: CountDownRange, *, count: int, held_out: int, seed: int
) -> tuple[list[CountDownTask], list[CountDownTask]]:
    """`count` questions, and `held_out` others that share no puzzle with them.

    The held-out ones depend on the seed and their own number only.
    """
    # Far from the seeds that people give, so that no other seed draws the same list.
    held_out_tasks = generate_tasks(limits, count=held_out, seed=seed + 2**32)
    tasks = generate_tasks(limits, count=count, seed=seed, avoid=held_out_tasks)
    return tasks, held_out_tasks


def draw_task(limits: CountDownRange, *, rng: random.Random) -> CountDownTask | None:
    """A random solution's puzzle; None when its value is no whole number in the target's range."""
    size = rng.randint(limits.min_numbers, limits.max_numbers)
    nums = [rng.randint(1, limits.max_number) for _ in range(size)]
    # Sums and differences need no parentheses: a chain reaches all that a tree does.
    is_chain = set(limits.operators) <= {"+", "-"}
    terms = [Term(number, str(number)) for number in rng.sample(nums, size)]
    while len(terms) > 1:
        left = terms.pop(0 if is_chain else rng.randrange(len(terms)))
        right = terms.pop(0 if is_chain else rng.randrange(len(terms)))
        joined = join_terms(left, right, sign=rng.choice(limits.operators))
        if joined is None:
            return None
        terms.insert(0, joined)
    if not 1 <= terms[0].value <= limits.max_target:
        return None
    return CountDownTask(tuple(nums), terms[0].value, terms[0].text)


def join_terms(left: Term, right: Term, *, sign: str) -> Term | None:
    """`left sign right` with the parentheses it needs; None for a division that leaves a rest.

    >>> join_terms(Term(5, "7-2", "-"), Term(3, "3"), sign="*").text
    '(7-2)*3'
    >>> join_terms(Term(9, "9"), Term(5, "7-2", "-"), sign="-").text
    '9-(7-2)'
    """
    if sign == "/" and (right.value == 0 or left.value % right.value):
        return None
    is_product = sign in "*/"
    left_text = f"({left.text})" if is_product and left.operator in {"+", "-"} else left.text
    loose = {"+": set(), "-": {"+", "-"}, "*": {"+", "-"}, "/": {"+", "-", "*", "/"}}[sign]
    right_text = f"({right.text})" if right.operator in loose else right.text
    return Term(OPERATORS[sign](left.value, right.value), left_text + sign + right_text, sign)


def prompt_of(task: CountDownTask, *, style: str, operators: str) -> str:
    """The question as text: `plain` English, or `compact` for a tiny model."""
    return PROMPTS[style].format(
        numbers=", ".join(map(str, task.nums)),
        spaced=" ".join(map(str, task.nums)),
        operators=" ".join(operators),
        target=task.target,
    )


def rows_of(
    tasks: Sequence[CountDownTask], *, style: str, operators: str, tokenizer: Any = None
) -> Iterator[dict[str, Any]]:
    """Lines for the data file; with a tokenizer they carry token ids."""
    from async_grpo.data.questions import prompt_token_ids

    for task in tasks:
        text = prompt_of(task, style=style, operators=operators)
        ids = {"input_token_ids": prompt_token_ids(tokenizer, text=text)} if tokenizer else {}
        yield {
            "input": text,
            **ids,
            "answer": str(task.target),
            "nums": list(task.nums),
            "target": task.target,
            "solution": task.solution,
        }


def load_tokenizer(model_path: str) -> Any:
    """The tokenizer of a Hugging Face folder; raises click's error when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        cause = str(error).splitlines()[0]
        raise click.BadParameter(f"{model_path} has no tokenizer: {cause}") from None


@click.command(help=__doc__)
@click.option("--num-questions", default=10_000, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=37, show_default=True)
@click.option("--min-numbers", default=3, show_default=True, type=click.IntRange(2))
@click.option("--max-numbers", default=4, show_default=True, type=click.IntRange(2, 8))
@click.option("--max-number", default=99, show_default=True, type=click.IntRange(1))
@click.option("--max-target", default=99, show_default=True, type=click.IntRange(1))
@click.option("--operators", default="+-*/", show_default=True, help="Some of + - * /.")
@click.option("--style", default="plain", show_default=True, type=click.Choice(sorted(PROMPTS)))
@click.option(
    "--model-path",
    type=click.Path(exists=True, file_okay=False),
    help="Model folder: also write the token ids of its tokenizer.",
)
@click.option("--output", default=DEFAULT_OUTPUT, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--held-out",
    default=0,
    type=click.IntRange(0),
    help="Questions for --held-out-output, not in --output.",
)
@click.option("--held-out-output", type=click.Path(path_type=Path, dir_okay=False))
def main(
    num_questions: int,
    seed: int,
    style: str,
    model_path: str | None,
    output: Path,
    held_out: int,
    held_out_output: Path | None,
    **limits: Any,
) -> None:
    if limits["min_numbers"] > limits["max_numbers"]:
        raise click.UsageError("--min-numbers must be at most --max-numbers")
    operators = limits["operators"]
    if not operators or set(operators) - set(OPERATORS):
        raise click.UsageError(f"--operators must be some of + - * /, got {operators!r}")
    if (held_out > 0) != (held_out_output is not None):
        raise click.UsageError("--held-out and --held-out-output go together")
    tokenizer = load_tokenizer(model_path) if model_path else None
    try:
        tasks, held_out_tasks = generate_split(
            CountDownRange(**limits), count=num_questions, held_out=held_out, seed=seed
        )
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    for path, part in ((output, tasks), (held_out_output, held_out_tasks)):
        if path is not None:
            rows = rows_of(part, style=style, operators=operators, tokenizer=tokenizer)
            write_jsonl(path, rows=rows)
            click.echo(f"wrote {len(part)} questions to {path}")


if __name__ == "__main__":
    main()
