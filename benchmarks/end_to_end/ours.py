"""This system on a task, as a user would run it: Ray, `worker_dispatcher.py`, `trainer_core.py`.

Ranks are as many as `async-grpo plan` has on two cores: one of a small model, of others two.
Threads are those of `launch`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from async_grpo.devices.core_shares import num_cores, thread_variables
from benchmarks.end_to_end.task import Task
from benchmarks.processes import Process
from benchmarks.stack import READY_TIMEOUT_S, Stack

SMALL_BYTES = 40_000_000  # of the file of weights
MODES = {
    "generation": ("--max-num-seqs", "256", "--reward-fns", "countdown"),
    "logprob": ("--max-tokens-per-gpu", "4096"),
}


@contextlib.contextmanager
def workers(
    stack: Stack, task: Task, *, started: Callable[[Process], None]
) -> Iterator[list[Process]]:
    """Dispatchers with registered workers: one that generates, one that scores if there is KL."""
    modes = ["generation", *(["logprob"] if task.kl_coefficient else [])]
    with contextlib.ExitStack() as running:
        dispatchers = [running.enter_context(_dispatcher(stack, task, mode)) for mode in modes]
        for dispatcher in dispatchers:
            started(dispatcher)
        dispatchers[0].wait_for_worker(timeout_s=READY_TIMEOUT_S)
        for dispatcher in dispatchers[1:]:  # which has no verifiers
            dispatcher.wait_for("registered", timeout_s=READY_TIMEOUT_S)
        yield dispatchers


def _dispatcher(stack: Stack, task: Task, mode: str) -> Process:
    return Process(
        f"the {mode} worker",
        [
            *(sys.executable, "worker_dispatcher.py", "--model-path", task.model),
            *("--mode", mode, "--max-model-len", str(task.longest_sequence), *MODES[mode]),
        ],
        log=stack.folder / "logs" / f"{mode}.log",
        environment=stack.environment,
    )


def variables(task: Task) -> dict[str, str]:
    """Of all processes: the ranks, the engine and, with KL, the reference share the cores."""
    processes = num_ranks(task) + (2 if task.kl_coefficient else 1)
    return thread_variables({}, processes=processes, cores=num_cores())


def num_ranks(task: Task) -> int:
    """How many ranks train."""
    is_small = (Path(task.model) / "model.safetensors").stat().st_size < SMALL_BYTES
    return 1 if is_small else num_cores()


def trainer(stack: Stack, task: Task, *, output: Path) -> Process:
    """The ranks that train; not started yet."""
    return Process(
        "the trainer",
        [
            *(sys.executable, "trainer_core.py", "--nproc-per-node", str(num_ranks(task))),
            *("--model-name-or-path", task.model),
            *("--data-path", task.questions, "--infinite-sampler-seed", str(task.seed)),
            *("--output-dir", str(output), "--overwrite"),
            *("--num-training-batches", str(task.num_steps)),
            *("--batch-size", str(task.questions_per_step)),
            *("--samples-per-question", str(task.samples_per_question)),
            *("--max-generation-tokens", str(task.max_output_tokens)),
            *("--kl-coefficient", str(task.kl_coefficient)),
            *("--learning-rate", str(task.learning_rate), "--lr-scheduler", "constant"),
            *("--adam-beta2", "0.999", "--max-grad-norm", "1.0"),
            *("--max-tokens-per-gpu", "4096", "--checkpoint-every-batches", "0"),
            *("--trackers", "", "--dump-samples-filename", ""),
        ],
        log=stack.folder / "logs" / f"{output.name}.log",
        environment=stack.environment,
    )
