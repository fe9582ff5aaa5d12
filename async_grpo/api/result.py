"""The files of a run's folder as Python objects."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from async_grpo.cli.use_run import MANY, make_page
from async_grpo.telemetry.jsonl import NewRows
from async_grpo.telemetry.progress import number, step_line
from async_grpo.util.run_folder import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    exports_in,
    newest_checkpoint,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Row = dict[str, Any]  # {metric: value}: docs/metrics.md has their types


@dataclass(frozen=True, slots=True)
class Step:
    """One gradient step that was taken."""

    metrics: Mapping[str, Any]  # the step's row of training_metrics.jsonl: docs/metrics.md
    num_batches: int  # of the run

    @property
    def number(self) -> int:
        """The step's number, from 1."""
        return int(self.metrics["step"])

    @property
    def reward(self) -> float | None:
        """Mean over the step's samples; None if none was graded, as in fine-tuning."""
        return self.metrics.get("avg_reward")

    @property
    def loss(self) -> float | None:
        """The objective, as docs/metrics.md defines `loss`; None if the step was skipped."""
        return self.metrics.get("loss")

    def __getitem__(self, metric: str) -> Any:
        return self.metrics[metric]

    def __str__(self) -> str:
        return step_line(self.metrics, num_batches=self.num_batches)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What a run's folder holds."""

    folder: Path
    history: tuple[Row, ...]  # a row a gradient step
    evaluations: tuple[Row, ...]  # a row an evaluation on held-out data

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read the folder of a run that has ended or is under way."""
        folder = Path(folder)
        files = (folder / METRICS_FILE, folder / EVALUATIONS_FILE)
        return cls(folder, *(tuple(NewRows(file).read()) for file in files))

    @property
    def model(self) -> Path | None:
        """The newest export, a folder for transformers and vLLM; None before the first."""
        found = exports_in(self.folder)
        return found[max(found)] if found else None

    @property
    def best_model(self) -> Path | None:
        """The export with the best evaluation; the newest one where none was evaluated.

        The best has the highest accuracy (of the first of several sets), or the lowest loss in
        supervised fine-tuning. `--min-samples-per-checkpoint` and `--eval-every-batches` decide how
        many there are to choose from.
        """
        exports, scores = exports_in(self.folder), {}
        for row in self.evaluations:
            accuracies = (value for key, value in row.items() if key.startswith("eval_accuracy"))
            score = next((value for value in accuracies if value is not None), None)
            if score is None and row.get("eval_loss") is not None:
                score = -row["eval_loss"]
            if score is not None and row["total_samples_accumulated"] in exports:
                scores[row["total_samples_accumulated"]] = score
        return exports[max(scores, key=scores.__getitem__)] if scores else self.model

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint that a run can resume from; None before the first."""
        newest = newest_checkpoint(self.folder)
        return newest[1] if newest else None

    def plot(self, *variables: str, smooth_window: int = 0, x: str = "step") -> Figure:
        """Plot metrics over the run, as a figure that notebooks show; the main ones by default.

        `smooth_window`: points of a moving average; 0: 10 for a run of more than 60 steps. Raises
        `DataError` for unknown variables, naming those spelt alike.
        """
        from async_grpo.viewing.curves import chosen_variables, make_curves, read_run
        from async_grpo.viewing.figure import fill

        run = read_run(str(self.folder), name=self.folder.name)
        window = smooth_window or (10 if len(run.rows) > MANY else None)
        wanted = dict.fromkeys(variables or chosen_variables([run]))
        panels = {y: make_curves([run], x=x, y=y, smooth_window=window) for y in wanted}
        picture = _picture()
        fill(picture, panels, x=x)
        return picture

    def rollouts(self, output: str | Path = "") -> Path:
        """Write the page of the model's outputs (`async-grpo rollouts`), and return its path."""
        path = Path(output) if output else self.folder / "rollouts.html"
        make_page(self.folder, path)
        return path

    def __repr__(self) -> str:
        told = [f"{len(self.history)} steps"]
        if self.history:
            told.append(f"reward {number(self.history[-1].get('avg_reward'))}")
        by_step = sorted(self.evaluations, key=lambda row: row.get("step", 0))  # a slow one is late
        if held_out := [row["eval_accuracy"] for row in by_step if "eval_accuracy" in row]:
            told.append(f"held-out accuracy {number(held_out[-1])}")
        return f"<Result of {self.folder}: {', '.join(told)}>"


def _picture() -> Figure:
    """A figure that notebooks show also without `%matplotlib inline`, which shows pyplot's only."""
    from matplotlib.figure import Figure  # takes a second, and only plots need it

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", bbox_inches="tight")
            return buffer.getvalue()

    return Picture()
