"""Which runs are seeds of one experiment, by their options, and what that one is called. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Any

from async_grpo.config.option import Change, options_of_change
from async_grpo.config.train_config import TrainConfig

# Of a run, what makes no other experiment of it.
NOT_COMPARED = {"output_dir", *options_of_change(TrainConfig, Change.INCIDENTAL)}
SEED_AT_THE_END = re.compile(r"[-_. ]*(seed|s)?[-_. ]*\d*$")


def experiment(options: Mapping[str, Any]) -> str:
    """What runs that differ by their seeds alone have in common, of their `training_params.json`.

    >>> first = {"infinite_sampler_seed": 1, "output_dir": "runs/1", "learning_rate": 1e-6}
    >>> experiment(first) == experiment(first | {"infinite_sampler_seed": 2, "output_dir": "b"})
    True
    >>> experiment(first) == experiment(first | {"learning_rate": 1e-5})
    False
    """
    compared = {
        name: value
        for name, value in options.items()
        if name not in NOT_COMPARED and not name.endswith("seed")
    }
    return json.dumps(compared, sort_keys=True)


def seed_of(options: Mapping[str, Any]) -> Any:
    return options.get("infinite_sampler_seed")


def names_of(paths: Sequence[str], options: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each run, the same for those of one experiment with seeds of their own.

    `options`: of each run, empty where it has left none. Runs of one experiment and one seed are
    told apart: they are repetitions, or one is a copy.

    >>> seeds = [{"infinite_sampler_seed": seed, "max_staleness": 0} for seed in (1, 2)]
    >>> other = {"infinite_sampler_seed": 1, "max_staleness": 1}
    >>> names_of(["runs/sync_seed1", "runs/sync_seed2", "runs/async"], [*seeds, other])
    ['sync', 'sync', 'async']
    >>> names_of(["runs/a", "runs/b"], [seeds[0]] * 2)
    ['a', 'b']
    """
    names = default_names(paths)
    groups: dict[str, list[int]] = {}
    for index, known in enumerate(options):
        if known:
            groups.setdefault(experiment(known), []).append(index)
    for group in groups.values():
        seeds = {str(seed_of(options[index])) for index in group}
        if 1 < len(group) == len(seeds):
            others = {name for index, name in enumerate(names) if index not in group}
            shared = SEED_AT_THE_END.sub("", _common_start([names[i] for i in group]))
            name = shared if shared and shared not in others else names[group[0]]
            for index in group:
                names[index] = name
    return names


def _common_start(texts: Sequence[str]) -> str:
    """
    >>> _common_start(["sync_seed1", "sync_seed2"])
    'sync_seed'
    """
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))
    return "".join(column[0] for column in columns)


def default_names(paths: Sequence[str]) -> list[str]:
    """The folders of the runs, or the whole paths where two folders are called the same.

    >>> default_names(["runs/a/training_metrics.jsonl", "runs/b"]), default_names(["1/x", "2/x"])
    (['a', 'b'], ['1/x', '2/x'])
    """
    files = [PurePosixPath(path) for path in paths]
    names = [(file.parent if file.suffix == ".jsonl" else file).name for file in files]
    return names if len(set(names)) == len(names) and all(names) else list(paths)
