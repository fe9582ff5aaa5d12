"""A task done by TRL's GRPOTrainer, one process a rank; rank 0 writes a row for each step.

    python -m benchmarks.end_to_end.trl_train TASK.json ROWS.jsonl --way transformers

Settings of the update equal ours. Everything else is what made TRL fastest on two cores: no
gradient checkpointing, float32, on-policy ratios without another forward pass (vLLM's correction is
off: engine and trainer agree to 1e-6 in float32), no logs but the rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.end_to_end.task import Task

WAYS = ("transformers", "colocate", "server")


@click.command()
@click.argument("task_file", type=click.Path(exists=True))
@click.argument("rows_file", type=click.Path())
@click.option("--way", type=click.Choice(WAYS), default="transformers", help="who generates")
@click.option("--micro-batch", default=256, help="samples of one forward pass, over all ranks")
@click.option("--server-port", default=0, help="of the vLLM server, with --way server")
def main(task_file: str, rows_file: str, way: str, micro_batch: int, server_port: int) -> None:
    """Train as the task says."""
    if way != "transformers":
        from benchmarks.end_to_end import trl_vllm

        trl_vllm.fit_to_cpu()
    trainer = make_trainer(
        Task.read(Path(task_file)),
        rows=Path(rows_file),
        options=_options_of(way, server_port),
        micro_batch=micro_batch,
    )
    trainer.train()


def _options_of(way: str, server_port: int) -> Mapping[str, Any]:
    if way == "transformers":
        return {}
    return {
        "use_vllm": True,
        "vllm_mode": way,
        "vllm_importance_sampling_correction": False,
        **({"vllm_server_port": server_port} if way == "server" else {}),
    }


def make_trainer(task: Task, *, rows: Path, options: Mapping[str, Any], micro_batch: int) -> Any:
    """TRL's trainer for the task; `options` say how it generates."""
    from accelerate import PartialState
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    num_ranks = PartialState(cpu=True).num_processes
    config = GRPOConfig(
        output_dir=str(rows.parent / "trl"),
        per_device_train_batch_size=micro_batch // num_ranks,
        gradient_accumulation_steps=task.samples_per_step // micro_batch,
        num_generations=task.samples_per_question,
        max_completion_length=task.max_output_tokens,
        max_steps=task.num_steps,
        temperature=1.0,
        beta=task.kl_coefficient,
        loss_type="grpo",
        learning_rate=task.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.999,
        weight_decay=0.0,
        max_grad_norm=1.0,
        shuffle_dataset=False,  # the questions come in the order in which they are asked
        seed=task.seed,
        vllm_max_model_length=task.longest_sequence,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        log_level="error",
        **options,
    )
    logging.getLogger("accelerate").setLevel("ERROR")
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    return GRPOTrainer(
        model=task.model,
        args=config,
        processing_class=tokenizer,
        reward_funcs=grade,
        train_dataset=Dataset.from_list([as_prompt(line) for line in task.asked()]),
        callbacks=[_row_writer(rows, task)],
    )


def as_prompt(line: Mapping[str, Any]) -> dict[str, Any]:
    """A question as TRL wants it: its text is `prompt`, what else it has is for the reward."""
    return {"prompt": line["input"], "nums": line["nums"], "target": line["target"]}


def grade(
    completions: list[str], nums: list[list[int]], target: list[int], **_: object
) -> list[float]:
    """The quick start's reward, by the very function that our verifiers call."""
    asked = zip(completions, nums, target, strict=True)
    return [_grade_one(text, numbers=numbers, target=aim) for text, numbers, aim in asked]


def _grade_one(text: str, *, numbers: list[int], target: int) -> float:
    from async_grpo.verification.graders.answers import UnscorableError
    from async_grpo.verification.graders.countdown import grade_countdown

    try:
        return grade_countdown(text, numbers=numbers, target=target).reward
    except UnscorableError:  # no answer in it: 0, as in our verifiers
        return 0.0


def _row_writer(rows: Path, task: Task) -> Any:
    from transformers import TrainerCallback

    class RowWriter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if state.is_world_process_zero and "reward" in logs:
                with rows.open("a") as file:
                    file.write(json.dumps(row_of(logs, task)) + "\n")

    return RowWriter()


def row_of(logs: Mapping[str, float], task: Task) -> dict[str, float]:
    """Reward, samples and output tokens of a step."""
    return {
        "reward": logs["reward"],
        "samples": task.samples_per_step,
        "tokens": logs["completions/mean_length"] * task.samples_per_step,
    }


if __name__ == "__main__":
    main()
