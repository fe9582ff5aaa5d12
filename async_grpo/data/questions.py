"""Questions and training pairs from the user's data, tokenised and checked before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from async_grpo.data.columns import Columns
from async_grpo.data.lines import MalformedLine, load_records
from async_grpo.data.table import PairTable, QuestionTable
from async_grpo.data.tokenisation import (
    chat_token_ids,
    completion_token_ids,
    has_chat_template,
    prompt_token_ids,
    text_token_ids,
    vocabulary_size,
)
from async_grpo.errors import DataError
from async_grpo.types import Question, TrainingPair

PROMPTS = ("input_token_ids", "input", "messages")
WHOLE_TEXTS = ("text", "completion", "completion_token_ids")  # of a line without a prompt
LIMITS = {
    "prompt": "--max-tokens-per-gpu or the model's own limit, less --max-generation-tokens",
    "pair": "--max-tokens-per-gpu or the model's own limit",
}  # options that bound each, for messages


def load_questions(
    path: str,
    *,
    split: str = "train",
    config: str = "",
    column_mapping: Mapping[str, str] | None = None,
    tokenizer: Any = None,
    vocab_size: int | None = None,
    max_prompt_tokens: int | None = None,
) -> QuestionTable:
    """The questions of a JSONL file, or of anything that `datasets.load_dataset` reads.

    A line has `input_token_ids`, or `input` or `messages` that `tokenizer` tokenises; `answer` and
    every other column are optional. Token ids win over text: they are what the model reads.
    `vocab_size` defaults to the tokenizer's; `max_prompt_tokens` is what fits beside the longest
    answer. Raises `DataError` that names lines, columns and what was expected.
    """
    vocab_size = vocab_size or vocabulary_size(tokenizer)

    def build(row: Mapping[str, Any]) -> Question:
        columns = Columns(row, mapping=column_mapping or {})
        ids = _prompt_ids(columns, tokenizer=tokenizer, vocab_size=vocab_size)
        _check_length(columns, num_tokens=len(ids), max_tokens=max_prompt_tokens, what="prompt")
        return Question(
            input_token_ids=np.asarray(ids, dtype=np.int32),
            input=_prompt_text(columns, ids=ids, tokenizer=tokenizer),
            answer=columns.answer(),
            columns=row,
        )

    return QuestionTable.of(load_records(path, split=split, config=config, build=build))


def load_pairs(
    path: str,
    *,
    split: str = "train",
    config: str = "",
    column_mapping: Mapping[str, str] | None = None,
    tokenizer: Any = None,
    vocab_size: int | None = None,
    max_pair_tokens: int | None = None,
) -> PairTable:
    """Prompts with demonstrated completions, for supervised training.

    A prompt is given as in `load_questions`; beside it `completion`, whose tokens are closed by
    the end token, or `completion_token_ids`, which are taken as they are. A line that has `text`
    instead, or nothing but a completion, is trained as a whole after its first token, which is
    the context of the second: the tokenizer's start token where it sets one. Raises `DataError`.
    """
    vocab_size = vocab_size or vocabulary_size(tokenizer)

    def build(row: Mapping[str, Any]) -> TrainingPair:
        columns = Columns(row, mapping=column_mapping or {})
        if column := _whole_text(columns):
            ids = _text_ids(columns, column, tokenizer=tokenizer, vocab_size=vocab_size)
            prompt, completion = ids[:1], ids[1:]
        else:
            prompt = _prompt_ids(columns, tokenizer=tokenizer, vocab_size=vocab_size)
            completion = _completion_ids(columns, tokenizer=tokenizer, vocab_size=vocab_size)
        num_tokens = len(prompt) + len(completion)
        _check_length(columns, num_tokens=num_tokens, max_tokens=max_pair_tokens, what="pair")
        return TrainingPair(
            prompt_token_ids=np.asarray(prompt, dtype=np.int32),
            completion_token_ids=np.asarray(completion, dtype=np.int32),
        )

    return PairTable.of(load_records(path, split=split, config=config, build=build))


def _prompt_ids(columns: Columns, *, tokenizer: Any, vocab_size: int) -> list[int]:
    if columns.has("input_token_ids"):
        return columns.token_ids("input_token_ids", vocab_size=vocab_size)
    if columns.has("messages") and not columns.has("input"):
        messages = columns.messages()
        if not has_chat_template(tokenizer):
            raise MalformedLine(
                columns.name("messages"),
                expected="'input' or 'input_token_ids' instead",
                got="messages, for a tokenizer without a chat template",
            )
        return chat_token_ids(tokenizer, messages=messages)
    text = columns.text("input")
    if tokenizer is None:
        raise columns.malformed("input_token_ids", expected="a list of token ids", value=None)
    return prompt_token_ids(tokenizer, text=text)


def _whole_text(columns: Columns) -> str:
    """The column of a line that has no prompt by intention; empty where it has or lacks one.

    A completion with a column beside it may have its prompt there, under another name.
    """
    for name in WHOLE_TEXTS:
        if columns.has_only(name):
            return name
    others = (*PROMPTS, *WHOLE_TEXTS[1:])
    return "text" if columns.has("text") and not any(map(columns.has, others)) else ""


def _text_ids(columns: Columns, column: str, *, tokenizer: Any, vocab_size: int) -> list[int]:
    if column == "completion_token_ids":
        ids = columns.token_ids(column, vocab_size=vocab_size)
    else:
        text = columns.text(column)
        ids = text_token_ids(_closing(tokenizer, columns, column), text=text)
    if len(ids) < 2:
        raise columns.malformed(column, expected="at least two tokens", value=ids)
    return ids


def _completion_ids(columns: Columns, *, tokenizer: Any, vocab_size: int) -> list[int]:
    if columns.has("completion_token_ids"):
        return columns.token_ids("completion_token_ids", vocab_size=vocab_size)
    text = columns.text("completion")
    tokenizer = _closing(tokenizer, columns, "completion_token_ids")
    return completion_token_ids(tokenizer, text=text)


def _closing(tokenizer: Any, columns: Columns, column: str) -> Any:
    """`tokenizer`, if it can close a text."""
    if tokenizer is None:
        raise columns.malformed(column, expected="a list of token ids", value=None)
    if tokenizer.eos_token_id is None:
        raise DataError(
            "completions need a tokenizer with an end token to close them, got one without: "
            "set eos_token in the model's tokenizer_config.json"
        )
    return tokenizer


def _prompt_text(columns: Columns, *, ids: list[int], tokenizer: Any) -> str:
    """What people and verifiers read as the question."""
    if columns.has("input"):
        return columns.text("input")
    if columns.has("messages"):
        return columns.messages()[-1]["content"]
    return "" if tokenizer is None else str(tokenizer.decode(ids))


def _check_length(columns: Columns, *, num_tokens: int, max_tokens: int | None, what: str) -> None:
    if max_tokens is not None and num_tokens > max_tokens:
        given = next(name for name in (*PROMPTS, *WHOLE_TEXTS) if columns.has(name))
        raise MalformedLine(
            columns.name(given),
            expected=f"a {what} of at most {max_tokens} tokens ({LIMITS[what]})",
            got=f"{num_tokens}",
        )
