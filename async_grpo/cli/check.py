"""`async-grpo check run.toml`: what is wrong with a run, before anything of it is started."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from async_grpo.check.finding import EVERYTHING, Cost, Finding, refused, tried
from async_grpo.cli.assignment import devices_in, placed, placed_on
from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.launch_file import run_of
from async_grpo.cli.local_run import LocalRun, check_origin
from async_grpo.cli.options import CONTEXT
from async_grpo.cli.run_file import trust_option
from async_grpo.cli.run_processes import COMMAND
from async_grpo.cli.train import QUIET
from async_grpo.config.option import groups_of
from async_grpo.config.worker_config import check_services
from async_grpo.devices.inventory import usable_devices
from async_grpo.launch.child_processes import ChildProcess
from async_grpo.model.model_folder import ModelFacts
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError
from async_grpo.util.files import replacing
from async_grpo.util.run_folder import METRICS_FILE

if TYPE_CHECKING:
    from async_grpo.check.facts import Facts

EXIT_WRONG = 1
# Of the short runs of --deep.
KEPT_GROUPS = ("Memory and speed", "Learning rate and optimizer")
NUM_BATCHES, NUM_PAIRS, LEAST_RATE = 20, 4, 1e-4
HALF = NUM_BATCHES // 2


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
    for minutes: the largest minibatch, one batch until its loss falls, and a resume.

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
    found = tried(
        lambda: placed_on(run, devices_in(plan_for)) if plan_for else placed(run, usable_devices())
    )
    if isinstance(found, AsyncGrpoError):
        return check_all(run, replace(facts, placement=found), cost=cost)
    facts = replace(facts, placement=found.placement, num_devices=found.num_devices)
    findings = check_all(run, facts, cost=cost)
    if deep and not any(finding.level == "error" for finding in findings):
        findings += deep_findings(found, facts)
    return findings


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel("CRITICAL")
    try:
        yield
    finally:
        logger.setLevel(level)


def deep_findings(run: LocalRun, facts: Facts) -> Iterator[Finding]:
    """Findings of short supervised runs in a folder of their own; they end at the first error.

    They need neither workers nor Ray, and take minutes: the largest minibatch that the run may
    meet, one batch trained repeatedly, and the second half of that again from its checkpoint.
    """
    from async_grpo.check.data_read import ids_of  # imports Ray

    reads = facts.data if isinstance(facts.data, tuple) else ()
    prompts = [ids_of(first) for read in reads for first in read.firsts.values()]
    if not isinstance(facts.model, ModelFacts) or not prompts:
        yield Finding("waits", "deep", "model and data are not here yet: prepare them first")
        return
    max_prompt = max(int(read.lengths.max(initial=0)) for read in reads)
    max_output = run.train.sampling.max_generation_tokens
    longest = min(max_prompt + max_output, facts.model.max_positions)
    with tempfile.TemporaryDirectory(prefix="async-grpo-check-") as place:
        trials = Trials(run, facts.model, Path(place))
        yield (found := trials.worst_minibatch(longest))
        if found.level == "ok":
            yield (found := trials.overfit(prompts))
        if found.level == "ok":
            yield trials.resume()


class Trials:
    """The short runs of --deep, whose data and folders lie in one place."""

    def __init__(self, run: LocalRun, model: ModelFacts, place: Path) -> None:
        self._run, self._model, self._place = run, model, place

    def worst_minibatch(self, num_tokens: int) -> Finding:
        """One step on as many sequences of `num_tokens` as a minibatch of each rank holds."""
        num_sequences = max(1, self._run.train.batching.max_tokens_per_gpu // num_tokens)
        ids = [number % self._model.vocab_size for number in range(num_tokens)]
        pair = {"input_token_ids": ids[:1], "completion_token_ids": ids[1:]}
        pairs = [pair] * (num_sequences * self._run.num_ranks)
        what = f"{num_sequences} sequences of {num_tokens} tokens on each rank"
        failure = self._train("worst", pairs, num_training_batches=1, checkpoint_every_batches=0)
        if failure:
            remedy = "lower --max-tokens-per-gpu, or add --activation-checkpointing"
            return Finding("error", "deep", f"{what}: {failure}: {remedy}")
        [row] = self._rows("worst")
        passed = f"{what} went forward, backward and stepped in {row['seconds']:.1f} s"
        return Finding("ok", "deep", passed)

    def overfit(self, prompts: Sequence[Sequence[int]]) -> Finding:
        """Train one batch of prompts, each completed by itself reversed: its loss must fall."""
        chosen = islice(cycle(prompts), NUM_PAIRS * self._run.num_ranks)
        pairs = [
            {"input_token_ids": [*ids], "completion_token_ids": [*reversed(ids)]} for ids in chosen
        ]
        failure = self._train("batch", pairs, num_training_batches=NUM_BATCHES)
        if failure:
            return Finding("error", "deep", f"one batch {NUM_BATCHES} times: {failure}")
        losses = [row["loss"] for row in self._rows("batch")]
        change = f"from {losses[0]:.3g} to {losses[-1]:.3g} in {NUM_BATCHES} steps"
        text = f"the loss of one batch went {change}"
        if losses[-1] < losses[0]:
            return Finding("ok", "deep", text)
        return Finding("error", "deep", f"{text}: nothing is learnt, look at --learning-rate")

    def resume(self) -> Finding:
        """Train the second half again from its checkpoint: the weights must be the same."""
        saved = self._place / "batch" / "checkpoints" / f"batch_{HALF}"
        failure = self._train("again", None, num_training_batches=NUM_BATCHES, resume=str(saved))
        if failure:
            return Finding("error", "deep", f"resumed after batch {HALF}: {failure}")
        first, again = (self._weights(name) for name in ("batch", "again"))
        text = f"batches {HALF + 1} to {NUM_BATCHES} again from their checkpoint"
        if first == again:
            return Finding("ok", "deep", f"{text} came to the same weights, bit for bit")
        remedy = "a run would not go on as it was: report it, with the options of this run"
        return Finding("error", "deep", f"{text} came to other weights: {remedy}")

    def _train(self, name: str, pairs: Sequence[object] | None, **options: Any) -> str:
        """Train on these pairs, or None: on those of `overfit`; return why it failed, or ""."""
        data = self._place / f"{name if pairs is not None else 'batch'}.jsonl"
        if pairs is not None:
            data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        own = self._run.train.options()
        kept = {
            option: own[option]
            for option, group in groups_of(type(self._run.train)).items()
            if group in KEPT_GROUPS and option != "weight_transport"
        }
        num_lines = data.read_text().count("\n")
        settings = {
            **kept, "algorithm": "sft", "model_name_or_path": self._model.path,
            "data_path": str(data), "output_dir": str(self._place / name), "trackers": "",
            "batch_size": num_lines, "train_minibatch_size": 0, "dump_samples_filename": "",
            "max_tokens_per_gpu": self._run.train.batching.max_tokens_per_gpu,
            "learning_rate": max(self._run.train.optimizer.learning_rate, LEAST_RATE),
            "lr_scheduler": "constant", "num_warmup_steps": 0, "num_warmup_samples": 0,
            "warmup_ratio": 0.0, "schedule_clock": "steps", "checkpoint_every_batches": HALF,
            "logging_level": "WARNING", **options,
        }  # fmt: skip
        run = replace(self._run, train=type(self._run.train)(**settings))
        log = self._place / f"{name}.log"
        run.logs.mkdir(parents=True)
        run.write_file()
        command = [*COMMAND, *run.train_words]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        with ChildProcess("the trainer", command, log=log, environment=environment,
                     stop_timeout_s=deadlines.TRAINER_ENDED_S) as trainer:  # fmt: skip
            code = trainer.exit_code()
        return trainer.failure if code else ""

    def _rows(self, name: str) -> list[dict[str, Any]]:
        lines = (self._place / name / METRICS_FILE).read_text().splitlines()
        return [json.loads(line) for line in lines]

    def _weights(self, name: str) -> list[str]:
        """Hashes of the files of the last export."""
        files = sorted((self._place / name / "hf_format").glob("*/*.safetensors"))
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
