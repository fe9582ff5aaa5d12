"""What `check` finds of a run: `check` itself asks, and `launch` before and while it starts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from async_grpo.check.finding import Cost
from async_grpo.cli.local_run import LocalRun, as_toml, variables_of
from async_grpo.launch.child_processes import ChildProcess
from async_grpo.util.errors import ConfigError

if TYPE_CHECKING:
    from async_grpo.check.facts import Setup

LINE = re.compile(r"(?P<level>warning|error) +\S+ +(?P<text>.*)")  # of `str(Finding)`
Say = Callable[[str], object]


def setup_of(run: LocalRun, *, file: str = "") -> Setup:
    """A run as checks see it."""
    from async_grpo.check.facts import Setup  # imports Ray

    return Setup(
        train=run.train,
        workers=run.workers,
        num_ranks=run.num_ranks,
        prepare=() if run.goes_on else run.prepare,
        starts_head=run.starts_head,
        ray_address=run.ray_address,
        file=file,
        num_cpus=run.given_cpus,
        plot_variables=variables_of(run.plot),
        types_overwrite=run.types_overwrite,
    )


def refuse_broken(run: LocalRun, *, say: Say, is_prepared: bool = False) -> None:
    """Raise `ConfigError` for what is wrong with a run, as far as that is seen without a process.

    `is_prepared`: what its `prepare` makes is there, and warnings were said before.
    """
    from async_grpo.check.checks import check_all
    from async_grpo.check.facts import gather

    setup = setup_of(run, file="the run")
    setup = replace(setup, prepare=()) if is_prepared else setup
    facts = replace(gather(setup, cost=Cost.AT_ONCE), num_devices=run.num_devices)
    findings = check_all(setup, facts, cost=Cost.AT_ONCE)
    unsaid = ("warning",) if is_prepared else ()
    _tell([(each.level, each.text) for each in findings if each.level not in unsaid], say=say)


def _tell(findings: Iterable[tuple[str, str]], *, say: Say) -> None:
    told = list(findings)
    for text in (text for level, text in told if level == "warning"):
        say(f"warning: {text}")
    if errors := [text for level, text in told if level == "error"]:
        raise ConfigError(" | ".join(errors))


class CheckBeside(ChildProcess):
    """`async-grpo check` of all that takes seconds, in a process while the run starts.

    consumes:     the run, as a file
    produces:     warnings, or the error that ends the start
    waits for:    nothing: whoever waits for a part of the run looks here too
    unblocked by: the end of its process
    """

    def __init__(self, run: LocalRun, *, command: Iterable[str], say: Say) -> None:
        self._file, self._say, self.is_told = run.logs / "check.toml", say, False
        self._file.write_text(as_toml(run.tables))
        words = [*command, "check", str(self._file), "--beside", "--trust"]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        super().__init__("the check", words, log=run.logs / "check.log", environment=environment)

    def check(self) -> None:
        """Say what it has found, once it has ended; raises `ConfigError` for what is wrong."""
        if self.is_told or not self.has_ended:
            return
        self.is_told = True
        self._file.unlink()
        lines = self.log.read_text("utf-8", "replace").splitlines()
        found = filter(None, map(LINE.fullmatch, lines))
        _tell([(each["level"], each["text"]) for each in found], say=self._say)
