"""Progress for people: a live display in a terminal, plain log lines anywhere else."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Self, TextIO

import click
import rich.console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from async_grpo.telemetry.bottleneck import Bottleneck, Row
from async_grpo.types import PipelineStatus

logger = logging.getLogger(__name__)

STAGES = ("generating", "verifying", "in_reference", "ready", "training")  # of a status
LINE_WIDTH, TIME_WIDTH = 100, 20  # characters of a step's line, and of the time before it
CELLS = (  # of a step's line, in this order as far as they fit: (what is said, its value's width)
    ("reward {avg_reward}", 5), ("loss {only_loss}", 8), ("failed {failed}", 4),
    ("timed out {timed_out}", 4),
    ("batch {batch}", 0), ("left {left}", 5), ("{seconds} s", 5), ("{rate} tok/s", 5),
    ("length {avg_output_tokens}", 5), ("grad {grad_norm}", 5), ("KL {kl}", 7),
    ("loss {loss}", 8), ("entropy {entropy}", 5), ("best {avg_max_reward_in_group}", 5),
    ("lag {max_lag}", 1), ("MFU {mfu}", 5), ("memory {memory} GiB", 5),
)  # fmt: skip
COLOURS = {"reward": "green", "failed": "red", "timed out": "red"}
HELD_OUT = "== held-out"  # begins a line about held-out data
RATE_WINDOW_S = 20.0
NUM_BATCHES_FOR_ETA = 20
BAR_WIDTH = 32


class Console:
    """Shows a run's progress between `__enter__` and `__exit__`.

    A terminal gets a panel below the log, redrawn four times a second; any other stream gets a log
    line at most every `interval_s` seconds. Both get a log line for each gradient step. However the
    run ends, the terminal is restored.
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
        """Show a new status of the pipeline."""
        now_s = self._clock()
        self._progress.see_status(status, now_s=now_s)
        if not self.is_live and now_s - self._last_line_s >= self._interval_s:
            self._last_line_s = now_s
            logger.info(self._progress.status_line(now_s))

    def doing(self, what: str) -> None:
        """From now on show that the trainer does `what`."""
        self._progress.activity = what

    def alarms(self, sentences: Sequence[str]) -> None:
        """From now on show `sentences`, those of the active alarms."""
        self._progress.alarms = sentences

    def step(self, row: Mapping[str, float | int | None]) -> None:
        """Show and log the gradient step whose metrics are `row`."""
        self._last_line_s = self._clock()
        has_moved = self._progress.see_row(row, now_s=self._last_line_s)
        left = duration(self._progress.remaining_s(self._last_line_s))
        line = partial(step_line, row, num_batches=self._progress.num_batches, left=left)
        if self.is_live:
            width = min(LINE_WIDTH, self._screen.width - TIME_WIDTH)
            line = partial(line, line_width=width, coloured=not self._screen.no_color)
        logger.info(line())
        if has_moved:
            logger.info(self._progress.bottleneck.sentence)

    def _render(self) -> RenderableType:
        return panel(self._progress, now_s=self._clock())


class Progress:
    """The state that the console shows, kept by a run's statuses and metrics rows.

    All times are seconds of one clock.
    """

    def __init__(self, *, num_batches: int, start_s: float) -> None:
        self.num_batches = num_batches
        self.status: PipelineStatus | None = None
        self.row: Row | None = None
        self.activity = ""  # of the trainer
        self.alarms: Sequence[str] = ()  # sentences of the active ones
        self.bottleneck = Bottleneck()
        self._start_s = start_s
        self._tokens: deque[tuple[float, int]] = deque()  # (time, output tokens since the start)
        self._completions: deque[tuple[float, int]] = deque(  # (time, batches before this one)
            maxlen=NUM_BATCHES_FOR_ETA
        )

    def see_status(self, status: PipelineStatus, *, now_s: float) -> None:
        """Take a new status of the pipeline."""
        self.status = status
        self._see_batch(status.batch, now_s=now_s)
        self._tokens.append((now_s, status.output_tokens))
        # Over whole batches, because generators idle while the trainer computes the newest one.
        since_s = self._completions[-2][0] if len(self._completions) > 1 else now_s
        since_s = min(since_s, now_s - RATE_WINDOW_S)
        while len(self._tokens) > 2 and self._tokens[1][0] <= since_s:
            self._tokens.popleft()

    def see_row(self, row: Row, *, now_s: float) -> bool:
        """Take the metrics of the step that has just ended; True if the bottleneck has moved."""
        self.row = row
        if self.status is None:  # the algorithm has no pipeline
            self._see_batch(int(row.get("iteration") or 0), now_s=now_s)
        return self.bottleneck.see_row(row)

    def _see_batch(self, batch: int, *, now_s: float) -> None:
        if not self._completions or batch > self._completions[-1][1]:
            self._completions.append((now_s, batch))

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens a second since the previous batch began, or over the last `RATE_WINDOW_S`
        where that is longer; None before there are two statuses.
        """
        if len(self._tokens) < 2:
            return None
        (first_s, first), (last_s, last) = self._tokens[0], self._tokens[-1]
        # A restarted batcher counts from 0 again.
        return max(0, last - first) / (last_s - first_s) if last_s > first_s else None

    @property
    def reward(self) -> float | None:
        """Mean reward of the samples graded so far in this batch; None before the first one."""
        status = self.status
        return status.reward_sum / status.reward_count if status and status.reward_count else None

    def elapsed_s(self, now_s: float) -> float:
        return now_s - self._start_s

    def remaining_s(self, now_s: float) -> float | None:
        """Time left at the rate of the last batches; None before the first is complete."""
        if len(self._completions) < 2:
            return None
        (first_s, first), (last_s, last) = self._completions[0], self._completions[-1]
        pace_s = (last_s - first_s) / (last - first)
        return max(0.0, (self.num_batches - last) * pace_s - (now_s - last_s))

    def status_line(self, now_s: float) -> str:
        """The whole state on one line, for logs."""
        status = self.status
        if status is None:
            return f"waiting for the pipeline, {duration(self.elapsed_s(now_s))}"
        parts = [f"batch {self.batch_text}"]
        parts += [f"{stage.replace('_', ' ')} {getattr(status, stage)}" for stage in STAGES]
        parts += [f"reward so far {number(self.reward)}"]
        parts += [f"generated {number(self.tokens_per_second)} tok/s"]
        parts += [f"trainer: {self.activity}"] if self.activity else []
        parts += [workers_text(status.workers), f"left {duration(self.remaining_s(now_s))}"]
        return " · ".join(parts) + (f" · {status.problem}" if status.problem else "")

    @property
    def batch_text(self) -> str:
        """The current batch, counted from 1, and how many there are."""
        batch = self._completions[-1][1] if self._completions else 0
        return f"{min(batch + 1, self.num_batches)}/{self.num_batches}"


def panel(progress: Progress, *, now_s: float) -> RenderableType:
    """The live display: a row for each stage, then rates, workers, activity, alarms, problem."""
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
    # Keep the cursor on a separate line: what the terminal or a dying process writes there, such as
    # ^C, must not overwrite the lower border.
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


class TerminalFormatter(logging.Formatter):
    """Colours what a reader of a terminal looks for: warnings, and lines about held-out data."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            return click.style(text, fg="yellow")
        is_held_out = record.getMessage().startswith(HELD_OUT)
        return click.style(text, fg="cyan", bold=True) if is_held_out else text


class _Screen(rich.console.Console):
    """Never hides the cursor, which a killed process could not show again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


@contextlib.contextmanager
def _log_handlers_moved(stream: TextIO, *, to: TextIO) -> Iterator[None]:
    """Have the log handlers of `stream` write to `to` meanwhile: above the panel, not into it."""
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


def step_line(
    row: Row,
    *,
    num_batches: int,
    left: str = "",
    line_width: int = LINE_WIDTH,
    coloured: bool = False,
) -> str:
    """The summary of one gradient step in columns, as many of `CELLS` as fit.

    `left`: the time to the end of the run.

    >>> step_line({"iteration": 2, "avg_reward": 0.5, "grad_norm": 0.25}, num_batches=9, left="9s")
    'reward   0.5  batch 3/9  left    9s  grad  0.25'
    """
    shown = _shown(row, num_batches, left)
    told: list[str] = []
    length = -2
    for form, width in CELLS:
        label, _, name = form.partition("{")
        name = name.partition("}")[0]
        if name not in shown:
            continue
        cell = form.format_map({name: f"{shown[name]:>{width}}"})
        cell += in_brackets(row, name) if name == "avg_reward" else ""
        length += 2 + len(cell)
        if told and length > line_width:
            break
        colour = COLOURS.get(label.rstrip()) if coloured else None
        told.append(click.style(cell, fg=colour, bold=True) if colour else cell)
    return "  ".join(told)


def _shown(row: Row, num_batches: int, left: str) -> dict[str, str]:
    """{name in `CELLS`: its value as text}; without rewards the loss is said first."""
    shown = {key: number(value) for key, value in row.items() if value is not None}
    if "avg_reward" not in shown and "loss" in shown:
        shown["only_loss"] = shown.pop("loss")
    if (batch := row.get("iteration")) is not None:
        shown["batch"] = f"{int(batch) + 1:>{len(str(num_batches))}}/{num_batches}"
    if left:
        shown["left"] = left
    if (rate := row.get("tokens_per_second")) is not None:
        shown["rate"] = number(rate) if rate < 1000 else f"{number(rate / 1000)}k"
    if most := row.get("peak_device_bytes") or row.get("peak_process_bytes"):  # of any rank
        shown["memory"] = number(most / 2**30)
    for name in ("failed", "timed_out"):
        if share := row.get(f"perc_{name}_samples"):
            shown[name] = f"{100 * share:.0f} %"
    return shown


def in_brackets(row: Row, metric: str) -> str:
    """A metric's value for each type of questions; "" without types.

    >>> in_brackets({"avg_reward": 0.5, "avg_reward/sums": 0.75, "kl/sums": 1.0}, "avg_reward")
    ' (sums 0.75)'
    """
    start = f"{metric}/"
    own = [f"{key[len(start) :]} {number(row[key])}" for key in row if key.startswith(start)]
    return f" ({', '.join(own)})" if own else ""


def number(value: float | int | None) -> str:
    """A number in few digits.

    >>> [number(value) for value in (None, 12, 0.43217, 12345.6, 0.000012, 0.0)]
    ['–', '12', '0.432', '12,346', '1.2e-05', '0']
    """
    if value is None:
        return "–"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """
    >>> [duration(seconds) for seconds in (None, 7.6, 185, 7380)]
    ['–', '8s', '3m05s', '2h03m']
    """
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def workers_text(workers: Mapping[str, int]) -> str:
    """
    >>> workers_text({"generation": 2, "reference": 1}), workers_text({})
    ('2 generation, 1 reference workers', 'no workers')
    """
    if not workers:
        return "no workers"
    return ", ".join(f"{count} {role}" for role, count in sorted(workers.items())) + " workers"
