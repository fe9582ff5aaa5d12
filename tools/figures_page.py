"""Writes figures of pages out of benchmarks/results: `python tools/figures_page.py`.

They stand between `<!-- figures: NAME -->` and `<!-- end of figures -->`. The text there is that of
tools/figures/NAME.md, in which `{file; figure; format}` stands for a figure: `.2f/1000` divides it,
`.2f~` adds its lowest and highest. Or NAME is one of `TABLES`, whose rows are counted out. What
misses its goal is bold, what no file holds is a dash. A test compares the pages with the files.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import results  # noqa: E402
from benchmarks.results import Figure  # noqa: E402
from benchmarks.scaling.__main__ import BOUNDS, CLUSTERS  # noqa: E402
from benchmarks.scaling.hardware import MODELS  # noqa: E402

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TEMPLATES = ROOT / "tools" / "figures"
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.S)
CELL = re.compile(r"\{(\w+); ([^;}]+)(?:; ([^}/~]+)(?:/([\d.]+))?(~)?)?\}")


class Files:
    """The files of a folder; `sources` tells which of them were read."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._read = folder, dict[str, dict[str, Figure]]()

    def all(self, file: str) -> dict[str, Figure]:
        """The figures of a file by name."""
        if file not in self._read:
            self._read[file] = {each.name: each for each in results.read(file, folder=self._folder)}
        return self._read[file]

    def __call__(
        self, file: str, name: str, form: str = ".2f", by: float = 1.0, *, spread: bool = False
    ) -> str:
        """A figure, divided by `by`, with its lowest and highest if asked for and they differ."""
        if (found := self.all(file).get(name)) is None:
            return "–"
        form = f"z{form}"  # no -0
        text = format(found.value / by, form)
        if found.goal is not None:
            lower = found.better == "lower"
            missed = found.value > found.goal if lower else found.value < found.goal
            text = f"**{text}**" if missed else text
        low, high = found.spread or (found.value, found.value)
        varies = spread and low < high
        return f"{text} ({low / by:{form}} to {high / by:{form}})" if varies else text

    def cell(self, found: re.Match[str]) -> str:
        """What stands for a placeholder."""
        file, name, form, by, spread = found.groups()
        return self(file, name, form or ".2f", float(by or 1), spread=bool(spread))

    def sources(self) -> str:
        """When, where and of which commit the files that were read are."""
        origins: dict[str, list[str]] = {}
        for file in self._read:
            path = self._folder / f"{file}.json"
            told = {"commit": "unknown", **json.loads(path.read_text())} if path.exists() else {}
            when = "{date}, commit {commit}, {machine}".format(**told) if told else "not measured"
            origins.setdefault(when, []).append(f"`{file}`")
        return "; ".join(f"{', '.join(files)}: {when}" for when, files in origins.items()) + "."


def scaling(of: Files) -> Iterator[str]:
    """Of docs/scaling.md."""
    shares = ("standing still for weights", "weights on their way", "control process")
    columns = ("devices, model", "engines + ranks", "samples/s at S = 0, 1, 2, 4",
               "tokens/s a device", "trainers idle at S = 0, 1, 2", *shares)  # fmt: skip
    yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    get = partial(of, "scaling")
    for name, devices in CLUSTERS:
        at, width = f"{name} on {devices:,} devices", MODELS[name].devices_per_engine
        engines = of.all("scaling").get(f"{at}, engines")
        num = engines.value if engines else 0
        split = f"{num:,.0f}{f' x {width}' * (width > 1)} + {devices - num * width:,.0f}"
        cells = (
            split if engines else "–",
            ", ".join(get(f"{at}, staleness {bound}, samples", ",.3g") for bound in BOUNDS),
            get(f"{at}, staleness 2, tokens", ",.0f", devices),
            ", ".join(get(f"{at}, staleness {bound}, idle", ".0%") for bound in BOUNDS[:3]),
            *(get(f"{at}, staleness 2, {share}", ".1%") for share in shares),
        )
        yield f"| {devices:,}, {name} | {' | '.join(cells)} |"


def faults(of: Files) -> Iterator[str]:
    """Of docs/faults.md."""
    get, whole = partial(of, "faults"), ", whole again"
    counts = ("faults", "batches", "lost", "doubled", "stale")
    numbers = [get(f"all, {what}", ",.0f") for what in counts]
    yield "{} faults, {} batches; {} samples lost, {} doubled, {} stale.".format(*numbers)
    yield "\n| fault | detected, s | whole again, s |\n|---|---|---|"
    for name in (each.removesuffix(whole) for each in of.all("faults") if each.endswith(whole)):
        cells = (get(f"{name}{time}", ".1f", spread=True) for time in (", detected", whole))
        yield f"| {name} | {' | '.join(cells)} |"
    p99 = (get(f"all{time}, p99", ".1f") for time in (", detected", whole))
    yield f"| all, p99 | {' | '.join(p99)} |"


TABLES: Mapping[str, Callable[[Files], Iterator[str]]] = {"scaling": scaling, "faults": faults}


def rewritten(page: str, folder: Path = results.FOLDER) -> str:
    """The page with the figures of the files."""

    def block(found: re.Match[str]) -> str:
        of, name = Files(folder), found[2]
        template = TEMPLATES / f"{name}.md"
        made = "\n".join(TABLES[name](of)) if name in TABLES else template.read_text().strip()
        text = CELL.sub(of.cell, made)
        return f"{found[1]}\n{text}\n\n{of.sources()}\n\n{found[3]}"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    for file in PAGES:
        text = file.read_text(encoding="utf-8")
        if (new := rewritten(text)) != text:
            file.write_text(new, encoding="utf-8")
