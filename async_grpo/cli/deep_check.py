"""The short runs of `async-grpo check --deep`: the protocol of docs/check.md, step by step."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from async_grpo.check.finding import Finding
from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.launch_file import with_drawn_weights
from async_grpo.cli.local_run import LocalRun, read_run
from async_grpo.cli.options import CONTEXT
from async_grpo.cli.run_file import TRUST, as_toml
from async_grpo.cli.run_processes import COMMAND
from async_grpo.cli.train import ranks_alone
from async_grpo.config.training_options import MAX_LEARNING_RATE
from async_grpo.devices.bill import GIB
from async_grpo.launch import local_ranks
from async_grpo.launch.child_processes import ChildProcess
from async_grpo.model.model_folder import ModelFacts
from async_grpo.util import deadlines
from async_grpo.util.run_folder import CHECKPOINTS_FOLDER, EVALUATIONS_FILE, METRICS_FILE

if TYPE_CHECKING:
    from async_grpo.check.facts import Facts
    from async_grpo.types import Sample, TrainingPair

NUM_BATCHES, HALF, LEAST_RATE = 40, 20, 1e-4
NUM_IN_BATCH = 4  # questions, or pairs a rank
NUM_PAIRS, NUM_HELD_OUT, LEAST_PAIRS, READ_FOR_EACH = 128, 64, 6, 16
CHECKPOINT, DUMP, RESULT = f"{CHECKPOINTS_FOLDER}/batch_{{}}", "samples.jsonl", ".json"
OF_ALL: dict[str, Any] = {
    "trackers": "", "eval_data_path": "", "eval_data_split": "", "eval_data_config": "", "eval": (),
    "eval_every_batches": 0, "keep_best_checkpoint": "", "min_samples_per_checkpoint": 0,
    "resume": "never", "overwrite": False, "checkpoint_every_batches": 0, "keep_checkpoints": 2,
    "checkpoint_every_minutes": 0.0, "logging_level": "WARNING",
}  # fmt: skip
HALVES: dict[str, Any] = {"checkpoint_every_batches": HALF}
SHORT = {"num_training_batches": NUM_BATCHES, "train_minibatch_size": 0, "num_passes": 1}
OF_PAIRS: dict[str, Any] = {
    **SHORT, "data": (), "data_split": "train", "data_config": "", "block_size": 0,
}  # fmt: skip
OF_SAMPLES: dict[str, Any] = {
    **SHORT, **HALVES, "deterministic": True, "max_staleness": 0, "replay_max_gib": 4.0,
    "dump_samples_filename": DUMP, "dump_max_gib": 0.0,
}  # fmt: skip
CONSTANT: dict[str, Any] = {
    "lr_scheduler": "constant", "schedule_clock": "steps", "num_warmup_steps": 0,
    "num_warmup_samples": 0, "warmup_ratio": 0.0, "min_learning_rate_ratio": 0.0,
}  # fmt: skip
# What passes.
MOST_LOSS = 0.1  # nats a token, of one batch that was trained again and again
MOST_OF_RANDOM = 0.75  # of its first loss, where the weights were random
LEAST_GAIN = 0.98  # of the held-out loss with shuffled labels
LEAST_PARTED = 0.05  # nats a token, between answers of positive and of negative advantage
LEAST_SPREADS = 2  # root mean squares of what shuffled advantages come to
TOLERANCE = 0.1  # of the way that a resumed half goes, where an engine samples it again


def deep_findings(run: LocalRun, facts: Facts) -> Iterator[Finding]:
    """Findings of short runs in a folder of their own: the protocol of docs/check.md."""
    reads = facts.data if isinstance(facts.data, tuple) else ()
    if not isinstance(facts.model, ModelFacts) or not any(read.firsts for read in reads):
        yield Finding("waits", "deep", "model and data are not here yet: prepare them first")
        return
    longest = max(int(read.lengths.max(initial=0)) for read in reads)
    if not run.learns_from_pairs:
        longest += run.train.sampling.max_generation_tokens
    with tempfile.TemporaryDirectory(prefix="async-grpo-check-") as place:
        trials = Trials(run, facts.model, Path(place))
        yield trials.worst_minibatch(min(longest, facts.model.max_positions))
        yield from trials.of_pairs() if run.learns_from_pairs else trials.of_samples()


class Trials:
    """The short runs of --deep, whose data and folders lie in one place."""

    def __init__(self, run: LocalRun, model: ModelFacts, place: Path) -> None:
        self._is_drawn = run.train.places.draws_weights
        if self._is_drawn:
            run = with_drawn_weights(run, output_dir=str(place))
            model = replace(model, path=run.train.places.model_name_or_path)
        own = run.train.but(model_name_or_path=model.path, **OF_ALL)
        self._run = replace(run, train=own, prepare=(), plot={})
        self._model, self._place = model, place
        # A few steps of a usual rate would show nothing.
        self._rate = max(own.optimizer.learning_rate, LEAST_RATE)

    def worst_minibatch(self, longest: int) -> Finding:
        """Two steps on as many sequences of `longest` tokens as a minibatch of each rank holds."""
        found = self._trial("worst", self._run, f"--longest={longest}")
        if isinstance(found, Finding):
            remedy = "lower --max-tokens-per-gpu, or add --activation-checkpointing"
            return replace(found, text=f"sequences of {longest} tokens: {found.text}: {remedy}")
        kind = "device" if found.get("peak_device_bytes") else "process"
        peak, free = found[f"peak_{kind}_bytes"] / GIB, found["free"] / GIB
        text = (
            f"the largest minibatch, {found['sequences']} sequences of {longest} tokens on each "
            f"rank, went forward, backward and stepped twice, in {peak:.2f} GiB of the {kind}; "
            f"{free:.2f} GiB were free"
        )
        if found["skipped"]:
            return Finding("error", "deep", f"{text}, and the update was left out: "
                           f"{found['skipped']}: look at the model's weights")  # fmt: skip
        return Finding("ok" if peak < free else "error", "deep", text)

    def of_pairs(self) -> Iterator[Finding]:
        """The findings of a supervised run, on pairs of its own data."""
        from async_grpo.batching.supervised import pack_pairs  # with numpy

        pairs = self._pairs(NUM_PAIRS + NUM_HELD_OUT)
        most = self._run.train.batching.max_tokens_per_gpu
        [[[sample]]] = pack_pairs({0: pairs[0]}, num_ranks=1, max_tokens=most)
        yield self._line(sample)
        yield self._overfit(pairs[: NUM_IN_BATCH * self._run.num_ranks])
        if not self._run.train.data.block_size:  # of a text, completions are not shuffled
            yield self._labels(pairs)
        yield self._resumed()

    def of_samples(self) -> Iterator[Finding]:
        """The findings of a run that samples: it is launched, recorded, and trained again."""
        if not self._run.workers:
            yield Finding("waits", "deep", "no [[worker]] is named, and others' are left alone: "
                          "name workers in the file, and its outputs are tried too")  # fmt: skip
            return
        from async_grpo.check import deep  # with torch

        num_questions = min(self._run.train.batching.batch_size, NUM_IN_BATCH)
        live = self._with("live", batch_size=num_questions, **OF_SAMPLES)
        if failure := self._done("live", "launch", self._file("live", live), TRUST):
            yield Finding("error", "deep", f"{NUM_BATCHES} batches of outputs: {failure}")
            return
        yield self._line(deep.first_sample(live.folder))
        yield self._told_apart(live)
        yield self._of_other_prompts(live)
        yield self._replayed(live)
        yield self._resumed_live(live)

    def _line(self, sample: Sample) -> Finding:
        from async_grpo.check.deep import line_shown  # with torch
        from async_grpo.environments.chat.find import find_tokenizer

        tokenizer = find_tokenizer(self._model.path)
        problem, table = line_shown(sample, tokenizer.decode)
        if problem:
            return Finding("error", "deep", f"a line: {problem}, 0 may be so: report it\n{table}")
        return Finding("ok", "deep", f"a line as loss and model read it: {table}")

    def _overfit(self, pairs: Sequence[TrainingPair]) -> Finding:
        """Train one batch again and again, at rates up to the highest: its loss must vanish."""
        rates = [min(self._rate * factor, MAX_LEARNING_RATE) for factor in (1, 10, 100)]
        for rate in dict.fromkeys(rates):
            name = f"batch_{rate:g}"
            failure = self._train(name, pairs, **HALVES, learning_rate=rate)
            if failure:
                return Finding("error", "deep", f"one batch {NUM_BATCHES} times: {failure}")
            losses = [row["loss"] for row in self._rows(name, METRICS_FILE)]
            self._trained = name, rate, pairs
            most = MOST_OF_RANDOM * losses[0] if self._is_drawn else MOST_LOSS
            if losses[-1] <= most:
                break
        text = (
            f"the loss of one batch of {len(pairs)} lines went from {losses[0]:.3g} to "
            f"{losses[-1]:.3g} nats a token in {NUM_BATCHES} steps at a rate of {rate:g}; at most "
            f"{most:.3g} may be left"
        )
        if losses[-1] <= most:
            return Finding("ok", "deep", text)
        return Finding("error", "deep", f"{text}: look at labels and --learning-rate")

    def _labels(self, pairs: Sequence[TrainingPair]) -> Finding:
        """Train on the pairs, and on them with completions of others: who answers held-out ones?"""
        from async_grpo.check.deep import shuffled  # with torch

        if len(pairs) < LEAST_PAIRS:
            return Finding("warning", "deep", f"labels: {len(pairs)} lines have prompts of their "
                           f"own, {LEAST_PAIRS} are needed: they are not compared")  # fmt: skip
        num_held_out = min(NUM_HELD_OUT, len(pairs) // 3)
        held_out, trained = pairs[:num_held_out], pairs[num_held_out:]
        losses = {}
        for name, own in (("own", trained), ("shuffled", shuffled(trained))):
            failure = self._train(
                name, own, batch_size=min(len(own), 4 * NUM_IN_BATCH), eval_every_batches=HALF // 2,
                eval_data_path=self._written("held_out", held_out),
            )  # fmt: skip
            if failure:
                return Finding("error", "deep", f"{name} labels: {failure}")
            losses[name] = min(row["eval_loss"] for row in self._rows(name, EVALUATIONS_FILE))
        text = (
            f"the loss of {num_held_out} held-out lines fell to {losses['own']:.3g} with the "
            f"labels of {len(trained)} lines, and to {losses['shuffled']:.3g} with these shuffled; "
            f"it must be below {LEAST_GAIN:.0%} of that"
        )
        if losses["own"] < LEAST_GAIN * losses["shuffled"]:
            return Finding("ok", "deep", text)
        return Finding("error", "deep", f"{text}: are prompts and completions those of one line?")

    def _resumed(self) -> Finding:
        """Train the second half of the one batch again from its checkpoint, to the same bits."""
        name, rate, pairs = self._trained
        saved = str(self._place / name / CHECKPOINT.format(HALF))
        failure = self._train("again", pairs, **HALVES, learning_rate=rate, resume=saved)
        if failure:
            return Finding("error", "deep", f"resumed after batch {HALF}: {failure}")
        return self._compared(name, most=0.0)

    def _told_apart(self, live: LocalRun) -> Finding:
        """Train one recorded batch again and again: its answers must part by their advantages."""
        found = self._trial("batch", self._with("live", rate=self._rate, like=live))
        if isinstance(found, Finding):
            return found
        rose, fell = (b - a for a, b in zip(found["before"], found["after"], strict=True))
        good, bad = found["answers"]
        text = (
            f"the mean log-probability of a token went by {rose:+.3g} nats in {good} answers of "
            f"positive advantage and by {fell:+.3g} in {bad} of negative, recorded batch "
            f"{found['batch']} trained again and again at a rate of {self._rate:g}; the difference "
            f"is {rose - fell:.3g}, at least {LEAST_PARTED} is needed"
        )
        if rose - fell >= LEAST_PARTED:
            return Finding("ok", "deep", text)
        return Finding("error", "deep", f"{text}: look at the objective and --learning-rate")

    def _of_other_prompts(self, live: LocalRun) -> Finding:
        """Train half of the prompts: own advantages must part answers to others, shuffled not."""
        found = self._trial("answers", self._with("live", rate=self._rate, like=live))
        if isinstance(found, Finding):
            return found
        own, shuffled = found["own"], found["shuffled"]
        least = LEAST_SPREADS * math.sqrt(sum(gain**2 for gain in shuffled) / len(shuffled))
        text = (
            f"trained on half of the prompts, answers to the others part by {own:.3g} nats with "
            f"their own advantages, and by {', '.join(f'{gain:.3g}' for gain in shuffled)} with "
            f"these shuffled; it must be above {LEAST_SPREADS} times their size, {least:.3g}"
        )
        if own > least:
            return Finding("ok", "deep", text)
        return Finding("error", "deep", f"{text}: look at --reward-fns and the column of answers")

    def _replayed(self, live: LocalRun) -> Finding:
        """Train the second half of the recorded outputs again from its checkpoint, bit for bit."""
        last = NUM_BATCHES - 1
        failure = self._done("replay", "replay", str(live.folder), f"--batch={last}")
        text = f"recorded batches {HALF + 1} to {NUM_BATCHES} from the checkpoint after {HALF}"
        if failure:
            return Finding("error", "deep", f"{text}: {failure}")
        return Finding("ok", "deep", f"{text} came to the same weights at each step, bit for bit")

    def _resumed_live(self, live: LocalRun) -> Finding:
        """Launch the second half again: the same questions, and weights within the tolerance."""
        from async_grpo.check.deep import same_questions  # with torch

        saved = str(live.folder / CHECKPOINT.format(HALF))
        again = self._file("again", self._with("again", like=live, resume=saved))
        if failure := self._done("again", "launch", again, TRUST):
            return Finding("error", "deep", f"resumed after batch {HALF}: {failure}")
        dumps = (self._place / name / DUMP for name in ("live", "again"))
        num_outputs, num_others, num_same = same_questions(*dumps)
        told = f"{num_same} of {num_outputs} outputs the same"
        if num_others or not num_outputs:
            return Finding("error", "deep", f"resumed after batch {HALF}, {num_others} of "
                           f"{num_outputs} outputs were of other questions, 0 may be")  # fmt: skip
        return self._compared("live", most=TOLERANCE, told=f" with the engine, {told},")

    def _compared(self, name: str, *, most: float, told: str = "") -> Finding:
        """What the run `again` came to, beside the run `name` that went on."""
        from async_grpo.check.deep import distance  # with torch

        folders = self._place / name, self._place / "again", self._place / name
        ends = zip(folders, (NUM_BATCHES, NUM_BATCHES, HALF), strict=True)
        apart = distance(*(folder / CHECKPOINT.format(number) for folder, number in ends))
        text = f"batches {HALF + 1} to {NUM_BATCHES} again from their checkpoint{told} came to"
        if apart == 0:
            return Finding("ok", "deep", f"{text} the same weights, bit for bit")
        text += f" other weights, {apart:.2g} of the way that they went; at most {most:g} may be"
        if apart <= most:
            return Finding("ok", "deep", text)
        remedy = "a run would not go on as it was: report it, with the options of this run"
        return Finding("error", "deep", f"{text}: {remedy}")

    def _pairs(self, most: int) -> list[TrainingPair]:
        """The first pairs of the run's data, each of a prompt of its own, whole texts excepted."""
        from async_grpo.run.data import parts_of  # with numpy

        [part, *_] = parts_of(self._run.train, self._model)
        found: dict[bytes, TrainingPair] = {}
        for pair in islice(part.records(), READ_FOR_EACH * most):
            is_text = len(pair.prompt_token_ids) == 1
            known_by = pair.completion_token_ids if is_text else pair.prompt_token_ids
            found.setdefault(known_by.tobytes(), pair)
            if len(found) == most:
                break
        return list(found.values())

    def _train(self, name: str, pairs: Sequence[TrainingPair], **options: Any) -> str:
        """Train on these pairs; return why it failed, or ""."""
        given = {"batch_size": len(pairs), "rate": self._rate, **OF_PAIRS, **options}
        run = self._with(name, data_path=self._written(name, pairs), **given)
        return self._done(name, "train", "--config", self._file(name, run))

    def _trial(self, name: str, run: LocalRun, *words: str) -> Any:
        """The numbers of a trial of `check.deep` on the run's ranks, or why it failed."""
        file = self._file(name, run)
        if failure := self._done(name, "trial", name, file, *words):
            return Finding("error", "deep", failure)
        return json.loads(Path(file + RESULT).read_text())

    def _with(
        self, name: str, *, like: LocalRun | None = None, rate: float = 0.0, **options: Any
    ) -> LocalRun:
        """A run as `like` in the folder `name`, with these options; `rate`: a constant one."""
        constant = {**CONSTANT, "learning_rate": rate} if rate else {}
        own = {"output_dir": str(self._place / name), **constant, **options}
        train = (like or self._run).train.but(**own)
        return replace(self._run, train=train)

    def _file(self, name: str, run: LocalRun) -> str:
        file = self._place / f"{name}.toml"
        file.write_text(as_toml(run.tables))
        return str(file)

    def _written(self, name: str, pairs: Sequence[TrainingPair]) -> str:
        file = self._place / f"{name}.jsonl"
        lines = (
            {"input_token_ids": pair.prompt_token_ids.tolist(),
             "completion_token_ids": pair.completion_token_ids.tolist()} for pair in pairs
        )  # fmt: skip
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(file)

    def _done(self, name: str, *words: str) -> str:
        """Run a command to its end; return why it failed, or ""."""
        log = self._place / f"{name}.log"
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        with ChildProcess(f"async-grpo {words[0]}", [*COMMAND, *words], log=log,
                     environment=environment,
                     stop_timeout_s=deadlines.LAUNCHED_ENDED_S) as child:  # fmt: skip
            code = child.exit_code()
        return child.failure if code else ""

    def _rows(self, name: str, file: str) -> list[dict[str, Any]]:
        lines = (self._place / name / file).read_text().splitlines()
        return [json.loads(line) for line in lines]


@click.command("trial", hidden=True, context_settings=CONTEXT)
@click.argument("name")
@click.argument("file")
@click.option("--longest", default=1)
@command_boundary()
@local_ranks.rank0_only_errors()
def trial(*, name: str, file: str, longest: int) -> None:
    """One trial of `check --deep` on the ranks of FILE's run; the numbers go beside FILE."""
    run = read_run(config=file)
    with ranks_alone(run.train, run.num_ranks) as ranks:
        from async_grpo.check import deep

        found = deep.trial(name, run.train, ranks, longest=longest)
        if ranks.is_main:
            Path(file + RESULT).write_text(json.dumps(found))
        ranks.stop()
