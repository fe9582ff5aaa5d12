"""The data of a run: reads and checks every line of every source that its options name."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.data_files import DataSource
from async_grpo.config.evaluation_sets import EvaluationSet
from async_grpo.config.option import flag
from async_grpo.config.teaching import EVERY_TYPE
from async_grpo.config.train_config import TrainConfig
from async_grpo.data.lines import Build, load_records
from async_grpo.data.order import QuestionStream, TypedQuestions, WindowStream
from async_grpo.data.questions import LineReader, parse_column_mapping
from async_grpo.data.shards import NUM_CHECKED, StreamedRecords
from async_grpo.data.table import GivenTable, PairTable, QuestionTable, blocks_of
from async_grpo.model.model_folder import ModelFacts
from async_grpo.types import GivenPair, Question, TrainingPair
from async_grpo.util.errors import ConfigError, DataError

logger = logging.getLogger(__name__)
TYPE = "dataset_type"
MAX_SHOWN = 5
Purpose = Literal["train", "held out", "given"]
Questions = QuestionTable | StreamedRecords[Question]
Pairs = PairTable | StreamedRecords[TrainingPair]
Order = QuestionStream | WindowStream | TypedQuestions


@dataclass(frozen=True, slots=True)
class Part:
    """One source of a run, and the function that builds a record from each of its lines."""

    purpose: Purpose  # given: pairs beside questions
    source: DataSource
    build: Build[Any]
    set: EvaluationSet | None = None  # of --eval
    block_size: int = 0  # tokens of the blocks that all lines are cut into; 0: a line is a record

    def records(self, *, goes_on: Callable[[], bool] = lambda: True) -> Iterator[Any]:
        """Yield the record of every line while `goes_on` is true; raises `DataError`."""
        few = NUM_CHECKED if self.source.window else None  # a run leaves out bad ones of the rest
        limit = (self.set.limit or None) if self.set else few
        found = load_records(self.source, self.build, goes_on=goes_on, limit=limit)
        return blocks_of(found, size=self.block_size) if self.block_size else found


def parts_of(config: TrainConfig, facts: ModelFacts) -> tuple[Part, ...]:
    """The sources of a run, in the order of their records in the run's tables."""
    if find_algorithm(config).learns_from_pairs:
        size, most = config.data.block_size, _most(config, facts)
        if size > most:
            rule = f"must be at most {most}, as --max-tokens-per-gpu and the model's positions are"
            raise config.refusal("block_size", rule, "lower it")
        reader = line_reader(config, facts, max_tokens=most)
        build = reader.document if size else reader.pair
        source = replace(config.data.data_files[0].source, window=config.data.window)
        named: dict[Purpose, DataSource | None] = {"train": source, "held out": config.held_out}
        return tuple(
            Part(purpose, replace(each, whole_texts=size > 0), build, block_size=size)
            for purpose, each in named.items()
            if each
        )
    return tuple(_question_parts(config, facts))


def load_data(config: TrainConfig, facts: ModelFacts) -> tuple[Questions, QuestionTable]:
    """The questions to train on, and the unnamed set of held-out ones.

    All are checked, except for those that stay in their files.
    """
    parts = parts_of(config, facts)
    held_out = QuestionTable.of(_records(parts, "held out"))
    if streamed := _streamed(parts):
        sources = [(part.source, part.build) for part in streamed]
        return StreamedRecords(sources, longest_prompt=_room(config, facts)), held_out
    return QuestionTable.of(_records(parts, "train")), held_out


def load_sets(config: TrainConfig, facts: ModelFacts) -> Mapping[str, QuestionTable]:
    """{name: questions} of the sets of --eval, all of them checked."""
    parts = parts_of(config, facts)
    return {part.set.name: QuestionTable.of(part.records()) for part in parts if part.set}


def load_given(config: TrainConfig, facts: ModelFacts) -> GivenTable:
    """The pairs that are trained beside questions, all of them checked; empty without any."""
    return GivenTable.of(_records(parts_of(config, facts), "given"))


def load_pairs(config: TrainConfig, facts: ModelFacts) -> tuple[Pairs, PairTable]:
    """The pairs that a supervised run trains on, and those held out, checked as by `load_data`."""
    parts = parts_of(config, facts)
    held_out = PairTable.of(_records(parts, "held out"))
    if streamed := _streamed(parts):
        return StreamedRecords([(part.source, part.build) for part in streamed]), held_out
    return PairTable.of(_records(parts, "train")), held_out


def order_of(
    config: TrainConfig, records: Questions | Pairs
) -> QuestionStream | WindowStream | TypedQuestions:
    """The order in which lines are trained, of which `records` has them file by file."""
    seed, files = config.data.infinite_sampler_seed, config.data.data_files
    streams: list[QuestionStream | WindowStream]
    if isinstance(records, StreamedRecords):
        streams = [WindowStream(records.sizes(n), seed=seed + n) for n in range(len(files))]
    elif len(files) == 1:
        streams = [QuestionStream(len(records), seed=seed)]
    else:
        assert isinstance(records, QuestionTable), "pairs have one file"
        sizes = Counter(question.dataset_type for question in records)
        streams = [QuestionStream(sizes[file.type], seed=seed + n) for n, file in enumerate(files)]
    if len(files) == 1:
        return streams[0]
    return TypedQuestions(
        streams,
        weights=[file.weight for file in files],
        batch_size=config.batching.batch_size,
        sampled_share=config.teaching.gkd_lambda,
    )


def warn_of_few(config: TrainConfig, num_records: int) -> None:
    """Warn when every batch repeats the data: often the file is cut short, or the wrong one."""
    if sentence := few_lines(config, num_records):
        logger.warning("%s", sentence)


def few_lines(config: TrainConfig, num_records: int) -> str:
    """A warning for data that is smaller than a batch; empty when it is not."""
    batching = config.batching
    if num_records >= batching.batch_size:
        return ""
    kind = "blocks" if config.data.block_size else "lines"
    return (
        f"--data-path {config.data.data_paths} holds {num_records} {kind}, fewer than --batch-size "
        f"{batching.batch_size}: each is trained about {batching.batch_size / num_records:.3g} "
        "times in every batch; give more data or a smaller batch"
    )


def first_of_each_file(config: TrainConfig, questions: Sequence[Question]) -> list[Question]:
    """The first question of each data file: the rewards are tried on them."""
    if isinstance(questions, StreamedRecords):
        return list(questions.firsts())
    if not config.data.data:
        return [questions[0]]
    first: dict[str, Question] = {}
    for question in questions:
        first.setdefault(question.dataset_type, question)
    return list(first.values())


def check_types(
    config: TrainConfig, questions: Sequence[Question], pairs: Sequence[GivenPair]
) -> None:
    """Raise `DataError` for lines without a teacher, and for teachers without a line."""
    if named := config.teacher_routes.keys() - {EVERY_TYPE}:
        is_streamed = isinstance(questions, StreamedRecords)
        if is_streamed and not config.data.types:
            raise ConfigError(
                "--data-order window must have a file for each type, to know its teacher, got "
                f"{flag('teacher_for')} {min(named)}=... with one file of all: give --data for each"
            )
        # Of those that stay in their files, each file has one type.
        kinds = config.data.types if is_streamed else (each.dataset_type for each in questions)
        of_data = set(kinds)
        check_routes(config, of_data, {pair.question.dataset_type for pair in pairs})


def check_routes(config: TrainConfig, of_data: set[str], of_pairs: set[str]) -> None:
    """Raise as `check_types` does, for the types of all questions and of all pairs."""
    data = config.data
    named = config.teacher_routes.keys() - {EVERY_TYPE}
    if not named:
        return
    column = parse_column_mapping(data.column_mapping).get(TYPE, TYPE)
    found = of_data | of_pairs
    if missing := sorted(kind for kind in found if config.teacher_of(kind) is None):
        path = data.data_paths if missing[0] in of_data else config.teaching.pairs_path
        raise DataError(
            f"every {column} of {path} must have a teacher, {_shown(missing)} has "
            f"none: add {flag('teacher_for')} TYPE=NAME for it, or NAME for all others"
        )
    if unused := sorted(named - found):
        raise DataError(
            f"{flag('teacher_for')} {unused[0]}={config.teacher_routes[unused[0]]} names a teacher "
            f"that nobody uses: no line of {data.data_paths} has the {column} {unused[0]!r}, but "
            f"{_shown(sorted(found))}"
        )


def line_reader(config: TrainConfig, facts: ModelFacts, *, max_tokens: int) -> LineReader:
    """A reader of lines of at most `max_tokens` tokens, for the model that is trained."""
    from transformers import AutoTokenizer  # takes seconds, and early checks do not need it

    return LineReader(
        tokenizer=AutoTokenizer.from_pretrained(config.places.model_name_or_path),
        vocab_size=facts.vocab_size,
        max_tokens=max_tokens,
        mapping=parse_column_mapping(config.data.column_mapping),
        other_tokens=facts.other_tokens,
    )


def _streamed(parts: Sequence[Part]) -> list[Part]:
    """The training sources whose lines stay in their files."""
    return [part for part in parts if part.purpose == "train" and part.source.window]


def _records(parts: Sequence[Part], purpose: Purpose) -> Iterator[Any]:
    own = (part for part in parts if part.purpose == purpose and not part.set)
    return chain.from_iterable(part.records() for part in own)


def _question_parts(config: TrainConfig, facts: ModelFacts) -> Iterator[Part]:
    room = _room(config, facts)
    reader = line_reader(config, facts, max_tokens=room)
    for file in config.data.data_files:
        types = (file.type,) if file.type else ()
        own = replace(reader, types=types, mapping={**reader.mapping, **file.columns})
        longest_pair = _most(config, facts) if config.objective.use_ref_answers else 0
        source = replace(file.source, window=config.data.window)
        yield Part("train", source, replace(own, longest_pair=longest_pair).question)
        if file.held_out:
            yield Part("held out", file.held_out, own.question)
    if config.held_out:
        yield Part("held out", config.held_out, replace(reader, types=config.data.types).question)
    for found in config.evaluation.eval:
        yield _part_of_set(found, config, facts, reader)
    if config.pairs:
        yield Part("given", config.pairs, replace(reader, max_tokens=_most(config, facts)).given)


def _part_of_set(
    found: EvaluationSet, config: TrainConfig, facts: ModelFacts, reader: LineReader
) -> Part:
    longest = found.max_tokens or config.sampling.max_generation_tokens
    room = facts.max_positions - longest  # it is not trained: --max-tokens-per-gpu does not apply
    if room < 1:
        raise ConfigError(
            f"--eval of {found.name} must leave room for a prompt in the model's "
            f"{facts.max_positions} positions, got max_tokens {longest}: lower it"
        )
    own = replace(
        reader,
        max_tokens=room,
        types=(found.type,) if found.type else config.data.types,
        mapping={**reader.mapping, **found.columns},
    )
    assert found.source is not None, "a named set has a file"
    return Part("held out", found.source, own.question, found)


def _room(config: TrainConfig, facts: ModelFacts) -> int:
    """The longest prompt that may be asked, in tokens; raises `ConfigError` if there is none."""
    longest_answer = config.sampling.max_generation_tokens
    room = _most(config, facts) - longest_answer
    if room < 1:
        raise ConfigError(
            f"--max-generation-tokens ({longest_answer}) must leave room for a "
            f"prompt in the model's {facts.max_positions} positions: lower it"
        )
    return min(room, config.data.max_prompt_tokens or room)


def _most(config: TrainConfig, facts: ModelFacts) -> int:
    """The longest sequence that can be trained, in tokens."""
    return min(config.batching.max_tokens_per_gpu, facts.max_positions)


def _shown(kinds: Collection[str]) -> str:
    more = ", ..." if len(kinds) > MAX_SHOWN else ""
    return ", ".join(map(repr, list(kinds)[:MAX_SHOWN])) + more
