"""`async-grpo plan run.toml`: memory, time and the best split of a run, before it is started."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from async_grpo.check.finding import tried
from async_grpo.cli.assignment import placed_on
from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.launch_file import run_of
from async_grpo.cli.local_run import LocalRun, check_origin
from async_grpo.cli.memory import MEMORY_BYTES, asked_of, fleet_here
from async_grpo.cli.options import CONTEXT
from async_grpo.cli.run_file import trust_option
from async_grpo.devices.core_shares import THREADS
from async_grpo.devices.inventory import read_inventory
from async_grpo.util.errors import AsyncGrpoError, ConfigError, UnfitModel
from async_grpo.util.run_folder import RUN_FILE

if TYPE_CHECKING:
    from async_grpo.planning.asked import Asked, Fleet
    from async_grpo.planning.measured import EarlierRun
    from async_grpo.planning.page import Plan


@click.command("plan", context_settings={**CONTEXT, "ignore_unknown_options": True})
@click.argument("file", metavar="FILE")
@click.argument("train_options", metavar="[TRAIN OPTIONS]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--devices", default="", metavar="N|8,8|16xH200", show_default="this machine's",
              help="devices that it may have: how many, of each machine, their kind")  # fmt: skip
@click.option("--host-gib", type=click.FloatRange(0), default=0.0, metavar="GIB",
              show_default="this machine's, without --devices",
              help="memory of each machine, which then must hold its processes too")  # fmt: skip
@click.option("--rates", default="", metavar="FILE",
              help="TOML of speeds that you know, in tables as --json shows them")  # fmt: skip
@click.option("--from-run", multiple=True, metavar="RUN",
              help="folder of an earlier run of `launch`: its speeds and lengths")  # fmt: skip
@click.option("--output-tokens", type=click.FloatRange(0), default=0.0, metavar="MEAN",
              show_default="--from-run's, or assumed", help="mean output in tokens")  # fmt: skip
@click.option("--prompt-tokens", type=click.IntRange(0), default=0, metavar="MEAN",
              show_default="--from-run's, or the data's",
              help="mean prompt in tokens")  # fmt: skip
@click.option("--shape-of", default="", metavar="MODEL",
              help="model whose sizes stand for one that is not here yet")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="print the plan as JSON")
@trust_option
@command_boundary()
def plan(
    *, file: str, train_options: Sequence[str], as_json: bool, trust: bool, **options: Any
) -> None:
    """Say what the run of FILE would take on some devices, and how best to share them.

    The bill of memory of every role with its formulas; the time of a gradient step by its parts,
    what bounds it, and what staleness would change; the split of the devices with the most samples
    a second. The run is simulated: nothing of it is started, and no device is needed.

    \b
    e.g. examples/qwen_7b.toml --devices 16xH100
    """
    from async_grpo.check.described import users_code_confined

    run = run_of(file, train_options)
    check_origin(run, file=file, typed=train_options, trusted=trust)
    with users_code_confined(trusted=trust):
        found = plan_of(run, **options)
        from async_grpo.planning.page import as_text, in_words

        click.echo(as_text(found) if as_json else in_words(found))


def plan_of(
    run: LocalRun,
    *,
    devices: str = "",
    rates: str = "",
    from_run: Sequence[str] = (),
    output_tokens: float = 0.0,
    prompt_tokens: int = 0,
    shape_of: str = "",
    host_gib: float = 0.0,
) -> Plan:
    """The plan of a run; raises `ConfigError` or `UnfitModel` for what cannot be planned."""
    from async_grpo.devices.bill import GIB
    from async_grpo.planning.asked import fleet_of
    from async_grpo.planning.bills import bills_of, check_fits, check_hosts
    from async_grpo.planning.measured import RateSources, lengths_of, work_of
    from async_grpo.planning.page import Plan
    from async_grpo.planning.search import search

    threads = run.thread_variables[THREADS]
    fleet = fleet_of(devices) if devices else fleet_here(read_inventory(), threads=threads)
    held = int(host_gib * GIB) or (0 if devices else MEMORY_BYTES)
    asked = asked_of(_placed(run, fleet), fleet, shape_of=shape_of, host_bytes=held)
    check_fits(asked)
    known = RateSources(
        runs=tuple(_earlier(name, asked, shape_of) for name in from_run), given=_tables(rates),
        file=rates,
    )  # fmt: skip
    of_data = 0 if prompt_tokens or from_run else _prompt_of_data(run)
    lengths = lengths_of(
        asked, known, output_tokens=output_tokens, prompt_tokens=prompt_tokens or of_data
    )
    if of_data:
        lengths = replace(lengths, source=f"{lengths.source}, prompts of the data")
    work = work_of(asked, known, lengths)
    found = search(work, asked)
    check_hosts(asked, found.best.split)
    return Plan(work(found.best.split), bills_of(asked, found.best.split), found)


def _placed(run: LocalRun, fleet: Fleet) -> LocalRun:
    """The run with whole devices; where they are too few, with shares as `launch` gives them."""
    is_colocated = run.train.memory.colocated
    if is_colocated or fleet.num_devices < 1 + sum(each.num_devices for each in run.workers):
        return placed_on(run, fleet)
    workers = tuple(replace(each, gpus_per_worker=1.0) for each in run.workers)
    train = run.train.but(gpus_per_rank=1.0)
    return replace(run, train=train, workers=workers)


def _prompt_of_data(run: LocalRun) -> int:
    """Mean tokens of the run's prompts; 0 where its data or tokenizer is not here."""
    from async_grpo.check.data_read import read_data
    from async_grpo.check.facts import read_model
    from async_grpo.model.model_folder import ModelFacts

    model = read_model(run)
    if not isinstance(model, ModelFacts):
        return 0
    reads = tried(lambda: tuple(read_data(run, model)))
    read = () if isinstance(reads, AsyncGrpoError) else reads
    lengths = [each for one in read if one.purpose == "train" for each in one.lengths.tolist()]
    return round(fmean(lengths)) if lengths else 0


def _tables(file: str) -> dict[str, object]:
    """The tables of the file of --rates."""
    if not file:
        return {}
    try:
        return tomllib.loads(Path(file).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--rates {file} cannot be read as TOML: {error}") from None


def _earlier(folder: str, asked: Asked, shape_of: str) -> EarlierRun:
    """An earlier run by `launch`; raises `UnfitModel` if its model has other sizes."""
    from async_grpo.planning.measured import EarlierRun, read_lengths, read_rows

    file = Path(folder) / RUN_FILE
    if not file.is_file():
        raise ConfigError(
            f"--from-run {folder} has no {RUN_FILE}, which says how it was shared out: name a run "
            "of `async-grpo launch`"
        )
    run = run_of(str(file), ())
    earlier = asked_of(run, asked.fleet, shape_of=shape_of)
    if earlier.model != asked.model:
        raise UnfitModel(
            f"--from-run {folder} must have trained a model of the same sizes, it has "
            f"{earlier.model.num_parameters:,} parameters and "
            f"{run.train.places.model_name_or_path}, this "
            f"one {asked.model.num_parameters:,}: leave it out, or give --rates"
        )
    rows = read_rows(Path(folder))
    dump = run.train.recording.dump_samples_filename
    lengths = read_lengths(Path(folder), rows, dump=dump)
    return EarlierRun(name=folder, asked=earlier, rows=rows, lengths=lengths)
