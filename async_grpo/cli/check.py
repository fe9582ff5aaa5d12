"""`async-grpo check run.toml`: what is wrong with a run, before anything of it is started."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import click

from async_grpo.check.finding import EVERYTHING, Cost, Finding, refused, tried
from async_grpo.cli.assignment import placed, placed_on
from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.deep_check import deep_findings
from async_grpo.cli.launch_file import run_of
from async_grpo.cli.local_run import LocalRun, check_origin
from async_grpo.cli.memory import check_memory, devices_in
from async_grpo.cli.options import CONTEXT
from async_grpo.cli.run_file import trust_option
from async_grpo.cli.train import QUIET
from async_grpo.config.worker_config import check_services
from async_grpo.devices.inventory import usable_devices
from async_grpo.util.errors import AsyncGrpoError
from async_grpo.util.files import replacing

EXIT_WRONG = 1


@click.command("check", context_settings={**CONTEXT, "ignore_unknown_options": True})
@click.argument("words", metavar="[FILE] [TRAIN OPTIONS]...", nargs=-1, type=click.Path())
@click.option(
    "--plan-for",
    default="",
    metavar="8,8",
    show_default="this machine's",
    help="devices of machines that are to run it",
)
@click.option("--deep", is_flag=True, help="then train shortly: minutes, and the device's memory")
@click.option("--beside", default="", hidden=True, metavar="FILE",
              help="only what `launch` leaves to its start, as JSON in FILE too")  # fmt: skip
@trust_option
@click.option("--json", "as_json", is_flag=True, help="print the findings as one JSON list")
@command_boundary()
def check(
    *, words: Sequence[str], plan_for: str, deep: bool, beside: str, trust: bool, as_json: bool
) -> None:
    """Say what is wrong with the run of FILE, or of train options alone, and start nothing of it.

    It reads the data and the model's folder, has the rewards grade the first line in processes of
    their own, and looks at this machine and the cluster. A line a finding: ok, waits (for what
    `prepare` makes), warning, or error. Exits with 1 after an error. With --deep it also trains,
    for minutes: the debugging protocol of docs/check.md, with the workers of FILE where it samples.

    \b
    e.g. examples/quickstart.toml --batch-size 64
    """
    for name, value in {**QUIET, "TRANSFORMERS_VERBOSITY": "critical"}.items():
        os.environ.setdefault(name, value)
    with _silent(logging.getLogger("async_grpo")):  # findings report the same
        cost = Cost.SECONDS if beside else EVERYTHING
        findings = findings_of(words, plan_for=plan_for, deep=deep, cost=cost, trusted=trust)
    found = json.dumps([asdict(finding) for finding in findings], indent=1)
    if beside:
        with replacing(Path(beside)) as new:
            new.write(found.encode())
    click.echo(found if as_json else "\n".join(map(str, findings)))
    if any(finding.level == "error" for finding in findings):
        sys.exit(EXIT_WRONG)


def findings_of(
    words: Sequence[str],
    *,
    tries_rewards: bool = True,
    plan_for: str = "",
    deep: bool = False,
    cost: Cost = EVERYTHING,
    trusted: bool = False,
) -> list[Finding]:
    """Findings of a file and train options, as typed; one alone if they make no run.

    `plan_for`: devices of other machines than this one, on which it is to run.
    """
    file, options = (words[0], words[1:]) if words and words[0][:1] != "-" else ("", words)
    try:
        run = run_of(file, options)
        check_origin(run, file=file, typed=options, trusted=trusted)
        check_services(run.workers)
    except click.UsageError as error:
        return [Finding("error", "options", " ".join(error.format_message().split()))]
    except AsyncGrpoError as error:
        return refused("options", error)
    from async_grpo.check.described import users_code_confined

    run = replace(run, file=file, trusted=trusted, prepare=run.due)
    with users_code_confined(trusted=trusted):
        return _findings(run, tries_rewards, plan_for=plan_for, deep=deep, cost=cost)


def _findings(
    run: LocalRun, tries_rewards: bool, *, plan_for: str, deep: bool, cost: Cost
) -> list[Finding]:
    from async_grpo.check.checks import check_all  # imports Ray
    from async_grpo.check.facts import gather

    facts = gather(run, tries_rewards=tries_rewards, cost=cost)
    found = tried(lambda: _placed_for(run, plan_for) if plan_for else placed(run, usable_devices()))
    if isinstance(found, AsyncGrpoError):
        return check_all(run, replace(facts, placement=found), cost=cost)
    facts = replace(facts, placement=found.placement, num_devices=found.num_devices)
    findings = check_all(run, facts, cost=cost)
    if deep and not any(finding.level == "error" for finding in findings):
        findings += deep_findings(found, facts)
    return findings


def _placed_for(run: LocalRun, plan_for: str) -> LocalRun:
    fleet = devices_in(plan_for)
    found = placed_on(run, fleet)
    check_memory(found, fleet)
    return found


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel("CRITICAL")
    try:
        yield
    finally:
        logger.setLevel(level)
