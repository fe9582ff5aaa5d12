"""Measure models on the compact countdown questions that their demonstrations lack.

    python sample-data/measure_countdown.py sample-data/tiny-countdown
    python sample-data/measure_countdown.py --puzzles mul sample-data/tiny-teacher-mul

Samples with transformers, at temperature 1 and greedily, and grades as the reward `countdown` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from countdown_demonstrations import PUZZLES, compact_prompt, split_tasks
from create_count_down import CountDownTask

NUM_SAMPLES = 8  # of a question; of more, the first eight count as the tries of pass_at_8
MAX_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a model does on questions, from samples at temperature 1 and a greedy one of each."""

    reward: float  # mean over samples
    accuracy: float  # share of samples that solve their puzzle
    pass_at_8: float  # share of questions that at least one sample solves
    greedy_accuracy: float
    output_tokens: float  # mean over samples, with the end token

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.3g}" for name, value in asdict(self).items())


def measure(
    folder: Path,
    *,
    tasks: Sequence[CountDownTask],
    seed: int = 0,
    num_samples: int = NUM_SAMPLES,
) -> Measurement:
    """Load the model of `folder` and let it answer `tasks`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(seed)
    sampled, lengths = answer(model, tokenizer, tasks, num_samples=num_samples)
    greedy, _ = answer(model, tokenizer, tasks, num_samples=1)
    rewards = grade(sampled, tasks=tasks)
    flat = [value for group in rewards for value in group]
    return Measurement(
        reward=mean(flat),
        accuracy=mean([value == 1.0 for value in flat]),
        pass_at_8=mean([max(group[:NUM_SAMPLES]) == 1.0 for group in rewards]),
        greedy_accuracy=mean([group == [1.0] for group in grade(greedy, tasks=tasks)]),
        output_tokens=mean(lengths),
    )


def answer(
    model: Any, tokenizer: Any, tasks: Sequence[CountDownTask], *, num_samples: int
) -> tuple[list[list[str]], list[int]]:
    """`num_samples` texts a task, a single one being greedy, and all their lengths in tokens."""
    inputs = tokenizer([compact_prompt(task) for task in tasks], return_tensors="pt", padding=True)
    sampling = {"do_sample": True, "top_k": 0, "num_return_sequences": num_samples}
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        **(sampling if num_samples > 1 else {"do_sample": False}),
    )[:, inputs["input_ids"].shape[1] :]
    lengths = (output != tokenizer.pad_token_id).sum(dim=1).tolist()
    texts = tokenizer.batch_decode(output, skip_special_tokens=True)
    groups = [texts[i : i + num_samples] for i in range(0, len(texts), num_samples)]
    return groups, lengths


def grade(texts: Sequence[Sequence[str]], *, tasks: Sequence[CountDownTask]) -> list[list[float]]:
    """The rewards of every task's texts."""
    return [
        [reward(text, task) for text in group] for group, task in zip(texts, tasks, strict=True)
    ]


def reward(text: str, task: CountDownTask) -> float:
    from async_grpo.verification.graders.answers import UnscorableError
    from async_grpo.verification.graders.countdown import grade_countdown

    try:
        return grade_countdown(text, numbers=task.nums, target=task.target).reward
    except UnscorableError:
        return 0.0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@click.command(help=__doc__)
@click.argument(
    "models",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.option("--puzzles", default="add", show_default=True, type=click.Choice(sorted(PUZZLES)))
@click.option(
    "--num-samples", default=NUM_SAMPLES, show_default=True, type=click.IntRange(NUM_SAMPLES)
)
def main(models: tuple[Path, ...], puzzles: str, num_samples: int) -> None:
    _, held_out = split_tasks(puzzles)
    for model in models:
        name = f"{model}: " if len(models) > 1 else ""
        click.echo(f"{name}{measure(model, tasks=held_out, num_samples=num_samples)}")


if __name__ == "__main__":
    main()
