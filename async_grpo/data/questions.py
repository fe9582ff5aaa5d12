"""Questions and training pairs of the user's lines, tokenised and checked before a run starts.

Text is tokenised here and nowhere else: with the chat template where the tokenizer has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from async_grpo.config.data_files import OUR_COLUMNS, DataOptions
from async_grpo.config.evaluation_sets import EvaluationOptions
from async_grpo.config.option import require
from async_grpo.config.teaching import TeachingOptions
from async_grpo.data.lines import MalformedLine, check_source, describe
from async_grpo.types import GivenPair, Question, TrainingPair
from async_grpo.util.errors import DataError, UnfitModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

PROMPTS = ("input_token_ids", "input", "messages")
WHOLE_TEXTS = ("text", "completion", "completion_token_ids")  # of a line without a prompt


def parse_column_mapping(text: str) -> dict[str, str]:
    """{our column name: the user's} from the text of `--column-mapping`.

    Raises `ConfigError` for an unknown name of ours, or one that is given twice.

    >>> parse_column_mapping("input=question, answer=solution")
    {'input': 'question', 'answer': 'solution'}
    """
    mapping: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        ours, equals, theirs = (part.strip() for part in pair.partition("="))
        require(
            bool(equals and theirs) and ours in OUR_COLUMNS and ours not in mapping,
            "column_mapping",
            "must hold our=yours pairs",
            pair,
            f"ours are {', '.join(OUR_COLUMNS)}, each at most once: input=question,answer=solution",
        )
        mapping[ours] = theirs
    return mapping


class Columns:
    """Reads one line by our column names; every getter of a value raises `MalformedLine`."""

    __slots__ = ("_mapping", "_row")

    def __init__(self, row: Mapping[str, object], *, mapping: Mapping[str, str]) -> None:
        self._row = row
        self._mapping = mapping
        for ours in mapping:
            if self.name(ours) not in row:
                raise self.malformed(ours, expected="what --column-mapping names", value=None)

    def name(self, ours: str) -> str:
        """The user's name of our column."""
        return self._mapping.get(ours, ours)

    def is_mapped(self, ours: str) -> bool:
        """Whether the user's mapping names this column of ours."""
        return ours in self._mapping

    def has(self, ours: str) -> bool:
        """Whether the line has the column, and not as null."""
        return self._value(ours) is not None

    def has_only(self, ours: str) -> bool:
        """Whether every other column is missing or null."""
        return [name for name, value in self._row.items() if value is not None] == [self.name(ours)]

    def is_blank(self, ours: str) -> bool:
        """Whether the column's text is empty, or white space."""
        value = self._value(ours)
        return isinstance(value, str) and not value.strip()

    def text(self, ours: str) -> str:
        """The column's text, which must hold more than white space."""
        value = self._value(ours)
        if not isinstance(value, str) or not value.strip():
            raise self.malformed(ours, expected="non-empty text", value=value)
        return value

    def answer(self) -> str | None:
        """The answer as text, which the line may give as a number; None without one."""
        value = self._value("answer")
        if value is None or isinstance(value, str):
            return value
        is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        if isinstance(value, bool) or not is_number:
            raise self.malformed("answer", expected="text or a number", value=value)
        return str(value)

    def dataset_type(self) -> str:
        """The type that chooses environment, rewards and teacher; empty when the line has none."""
        return str(self._value("dataset_type") or "")

    def messages(self) -> list[dict[str, str]]:
        """The line's chat messages, each with a role and a content."""
        value = self._value("messages")
        if not isinstance(value, list) or not value:
            raise self.malformed("messages", expected="a list of chat messages", value=value)
        for message in value:
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise self.malformed(
                    "messages", expected="messages with a text role and content", value=message
                )
        return value

    def token_ids(self, ours: str, *, vocab_size: int) -> list[int]:
        """The column's token ids, at least one, each in [0, vocab_size)."""
        value = self._value(ours)
        if not isinstance(value, list) or not value:
            raise self.malformed(ours, expected="a list of token ids", value=value)
        for token in value:
            if isinstance(token, bool) or not isinstance(token, int):
                raise self.malformed(ours, expected="whole numbers", value=token)
            if not 0 <= token < vocab_size:
                raise self.malformed(
                    ours, expected=f"token ids from 0 to {vocab_size - 1}", value=token
                )
        return value

    def _value(self, ours: str) -> object:
        return self._row.get(self.name(ours))

    def malformed(self, ours: str, *, expected: str, value: object) -> MalformedLine:
        """The error for a column of this line, named as the user names it."""
        name = self.name(ours)
        there = f"only columns {', '.join(self._row)} (see --column-mapping)"
        got = describe(value) if name in self._row else there
        return MalformedLine(name, expected=expected, got=got)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineReader:
    """Makes a record of a line; raises `MalformedLine` that names a column and what it expects."""

    tokenizer: Tokenizer  # or an object with the few members that are used here
    vocab_size: int
    max_tokens: int  # of a prompt that fits beside the longest answer, or of a whole pair
    mapping: Mapping[str, str] = field(default_factory=dict)  # {our column name: the user's}
    types: Sequence[str] = ()  # that a line may have; empty: any. A single one is the default
    longest_pair: int = 0  # tokens of a prompt with its reference answer; 0: questions have none
    other_tokens: Collection[int] = ()  # that stand for images or sound, of which no line may have

    def question(self, row: Mapping[str, object]) -> Question:
        """A question from `input_token_ids`, `messages` or `input`; other columns are optional.

        Token ids win over text, because the model reads them. Where the line has messages, `input`
        is the question as rewards and people see it.
        """
        columns = Columns(row, mapping=self.mapping)
        ids = self._prompt(columns)
        limit = (
            "--max-prompt-tokens, or --max-tokens-per-gpu or the model's own limit, less "
            "--max-generation-tokens"
        )
        self._check_tokens(columns, ids, "prompt", limit)
        text = self._text_of(columns, ids)
        kind = self._type(columns)
        question = Question(np.asarray(ids, dtype=np.int32), text, columns.answer(), row, kind)
        if not self.longest_pair:
            return question
        pair = replace(self, max_tokens=self.longest_pair).given(row)
        answer = pair.completion_token_ids
        text = self.tokenizer.decode(answer.tolist(), skip_special_tokens=True)  # as of an engine
        return replace(question, reference_token_ids=answer, reference=str(text))

    def pair(self, row: Mapping[str, object]) -> TrainingPair:
        """A prompt, read as `question` reads it, with a demonstrated completion.

        The completion is `completion`, which the end token closes, or `completion_token_ids`, which
        are taken as they are. A line that has `text` instead, or nothing but a completion, is
        trained as a whole after its first token, which is the context of the second: the
        tokenizer's start token where it sets one.
        """
        columns = Columns(row, mapping=self.mapping)
        if column := _whole_text(columns):
            ids = self._closed(columns, column, text_token_ids)
            if len(ids) < 2:
                raise columns.malformed(column, expected="at least two tokens", value=ids)
            prompt, completion = ids[:1], ids[1:]
        else:
            has_ids = columns.has("completion_token_ids")
            column = "completion_token_ids" if has_ids else "completion"
            prompt = self._prompt(columns)
            completion = self._closed(columns, column, completion_token_ids)
        limit = "--max-tokens-per-gpu or the model's own limit"
        self._check_tokens(columns, [*prompt, *completion], "pair", limit)
        return TrainingPair(np.asarray(prompt, np.int32), np.asarray(completion, np.int32))

    def document(self, row: Mapping[str, object]) -> TrainingPair:
        """All tokens of a line that `pair` trains as a whole, however many; of a blank text none.

        They are an uncut pair: see `table.blocks_of`.
        """
        columns = Columns(row, mapping=self.mapping)
        if not (column := _whole_text(columns)):
            expected = "a text alone, which --block-size cuts"
            raise columns.malformed("text", expected=expected, value=[*row])
        is_blank = columns.is_blank(column)
        ids = [] if is_blank else self._closed(columns, column, text_token_ids)
        return TrainingPair(np.asarray(ids[:1], np.int32), np.asarray(ids[1:], np.int32))

    def given(self, row: Mapping[str, object]) -> GivenPair:
        """A pair, read as `pair` reads it, with its texts and every other column."""
        pair, columns = self.pair(row), Columns(row, mapping=self.mapping)
        prompt, completion = pair.prompt_token_ids, pair.completion_token_ids
        shown = self._text_of(columns, prompt.tolist())
        question = Question(prompt, shown, None, row, self._type(columns))
        is_text = columns.has("completion")
        text = columns.text("completion") if is_text else self.tokenizer.decode(completion.tolist())
        return GivenPair(question, completion, str(text))

    def _type(self, columns: Columns) -> str:
        kind = columns.dataset_type()
        if not kind and len(self.types) == 1:
            return self.types[0]
        if self.types and kind not in self.types:
            expected = f"a type of --data ({', '.join(self.types)})"
            raise columns.malformed("dataset_type", expected=expected, value=kind)
        return kind

    def _text_of(self, columns: Columns, prompt: Sequence[int]) -> str:
        """The prompt as people and rewards see it."""
        if columns.has("input"):
            return columns.text("input")
        if columns.has("messages"):
            return columns.messages()[-1]["content"]
        return str(self.tokenizer.decode(prompt))

    def _prompt(self, columns: Columns) -> list[int]:
        if columns.has("input_token_ids"):
            return columns.token_ids("input_token_ids", vocab_size=self.vocab_size)
        if not _are_prompt(columns):
            return prompt_token_ids(self.tokenizer, text=columns.text("input"))
        messages = columns.messages()
        if messages[-1]["role"] == "assistant":
            raise columns.malformed(
                "messages",
                expected="a conversation that ends before the answer",
                value=messages[-1],
            )
        if not self.tokenizer.chat_template:
            raise MalformedLine(
                columns.name("messages"),
                expected="'input' or 'input_token_ids' instead",
                got="messages, for a tokenizer without a chat template",
            )
        return chat_token_ids(self.tokenizer, messages=messages)

    def _closed(
        self, columns: Columns, column: str, tokenise: Callable[..., list[int]]
    ) -> list[int]:
        """A column of token ids as it is, or a text that `tokenise` closes by the end token."""
        if column == "completion_token_ids":
            return columns.token_ids(column, vocab_size=self.vocab_size)
        text = columns.text(column)
        if self.tokenizer.eos_token_id is None:
            raise DataError(
                "completions need a tokenizer with an end token to close them, got one without: "
                "set eos_token in the model's tokenizer_config.json"
            )
        return tokenise(self.tokenizer, text=text)

    def _check_tokens(self, columns: Columns, ids: Sequence[int], noun: str, limit: str) -> None:
        expected = got = ""
        if len(ids) > self.max_tokens:
            expected = f"a {noun} of at most {self.max_tokens} tokens ({limit})"
            got = f"{len(ids)}"
        elif others := set(self.other_tokens).intersection(ids):
            expected = f"a {noun} of text alone, as the text model that is trained"
            got = f"token {min(others)}, of an image or sound"
        if expected:
            given = next(name for name in (*PROMPTS, *WHOLE_TEXTS) if columns.has(name))
            raise MalformedLine(columns.name(given), expected=expected, got=got)


def _are_prompt(columns: Columns) -> bool:
    """Whether the line's messages are its prompt: not if the user maps `input` but not `messages`.

    Raises `MalformedLine` where `input` would lose the system turn of the messages.
    """
    if not columns.has("messages"):
        return False
    if not columns.has("input") or columns.is_mapped("messages") or not columns.is_mapped("input"):
        return True
    if any(message["role"] == "system" for message in columns.messages()):
        expected = "to be mapped too (messages=messages), for input has no system turn"
        raise columns.malformed("messages", expected=expected, value=columns.messages())
    return False


def _whole_text(columns: Columns) -> str:
    """The column that is trained as a whole, for a line meant to have no prompt; empty for others.

    A completion counts only as the sole column: one beside it may be a prompt under another name.
    """
    for name in WHOLE_TEXTS:
        if columns.has_only(name):
            return name
    others = (*PROMPTS, *WHOLE_TEXTS[1:])
    return "text" if columns.has("text") and not any(map(columns.has, others)) else ""


def prompt_token_ids(tokenizer: Tokenizer, *, text: str) -> list[int]:
    """Token ids of a user's prompt, ready for the model to answer."""
    if tokenizer.chat_template:
        return chat_token_ids(tokenizer, messages=[{"role": "user", "content": text}])
    ids = list(tokenizer(text)["input_ids"])
    # Some tokenizers close every text, but an answer must follow an open one.
    if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        ids.pop()
    return ids


def chat_token_ids(tokenizer: Tokenizer, *, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, up to where the assistant's next words begin.

    Raises `MalformedLine` for messages that the chat template refuses, `UnfitModel` for a template
    that is broken.
    """
    try:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # the model's template is a program: it may raise anything
        said = f"{type(error).__name__}: {error}"
        if type(error).__name__ != "TemplateSyntaxError":
            expected = "messages that the model's chat template takes"
            raise MalformedLine("", expected=expected, got=said) from error
        raise UnfitModel(
            f"the chat template of {tokenizer.name_or_path} must be one that Jinja reads, but: "
            f"{said}: correct its chat_template"
        ) from error
    return list(ids)


def completion_token_ids(tokenizer: Tokenizer, *, text: str) -> list[int]:
    """Token ids of a demonstrated answer, closed by the end token."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def text_token_ids(tokenizer: Tokenizer, *, text: str) -> list[int]:
    """Token ids of a whole text, begun as the tokenizer begins texts, closed by the end token."""
    ids = list(tokenizer(text)["input_ids"])
    return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def check_sources(
    data: DataOptions,
    evaluation: EvaluationOptions,
    teaching: TeachingOptions,
    *,
    waits: Callable[[str], bool] = lambda _: False,
) -> None:
    """Raise `DataError` for a missing source, or one whose first line lacks a named column.

    A path for which `waits` is true is made later, and is not checked.
    """
    mapping = parse_column_mapping(data.column_mapping)
    named = [
        ("--data-path", data.data_path, mapping),
        ("--eval-data-path", evaluation.eval_data_path, mapping),
        ("--pairs-path", teaching.pairs_path, mapping),
    ]
    for file in data.data_files if data.data else ():
        for source in filter(None, (file.source, file.held_out)):
            named.append((f"--data of {file.type}", source.path, {**mapping, **file.columns}))
    for found in evaluation.eval:
        if found.source:
            columns = {**mapping, **found.columns}
            named.append((f"--eval of {found.name}", found.source.path, columns))
    for option, path, columns in named:
        if path and not waits(path):
            check_source(path, option=option, build=partial(Columns, mapping=columns))
