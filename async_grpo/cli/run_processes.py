"""What `launch` starts around the trainer: a Ray head, dispatchers, and a check beside them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from async_grpo.check.finding import Cost, Finding
from async_grpo.cli.assignment import Node
from async_grpo.cli.local_run import LocalRun
from async_grpo.cli.run_file import as_toml
from async_grpo.cluster import head
from async_grpo.devices.core_shares import PASSIVE, THREADS
from async_grpo.devices.inventory import forwarded
from async_grpo.launch.child_processes import ChildProcess, RemoteProcess, Watched
from async_grpo.launch.local_ranks import TRAINER_NODE
from async_grpo.run.output_folder import LAUNCH_LOGS
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError
from async_grpo.util.ports import free_port

logger = logging.getLogger(__name__)
COMMAND = (sys.executable, "-m", "async_grpo.cli.main")
MAX_RESTARTS = 3  # of a dispatcher that was killed
Say = Callable[[str], object]


@contextlib.contextmanager
def cluster_of(
    run: LocalRun, *, watched: Sequence[Watched] = ()
) -> Iterator[tuple[dict[str, str], list[ChildProcess]]]:
    """Start the run's Ray head, if it needs one; yield the variables to join it, and [head]."""
    common = {**os.environ, **run.thread_variables, "PYTHONUNBUFFERED": "1"}
    if not run.starts_head:
        yield common | _way_to_cluster(run), []
        return
    port, pages = free_port(), free_port()
    # Short, because Ray keeps sockets there, whose paths must not exceed 107 characters; below a
    # folder of this user's alone, because Ray opens its own to everybody.
    with (
        head.private_cluster() as private,
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
    ):
        session = f"{folder}/s"
        environment = common | private
        environment["RAY_ADDRESS"] = f"127.0.0.1:{port}"
        environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # its workers end before it
        environment.pop("RAY_AUTH_TOKEN", None)  # it would go before the cluster's own
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--node-ip-address", "127.0.0.1", "--port", str(port), "--temp-dir", session),
            *("--num-cpus", str(run.num_cpus), "--num-gpus", str(run.num_devices)),
            *("--ray-client-server-port", str(free_port())),
            *(() if run.dashboard else ("--no-monitor",)),  # it tells the pages, and scales nothing
            *(f"--include-dashboard={str(run.dashboard).lower()}", "--disable-usage-stats"),
            *("--dashboard-host", "127.0.0.1", "--dashboard-port", str(pages)),
            "--include-log-monitor=false",  # it has no reader, and takes 3 % of a core
        ]
        logger.info("starting Ray ...")
        ray_head = ChildProcess(
            "the Ray head",
            command,
            log=run.logs / "ray.log",
            environment=environment,
            stop_signal=signal.SIGTERM,
        )
        try:
            with ray_head:
                ray_head.wait_for(
                    "Ray runtime started", timeout_s=deadlines.HEAD_READY_S, watched=watched
                )
                if run.dashboard:
                    url = f"http://127.0.0.1:{pages}"
                    logger.info("Ray's dashboard: %s, `%s`", url, command_to_ask(url, private))
                yield environment, [ray_head]
        finally:
            _keep_logs(Path(session), run.logs / "ray")


def _way_to_cluster(run: LocalRun) -> dict[str, str]:
    """RAY_ADDRESS for the run's processes, unless theirs, or the machine's only cluster, holds."""
    return {"RAY_ADDRESS": run.ray_address} if run.ray_address not in ("", "auto") else {}


def remote_variables(run: LocalRun) -> dict[str, str]:
    """Variables of a process on another node, beside those of `ray start` there.

    This process's variables of libraries, a hub's token among them.
    """
    variables = forwarded(os.environ, secrets=True)
    variables.pop("VLLM_HOST_IP", None)  # of this machine
    return variables | {THREADS: "1", **PASSIVE} | _way_to_cluster(run)


def command_to_ask(url: str, private: Mapping[str, str]) -> str:
    """The command that asks a private cluster's dashboard, with the variables that it needs."""
    token = " ".join(f"{name}={private[name]}" for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"))
    return f"{token} ray list actors --address {url}"


def _keep_logs(session: Path, target: Path) -> None:
    """Copy the logs of Ray's processes, whose folder is deleted with the run."""
    shutil.rmtree(target, ignore_errors=True)
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(session / "session_latest" / "logs", target, ignore_dangling_symlinks=True)


def dispatcher_of(
    run: LocalRun, number: int, environment: Mapping[str, str], *, name: str
) -> ChildProcess:
    """The process of one of the run's dispatchers; entering it starts it."""
    return ChildProcess(
        f"the {name} worker",
        [*COMMAND, *run.worker_words(number)],
        log=run.logs / f"{name}.log",
        environment=environment,
        max_restarts=MAX_RESTARTS,
    )


def remote_dispatcher_of(run: LocalRun, number: int, *, name: str, node: Node) -> RemoteProcess:
    """The process of a dispatcher on another node, which need not see the run's folder."""
    process = ChildProcess(
        f"the {name} worker on {node.host}",
        [*COMMAND[1:], *run.worker_words(number), "--ends-with-stdin"],
        log=run.logs / f"{name}@{node.host}.log",
        environment=remote_variables(run),
        max_restarts=MAX_RESTARTS,
    )
    return RemoteProcess(process, node_id=node.node_id, reads=run.resolved_file)


def trainers_of(
    run: LocalRun, nodes: Sequence[Node], environment: dict[str, str]
) -> tuple[ChildProcess, list[RemoteProcess]]:
    """The trainer here, which has rank 0, and those of the other machines that train."""
    here = ChildProcess(
        "the trainer",
        [*COMMAND, *run.train_words],
        log=run.logs / "trainer.log",
        environment=environment | {LAUNCH_LOGS: str(run.logs)},
        shows_output=True,
        stop_timeout_s=deadlines.TRAINER_ENDED_S,
    )
    if run.trainer_nodes == 1:
        return here, []
    rank0, others = f"{run.trainer_nodes} {nodes[0].host} {free_port()}", []
    for number, node in enumerate(nodes[1 : run.trainer_nodes], start=1):
        process = replace(
            here,
            name=f"the trainer on {node.host}",
            command=[*COMMAND[1:], *run.train_words, "--ends-with-stdin"],
            log=run.logs / f"trainer@{node.host}.log",
            environment=remote_variables(run) | {TRAINER_NODE: f"{number} {rank0}"},
            shows_output=False,
            may_end=True,
        )
        others.append(RemoteProcess(process, node_id=node.node_id, reads=run.resolved_file))
    here.environment = {**here.environment, TRAINER_NODE: f"0 {rank0}"}
    return here, others


def stop_when_asked(run: LocalRun) -> None:
    """Have SIGUSR1 end the run with its batch and a checkpoint, or, if that takes long, at once."""

    def stop() -> None:
        words = [*COMMAND, "control", str(run.folder), "stop"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            limit_s = deadlines.ANSWER_S
            if run.workers and not subprocess.run(words, check=False, timeout=limit_s).returncode:
                time.sleep(deadlines.JOB_ENDED_S - deadlines.LAUNCHED_ENDED_S)
        os.kill(os.getpid(), signal.SIGTERM)

    def asked(*_: object) -> None:
        threading.Thread(target=stop, name="stop", daemon=True).start()

    signal.signal(signal.SIGUSR1, asked)


def name_of(run: LocalRun, number: int) -> str:
    """The name of the workers of a table, in messages and names of logs."""
    modes = [config.kind for config in run.workers]
    mode = modes[number]
    return mode if modes.count(mode) == 1 else f"{mode}_{number}"


def refuse_broken(run: LocalRun, *, say: Say, is_prepared: bool = False) -> None:
    """Raise `ConfigError` for the errors that checks of `Cost.AT_ONCE` find, and say warnings.

    `is_prepared`: `prepare` has run, and the warnings were said before it.
    """
    from async_grpo.check.checks import check_all
    from async_grpo.check.facts import gather

    run = replace(run, file="the run", prepare=() if is_prepared else run.due)
    facts = replace(gather(run, cost=Cost.AT_ONCE), num_devices=run.num_devices)
    findings = check_all(run, facts, cost=Cost.AT_ONCE)
    unsaid = ("warning",) if is_prepared else ()
    _tell([each for each in findings if each.level not in unsaid], say=say)


def _tell(findings: Sequence[Finding], *, say: Say) -> None:
    for each in findings:
        if each.level == "warning":
            say(f"warning: {each.text}")
    if errors := [each.text for each in findings if each.level == "error"]:
        raise ConfigError(" | ".join(errors))


class CheckBeside(ChildProcess):
    """Runs the checks of `Cost.SECONDS` in a process while the run starts.

    consumes:     the run, as a file
    produces:     warnings, or the error that ends the start
    waits for:    nothing: those who wait for another process call `check` too
    unblocked by: the end of its process
    """

    def __init__(self, run: LocalRun, *, command: Iterable[str], say: Say) -> None:
        self._file, self._found = run.logs / "check.toml", run.logs / "check.json"
        self._say, self.is_told = say, False
        self._file.write_text(as_toml(run.tables))
        self._found.unlink(missing_ok=True)  # of a start that ended before this
        words = [*command, "check", str(self._file), "--beside", str(self._found), "--trust"]
        environment = {THREADS: "1", **os.environ}
        super().__init__("the check", words, log=run.logs / "check.log", environment=environment)

    def check(self) -> None:
        """After its end, say its warnings and raise `ConfigError` with its errors, once."""
        if self.is_told or not self.has_ended:
            return
        self.is_told = True
        self._file.unlink()
        if self._found.exists():  # else it has failed: its log says why
            found = [Finding(**each) for each in json.loads(self._found.read_text())]
            self._found.unlink()
            _tell(found, say=self._say)
