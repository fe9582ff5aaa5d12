"""Metrics files as curves: read, smoothed, and several seeds of one run made into a band.

Runs whose options differ by their seeds alone are one experiment.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_grpo.config.train_config import INCIDENTAL
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError, DataError
from async_grpo.util.run_folder import EVALUATIONS_FILE, METRICS_FILE, PARAMETERS_FILE

logger = logging.getLogger(__name__)

BESIDE = (EVALUATIONS_FILE, PARAMETERS_FILE)  # which a run may lack
BOUNDARY = "---next file---"  # the line between the files of a remote run
CLOCKS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}  # axes made of `total_seconds`
# Metrics that show whether a run learns, and whether training is stable.
PANELS = (
    "avg_reward", "eval_accuracy", "avg_output_tokens", "entropy", "grad_norm", "mismatch_kl",
)  # fmt: skip
PANELS_OF_PAIRS = ("loss", "eval_loss", "grad_norm", "learning_rate")
# Options in which two runs of one experiment may differ.
NOT_COMPARED = {"output_dir", "threads", *INCIDENTAL}
SEED_AT_THE_END = re.compile(r"[-_. ]*(seed|s)?[-_. ]*\d*$")
Row = dict[str, Any]  # {metric: its value in JSON}
Floats = NDArray[np.float64]


class NotMeasuredError(DataError):
    """A variable that stands in the run's rows, and has no value in any of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The rows of one run; several runs of one name are seeds of the same experiment."""

    name: str
    source: str  # the path, for messages
    rows: Sequence[Row]  # one a step, then one an evaluation
    options: Mapping[str, object] = field(default_factory=dict)  # training options; empty: unknown


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One line of a plot: the mean over `num_seeds` runs, between their minimum and maximum."""

    name: str
    x: Floats  # [K] ascending
    mean: Floats  # [K]
    low: Floats  # [K]
    high: Floats  # [K]
    raw: tuple[tuple[Floats, Floats], ...]  # the points (x, y) of each seed; empty: not smoothed
    num_seeds: int
    smooth_window: int  # points of the moving average; 1: none


def read_run(path: str, *, name: str, remote: str = "") -> Run:
    """The rows of a metrics file or a run folder, on this machine or on `remote` over ssh.

    Raises `DataError` if it has no rows, `ConfigError` if the remote cannot be reached.
    """
    text, evaluations, options = _read_remote(path, remote) if remote else _read_local(Path(path))
    source = f"{remote}:{path}" if remote else path
    rows = parse_rows(text, source)
    if evaluations:
        rows += map(_evaluated, parse_rows(evaluations, f"{source}'s evaluations"))
    return Run(name, source, rows, json_object(options))


def json_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object that `text` holds; empty where it holds none, or not all of one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _evaluated(row: Row) -> Row:
    """The metrics of an evaluation that no step has, and its time."""
    return {key: row[key] for key in row if re.match("eval_|total_|step$", key)}


def parse_rows(text: str, source: str) -> list[Row]:
    """The JSON objects of `text`; a half-written last line is left out with a warning."""
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    rows: list[Row] = []
    for number, line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == lines[-1][0] and not text.endswith("\n"):
                logger.warning("%s ends in a half-written line, which is left out", source)
                break
            raise DataError(f"{source} line {number} is not JSON ({error.msg})") from error
        if not isinstance(row, dict):
            raise DataError(f"{source} line {number} must be a JSON object, got {line[:40]!r}")
        rows.append(row)
    if not rows:
        raise DataError(f"{source} has no rows yet: wait for the first gradient step")
    return rows


def values(run: Run) -> dict[str, list[float]]:
    """{variable: its numbers in order}, of all variables that can be plotted."""
    found: dict[str, list[float]] = {}
    for row in run.rows:
        for key, value in row.items():
            if _is_number(value):
                found.setdefault(key, []).append(value)
    return found


def chosen_variables(runs: Sequence[Run]) -> list[str]:
    """The variables to plot by default: of `PANELS`, those with a non-zero value in every run.

    >>> row = {"loss": 1.5, "grad_norm": 0.1, "avg_reward": None, "entropy": 0.0}
    >>> chosen_variables([Run("a", "file", [row, row | {"loss": 1.2}])])
    ['loss', 'grad_norm']
    """
    found = [values(run) for run in runs]
    is_trained = all("avg_reward" in each for each in found)
    names = [_of_a_set(name, found) for name in (PANELS if is_trained else PANELS_OF_PAIRS)]
    chosen = [name for name in names if all(any(each.get(name, ())) for each in found)]
    return chosen or list(names[:1])


def _of_a_set(name: str, found: Sequence[Mapping[str, Sequence[float]]]) -> str:
    """The variable `name`, or that of the first named set where no unnamed set was evaluated.

    >>> _of_a_set("eval_accuracy", [{"loss": [1.0], "eval_accuracy/math": [0.5]}])
    'eval_accuracy/math'
    """
    own = (key for each in found for key in each if key.startswith(f"{name}/"))
    return name if any(name in each for each in found) else next(own, name)


def make_curves(
    runs: Sequence[Run], *, x: str, y: str, smooth_window: int | None = None
) -> list[Curve]:
    """One curve for each name of a run, in order. Raises `DataError` for unknown variables.

    Evaluations are not smoothed: they are few, and each is a mean over many samples.
    """
    if y.startswith("eval_"):
        smooth_window = None
    points: dict[str, list[tuple[Floats, Floats]]] = {}
    for run in runs:
        points.setdefault(run.name, []).append(_points(run, x=x, y=y))
    return [_curve(name, seeds, x, smooth_window) for name, seeds in points.items()]


def moving_average(values: Floats, window: int) -> Floats:
    """Centred mean over `window` values, over fewer at the ends.

    >>> moving_average(np.array([0.0, 3.0, 6.0, 3.0]), 3)
    array([1.5, 3. , 4. , 4.5])
    """
    ones = np.ones(min(window, len(values)))
    counts = np.convolve(np.ones(len(values)), ones, "same")
    return np.convolve(values, ones, "same") / counts


def _curve(
    name: str, seeds: list[tuple[Floats, Floats]], x_name: str, smooth_window: int | None
) -> Curve:
    smooth = [(x, moving_average(y, smooth_window) if smooth_window else y) for x, y in seeds]
    # Only where every seed has values: a mean over fewer would jump where one ends.
    first, last = max(x[0] for x, _ in smooth), min(x[-1] for x, _ in smooth)
    grid = np.unique(np.concatenate([x for x, _ in smooth]))
    grid = grid[(grid >= first) & (grid <= last)]
    if not len(grid):
        raise DataError(f"the runs named {name!r} have no range of {x_name!r} in common")
    values = np.stack([np.interp(grid, x, y) for x, y in smooth])  # [seeds, K]
    raw = tuple(seeds) if smooth_window else ()
    band, window = (values.mean(0), values.min(0), values.max(0)), smooth_window or 1
    return Curve(name, grid, *band, raw, len(seeds), window)


def _points(run: Run, *, x: str, y: str) -> tuple[Floats, Floats]:
    key, unit = ("total_seconds", CLOCKS[x]) if x in CLOCKS else (x, 1.0)
    known = list(values(run))
    for name in (key, y):
        if name not in known:
            raise _unknown_variable(name, run, known)
    pairs = sorted(
        (float(row[key]) / unit, float(row[y]))
        for row in run.rows
        if _is_number(row.get(key)) and _is_number(row.get(y))
    )
    if not pairs:
        raise DataError(f"no row of {run.source} has both {key!r} and {y!r}")
    xs, ys = zip(*pairs, strict=True)
    return np.array(xs), np.array(ys)


def _unknown_variable(name: str, run: Run, known: Sequence[str]) -> DataError:
    if any(name in row for row in run.rows):
        return NotMeasuredError(
            f"{name!r} has no value in any row of {run.source}: the run did not measure it"
        )
    remedy = f": `plot list {run.source}` prints those it has"
    if close := near_names(name, known):
        remedy = f": did you mean {' or '.join(close)}?"
    return DataError(f"{run.source} has no variable {name!r}{remedy}")


def near_names(name: str, known: Sequence[str]) -> list[str]:
    """At most three of `known` with a similar spelling, or else with a word in common.

    >>> known = ["avg_reward", "kl"]
    >>> near_names("avg_rewrd", known), near_names("held_out_kl", known)
    (['avg_reward'], ['kl'])
    """
    words = set(name.split("_"))
    sharing = [each for each in known if words & set(each.split("_"))]
    return get_close_matches(name, known, n=3, cutoff=0.7) or sharing[:3]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_local(path: Path) -> list[str]:
    """The text of a run's metrics, and of each file `BESIDE` them: empty for a missing one.

    A `path` that is no folder is the metrics file itself.
    """
    file = path / METRICS_FILE if path.is_dir() else path
    beside = [file.parent / name for name in BESIDE]
    read = partial(Path.read_text, encoding="utf-8", errors="replace")
    try:
        return [read(file), *(read(each) if each.is_file() else "" for each in beside)]
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(
            f"cannot read {file} ({reason}): give a metrics file or the folder of a run"
        ) from error


def _read_remote(path: str, remote: str) -> list[str]:
    """The texts that `_read_local` returns, read on another machine."""
    # The shell there expands ~ only where it is not quoted.
    quoted = "~/" + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)
    command = (
        f'file={quoted}; if test -d "$file"; then file=$file/{METRICS_FILE}; fi; '
        f'cat "$file" && for name in {" ".join(BESIDE)}; do echo {BOUNDARY}; '
        'cat "$(dirname "$file")/$name" 2>/dev/null; done'
    )
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "--", remote, command]
    try:
        answer = subprocess.run(
            ssh, capture_output=True, timeout=deadlines.SSH_S, check=False, errors="replace"
        )
    except FileNotFoundError as error:
        raise ConfigError("--remote needs ssh, which is not installed: install OpenSSH") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"--remote {remote} did not answer within {deadlines.SSH_S:g} s: try `ssh {remote}` "
            "by hand"
        ) from error
    texts = answer.stdout.split(f"{BOUNDARY}\n")
    if len(texts) != 1 + len(BESIDE):
        reason = answer.stderr.strip().replace("\n", "; ")
        raise DataError(
            f"cannot read {path} on {remote} ({reason or f'exit code {answer.returncode}'}): "
            f"check the path, and that `ssh {remote}` works without a password"
        )
    return texts


def experiment(options: Mapping[str, object]) -> str:
    """A key that is equal for runs whose `training_params.json` differ by their seeds alone.

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


def seed_of(options: Mapping[str, object]) -> object:
    return options.get("infinite_sampler_seed")


def names_of(paths: Sequence[str], options: Sequence[Mapping[str, object]]) -> list[str]:
    """A name for each run; runs of one experiment with different seeds share a name.

    `options`: each run's, empty where they are unknown. Runs of one experiment with equal seeds
    keep names of their own: they are repetitions, or one is a copy.

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
            letters = os.path.commonprefix([names[i] for i in group])  # noqa: RUF071  not folders
            shared = SEED_AT_THE_END.sub("", letters)
            name = shared if shared and shared not in others else names[group[0]]
            for index in group:
                names[index] = name
    return names


def default_names(paths: Sequence[str]) -> list[str]:
    """The names of the runs' folders, or the whole paths where two folders share a name.

    >>> default_names(["runs/a/training_metrics.jsonl", "runs/b"]), default_names(["1/x", "2/x"])
    (['a', 'b'], ['1/x', '2/x'])
    """
    files = [PurePosixPath(path) for path in paths]
    names = [(file.parent if file.suffix == ".jsonl" else file).name for file in files]
    return names if len(set(names)) == len(names) and all(names) else list(paths)
