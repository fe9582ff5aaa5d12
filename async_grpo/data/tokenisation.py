"""Prompts to token ids, the only time text is tokenised: with the chat template where there is one.

Tokenizers are Hugging Face's, or anything with the few members of theirs used here; this file
imports none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from async_grpo.data.lines import MalformedLine
from async_grpo.util.errors import ModelError


def prompt_token_ids(tokenizer: Any, *, text: str) -> list[int]:
    """Token ids of a user's prompt, ready for the model to answer."""
    if tokenizer.chat_template:
        return chat_token_ids(tokenizer, messages=[{"role": "user", "content": text}])
    ids = list(tokenizer(text)["input_ids"])
    # Some tokenizers close every text: an answer to a closed text is what nobody trains.
    if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        ids.pop()
    return ids


def chat_token_ids(tokenizer: Any, *, messages: Sequence[dict[str, str]]) -> list[int]:
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
        raise ModelError(
            f"the chat template of {tokenizer.name_or_path} must be one that Jinja reads, but: "
            f"{said}: correct its chat_template"
        ) from error
    return list(ids)


def completion_token_ids(tokenizer: Any, *, text: str) -> list[int]:
    """Token ids of a demonstrated answer, closed by the end token."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def text_token_ids(tokenizer: Any, *, text: str) -> list[int]:
    """Token ids of a whole text, begun as the tokenizer begins texts, closed by the end token."""
    ids = list(tokenizer(text)["input_ids"])
    return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
