"""What distillation costs, and what it reaches.

python -m benchmarks.distillation                      # everything, half an hour or more
python -m benchmarks.distillation --parts payloads,rates
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import click

from async_grpo.launch.interrupts import interrupt_once
from benchmarks import results
from benchmarks.results import Figure
from benchmarks.stack import MODEL

NAME = "distillation"
PARTS = ("payloads", "rates", "recipes", "trl")


@click.command()
@click.option("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; trl needs recipes")
@click.option("--recipes", "named", default="one teacher,two", help="to run, of these")
@click.option("--seeds", default=3, help="runs of each recipe")
@click.option("--repeats", default=3, help="turns of what is timed")
@click.option("--quick", is_flag=True, help="small sizes of payloads and rates, to show they run")
@click.option("--output-dir", default="runs/benchmarks/distillation", help="replaced")
@click.option("--results-dir", default=str(results.FOLDER), help="where the figures go")
def main(
    parts: str,
    named: str,
    seeds: int,
    repeats: int,
    quick: bool,
    output_dir: str,
    results_dir: str,
) -> None:
    """Measure payloads, steps a minute, and the recipes beside TRL; other parts' figures stay."""
    from benchmarks.distillation import payloads, rates, recipes

    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
    logging.getLogger("async_grpo").setLevel("WARNING")
    interrupt_once()  # so that SIGTERM too ends what was started
    chosen = ["payloads", "rates"] if quick else parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise click.BadParameter(f"--parts must be of {PARTS}, got {sorted(unknown)}")
    examples = named.split(",")
    if unknown := set(examples) - set(recipes.EXAMPLES):
        known = tuple(recipes.EXAMPLES)
        raise click.BadParameter(f"--recipes must be of {known}, got {sorted(unknown)}")
    repeats = 1 if quick else repeats
    folder = Path(output_dir)
    shutil.rmtree(folder, ignore_errors=True)
    click.echo(f"{results.machine()}, {results.load()}")
    found: list[Figure] = []
    if "payloads" in chosen:
        size = 4 if quick else 32
        found += payloads.figures(folder / "model", tokenizer=MODEL, num_rows=size, repeats=repeats)
    if "rates" in chosen:
        found += rates.figures(folder / "rates", num_batches=8 if quick else 24, repeats=repeats)
    if "recipes" in chosen:
        found += recipes.figures(
            folder / "recipes", names=examples, seeds=seeds, with_trl="trl" in chosen
        )
    click.echo(results.show(found))
    names = {figure.name for figure in found}
    kept = [f for f in results.read(NAME, folder=Path(results_dir)) if f.name not in names]
    path = results.write(NAME, [*found, *kept], folder=Path(results_dir))
    click.echo(f"wrote {path}, {results.load()}")


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
