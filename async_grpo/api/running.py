"""`async_grpo.train` and `start`: a run of `async-grpo launch` from a script or a notebook.

The run is a child process, `async-grpo launch`, which starts and ends all others. It ends with the
`with` block, with an exception or Ctrl-C in it, and with this process however that dies: the child
watches its standard input. The arguments become the tables of a run's file.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import click

from async_grpo.api.result import Result, Step
from async_grpo.api.rewards import RewardFile, Rewards, reward_file
from async_grpo.cli.launch_file import launch
from async_grpo.cli.local_run import LocalRun, check_origin, options_of_run, planned, read_run
from async_grpo.cli.run_file import (
    MAY_REPEAT,
    TRUST,
    as_toml,
    as_typed,
    here_or_shared,
    read_tables,
    values_in,
    values_of,
)
from async_grpo.cli.run_processes import COMMAND
from async_grpo.cli.train import main as train_command
from async_grpo.config.roles import ENVIRONMENT, GENERATION, LOGPROB, REFERENCE, VERIFIER
from async_grpo.config.train_config import TrainConfig
from async_grpo.launch.child_processes import ChildProcess
from async_grpo.run.output_folder import check_free, check_overwrite
from async_grpo.telemetry.jsonl import NewRows
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError, RunFailed
from async_grpo.util.run_folder import METRICS_FILE, PARAMETERS_FILE

POLL_INTERVAL_S = 0.2
LAUNCH_LOG = "launch.log"
Config = str | os.PathLike[str] | Mapping[str, object] | TrainConfig
Tables = dict[str, list[dict[str, Any]]]
MODES = {GENERATION: GENERATION, REFERENCE: LOGPROB, ENVIRONMENT: ENVIRONMENT}  # by role
OF_LAUNCH = {"prepare", "num_cpus", "ray_address", "unconfined_rewards", "unconfined_code"}


def train(
    config: Config,
    *,
    reward: Rewards | None = None,
    on_step: Callable[[Step], object] | None = None,
    **options: object,
) -> Result:
    """Train to the end, and return the run's result.

    `config`: the file of a run, a dict of its tables ({"train": {...}, "worker": [...]}), or a
    `TrainConfig`; where it names no workers, those that the run needs serve the trained model.
    `reward`: a function, or several, or names that `--reward-fns` takes; a function gets a sample,
    a dict with `input`, `answer`, `output` and the columns of its line, and returns a number.
    `on_step` is called after each gradient step; `trust=True` runs code that a file from elsewhere
    names. `options` of `async-grpo train` or `launch` override those of `config`.

    Raises `ConfigError` for a run that cannot begin and `RunFailed` for one that has failed, both
    `AsyncGrpoError`. When this call ends, also by Ctrl-C, all that it has started has ended.
    """
    with start(config, reward=reward, **options) as run:
        for step in run:
            if on_step is not None:
                on_step(step)
    return run.result


def start(config: Config, *, reward: Rewards | None = None, **options: object) -> Run:
    """Begin a run as `train` does, and return at once; iterate over it for its steps."""
    plan, rewards = plan_run(config, reward=reward, **options)
    if rewards is not None:
        rewards.write()
    return Run(plan)


def plan_run(
    config: Config, *, reward: Rewards | None = None, **options: object
) -> tuple[LocalRun, RewardFile | None]:
    """Check the arguments of `train`, and return the run they describe; starts and writes nothing.

    Raises `ConfigError` for anything that its commands would refuse.
    """
    rewards, trusted = None, bool(options.pop("trust", False))
    with tempfile.TemporaryDirectory(prefix="async-grpo-") as folder, _as_config_error(folder):
        file, given = Path(folder, "config"), as_typed(plain(options))
        tables = tables_of(config)
        first = read_run(**_launch_options(file, tables, given))
        of_file = os.fspath(config) if isinstance(config, str | os.PathLike) else ""
        typed = [str(value) for value in given.values()]
        check_origin(first, file=of_file, typed=typed, trusted=trusted)
        tables = with_workers(tables, first)
        if reward is not None:
            rewards = reward_file(reward, folder=first.folder)
            if rewards.asks:
                tables = with_asking_reward(tables, *rewards.names, run=first)
                rewards.write()  # whoever plans the run reads it
            else:
                tables = with_rewards(tables, rewards.names)
        plan = planned(trust=True, **_launch_options(file, tables, given))
        check_overwrite(plan.train.recording, is_typed=plan.types_overwrite)
        check_free(plan.folder)
        return plan, rewards


class Run:
    """A run that was started: iterate over its gradient steps, or `wait` for its end.

    A `with` block ends it in order on leaving: its checkpoint is saved.
    """

    def __init__(self, plan: LocalRun) -> None:
        self.folder = plan.folder
        self.log = plan.logs / LAUNCH_LOG
        self._num_batches = plan.train.batching.num_training_batches
        self._began_at_ns = time.time_ns()
        self._is_stopped = False
        self._open = contextlib.ExitStack()
        plan.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        plan.logs.mkdir(exist_ok=True)
        place = self._open.enter_context(tempfile.TemporaryDirectory(prefix="async-grpo-"))
        file = Path(place, "run.toml")
        file.write_text(as_toml(plan.tables))
        typed = ["--overwrite"] if plan.types_overwrite and plan.train.recording.overwrite else []
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment.pop("MPLBACKEND", None)  # a notebook's backend draws in that notebook only
        child = ChildProcess(
            "the run",
            [*COMMAND, "launch", str(file), "--ends-with-stdin", TRUST, *typed],
            log=self.log,
            environment=environment,
            stdin=subprocess.PIPE,
            stop_timeout_s=deadlines.LAUNCHED_ENDED_S,
        )
        self._process = self._open.enter_context(child)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Step]:
        """Yield each step once it was taken; of a resumed run, also those of its earlier parts.

        Raises `RunFailed`, with the run's error message, after the last step.
        """
        new = NewRows(self.folder / METRICS_FILE)
        last = 0
        while True:
            is_last = not self.is_running  # asked before reading, so that no row is missed
            for row in new.read() if self._is_accepted() else ():
                if row["step"] > last:  # a resumed run may repeat steps
                    last = row["step"]
                    yield Step(row, self._num_batches)
            if is_last:
                break
            time.sleep(POLL_INTERVAL_S)
        self._check_end()

    def wait(self) -> Result:
        """Wait for the end of the run; raises `RunFailed` as iterating does."""
        for _ in self:
            pass
        return self.result

    def stop(self) -> None:
        """Ask the run to end after this gradient step, with a checkpoint; iterating ends then."""
        self._is_stopped = True
        self._process.interrupt()

    def close(self) -> None:
        """End the run and all its processes."""
        self._is_stopped = self._is_stopped or self.is_running
        self._open.close()

    @property
    def is_running(self) -> bool:
        return self._process.child.poll() is None

    @property
    def result(self) -> Result:
        """The result so far."""
        return Result.read(self.folder)

    def __repr__(self) -> str:
        return f"<Run in {self.folder}, {'running' if self.is_running else 'ended'}>"

    def _is_accepted(self) -> bool:
        """Whether the folder's metrics are this run's: at first they may be an older run's."""
        try:
            return (self.folder / PARAMETERS_FILE).stat().st_mtime_ns >= self._began_at_ns
        except FileNotFoundError:
            return False

    def _check_end(self) -> None:
        code = self._process.child.wait()
        if code and not self._is_stopped:
            raise RunFailed(self._process.failure, folder=self.folder)


def _launch_options(file: Path, tables: Tables, options: Mapping[str, object]) -> dict[str, Any]:
    """The parameters of `launch` for these tables; `options` override the tables'."""
    of_launch = {name: value for name, value in options.items() if name in OF_LAUNCH}
    of_train = {name: value for name, value in options.items() if name not in OF_LAUNCH}
    own = values_of(of_launch, command=launch, where="option")
    given = values_of(of_train, command=train_command, where="option")
    file.write_text(as_toml(tables))
    context = launch.make_context("launch", [str(file)], default_map=own)
    return {**options_of_run(context.params), "given": given}


@contextlib.contextmanager
def _as_config_error(folder: str) -> Iterator[None]:
    """Turn usage errors into `ConfigError`s, without the name of the temporary `folder`."""
    try:
        yield
    except (click.UsageError, ConfigError) as error:
        said = error.format_message() if isinstance(error, click.UsageError) else str(error)
        sentence = " ".join(said.replace(f"{folder}{os.sep}", "").split())
        raise ConfigError(sentence) from (None if isinstance(error, click.UsageError) else error)


def tables_of(config: Config) -> Tables:
    """{name: tables} of a run's file, of a dict of tables, or of the trainer's options.

    >>> tables_of({"launch": {"num_cpus": 8}, "train": {"teacher_for": ("sums",), "preset": None}})
    {'launch': [{'num_cpus': 8}], 'train': [{'teacher_for': ['sums']}]}
    """
    if isinstance(config, TrainConfig):
        return {"train": [values_in(config)]}
    if isinstance(config, Mapping):
        found: Mapping[str, object] = config
    elif isinstance(config, str | os.PathLike):
        file = os.fspath(config)
        read_tables(file)  # refuses mistakes, naming the user's file
        found = tomllib.loads(Path(here_or_shared(file)).read_text())
    else:
        raise ConfigError(
            f"config must be the file of a run, a dict of its tables or a TrainConfig, got "
            f"{config!r}: give one of these"
        )
    return {
        name: [plain(_dict(each, name)) for each in _listed(its)] for name, its in found.items()
    }


def with_workers(tables: Tables, run: LocalRun) -> Tables:
    """Add the workers that the run needs, unless some are named or it joins a cluster.

    They serve the trained model; the file must name workers of teachers and judges.
    """
    from async_grpo.algorithms.find import find_algorithm
    from async_grpo.run.recruitment import needed_roles  # imports Ray

    joins = run.ray_address or run.train.places.ray_address != "auto"
    if "worker" in tables or joins or find_algorithm(run.train).learns_from_pairs:
        return tables
    model = {"model_path": run.train.places.model_name_or_path}
    made = [
        {"mode": MODES[role], **({} if role == ENVIRONMENT else model)}
        for role in needed_roles(run.train)
        if role in MODES
    ]
    return {**tables, "worker": made} if made else tables


def with_rewards(tables: Tables, names: Sequence[str]) -> Tables:
    """The tables with these rewards at every worker that starts verifiers."""
    workers = tables.get("worker", [])
    grading = (GENERATION, VERIFIER)
    if not any(table.get("mode", GENERATION) in grading for table in workers):
        raise ConfigError(
            "reward needs a [[worker]] of mode generation or verifier, which grades, and the run "
            "has none: add one, or leave out the reward"
        )
    named = {"reward_fns": ",".join(names)}
    graded = [
        {**table, **named} if table.get("mode", GENERATION) in grading else table
        for table in workers
    ]
    return {**tables, "worker": graded}


def with_asking_reward(tables: Tables, name: str, *, run: LocalRun) -> Tables:
    """The tables with an asynchronous reward as the environment, and a worker that plays it."""
    if run.train.environments != {"single_turn"}:
        raise ConfigError(
            f"an asynchronous reward grades questions of one turn, got the environment "
            f"{', '.join(sorted(run.train.environments))}: await the reward in its `grade`"
        )
    workers = tables.get("worker", [])
    if workers and ENVIRONMENT not in (table.get("mode") for table in workers):
        tables = {**tables, "worker": [*workers, {"mode": ENVIRONMENT}]}
    return {**tables, "train": [{**table, "environment": name} for table in tables["train"]]}


def _listed(tables: object) -> Sequence[object]:
    return tables if isinstance(tables, list | tuple) else [tables]


def _dict(table: object, name: str) -> Mapping[str, object]:
    if not isinstance(table, Mapping):
        several = " or a list of them" if name in MAY_REPEAT else ""
        raise ConfigError(f"config[{name!r}] must be a dict{several}, got {table!r}: give one")
    return table


def plain(table: Mapping[str, object]) -> dict[str, object]:
    """The table with values that TOML has: paths as text, numpy's numbers as Python's, no None.

    >>> plain({"data_path": Path("a"), "teacher_for": ("b",), "preset": None})
    {'data_path': 'a', 'teacher_for': ['b']}
    """
    return {key: _plain_value(value) for key, value in table.items() if value is not None}


def _plain_value(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, list | tuple):
        return [_plain_value(each) for each in value]
    return value.item() if hasattr(value, "item") else value
