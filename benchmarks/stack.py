"""The real stack on two cores: a Ray cluster of our own, a generation worker and a trainer.

The generation worker's processes run on GENERATOR_CORE, the trainer's on TRAINER_CORE; Ray, the
batcher and the verifiers float over both. Everything ends with the `with` block.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from async_grpo.cluster.head import LATE_REGISTRATION
from benchmarks.cores import end, family, pin, pinned, titled
from benchmarks.processes import Process

MODEL = Path("sample-data/tiny-countdown")
GENERATOR_CORE, TRAINER_CORE = 0, 1
READY_TIMEOUT_S = 300.0
LONGEST_ANSWER = 64
SERVICE_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """A running cluster, and the folder of its logs and runs."""

    folder: Path
    head: Process
    environment: Mapping[str, str]

    def generator_pids(self) -> set[int]:
        """The generation worker's actor and its engine's processes."""
        return family(*titled(family(self.head.pid), "ray::GenerationWorker"))


@contextlib.contextmanager
def start(folder: Path, *, variables: Mapping[str, str] = MappingProxyType({})) -> Iterator[Stack]:
    """A Ray head of our own; each of the processes also gets `variables`."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if name not in SERVICE_VARIABLES}
    environment = kept | {
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_AUTH_MODE": "disabled",  # a cluster of one machine and a few minutes
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **LATE_REGISTRATION,  # as `launch` has it
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        **variables,
    }
    # Short, because Ray keeps sockets there, whose paths must not exceed 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as session:
        command = [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
            *("--node-ip-address", "127.0.0.1", "--port", str(port), "--num-cpus", "8"),
            *("--temp-dir", session, "--include-dashboard=false", "--disable-usage-stats"),
        ]
        log = folder / "logs" / "ray.log"
        head = Process(
            "the Ray head", command, log=log, environment=environment, stop_signal=signal.SIGTERM
        )
        with _whole_family_ends(head):
            head.wait_for("Ray runtime started", timeout_s=READY_TIMEOUT_S)
            yield Stack(folder, head, environment)


@contextlib.contextmanager
def _whole_family_ends(head: Process) -> Iterator[None]:
    """Ray's workers outlive their raylet by seconds, and would disturb what is timed next."""
    members: set[int] = set()
    try:
        with head:
            try:
                yield
            finally:
                members = family(head.pid)
    finally:
        end(members)


@contextlib.contextmanager
def generation_worker(stack: Stack, model: Path, *, reward: str, log: str) -> Iterator[Process]:
    """A dispatcher whose one worker is registered, and pinned to its core."""
    dispatcher = Process(
        "the generation worker",
        [
            *(sys.executable, "worker_dispatcher.py", "--model-path", str(model)),
            *("--max-model-len", "256", "--max-num-seqs", "256"),
            *("--reward-fns", reward, "--global-num-verifiers", "1"),
        ],
        log=stack.folder / "logs" / f"{log}.log",
        environment=stack.environment,
    )
    with dispatcher:
        dispatcher.wait_for_worker(timeout_s=READY_TIMEOUT_S)
        pin(stack.generator_pids(), core=GENERATOR_CORE)
        yield dispatcher


@contextlib.contextmanager
def trainer(
    stack: Stack, model: Path, *, output: Path, options: Mapping[str, object]
) -> Iterator[Process]:
    """One trainer rank on its core, in mid-run."""
    flags = [
        str(part)
        for name, value in options.items()
        for part in ("--" + name.replace("_", "-"), value)
    ]
    process = Process(
        "the trainer",
        [
            *(sys.executable, "trainer_core.py", "--model-name-or-path", str(model)),
            *("--output-dir", str(output), "--max-generation-tokens", str(LONGEST_ANSWER)),
            *("--max-tokens-per-gpu", "4096", "--lr-scheduler", "constant"),
            *("--trackers", "", "--dump-samples-filename", "", *flags),
        ],
        log=stack.folder / "logs" / f"{output.name}.log",
        environment=stack.environment,
    )
    with contextlib.ExitStack() as pinning:
        pinning.enter_context(pinned(TRAINER_CORE))
        process.__enter__()
    try:
        yield process
    finally:
        process.__exit__(None, None, None)


def write_puzzles(file: Path, *, seed: int, num_questions: int = 2000) -> Path:
    """The puzzles of the quick start."""
    command = [
        *(sys.executable, "sample-data/create_count_down.py", "--style", "compact"),
        *("--min-numbers", "3", "--max-numbers", "3", "--max-number", "9", "--operators", "+-"),
        *("--num-questions", str(num_questions), "--seed", str(seed)),
        *("--model-path", str(MODEL), "--output", str(file)),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return file
