"""Writes a teacher's outputs as training pairs: sequence-level distillation (Kim and Rush, 2016).

consumes:     questions; a teacher; rewards, where only good outputs are kept
produces:     a file of pairs, whole or not at all, and the number of outputs left out
waits for:    the engine, a chunk of questions at a time; verifier processes, each within its limit
unblocked by: the chunk's last output, and its last verdict
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from async_grpo.config.command_options import GenerateConfig, worker_options
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.data.lines import load_records
from async_grpo.data.order import sampling_seed
from async_grpo.data.questions import LineReader, parse_column_mapping
from async_grpo.data.table import QuestionTable
from async_grpo.model.model_folder import ModelFacts, check_model_folder
from async_grpo.rollout.generation_worker import worker_environment
from async_grpo.run.reward_trial import example_output
from async_grpo.types import (
    GenerationRequest,
    Question,
    SamplingContract,
    Turn,
    Verdict,
    VerificationRequest,
)
from async_grpo.types.worker_info import confinement_in_words
from async_grpo.util.errors import ConfigError, DataError
from async_grpo.util.files import replacing
from async_grpo.verification.config import verifier_config
from async_grpo.verification.sandbox import Sandbox
from async_grpo.verification.tasks import adapter_sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

logger = logging.getLogger(__name__)
CHUNK = 1024  # questions: enough that the engine seldom idles during the last outputs of a chunk
# A worker's log takes these lines; here they would mix with the command's output.
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TQDM_DISABLE": "1"}
Outputs = Sequence[tuple[Question, Turn]]
Grade = Callable[[Outputs], Sequence[Verdict | None]]


def generate_pairs(config: GenerateConfig, *, say: Callable[[str], object]) -> PairCount:
    """Sample the questions and write the outputs that are kept; `say` gets a line per chunk.

    Raises `DataError` where none is kept. Any error leaves the old file at `--output` in place.
    """
    facts = check_model_folder(config.model_path)
    tokenizer = AutoTokenizer.from_pretrained(config.model_path)
    questions = _load(config, facts, tokenizer)
    rules = PairRules(
        min_reward=config.min_reward,
        has_token_ids=config.token_ids,
        mapping=parse_column_mapping(config.column_mapping),
    )
    count = PairCount()
    with _replacing(config.output) as write, _grading(config, questions[0]) as grade:
        teacher = OfflineTeacher(config, facts, tokenizer, longest_prompt=questions.longest_prompt)
        for first in range(0, len(questions), CHUNK):
            ordinals = range(first, min(first + CHUNK, len(questions)))
            outputs = teacher.outputs({ordinal: questions[ordinal] for ordinal in ordinals})
            for (question, turn), verdict in zip(outputs, grade(outputs), strict=True):
                if count.see(rules.why_rejected(turn, verdict)):
                    write(rules.line(question, turn, verdict))
            say(f"{ordinals.stop} of {len(questions)} questions: {count.in_words()}")
        if not count.num_kept:
            raise DataError(
                f"at least one output must be kept, got {count.in_words()}: give the outputs more "
                "room or less to reach (--max-generation-tokens, --min-reward)"
            )
    return count


class OfflineTeacher:
    """An engine that answers questions as a run's generation worker does, and decodes the texts."""

    def __init__(
        self,
        config: GenerateConfig,
        facts: ModelFacts,
        tokenizer: Tokenizer,
        *,
        longest_prompt: int,
    ) -> None:
        # This imports torch, which reads the variables set below only later.
        from async_grpo.devices.current import seen_devices

        on_cpu = not seen_devices().devices
        os.environ.update(worker_environment(on_cpu=on_cpu) | QUIET)
        if on_cpu:  # a separate process would import for 8 s
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from async_grpo.rollout.local_engines import OfflineEngine

        self._config, self._tokenizer = config, tokenizer
        self._sampling = SamplingContract(
            config.temperature, facts.stop_token_ids, config.max_generation_tokens
        )
        self._engine = OfflineEngine(
            WorkerConfig(
                max_model_len=longest_prompt + config.max_generation_tokens,
                **worker_options(config),
            )
        )

    def outputs(self, questions: dict[int, Question]) -> list[tuple[Question, Turn]]:
        """All outputs of each question, in order, with their texts. The keys seed the sampling."""
        requests = [
            GenerationRequest(
                ordinal,
                0,
                question.input_token_ids,
                self._config.samples_per_question,
                self._sampling,
                sampling_seed(self._config.seed, ordinal=ordinal, attempt=0),
            )
            for ordinal, question in questions.items()
        ]
        found = zip(questions.values(), self._engine.generate(requests), strict=True)
        return [(question, self._with_text(turn)) for question, turns in found for turn in turns]

    def _with_text(self, turn: Turn) -> Turn:
        text = self._tokenizer.decode(turn.token_ids.tolist(), skip_special_tokens=True)
        return replace(turn, text=text)


def _load(config: GenerateConfig, facts: ModelFacts, tokenizer: Tokenizer) -> QuestionTable:
    room = facts.max_positions - config.max_generation_tokens
    if room < 1:
        raise config.refusal(
            "max_generation_tokens",
            f"must leave room for a prompt in the model's {facts.max_positions} positions",
            "lower it",
        )
    reader = LineReader(
        tokenizer=tokenizer,
        vocab_size=facts.vocab_size,
        max_tokens=room,
        mapping=parse_column_mapping(config.column_mapping),
        other_tokens=facts.other_tokens,
    )
    records = load_records(config.data, reader.question, limit=config.limit or None)
    return QuestionTable.of(records)


@contextmanager
def _replacing(output: str) -> Iterator[Callable[[bytes], object]]:
    try:
        with replacing(Path(output)) as file:
            yield file.write
    except OSError as error:
        raise ConfigError(
            f"--output {output} cannot be written ({error.strerror or error}): name another file"
        ) from error


@contextmanager
def _grading(config: GenerateConfig, first: Question) -> Iterator[Grade]:
    """Yield a function that grades outputs in verifier processes, which end with the block.

    Without rewards its verdicts are None. Raises `ConfigError` for a reward that cannot be loaded,
    or cannot grade the first question.
    """
    if not config.reward_names:
        yield lambda outputs: [None] * len(outputs)
        return
    rewards = verifier_config(WorkerConfig(**worker_options(config)))
    sandbox = Sandbox(rewards, num_processes=os.cpu_count() or 1)
    with asyncio.Runner() as runner:
        try:
            runner.run(sandbox.start())
            runner.run(_try_out(sandbox, first, config))
            if any(sandbox.confinement.values()):
                logger.warning("%s", confinement_in_words(sandbox.confinement))
            yield lambda outputs: runner.run(
                _grade(sandbox, outputs, num_samples=config.samples_per_question)
            )
        finally:
            runner.run(sandbox.close())


async def _try_out(sandbox: Sandbox, question: Question, config: GenerateConfig) -> None:
    request = VerificationRequest(0, 0, question, example_output(question))
    for verdict in await sandbox.grade_with_each(adapter_sample(request)):
        if verdict.status == "error":
            raise ConfigError(
                f"reward {verdict.reason}: it must grade the first line of {config.data_path}, "
                f"which has {', '.join(question.columns)}: correct the reward, the data, or "
                "--column-mapping"
            )


async def _grade(sandbox: Sandbox, outputs: Outputs, *, num_samples: int) -> list[Verdict]:
    """Verdicts of the outputs, which are `num_samples` of each question in turn."""
    samples = [
        adapter_sample(VerificationRequest(0, index, question, turn))
        for index, (question, turn) in enumerate(outputs)
    ]
    size = num_samples if sandbox.groupwise else len(samples)
    groups = [samples[first : first + size] for first in range(0, len(samples), size)]
    return list(chain(*await asyncio.gather(*map(sandbox.grade, groups))))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRules:
    """Decides which outputs are kept, and formats their lines."""

    min_reward: float
    has_token_ids: bool
    mapping: Mapping[str, str] = field(default_factory=dict)  # {our column name: the user's}

    def why_rejected(self, turn: Turn, verdict: Verdict | None) -> str:
        """A fixed phrase; empty for an output that is kept. `verdict` None: it was not graded."""
        if turn.finish_reason != "stop":
            return "cut at --max-generation-tokens"  # a student would not learn to stop
        if not turn.text.strip():
            return "empty"
        if verdict is None:
            return ""
        if verdict.status == "error":
            return "not graded, for the reward failed"
        return "" if verdict.reward >= self.min_reward else f"reward below {self.min_reward:g}"

    def line(self, question: Question, turn: Turn, verdict: Verdict | None) -> bytes:
        """The user's line with the output as its completion, and the reward of a graded one.

        >>> import numpy as np
        >>> question = Question(np.array([5]), "2+2=", "4", {"q": "2+2=", "level": 1})
        >>> turn = Turn(np.array([6, 1]), np.zeros(2), (), "stop", "4")
        >>> PairRules(min_reward=1, has_token_ids=True).line(question, turn, None).decode()
        '{"q": "2+2=", "level": 1, "completion": "4", "completion_token_ids": [6, 1]}\\n'
        """
        text, ids = (self.mapping.get(n, n) for n in ("completion", "completion_token_ids"))
        written: dict[str, object] = {**question.columns, text: turn.text}
        written.pop(ids, None)  # the line may have a demonstration's
        if self.has_token_ids:
            written[ids] = turn.token_ids.tolist()
        if verdict is not None:
            written["reward"] = verdict.reward
        # Columns may hold values that JSON lacks, such as dates; UTF-8 has no lone surrogates.
        content = json.dumps(written, ensure_ascii=False, default=str)
        return content.encode("utf-8", errors="backslashreplace") + b"\n"


@dataclass(slots=True)
class PairCount:
    """Counts the outputs kept and rejected so far."""

    num_kept: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # {reason: number of outputs}

    def see(self, why_rejected: str) -> bool:
        """Count an output; returns whether it is kept."""
        if why_rejected:
            self.rejected[why_rejected] += 1
        else:
            self.num_kept += 1
        return not why_rejected

    def in_words(self) -> str:
        """
        >>> count = PairCount(61, Counter({"reward below 1": 2, "empty": 1}))
        >>> count.in_words()
        '61 pairs of 64 outputs; rejected: 2 reward below 1, 1 empty'
        """
        why = ", ".join(f"{number} {reason}" for reason, number in self.rejected.most_common())
        num_outputs = self.num_kept + self.rejected.total()
        return f"{self.num_kept} pairs of {num_outputs} outputs; rejected: {why or 'none'}"
