"""Write countdown questions of one of two kinds: sums and differences, or products and quotients.

    python sample-data/create_two_kinds.py --kind add --output runs/two_kinds/add.jsonl \
        --held-out-output runs/two_kinds/held_out_add.jsonl

A question does not say which kind it is. Held-out puzzles of either kind are in no demonstration,
and not among the questions of both.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from atomic_files import write_jsonl
from countdown_demonstrations import PUZZLES, split_tasks
from create_count_down import CountDownTask, rows_of

# There are few sums more; products come in several orders of their numbers, which a model must
# learn one by one.
NUM_QUESTIONS = {"add": 2000, "mul": 4000}


@functools.cache
def _splits() -> dict[str, tuple[list[CountDownTask], list[CountDownTask]]]:
    """By kind: the puzzles that are demonstrated, and those that are held out."""
    return {name: split_tasks(name, count=count) for name, count in NUM_QUESTIONS.items()}


def rows_of_kind(kind: str, *, held_out: bool, seed: int) -> Iterator[dict[str, Any]]:
    """Questions of the kind in an order that the seed gives."""
    splits = _splits()
    # A puzzle of one kind may be one of the other too: 1, 2 and 3 make 6 either way.
    avoided = {task.key for _, tasks in splits.values() for task in tasks if not held_out}
    tasks = [task for task in splits[kind][held_out] if task.key not in avoided]
    rows = [*rows_of(tasks, style="compact", operators=PUZZLES[kind].operators)]
    random.Random(seed).shuffle(rows)
    yield from rows


@click.command(help=__doc__)
@click.option("--kind", required=True, type=click.Choice([*NUM_QUESTIONS]))
@click.option("--output", required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--held-out-output", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--seed", default=0, show_default=True, help="Of the order; puzzles are the same.")
def main(kind: str, output: Path, held_out_output: Path | None, seed: int) -> None:
    for path, held_out in ((output, False), (held_out_output, True)):
        if path is not None:
            write_jsonl(path, rows=rows_of_kind(kind, held_out=held_out, seed=seed))
            click.echo(f"wrote {path}")


if __name__ == "__main__":
    main()
