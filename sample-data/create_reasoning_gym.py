"""Write tasks of reasoning-gym as questions, which `--reward-fns reasoning_gym` grades.

    python sample-data/create_reasoning_gym.py --task chain_sum --task countdown --num-questions 200

It needs `pip install -r requirements/reasoning-gym.txt`. A task whose own answer does not score 1
once it has been written as JSON is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from atomic_files import write_jsonl

HERE = Path(__file__).parent
PROMPT = "{question}\n\nGive the answer between <answer> and </answer>."


def questions_of(
    task: str, *, num_questions: int, seed: int, config: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The questions of one task by its name, the same for a seed."""
    import reasoning_gym  # an extra: what only reads this file needs none of it

    made = reasoning_gym.create_dataset(task, seed=seed, size=num_questions, **config)
    for entry in made:
        entry = json.loads(json.dumps(entry, default=str))
        score = made.score_answer(entry["answer"], entry)
        if score != 1:
            raise click.ClickException(
                f"--task must be one whose answers survive JSON, got {task}, whose own answer "
                f"{entry['answer']!r} scores {score}: choose another"
            )
        yield {
            "input": PROMPT.format(question=entry["question"]),
            "answer": f"<answer>{entry['answer']}</answer>",
            "task": task,
            "reasoning_gym": {"entry": entry, "config": json.dumps(config)},
        }


@click.command(help=__doc__)
@click.option("--task", "tasks", multiple=True, required=True, help="its name; may be repeated")
@click.option("--num-questions", default=200, show_default=True, help="of each task")
@click.option("--seed", default=0, show_default=True)
@click.option("--config", default="{}", help="options of the tasks, as JSON")
@click.option("--output", default=HERE / "reasoning_gym.jsonl", type=click.Path(path_type=Path))
def main(tasks: tuple[str, ...], num_questions: int, seed: int, config: str, output: Path) -> None:
    given = {"num_questions": num_questions, "seed": seed, "config": json.loads(config)}
    made = [list(questions_of(task, **given)) for task in tasks]
    rows = [row for rows in zip(*made, strict=True) for row in rows]  # mixed
    output.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(output, rows=rows)
    click.echo(f"wrote {len(rows)} questions to {output}")


if __name__ == "__main__":
    main()
