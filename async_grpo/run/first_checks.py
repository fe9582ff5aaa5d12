"""What can be seen to be wrong with a run before torch is imported: in a second, not in ten."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from async_grpo.config.data_files import DataOptions
from async_grpo.config.evaluation_sets import EvaluationOptions
from async_grpo.config.option import flag, require
from async_grpo.config.run_options import RecordingOptions
from async_grpo.config.teaching import TeachingOptions
from async_grpo.data.lines import check_source
from async_grpo.data.questions import Columns, parse_column_mapping
from async_grpo.util.errors import ConfigError
from async_grpo.util.run_folder import is_restart, newest_checkpoint


def check_sources(
    data: DataOptions,
    evaluation: EvaluationOptions,
    teaching: TeachingOptions,
    *,
    waits: Callable[[str], bool] = lambda _: False,
) -> None:
    """Raise for a source that is not there, or whose first line has other columns than are named.

    A path that `waits` for somebody to make it is left out.
    """
    mapping = parse_column_mapping(data.column_mapping)
    named = [
        ("--data-path", data.data_path, mapping),
        ("--eval-data-path", evaluation.eval_data_path, mapping),
        ("--pairs-path", teaching.pairs_path, mapping),
    ]
    for file in data.data_files if data.data else ():
        for source in filter(None, (file.source, file.held_out)):
            named.append((f"--data of {file.type}", source.path, {**mapping, **file.columns}))
    for found in evaluation.eval:
        if found.source:
            columns = {**mapping, **found.columns}
            named.append((f"--eval of {found.name}", found.source.path, columns))
    for option, path, columns in named:
        if path and not waits(path):
            check_source(path, option=option, build=partial(Columns, mapping=columns))


def check_output(recording: RecordingOptions) -> None:
    """Raise `ConfigError` for places that cannot be written."""
    output, dump = Path(recording.output_dir), recording.dump_samples_filename
    _check_folder(output, "output_dir")
    if dump:
        _check_folder((output / dump).parent, "dump_samples_filename")
        require(
            not (output / dump).is_dir(), "dump_samples_filename", "must not be a folder", dump,
            "name a file in it",
        )  # fmt: skip


def check_overwrite(recording: RecordingOptions, *, is_typed: bool) -> None:
    """Raise `ConfigError` where a line of a file alone would remove a run with a checkpoint."""
    newest = newest_checkpoint(Path(recording.output_dir))
    if newest and recording.overwrite and not is_typed and not is_restart():
        raise ConfigError(
            f"--overwrite must be typed to remove a run with a checkpoint, got {newest[1]}, and a "
            f"file that says it: type --no-overwrite to go on after batch {newest[0]}, or type "
            "--overwrite to remove the run (overwrite=False or True of async_grpo.train)"
        )


def _check_folder(folder: Path, option: str) -> None:
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(
            f"{flag(option)} must lie in a folder that can be written, {existing} cannot: "
            "name another"
        )
