"""`make quickstart`: the whole system on this machine, from questions to a better model.

Data, a warm-started tiny model, Ray, one generation and one logprob worker, verifiers, two trainer
ranks, held-out accuracy before and after, a picture; then everything is stopped again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import click

from async_grpo import head
from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.options import CONTEXT
from async_grpo.cli.processes import Process
from async_grpo.errors import ConfigError, DeadlineError, WorkerError

logger = logging.getLogger(__name__)
MODEL = Path("sample-data/tiny-countdown")
READY_TIMEOUT_S = 300.0
SCRIPT_TIMEOUT_S = 300.0
LONGEST_ANSWER = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices of one quick start."""

    folder: Path
    num_batches: int
    seed: int
    num_ranks: int
    max_staleness: int

    @property
    def questions(self) -> Path:
        return self.folder / "questions.jsonl"

    @property
    def held_out(self) -> Path:
        return self.folder / "held_out.jsonl"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def picture(self) -> Path:
        return self.folder / "reward.svg"


@click.command(context_settings=CONTEXT)
@click.option("--output-dir", default="runs/quickstart", help="folder of the run; replaced")
@click.option("--num-batches", default=90, help="batches to train")
@click.option("--seed", default=0, help="seed of the questions and of their order")
@click.option("--num-ranks", default=2, help="trainer ranks")
@click.option("--max-staleness", default=1, help="batches that generation may run ahead")
@command_boundary()
def quickstart(**options: Any) -> None:
    """Train a tiny model on countdown puzzles, here and now.

    \b
    e.g. --num-batches 40 --output-dir runs/first
    """
    logging.basicConfig(level="INFO", format="%(message)s")
    signal.signal(signal.SIGTERM, _interrupt)
    plan = Plan(folder=Path(options.pop("output_dir")), **options)
    started = time.monotonic()
    _prepare(plan)
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(_cluster(plan))
        logger.info("starting a generation worker, a logprob worker and the trainer ...")
        workers = [stack.enter_context(_worker(plan, mode, environment)) for mode in WORKERS]
        # At once: it waits for them itself, and what takes it longest is to import.
        trainer = stack.enter_context(_trainer(plan, environment))
        trainer.wait(watched=workers)
    _plot(plan)
    _conclude(plan, seconds=time.monotonic() - started)


def _prepare(plan: Plan) -> None:
    if not MODEL.is_dir():
        raise ConfigError(
            f"the quick start needs {MODEL}: run it in the top folder of a clone, with `make "
            "quickstart`"
        )
    if plan.folder.exists() and not plan.logs.is_dir():
        raise ConfigError(
            f"--output-dir {plan.folder} exists and is not a quick start's: name another folder"
        )
    shutil.rmtree(plan.folder, ignore_errors=True)
    plan.logs.mkdir(parents=True)
    logger.info("making puzzles in %s", plan.folder)
    _run(
        "sample-data/create_count_down.py",
        *("--style", "compact", "--min-numbers", "3", "--max-numbers", "3", "--max-number", "9"),
        *("--operators", "+-", "--num-questions", "2000", "--seed", str(plan.seed)),
        *("--model-path", str(MODEL), "--output", str(plan.questions)),
        *("--held-out", "100", "--held-out-output", str(plan.held_out)),
    )


@contextlib.contextmanager
def _cluster(plan: Plan) -> Iterator[dict[str, str]]:
    """A Ray head of our own; yields the environment that leads to it."""
    port, client_port = _free_port(), _free_port()
    # Short, because Ray keeps sockets there, whose paths must not exceed 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as session:
        environment = os.environ | head.private_cluster(Path(session)) | {
            "RAY_ADDRESS": f"127.0.0.1:{port}",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        environment.pop("RAY_AUTH_TOKEN", None)  # it would go before the cluster's own
        command = [
            *("ray", "start", "--head", "--block", "--node-ip-address", "127.0.0.1"),
            *("--port", str(port), "--num-cpus", "8", "--temp-dir", session),
            *("--include-dashboard=false", "--ray-client-server-port", str(client_port)),
            "--disable-usage-stats",
        ]
        command[0] = str(Path(sys.executable).with_name("ray"))
        logger.info("starting Ray ...")
        log = plan.logs / "ray.log"
        ray_head = Process(
            "the Ray head",
            command,
            log=log,
            environment=environment,
            stop_signal=signal.SIGTERM,
        )
        try:
            with ray_head:
                ray_head.wait_for("Ray runtime started", timeout_s=READY_TIMEOUT_S)
                yield environment
        finally:
            _keep_logs(Path(session), plan.logs / "ray")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


WORKERS = {
    "generation": ("--max-num-seqs", "256", "--reward-fns", "countdown"),
    "logprob": ("--max-tokens-per-gpu", "4096"),
}


def _worker(plan: Plan, mode: str, environment: dict[str, str]) -> Process:
    return Process(
        f"the {mode} worker",
        [
            *(sys.executable, "worker_dispatcher.py", "--model-path", str(MODEL)),
            *("--mode", mode, "--max-model-len", "256", *WORKERS[mode]),
        ],
        log=plan.logs / f"{mode}.log",
        environment=environment,
    )


def _keep_logs(session: Path, target: Path) -> None:
    """Ray's folder is deleted with the run; what its workers said may be needed."""
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(session / "session_latest" / "logs", target, ignore_dangling_symlinks=True)


def _trainer(plan: Plan, environment: dict[str, str]) -> Process:
    command = [
        *(sys.executable, "trainer_core.py", "--nproc-per-node", str(plan.num_ranks)),
        *("--model-name-or-path", str(MODEL), "--data-path", str(plan.questions)),
        *("--eval-data-path", str(plan.held_out), "--output-dir", str(plan.folder)),
        *("--num-training-batches", str(plan.num_batches), "--batch-size", "32"),
        *("--samples-per-question", "8", "--max-generation-tokens", str(LONGEST_ANSWER)),
        *("--max-tokens-per-gpu", "4096", "--learning-rate", "3e-4", "--lr-scheduler", "constant"),
        *("--kl-coefficient", "0.001", "--max-staleness", str(plan.max_staleness)),
        *("--infinite-sampler-seed", str(plan.seed), "--run-name", "quickstart"),
    ]
    log = plan.logs / "trainer.log"
    return Process(
        "the trainer",
        command,
        log=log,
        environment=environment,
        shows_output=True,
        stop_timeout_s=30.0,  # the ranks' own time of grace, and the launcher's end
    )


def _plot(plan: Plan) -> None:
    for suffix in (".svg", ".png"):
        _run(
            "plot.py",
            *("plot", str(plan.folder), "-n", "quickstart", "-v", "avg_reward"),
            *("-v", "avg_max_reward_in_group", "-x", "step", "-s", "--smooth-window", "5"),
            *("-o", str(plan.picture.with_suffix(suffix))),
        )


def _conclude(plan: Plan, *, seconds: float) -> None:
    lines = (plan.folder / "evaluation_metrics.jsonl").read_text().splitlines()
    first, last = (json.loads(line) for line in (lines[0], lines[-1]))
    click.echo(
        f"\nheld-out accuracy {first['eval_accuracy']:.0%} before, {last['eval_accuracy']:.0%} "
        f"after {plan.num_batches} batches ({last['total_samples_accumulated']} samples), "
        f"{seconds / 60:.1f} minutes in all\n"
        f"reward curve   {plan.picture}\n"
        f"metrics        {plan.folder}/training_metrics.jsonl\n"
        f"samples        {plan.folder}/samples.jsonl\n"
        f"model          {max((plan.folder / 'hf_format').iterdir(), key=os.path.getmtime)}"
    )


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=SCRIPT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"{command[0]} was not done within {SCRIPT_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise WorkerError(f"{command[0]} failed: {done.stderr.strip() or done.stdout.strip()}")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
