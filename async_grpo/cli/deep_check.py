"""`async-grpo check --deep`: short supervised runs with the sizes of a run, in a folder apart.

They need neither workers nor Ray, and take minutes: the largest minibatch that the run may meet,
one batch learnt by heart, and the second half of that again from its checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from async_grpo.check.facts import Facts, ids_of
from async_grpo.check.finding import Finding
from async_grpo.cli.launch_file import COMMAND
from async_grpo.cli.local_run import LocalRun
from async_grpo.config.option import groups_of
from async_grpo.config.train_config import TrainConfig
from async_grpo.launch.child_processes import ChildProcess
from async_grpo.model.model_folder import ModelFacts
from async_grpo.util import deadlines
from async_grpo.util.run_folder import METRICS_FILE

KEPT_GROUPS = ("Memory and speed", "Learning rate and optimizer")
NUM_BATCHES, NUM_PAIRS, LEAST_RATE = 20, 4, 1e-4
HALF = NUM_BATCHES // 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """The largest minibatch that a rank of a run may meet."""

    num_tokens: int  # of a sequence
    num_sequences: int

    @classmethod
    def of(cls, config: TrainConfig, *, longest_prompt: int, max_positions: int) -> Sizes:
        """
        >>> config = TrainConfig(model_name_or_path="m", data_path="d", max_tokens_per_gpu=4096)
        >>> Sizes.of(config, longest_prompt=100, max_positions=32768)
        Sizes(num_tokens=612, num_sequences=6)
        """
        longest = min(longest_prompt + config.max_generation_tokens, max_positions)
        return cls(longest, max(1, config.max_tokens_per_gpu // longest))


def deep_findings(run: LocalRun, facts: Facts) -> Iterator[Finding]:
    """Each as soon as it is known; the first that fails is the last."""
    reads = facts.data if isinstance(facts.data, tuple) else ()
    prompts = [ids_of(first) for read in reads for first in read.firsts.values()]
    if not isinstance(facts.model, ModelFacts) or not prompts:
        yield Finding("waits", "deep", "model and data are not here yet: prepare them first")
        return
    longest = max(int(read.lengths.max(initial=0)) for read in reads)
    sizes = Sizes.of(run.train, longest_prompt=longest, max_positions=facts.model.max_positions)
    with tempfile.TemporaryDirectory(prefix="async-grpo-check-") as place:
        trials = Trials(run, facts.model, Path(place))
        yield (found := trials.worst_minibatch(sizes))
        if found.level == "ok":
            yield (found := trials.overfit(prompts))
        if found.level == "ok":
            yield trials.resume()


class Trials:
    """The short runs, whose data and folders lie in one place."""

    def __init__(self, run: LocalRun, model: ModelFacts, place: Path) -> None:
        self._run, self._model, self._place = run, model, place

    def worst_minibatch(self, sizes: Sizes) -> Finding:
        """One step on as many of the longest sequences as a minibatch of each rank holds."""
        ids = [number % self._model.vocab_size for number in range(sizes.num_tokens)]
        pairs = [{"input_token_ids": ids[:1], "completion_token_ids": ids[1:]}] * (
            sizes.num_sequences * self._run.num_ranks
        )
        what = f"{sizes.num_sequences} sequences of {sizes.num_tokens} tokens on each rank"
        failure = self._train("worst", pairs, num_training_batches=1, checkpoint_every_batches=0)
        if failure:
            remedy = "lower --max-tokens-per-gpu, or add --activation-checkpointing"
            return Finding("error", "deep", f"{what}: {failure}: {remedy}")
        [row] = self._rows("worst")
        passed = f"{what} went forward, backward and stepped in {row['seconds']:.1f} s"
        return Finding("ok", "deep", passed)

    def overfit(self, prompts: Sequence[Sequence[int]]) -> Finding:
        """The loss of one batch falls when nothing else is trained: prompts, read backwards."""
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
        """The second half again, from its checkpoint, comes to the same weights."""
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

    def _train(self, name: str, pairs: list[Any] | None, **options: Any) -> str:
        """Why a run has failed; empty when it has not."""
        data = self._place / f"{name if pairs is not None else 'batch'}.jsonl"
        if pairs is not None:
            data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        kept = {
            option: getattr(self._run.train, option)
            for option, group in groups_of(TrainConfig).items()
            if group in KEPT_GROUPS and option != "weight_transport"
        }
        num_lines = data.read_text().count("\n")
        settings = {
            **kept, "algorithm": "sft", "model_name_or_path": self._model.path,
            "data_path": str(data), "output_dir": str(self._place / name), "trackers": "",
            "batch_size": num_lines, "train_minibatch_size": 0, "dump_samples_filename": "",
            "max_tokens_per_gpu": self._run.train.max_tokens_per_gpu,
            "learning_rate": max(self._run.train.learning_rate, LEAST_RATE),
            "lr_scheduler": "constant", "num_warmup_steps": 0, "num_warmup_samples": 0,
            "warmup_ratio": 0.0, "schedule_clock": "steps", "checkpoint_every_batches": HALF,
            "logging_level": "WARNING", **options,
        }  # fmt: skip
        run = replace(self._run, train=TrainConfig(**settings))
        log = self._place / f"{name}.log"
        command = [*COMMAND, "train", *run.train_options]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        with ChildProcess("the trainer", command, log=log, environment=environment,
                     stop_timeout_s=deadlines.TRAINER_ENDED_S) as trainer:  # fmt: skip
            code = trainer.exit_code()
        return trainer.failure if code else ""

    def _rows(self, name: str) -> list[dict[str, Any]]:
        lines = (self._place / name / METRICS_FILE).read_text().splitlines()
        return [json.loads(line) for line in lines]

    def _weights(self, name: str) -> list[str]:
        """Of the last export."""
        files = sorted((self._place / name / "hf_format").glob("*/*.safetensors"))
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
