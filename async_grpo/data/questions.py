"""Questions and training pairs of the user's lines, tokenised and checked before a run starts.

It is the only time text is tokenised: with the chat template where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from async_grpo.data.columns import Columns
from async_grpo.data.lines import MalformedLine
from async_grpo.types import GivenPair, Question, TrainingPair
from async_grpo.util.errors import DataError, UnfitModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

PROMPTS = ("input_token_ids", "input", "messages")
WHOLE_TEXTS = ("text", "completion", "completion_token_ids")  # of a line without a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class LineReader:
    """Makes a record of a line; raises `MalformedLine` that names a column and what it expects."""

    tokenizer: Tokenizer  # or anything with the few members of theirs used here
    vocab_size: int
    max_tokens: int  # of a prompt that fits beside the longest answer, or of a whole pair
    mapping: Mapping[str, str] = field(default_factory=dict)  # our column names to the user's
    types: Sequence[str] = ()  # of which a line may be; none: of any. Of one, it need not say so

    def question(self, row: Mapping[str, object]) -> Question:
        """Of `input_token_ids`, `messages` or `input`; every other column is optional.

        Token ids win over text: they are what the model reads. Of a line with messages, `input` is
        the question as rewards and people see it.
        """
        columns = Columns(row, mapping=self.mapping)
        ids = self._prompt(columns)
        limit = "--max-tokens-per-gpu or the model's own limit, less --max-generation-tokens"
        self._check_length(columns, len(ids), f"a prompt of at most {self.max_tokens}", limit)
        text = self._text_of(columns, ids)
        kind = self._type(columns)
        return Question(np.asarray(ids, dtype=np.int32), text, columns.answer(), row, kind)

    def pair(self, row: Mapping[str, object]) -> TrainingPair:
        """A prompt, given as in `question`, with a demonstrated completion.

        That is `completion`, whose tokens are closed by the end token, or `completion_token_ids`,
        which are taken as they are. A line that has `text` instead, or nothing but a completion, is
        trained as a whole after its first token, which is the context of the second: the
        tokenizer's start token where it sets one.
        """
        columns = Columns(row, mapping=self.mapping)
        if column := _whole_text(columns):
            ids = self._whole(columns, column)
            prompt, completion = ids[:1], ids[1:]
        else:
            prompt, completion = self._prompt(columns), self._completion(columns)
        limit = "--max-tokens-per-gpu or the model's own limit"
        num_tokens = len(prompt) + len(completion)
        self._check_length(columns, num_tokens, f"a pair of at most {self.max_tokens}", limit)
        return TrainingPair(np.asarray(prompt, np.int32), np.asarray(completion, np.int32))

    def given(self, row: Mapping[str, object]) -> GivenPair:
        """A pair, as in `pair`, with its texts and every other column."""
        pair, columns = self.pair(row), Columns(row, mapping=self.mapping)
        prompt, completion = pair.prompt_token_ids, pair.completion_token_ids
        text = self._text_of(columns, prompt.tolist())
        question = Question(prompt, text, None, row, self._type(columns))
        if columns.has("completion"):
            return GivenPair(question, completion, columns.text("completion"))
        return GivenPair(question, completion, str(self.tokenizer.decode(completion.tolist())))

    def _type(self, columns: Columns) -> str:
        said = columns.dataset_type()
        if not said and len(self.types) == 1:
            return self.types[0]
        if self.types and said not in self.types:
            expected = f"a type of --data ({', '.join(self.types)})"
            raise columns.malformed("dataset_type", expected=expected, value=said)
        return said

    def _text_of(self, columns: Columns, prompt: Sequence[int]) -> str:
        """What people, and rewards, see of a prompt."""
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

    def _completion(self, columns: Columns) -> list[int]:
        if columns.has("completion_token_ids"):
            return columns.token_ids("completion_token_ids", vocab_size=self.vocab_size)
        text = columns.text("completion")
        self._check_end()
        return completion_token_ids(self.tokenizer, text=text)

    def _whole(self, columns: Columns, column: str) -> list[int]:
        if column == "completion_token_ids":
            ids = columns.token_ids(column, vocab_size=self.vocab_size)
        else:
            text = columns.text(column)
            self._check_end()
            ids = text_token_ids(self.tokenizer, text=text)
        if len(ids) < 2:
            raise columns.malformed(column, expected="at least two tokens", value=ids)
        return ids

    def _check_end(self) -> None:
        if self.tokenizer.eos_token_id is None:
            raise DataError(
                "completions need a tokenizer with an end token to close them, got one without: "
                "set eos_token in the model's tokenizer_config.json"
            )

    def _check_length(self, columns: Columns, num_tokens: int, expected: str, limit: str) -> None:
        if num_tokens > self.max_tokens:
            given = next(name for name in (*PROMPTS, *WHOLE_TEXTS) if columns.has(name))
            raise MalformedLine(
                columns.name(given), expected=f"{expected} tokens ({limit})", got=f"{num_tokens}"
            )


def _are_prompt(columns: Columns) -> bool:
    """Whether the line's messages are its prompt: not where the user maps `input` and not them.

    Raises `MalformedLine` where their system turn would be lost so.
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
    """The column of a line that has no prompt by intention; empty where it has or lacks one.

    A completion with a column beside it may have its prompt there, under another name.
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
    # Some tokenizers close every text: an answer to a closed text is what nobody trains.
    if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        ids.pop()
    return ids


def chat_token_ids(tokenizer: Tokenizer, *, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, up to where the assistant's next words begin."""
    try:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # a template is a program of the model's: it may raise anything
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
