"""Progress for people: a live display in a terminal, plain log lines anywhere else."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self, TextIO

import rich.console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from async_grpo.telemetry.progress import (
    STAGES,
    Progress,
    duration,
    number,
    step_line,
    workers_text,
)
from async_grpo.types import PipelineStatus

logger = logging.getLogger(__name__)

BAR_WIDTH = 32


class Console:
    """Shows a run's progress between `__enter__` and `__exit__`.

    In a terminal: a panel below the log, redrawn four times a second. Elsewhere: a log line at most
    every `interval_s` seconds. In both: a log line a gradient step. Leaves the terminal as it was,
    whatever ends the run.
    """

    def __init__(
        self,
        *,
        num_batches: int,
        interval_s: float = 15.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._last_line_s = clock()
        stream = stream or sys.stdout
        self._screen = _Screen(file=stream, highlight=False)
        self._progress = Progress(num_batches=num_batches, start_s=clock())
        self._open = contextlib.ExitStack()
        self.is_live = stream.isatty() and not self._screen.is_dumb_terminal

    def __enter__(self) -> Self:
        if self.is_live:
            before = sys.stdout, sys.stderr
            live = Live(
                console=self._screen, get_renderable=self._render, transient=True,
                refresh_per_second=4, redirect_stderr=sys.stderr.isatty(),
            )  # fmt: skip
            self._open.enter_context(live)
            for stream, to in zip(before, (sys.stdout, sys.stderr), strict=True):
                self._open.enter_context(_log_handlers_moved(stream, to=to))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def status(self, status: PipelineStatus) -> None:
        """Show what every stage is doing."""
        now_s = self._clock()
        self._progress.see_status(status, now_s=now_s)
        if not self.is_live and now_s - self._last_line_s >= self._interval_s:
            self._last_line_s = now_s
            logger.info(self._progress.status_line(now_s))

    def doing(self, what: str) -> None:
        """Show what the trainer computes or waits for from now on."""
        self._progress.activity = what

    def alarms(self, sentences: Sequence[str]) -> None:
        """Show what is wrong from now on."""
        self._progress.alarms = sentences

    def step(self, row: Mapping[str, float | int | None]) -> None:
        """Sum up the gradient step that `row` of the metrics describes."""
        self._last_line_s = self._clock()
        has_moved = self._progress.see_row(row, now_s=self._last_line_s)
        logger.info(step_line(row, num_batches=self._progress.num_batches))
        if has_moved:
            logger.info(self._progress.bottleneck.sentence)

    def _render(self) -> RenderableType:
        return panel(self._progress, now_s=self._clock())


def panel(progress: Progress, *, now_s: float) -> RenderableType:
    """The live display: a row a stage, then rates, workers, what the run waits for and why."""
    status = progress.status
    elapsed, left = duration(progress.elapsed_s(now_s)), duration(progress.remaining_s(now_s))
    title = f"batch {progress.batch_text} · {elapsed} elapsed · {left} left"
    parts: list[RenderableType] = []
    if status is not None:
        parts += [_stage_table(status), _rates(progress, status)]
    elif progress.row is not None:
        parts.append(Text(step_line(progress.row, num_batches=progress.num_batches)))
    else:
        parts.append(Text("waiting for the pipeline", style="yellow"))
    if progress.activity:
        parts.append(Text(f"trainer: {progress.activity}"))
    if progress.bottleneck.sentence:
        parts.append(Text(progress.bottleneck.sentence))
    parts += [Text(f"alarm: {sentence}", style="bold red") for sentence in progress.alarms]
    if status is not None and status.problem:
        parts.append(Text(str(status.problem), style="yellow"))
    shown = Panel(Group(*parts), title=title, title_align="left", border_style="dim")
    # The cursor waits on a line of its own: what the terminal or a dying process writes there, such
    # as ^C, leaves the lower border whole.
    return Group(shown, "")


def _stage_table(status: PipelineStatus) -> Table:
    counts = {stage.replace("_", " "): getattr(status, stage) for stage in STAGES}
    largest = max(1, *counts.values())
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=12)
    table.add_column(justify="right", min_width=6)
    table.add_column()
    for name, count in counts.items():
        bar = "━" * -(-BAR_WIDTH * count // largest)
        table.add_row(name, f"{count:,}", Text(bar, style="cyan"))
    return table


def _rates(progress: Progress, status: PipelineStatus) -> Text:
    parts = [f"generated {number(progress.tokens_per_second)} tok/s"]
    parts.append(f"reward of this batch so far {number(progress.reward)}")
    if progress.row is not None:
        parts.append(f"of the last trained step {number(progress.row.get('avg_reward'))}")
    parts += [f"{number(status.done)} samples done", workers_text(status.workers)]
    return Text("\n" + " · ".join(parts))


class _Screen(rich.console.Console):
    """Never hides the cursor, so that even a killed process leaves a sane terminal behind."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


@contextlib.contextmanager
def _log_handlers_moved(stream: TextIO, *, to: TextIO) -> Iterator[None]:
    """Meanwhile log handlers that write to `stream` write to `to`: above the panel, not into it."""
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is stream
    ]
    for handler in handlers:
        handler.setStream(to)
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(stream)
