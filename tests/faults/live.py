"""A real run, and the operator beside it: a cluster, dispatchers, and a trainer to be run again."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

from async_grpo.telemetry.sample_dump import dump_files
from async_grpo.util.ports import free_port
from benchmarks import procfs
from benchmarks.cores import family
from benchmarks.stack import MODEL, SERVICE_VARIABLES, write_puzzles
from benchmarks.two_cores import read_rows
from faults.books import Work
from faults.commands import Command
from faults.members import MARK, Members
from faults.probe import Probe

logger = logging.getLogger(__name__)
NAMESPACE = "faults"
TESTS = str(Path(__file__).parents[1])
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
WORKER_LEASE_S = 10.0  # a third of the default, for the sake of the measurement's length
NUM_GENERATION_DISPATCHERS = 2
SERVERS = ("/gcs_server", "/raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
GUEST = "generation-2"  # joins in mid-run, and leaves


@dataclass(frozen=True, slots=True)
class Shape:
    """What the run is: small enough that a batch takes about a second."""

    work: Work = field(default_factory=lambda: Work(batch_size=4, group=4, max_staleness=1))
    num_ranks: int = 2
    num_batches: int = 1_000_000
    checkpoint_every: int = 5
    longest_answer: int = 32
    is_scripted: bool = False  # generation takes no time, and there is no reference
    seed: int = 0


class LiveRun:
    """Everything that it starts bears a mark, and ends with the `with` block."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.folder = folder
        self.shape = shape
        self.output = folder / "run"
        self._session = tempfile.TemporaryDirectory(prefix="agf-", ignore_cleanup_errors=True)
        self.session = Path(self._session.name)  # short: Ray's sockets allow 107 characters
        mark = uuid.uuid4().hex
        self.members = Members(mark)
        self.address = f"127.0.0.1:{free_port()}"
        kept = {name: value for name, value in os.environ.items() if name not in SERVICE_VARIABLES}
        self.environment = kept | {
            "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "disabled",  # a cluster of one machine and a few minutes
            "RAY_prestart_worker_first_driver": "0",  # 16 processes that nobody has asked for
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([TESTS, kept.get("PYTHONPATH", "")]),  # this package
            MARK: mark,
        }
        self.probe = Probe(self.address, namespace=NAMESPACE, environment=self.environment)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.commands = self._commands()

    def __enter__(self) -> LiveRun:
        try:
            self.revive()
        except BaseException:
            self._clear()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def revive(self) -> None:
        """Start again whatever has ended, and wait until the run trains."""
        ended = self.start_again()
        for name in ended:
            if name in self.dispatchers:
                self.commands[name].wait_for("registered", timeout_s=READY_TIMEOUT_S)
        if "trainer" in ended:
            self.wait_for_rows(len(self.rows()) + 1, timeout_s=READY_TIMEOUT_S)

    def start_again(self) -> list[str]:
        """Start by its own line whatever has ended; the names of these. Only Ray is waited for."""
        order = ("ray", *self.dispatchers, "trainer")
        ended = [name for name in order if not self.commands[name].is_running]
        for name in ended:
            self.commands[name].start()
            if name == "ray":
                self.commands[name].wait_for("Ray runtime started", timeout_s=READY_TIMEOUT_S)
        return ended

    @property
    def dispatchers(self) -> tuple[str, ...]:
        """The commands that keep the run's workers."""
        generation = tuple(f"generation-{number}" for number in range(NUM_GENERATION_DISPATCHERS))
        return generation if self.shape.is_scripted else (*generation, "logprob-0")

    def rows(self) -> list[dict[str, Any]]:
        """The lines of the metrics so far."""
        return read_rows(self.output / "training_metrics.jsonl")

    def samples(self) -> list[dict[str, Any]]:
        """The lines of the samples so far."""
        files = dump_files(self.output / "samples.jsonl")
        return [line for file in files for line in read_rows(file)]

    def wait_for_rows(self, number: int, *, timeout_s: float) -> None:
        """Until the metrics have `number` lines; raises when the trainer ends before."""
        deadline = time.monotonic() + timeout_s
        trainer = self.commands["trainer"]
        while len(self.rows()) < number:
            if not trainer.is_running:
                raise RuntimeError(f"the trainer ended with {trainer.code}: {trainer.last_line()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.rows())} lines of {number} within {timeout_s:g} s")
            time.sleep(0.1)

    def living(self) -> set[int]:
        """Every process of the run."""
        roots = [command.pid for command in self.commands.values() if command.pid]
        return self.members.living(*roots)

    def logs(self) -> list[Path]:
        """Where anything of the run may say what has befallen it."""
        actors = (self.session / "session_latest" / "logs").glob("worker-*.err")
        return [*(self.folder / "logs").glob("[!r]*.log"), *actors]

    def stop(self) -> tuple[int | None, set[int]]:
        """End it as a user does, trainer first: its exit code, and what outlived the cluster."""
        self.probe.close()
        self.living()
        for name in ("trainer", *self.dispatchers, GUEST):
            command = self.commands[name]
            command.send(SIGTERM)
            if command.is_running and command.wait(timeout_s=STOP_TIMEOUT_S) is None:
                logger.warning("%s does not end on SIGTERM", name)
        # Ray would wait 30 s for the actors that outlive dispatchers; they must end without it too.
        lines = {pid: procfs.command_line(pid) for pid in self.family_of("ray")}
        servers = {pid for pid, line in lines.items() if line.partition(" ")[0].endswith(SERVERS)}
        procfs.send({*servers, self.commands["ray"].pid}, SIGKILL)
        deadline = time.monotonic() + STOP_TIMEOUT_S / 2
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(0.5)
        for pid in left:
            logger.warning("left behind: %d %s", pid, procfs.command_line(pid)[:120])
        return self.commands["trainer"].code, left

    def _clear(self) -> None:
        self.probe.close()
        self.living()
        left = self.members.end()
        if left:
            logger.warning("these processes cannot be ended: %s", sorted(left))
        self._session.cleanup()

    def _commands(self) -> dict[str, Command]:
        puzzles = write_puzzles(self.folder / "puzzles.jsonl", seed=self.shape.seed)
        lines = {
            "ray": self._ray_line(),
            "logprob-0": self._worker_line("logprob"),
            "trainer": self._trainer_line(puzzles),
        }
        for name in ("generation-0", "generation-1", GUEST):
            lines[name] = self._worker_line("generation")
        logs = self.folder / "logs"
        return {
            name: Command(name, line, folder=logs, environment=self.environment)
            for name, line in lines.items()
        }

    def _ray_line(self) -> list[str]:
        return [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
            *("--node-ip-address", "127.0.0.1", "--port", self.address.rpartition(":")[2]),
            *("--num-cpus", "16", "--temp-dir", str(self.session)),
            *("--object-store-memory", str(512 << 20)),
            *("--include-dashboard=false", "--disable-usage-stats", "--include-log-monitor=false"),
        ]

    def _worker_line(self, mode: str) -> list[str]:
        scripted = ("-m", "faults.scripted_dispatcher")
        return [
            *(sys.executable, *(scripted if self.shape.is_scripted else ("worker_dispatcher.py",))),
            *("--model-path", str(MODEL), "--mode", mode),
            *("--namespace", NAMESPACE, "--max-model-len", "256", "--max-num-seqs", "64"),
            *("--max-tokens-per-gpu", "2048", "--kv-cache-gib", "0.06"),
            *("--reward-fns", "benchmarks/rewards.py:scattered", "--global-num-verifiers", "2"),
            *("--verifier-timeout-s", "3"),
            *("--worker-lease-s", f"{WORKER_LEASE_S:g}", "--max-restarts", "1000"),
        ]

    def _trainer_line(self, puzzles: Path) -> list[str]:
        shape = self.shape
        ranks = str(shape.num_ranks)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        return [
            *(sys.executable, *(torchrun if shape.num_ranks > 1 else [])),
            *("trainer_core.py", "--model-name-or-path", str(MODEL), "--data-path", str(puzzles)),
            *("--output-dir", str(self.output), "--namespace", NAMESPACE),
            *("--batch-size", str(shape.work.batch_size)),
            *("--samples-per-question", str(shape.work.group)),
            *("--max-staleness", str(shape.work.max_staleness)),
            *("--num-training-batches", str(shape.num_batches)),
            *("--max-generation-tokens", str(shape.longest_answer), "--max-tokens-per-gpu", "512"),
            *("--kl-coefficient", "0" if shape.is_scripted else "0.001"),
            *("--learning-rate", "1e-5"),
            *("--lr-scheduler", "constant", "--trackers", ""),
            *("--checkpoint-every-batches", str(shape.checkpoint_every)),
            *("--stall-timeout-s", "300"),
        ]

    def family_of(self, *names: str) -> set[int]:
        """The commands' own processes; Ray's actors belong to the cluster, not to them."""
        return family(*(self.commands[name].pid for name in names if self.commands[name].pid))
