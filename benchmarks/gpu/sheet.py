"""The figures of a call: on the screen and in the file as they come, and what was left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import click
import torch

from benchmarks import results
from benchmarks.gpu.isolation import Problem
from benchmarks.gpu.numerics import EXACTNESS
from benchmarks.gpu.summary import derived
from benchmarks.results import Figure

NAME = "gpu"
TOY = "TOY SIZE"


class Sheet:
    """Written anew after every variant: a call that is cut short leaves what it had."""

    def __init__(self, folder: Path, *, device: str, toy: bool) -> None:
        self._folder = folder
        self._toy = toy
        self._device = f"{device or 'no NVIDIA device'}, torch {torch.__version__}"
        self._figures: list[Figure] = []
        self._problems: list[str] = []
        self._failures: list[str] = []
        click.echo(f"{self._device}, {results.machine()}, {results.load()}")
        if toy:
            click.echo(f"{TOY}: shows that everything runs, and says nothing of any GPU")

    def fill(self, trial: str, said: Iterable[Figure | Problem]) -> None:
        """Take what a variant says, as it says it."""
        click.echo(f"\n{trial}")
        found: list[Figure] = []
        for part in said:
            if isinstance(part, Figure):
                found.append(part)
                continue
            chosen = self._failures if part.is_failure else self._problems
            chosen.append(f"{trial}: {part.reason}")
            click.echo(f"  {part.reason}")
        if found:
            click.echo(results.show(self._labelled(found)))
        self._figures += found
        self._write()

    def leave_out(self, trial: str) -> None:
        self._problems.append(f"{trial}: no time was left for it")

    def close(self) -> None:
        """What follows from the figures, and what is missing; an error of ours ends the command."""
        click.echo(f"\n{results.show(self._labelled(derived(self._figures)))}")
        for problem in self._problems:
            click.echo(f"missing: {problem}")
        click.echo(f"wrote {self._write()}")
        if self._failures:
            raise click.ClickException("\n".join(["these variants failed", *self._failures]))

    def _write(self) -> Path:
        return results.write(
            f"{NAME}_toy" if self._toy else NAME,
            self._labelled([*self._figures, *derived(self._figures)]),
            folder=self._folder,
            device=self._device,
        )

    def _labelled(self, figures: Sequence[Figure]) -> list[Figure]:
        """Toy sizes are never to be mistaken for a GPU's: marked, and no speed has a goal."""
        if not self._toy:
            return list(figures)
        return [
            replace(f, name=f"{TOY}, {f.name}", goal=f.goal if EXACTNESS in f.name else None)
            for f in figures
        ]
