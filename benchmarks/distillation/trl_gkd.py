"""The recipe of `examples/distil_tiny.toml` done by TRL's GKDTrainer, one process a rank.

    torchrun --nproc-per-node 2 -m benchmarks.distillation.trl_gkd TASK.json OUTPUT_FOLDER

Settings of the update equal ours: fully on-policy, the same divergence, temperature, questions in
the same order, learning rate and schedule, float32. TRL divides by tokens, ours by samples.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from async_grpo.data.order import QuestionStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Distilled:
    """What is distilled into what, and how long."""

    student: str
    teacher: str
    questions: str  # JSONL file
    num_steps: int
    batch_size: int  # samples
    samples_per_question: int
    learning_rate: float
    num_warmup_steps: int
    alpha: float
    max_output_tokens: int
    seed: int

    def write(self, file: Path) -> Path:
        file.write_text(json.dumps(asdict(self)))
        return file

    def asked(self) -> list[dict[str, Any]]:
        """The lines of the questions as the steps ask them, over as many epochs as it takes."""
        lines = [json.loads(line) for line in Path(self.questions).read_text().splitlines()]
        order = QuestionStream(len(lines), seed=self.seed)
        numbers = range(self.num_steps * self.batch_size)
        return [lines[order.index(number // self.samples_per_question)] for number in numbers]


@click.command()
@click.argument("task_file", type=click.Path(exists=True))
@click.argument("output", type=click.Path())
def main(task_file: str, output: str) -> None:
    """Train as the task says, and save the model."""
    trainer = make_trainer(Distilled(**json.loads(Path(task_file).read_text())), output=output)
    trainer.train()
    trainer.save_model(output)


def make_trainer(task: Distilled, *, output: str) -> Any:
    """TRL's trainer for the task."""
    from accelerate import PartialState
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    num_ranks = PartialState(cpu=True).num_processes
    config = GKDConfig(
        output_dir=output,
        per_device_train_batch_size=task.batch_size // num_ranks,
        max_steps=task.num_steps,
        lmbda=1.0,
        beta=task.alpha,
        temperature=1.0,
        max_new_tokens=task.max_output_tokens,
        learning_rate=task.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=task.num_warmup_steps,
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=task.seed,
        model_init_kwargs={"dtype": "float32"},
        teacher_model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        log_level="error",
        logging_steps=10,
    )
    logging.getLogger("accelerate").setLevel("ERROR")
    tokenizer = AutoTokenizer.from_pretrained(task.student)

    class InOrder(GKDTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            from torch.utils.data import SequentialSampler

            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    return InOrder(
        model=task.student,
        teacher_model=task.teacher,
        args=config,
        data_collator=_Prompts(tokenizer),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": line["input"]} for line in task.asked()]),
    )


class _Prompts:
    """Questions as GKDTrainer wants them: it answers them itself, and replaces the rest."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        tokens = self._tokenizer(
            [row["prompt"] for row in rows],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            return_token_type_ids=False,
        )
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.clone(),
            "prompts": ids,
            "prompt_attention_mask": mask,
        }


if __name__ == "__main__":
    main()
