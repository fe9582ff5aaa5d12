"""Write countdown questions of two kinds; each line's `dataset_type` chooses its teacher.

    python sample-data/create_two_kinds.py --output runs/two_kinds/questions.jsonl \
        --held-out-output runs/two_kinds/held_out.jsonl
    python sample-data/create_two_kinds.py --kind mul --output runs/two_kinds/mul.jsonl

Sums and differences are of the type `add`, products and quotients of the type `mul`. A question
does not say which it is; held-out puzzles are in no demonstration and not among the questions.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import click
from atomic_files import write_jsonl
from countdown_demonstrations import PUZZLES, split_tasks
from create_count_down import rows_of

# There are few sums more; products come in several orders of their numbers, which a model must
# learn one by one.
NUM_QUESTIONS = {"add": 2000, "mul": 4000}


def typed_rows(kinds: Container[str], *, held_out: bool, seed: int) -> Iterator[dict[str, Any]]:
    """Questions of these types in an order that the seed gives."""
    splits = {name: split_tasks(name, count=count) for name, count in NUM_QUESTIONS.items()}
    # A puzzle of one type may be one of the other too: 1, 2 and 3 make 6 either way.
    avoided = {task.key for _, tasks in splits.values() for task in tasks if not held_out}
    rows = [
        {**row, "dataset_type": name}
        for name, split in splits.items()
        if name in kinds
        for row in rows_of(
            [task for task in split[held_out] if task.key not in avoided],
            style="compact",
            operators=PUZZLES[name].operators,
        )
    ]
    random.Random(seed).shuffle(rows)
    yield from rows


@click.command(help=__doc__)
@click.option("--output", required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--held-out-output", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--kind", default="", type=click.Choice(["", *PUZZLES]), help="Of one type only.")
@click.option("--seed", default=0, show_default=True, help="Of the order; puzzles are the same.")
def main(output: Path, held_out_output: Path | None, kind: str, seed: int) -> None:
    for path, held_out in ((output, False), (held_out_output, True)):
        if path is not None:
            rows = typed_rows([kind] if kind else PUZZLES, held_out=held_out, seed=seed)
            write_jsonl(path, rows=rows)
            click.echo(f"wrote {path}")


if __name__ == "__main__":
    main()
