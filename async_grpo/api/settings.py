"""A run as a script describes it, made into the tables of a run's file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_grpo.cli.local_run import LocalRun, values_in
from async_grpo.cli.run_file import MAY_REPEAT, read_tables
from async_grpo.config.train_config import TrainConfig
from async_grpo.launch.shared_files import here_or_shared
from async_grpo.types.roles import ENVIRONMENT, GENERATION, LOGPROB, REFERENCE, VERIFIER
from async_grpo.util.errors import ConfigError

Config = str | os.PathLike[str] | Mapping[str, Any] | TrainConfig
Tables = dict[str, list[dict[str, Any]]]
MODES = {GENERATION: GENERATION, REFERENCE: LOGPROB, ENVIRONMENT: ENVIRONMENT}  # of roles


def tables_of(config: Config) -> Tables:
    """{name: tables} of a file, of a dict of its tables, or of the trainer's options alone.

    >>> tables_of({"launch": {"num_cpus": 8}, "train": {"teacher_for": ("sums",), "preset": None}})
    {'launch': [{'num_cpus': 8}], 'train': [{'teacher_for': ['sums']}]}
    """
    if isinstance(config, TrainConfig):
        return {"train": [values_in(config)]}
    if isinstance(config, Mapping):
        found: Mapping[str, Any] = config
    elif isinstance(config, str | os.PathLike):
        file = os.fspath(config)
        read_tables(file)  # which refuses what is wrong, under the file's own name
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
    """The tables of `run` with the workers that it needs where none are named, nor on a cluster.

    They serve the trainer's own model; a teacher's, or a judge's, is for the file to name.
    """
    from async_grpo.algorithms.find import find_algorithm
    from async_grpo.run.recruitment import needed_roles  # imports Ray

    joins = run.ray_address or run.train.ray_address != "auto"
    if "worker" in tables or joins or find_algorithm(run.train).learns_from_pairs:
        return tables
    model = {"model_path": run.train.model_name_or_path}
    made = [
        {"mode": MODES[role], **({} if role == ENVIRONMENT else model)}
        for role in needed_roles(run.train)
        if role in MODES
    ]
    return {**tables, "worker": made} if made else tables


def with_rewards(tables: Tables, names: Sequence[str]) -> Tables:
    """The same with these rewards at every worker that brings verifiers."""
    workers = tables.get("worker", [])
    grading = (GENERATION, VERIFIER)
    if not any(table.get("mode", GENERATION) in grading for table in workers):
        raise ConfigError(
            "reward needs a [[worker]] of mode generation or verifier, which grades, and the run "
            "has none: add one, or leave out the reward"
        )
    told = {"reward_fns": ",".join(names)}
    graded = [
        {**table, **told} if table.get("mode", GENERATION) in grading else table
        for table in workers
    ]
    return {**tables, "worker": graded}


def _listed(tables: Any) -> Sequence[Any]:
    return tables if isinstance(tables, list | tuple) else [tables]


def _dict(table: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(table, Mapping):
        several = " or a list of them" if name in MAY_REPEAT else ""
        raise ConfigError(f"config[{name!r}] must be a dict{several}, got {table!r}: give one")
    return table


def plain(table: Mapping[str, Any]) -> dict[str, Any]:
    """The same in values that a file has: paths as text, arrays' numbers as Python's, no None.

    >>> plain({"data_path": Path("a"), "teacher_for": ("b",), "preset": None})
    {'data_path': 'a', 'teacher_for': ['b']}
    """
    return {key: _plain_value(value) for key, value in table.items() if value is not None}


def _plain_value(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [_plain_value(each) for each in value]
    return value.item() if hasattr(value, "item") else value
