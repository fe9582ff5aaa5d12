"""What a launched run has come to, for a person: at its end, or where it is launched again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from async_grpo.cli.local_run import RUN_FILE, LocalRun
from async_grpo.cli.origin import trust_words
from async_grpo.launch.interrupts import where_to_go_on
from async_grpo.telemetry.alarm_log import ALARMS_FILE
from async_grpo.telemetry.rows import NewRows
from async_grpo.util.run_folder import EVALUATIONS_FILE, METRICS_FILE


def how_to_go_on(run: LocalRun) -> str:
    """What its user can do, in half a sentence."""
    return where_to_go_on(run.folder, command=relaunch(run))


def relaunch(run: LocalRun, *options: str) -> str:
    """The command that goes on with it, or does with its folder what the options say."""
    file = str(run.folder / RUN_FILE)
    words = [file, *options, *trust_words(run, file=file)]
    return f"`async-grpo launch {shlex.join(words)}`"


def finished(run: LocalRun) -> str:
    """Of one of which nothing is left to train."""
    number = run.train.num_training_batches
    longer = relaunch(run, "--num-training-batches", str(2 * number))
    return (
        f"{run.folder} is finished: all of its {number} batches are trained, nothing was started; "
        f"{longer} trains on, {relaunch(run, '--overwrite')} begins anew"
    )


def conclusion(run: LocalRun, *, seconds: float) -> str:
    """What a person wants to know, as far as the run has written it."""
    folder = run.folder
    lines = ["", f"{seconds / 60:.1f} minutes in all"]
    if told := _held_out(NewRows(folder / EVALUATIONS_FILE).read()):
        lines[1] = f"{told}, {lines[1]}"
    rows = NewRows(folder / METRICS_FILE).read()
    batches, total = rows[-1]["iteration"] + 1 if rows else 0, run.train.num_training_batches
    if rows and batches < total:
        lines.append(f"stopped after batch {batches} of {total}: {how_to_go_on(run)}")
    lines += _alarms(run)
    models = sorted((folder / "hf_format").glob("*"), key=os.path.getmtime)
    for what, file in (
        ("reward curve", folder / "reward.svg"),
        ("metrics", folder / METRICS_FILE),
        ("samples", folder / run.train.dump_samples_filename),
        *(("model", model) for model in models[-1:]),
    ):
        if file.exists() and file != folder:
            lines.append(f"{what:<14} {file}")
    return "\n".join(lines)


def _held_out(rows: list[dict[str, Any]]) -> str:
    """Accuracy on held-out questions, of the first set that has one; empty without."""
    names = (key for row in rows for key in row if key.startswith("eval_accuracy"))
    name = next(names, "")
    measured = sorted(
        (row for row in rows if row.get(name) is not None), key=lambda row: row["step"]
    )
    if len(measured) < 2:
        return ""
    first, last = measured[0], measured[-1]
    whose = name.replace("eval_accuracy", "").replace("/", " of ")
    return (
        f"held-out accuracy{whose} {first[name]:.0%} {_sampled(first)}, {last[name]:.0%} after "
        f"{last['batch']} batches ({last['total_samples_accumulated']} samples)"
    )


def _sampled(first: Mapping[str, Any]) -> str:
    """When the first evaluation's tokens are from: one engine trains on while it evaluates.

    >>> _sampled({"weights": "7.0"}), _sampled({"weights": "7.0..7.4"}), _sampled({})
    ('before', 'in the first 4 batches', 'before')
    """
    _, is_span, last = first.get("weights", "").partition("..")
    return f"in the first {last.rpartition('.')[2]} batches" if is_span else "before"


def _alarms(run: LocalRun) -> Iterator[str]:
    """How many there were, and those that stand at the end."""
    changes = NewRows(run.folder / ALARMS_FILE).read()
    standing = {each["alarm"]: each for each in changes}.values()
    told = [f"  {each['sentence']}" for each in standing if each["event"] == "raised"]
    if num_raised := sum(each["event"] == "raised" for each in changes):
        still = f"{len(told)} stand at the end" if told else "none stands at the end"
        yield f"{'alarms':<14} {num_raised} raised, {still} ({run.folder / ALARMS_FILE})"
        yield from told
