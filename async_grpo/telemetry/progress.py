"""What to tell people about a run: rates, the time left, and the wording. Pure."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence

from async_grpo.telemetry.bottleneck import Bottleneck
from async_grpo.types import PipelineStatus

Row = Mapping[str, float | int | None]

STAGES = ("generating", "verifying", "in_reference", "ready", "training")  # of a status
STEP_LINE = (
    "step {step} · batch {batch} · reward {avg_reward} · best {avg_max_reward_in_group} · "
    "length {avg_output_tokens} · timed out {perc_timed_out_samples} · entropy {entropy} · "
    "loss {loss} · KL {kl} · gradient {grad_norm} · lag {max_lag} · mismatch {mismatch_kl} · "
    "{tokens_per_second} tok/s · MFU {mfu} · memory {memory} GiB · {seconds} s · {failed} % failed"
)
RATE_WINDOW_S = 20.0
NUM_BATCHES_FOR_ETA = 20


class Progress:
    """Follows a run by its statuses and metrics rows; all times are seconds of one clock."""

    def __init__(self, *, num_batches: int, start_s: float) -> None:
        self.num_batches = num_batches
        self.status: PipelineStatus | None = None
        self.row: Row | None = None
        self.activity = ""  # of the trainer
        self.alarms: Sequence[str] = ()  # what is wrong now
        self.bottleneck = Bottleneck()
        self._start_s = start_s
        self._tokens: deque[tuple[float, int]] = deque()  # (time, output tokens since the start)
        self._completions: deque[tuple[float, int]] = deque(  # (time, batches before this one)
            maxlen=NUM_BATCHES_FOR_ETA
        )

    def see_status(self, status: PipelineStatus, *, now_s: float) -> None:
        """Take in what every stage is doing."""
        self.status = status
        self._see_batch(status.batch, now_s=now_s)
        self._tokens.append((now_s, status.output_tokens))
        # Over whole batches: generators stand still while the trainer computes the newest one.
        since_s = self._completions[-2][0] if len(self._completions) > 1 else now_s
        since_s = min(since_s, now_s - RATE_WINDOW_S)
        while len(self._tokens) > 2 and self._tokens[1][0] <= since_s:
            self._tokens.popleft()

    def see_row(self, row: Row, *, now_s: float) -> bool:
        """Take in the metrics of the step that just ended; whether the bottleneck has moved."""
        self.row = row
        if self.status is None:  # an objective without a pipeline
            self._see_batch(int(row.get("iteration") or 0), now_s=now_s)
        return self.bottleneck.see_row(row)

    def _see_batch(self, batch: int, *, now_s: float) -> None:
        if not self._completions or batch > self._completions[-1][1]:
            self._completions.append((now_s, batch))

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens by wall clock since the batch before this one, or over the last seconds
        where that is longer; None before there are two readings.
        """
        if len(self._tokens) < 2:
            return None
        (first_s, first), (last_s, last) = self._tokens[0], self._tokens[-1]
        # A restarted batcher counts from 0 again.
        return max(0, last - first) / (last_s - first_s) if last_s > first_s else None

    @property
    def reward(self) -> float | None:
        """Mean reward graded so far in the current batch; None before the first verdict."""
        status = self.status
        return status.reward_sum / status.reward_count if status and status.reward_count else None

    def elapsed_s(self, now_s: float) -> float:
        return now_s - self._start_s

    def remaining_s(self, now_s: float) -> float | None:
        """Time left at the pace of the last batches; None before a batch was completed."""
        if len(self._completions) < 2:
            return None
        (first_s, first), (last_s, last) = self._completions[0], self._completions[-1]
        pace_s = (last_s - first_s) / (last - first)
        return max(0.0, (self.num_batches - last) * pace_s - (now_s - last_s))

    def status_line(self, now_s: float) -> str:
        """All of it on one line, for logs."""
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
        """Which batch is being worked on, counted from 1."""
        batch = self._completions[-1][1] if self._completions else 0
        return f"{min(batch + 1, self.num_batches)}/{self.num_batches}"


def step_line(row: Row, *, num_batches: int) -> str:
    """The summary of one gradient step.

    >>> step_line({"step": 3, "iteration": 2, "avg_reward": 0.5}, num_batches=9)
    'step 3 · batch 3/9 · reward 0.5'
    """
    told = {key: number(value) for key, value in row.items() if value is not None}
    if "avg_reward" in told:
        told["avg_reward"] += in_brackets(row, "avg_reward")
    if (batch := row.get("iteration")) is not None:
        told["batch"] = f"{int(batch) + 1}/{num_batches}"
    if most := row.get("peak_device_bytes") or row.get("peak_process_bytes"):  # of any rank
        told["memory"] = number(most / 2**30)
    if failed := row.get("perc_failed_samples"):
        told["failed"] = number(100 * failed)
    parts = []
    for part in STEP_LINE.split(" · "):
        with contextlib.suppress(KeyError):  # of what the row lacks
            parts.append(part.format_map(told))
    return " · ".join(parts)


def in_brackets(row: Row, metric: str) -> str:
    """What a metric is of each type of questions; empty without types.

    >>> in_brackets({"avg_reward": 0.5, "avg_reward/sums": 0.75, "kl/sums": 1.0}, "avg_reward")
    ' (sums 0.75)'
    """
    start = f"{metric}/"
    own = [f"{key[len(start) :]} {number(row[key])}" for key in row if key.startswith(start)]
    return f" ({', '.join(own)})" if own else ""


def number(value: float | int | None) -> str:
    """A number as short as it can be read.

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
